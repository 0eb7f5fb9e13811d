//! Types of elements and reductions, by their numbers in the header.

use std::ffi::c_int;

use kvplane::group::{DataType, Reduction};

use super::outcome::{CallFailure, ResultCode};

/// Arithmetic on the elements of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arithmetic {
    Full,
    /// An unsigned type that is moved and added as the signed one of its size: only comparisons would differ.
    Wrapping,
    None,
}

/// A type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ElementType {
    /// The type by which elements are moved and reduced.
    pub(crate) data_type: DataType,
    arithmetic: Arithmetic,
    name: &'static str,
}

/// All types, by number.
const ALL: [(&str, DataType, Arithmetic); 18] = [
    ("int8", DataType::I8, Arithmetic::Full),
    ("uint8", DataType::U8, Arithmetic::Full),
    ("int16", DataType::I16, Arithmetic::Full),
    ("uint16", DataType::I16, Arithmetic::Wrapping),
    ("int32", DataType::I32, Arithmetic::Full),
    ("uint32", DataType::I32, Arithmetic::Wrapping),
    ("int64", DataType::I64, Arithmetic::Full),
    ("uint64", DataType::I64, Arithmetic::Wrapping),
    ("float16", DataType::F16, Arithmetic::Full),
    ("float32", DataType::F32, Arithmetic::Full),
    ("float64", DataType::F64, Arithmetic::Full),
    ("bfloat16", DataType::Bf16, Arithmetic::Full),
    ("bool", DataType::Bool, Arithmetic::Full),
    ("float8e4m3fn", DataType::U8, Arithmetic::None),
    ("float8e5m2", DataType::U8, Arithmetic::None),
    ("float8e4m3fnuz", DataType::U8, Arithmetic::None),
    ("float8e5m2fnuz", DataType::U8, Arithmetic::None),
    ("float8e8m0fnu", DataType::U8, Arithmetic::None),
];

impl ElementType {
    /// Returns the type of a number.
    pub(crate) fn of(number: c_int) -> Result<Self, CallFailure> {
        let found = usize::try_from(number).ok().and_then(|number| ALL.get(number));
        let &(name, data_type, arithmetic) = found.ok_or_else(|| {
            CallFailure::argument(format_args!("dataType {number}: there are 0 to {}", ALL.len() - 1))
        })?;
        Ok(Self { data_type, arithmetic, name })
    }

    /// Returns the reduction of a number, of elements of this type.
    pub(crate) fn reduction(self, number: c_int) -> Result<Reduction, CallFailure> {
        let reduction = match number {
            0 => Reduction::Sum,
            1 => Reduction::Average,
            2 => Reduction::Product,
            3 => Reduction::Min,
            4 => Reduction::Max,
            _ => return Err(CallFailure::argument(format_args!("reduceOp {number}: there are 0 to 4"))),
        };
        let is_there = match self.arithmetic {
            Arithmetic::Full => reduction.is_of(self.data_type),
            Arithmetic::Wrapping => matches!(reduction, Reduction::Sum | Reduction::Product),
            Arithmetic::None => false,
        };
        let name = self.name;
        let text = || format!("there is no reduction `{}` of elements of type {name}", reduction.name());
        if is_there { Ok(reduction) } else { Err(CallFailure::new(ResultCode::NotSupported, text())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_the_sizes_of_their_names() {
        let sizes = [1, 1, 2, 2, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 1, 1, 1, 1];
        for (number, size) in sizes.into_iter().enumerate() {
            assert_eq!(ElementType::of(number as c_int).expect("a type").data_type.bytes(), size, "{number}");
        }
        assert!(ElementType::of(18).is_err() && ElementType::of(-1).is_err());
    }

    #[test]
    fn reductions_that_are_not_there_are_named() {
        let of = |element, reduction| ElementType::of(element).expect("a type").reduction(reduction);
        assert_eq!(
            (of(9, 0), of(9, 1), of(3, 2)),
            (Ok(Reduction::Sum), Ok(Reduction::Average), Ok(Reduction::Product))
        );
        assert_eq!(of(4, 3), Ok(Reduction::Min));
        for (element, reduction) in [(4, 1), (3, 3), (5, 4), (7, 1), (13, 0), (17, 4)] {
            let failure = of(element, reduction).expect_err("not reduced");
            assert_eq!(failure.code, ResultCode::NotSupported, "{}", failure.text);
        }
        assert_eq!(of(17, 0).expect_err("fp8").text, "there is no reduction `sum` of elements of type float8e8m0fnu");
        assert_eq!(of(9, 5).expect_err("no such one").code, ResultCode::InvalidArgument);
    }
}
