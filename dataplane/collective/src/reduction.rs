//! Reductions: the element-wise combination of two buffers, and the division of a sum by the number of its parts.

use core::fmt;
use core::str::FromStr;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::data_type::DataType;

/// Elements of half precision that are combined at a time, in single precision.
const BLOCK: usize = 256;

/// Element-wise combination. Sums and products of integers wrap; of halves, each step is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it")]
#[repr(u8)]
pub enum Reduction {
    Sum,
    /// The sum, divided by the number of contributions. Floating-point types only.
    Average,
    Product,
    /// A NaN wins.
    Min,
    /// A NaN wins.
    Max,
    /// Bits of integers, or truth of `bool`.
    And,
    Or,
    Xor,
}

const ALL: [(Reduction, &str); 8] = [
    (Reduction::Sum, "sum"),
    (Reduction::Average, "avg"),
    (Reduction::Product, "product"),
    (Reduction::Min, "min"),
    (Reduction::Max, "max"),
    (Reduction::And, "and"),
    (Reduction::Or, "or"),
    (Reduction::Xor, "xor"),
];

impl Reduction {
    /// Returns all reductions.
    pub fn all() -> impl Iterator<Item = Self> {
        ALL.iter().map(|(reduction, _)| *reduction)
    }

    /// Returns the reduction of this number on the wire.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        ALL.get(usize::from(number)).map(|(reduction, _)| *reduction)
    }

    /// Returns the name, such as `sum`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        ALL[self as usize].1
    }

    /// Returns true if elements of this type can be reduced so.
    #[must_use]
    pub const fn is_of(self, data_type: DataType) -> bool {
        match self {
            Self::Average => data_type.is_float(),
            Self::And | Self::Or | Self::Xor => !data_type.is_float(),
            Self::Sum | Self::Product | Self::Min | Self::Max => true,
        }
    }

    /// Combines elements of `with` into those of `into`, of equal length, a multiple of the element's bytes. A
    /// combination that [`Self::is_of`] rules out leaves `into` as it is.
    pub fn combine(self, data_type: DataType, into: &mut [u8], with: &[u8]) {
        match data_type {
            DataType::Bool => self.combine_bool(into, with),
            DataType::U8 => self.combine_integers::<u8, 1>(into, with),
            DataType::I8 => self.combine_integers::<i8, 1>(into, with),
            DataType::I16 => self.combine_integers::<i16, 2>(into, with),
            DataType::I32 => self.combine_integers::<i32, 4>(into, with),
            DataType::I64 => self.combine_integers::<i64, 8>(into, with),
            DataType::F32 => self.combine_floats::<f32, 4>(into, with),
            DataType::F64 => self.combine_floats::<f64, 8>(into, with),
            DataType::F16 => self.combine_halves::<f16>(into, with),
            DataType::Bf16 => self.combine_halves::<bf16>(into, with),
        }
    }

    fn combine_bool(self, into: &mut [u8], with: &[u8]) {
        each::<u8, 1>(into, with, |a, b| {
            let (a, b) = (a != 0, b != 0);
            u8::from(match self {
                Self::Sum | Self::Max | Self::Or => a | b,
                Self::Product | Self::Min | Self::And => a & b,
                Self::Xor => a ^ b,
                Self::Average => a,
            })
        });
    }

    fn combine_integers<T: Integer<N>, const N: usize>(self, into: &mut [u8], with: &[u8]) {
        match self {
            Self::Sum => each::<T, N>(into, with, T::sum),
            Self::Product => each::<T, N>(into, with, T::product),
            Self::Min => each::<T, N>(into, with, T::min),
            Self::Max => each::<T, N>(into, with, T::max),
            Self::And => each::<T, N>(into, with, T::and),
            Self::Or => each::<T, N>(into, with, T::or),
            Self::Xor => each::<T, N>(into, with, T::xor),
            Self::Average => {}
        }
    }

    fn combine_floats<T: Float<N>, const N: usize>(self, into: &mut [u8], with: &[u8]) {
        match self {
            Self::Sum | Self::Average => each::<T, N>(into, with, T::sum),
            Self::Product => each::<T, N>(into, with, T::product),
            Self::Min => each::<T, N>(into, with, T::least),
            Self::Max => each::<T, N>(into, with, T::greatest),
            Self::And | Self::Or | Self::Xor => {}
        }
    }

    fn combine_halves<T: Half>(self, into: &mut [u8], with: &[u8]) {
        let (mut ours, mut theirs) = ([0.0; BLOCK], [0.0; BLOCK]);
        for (into, with) in into.chunks_mut(2 * BLOCK).zip(with.chunks(2 * BLOCK)) {
            let elements = into.len() / 2;
            let (ours, theirs) = (&mut ours[..elements], &mut theirs[..elements]);
            T::widen(into, ours);
            T::widen(with, theirs);
            let pairs = ours.iter_mut().zip(theirs.iter());
            match self {
                Self::Sum | Self::Average => pairs.for_each(|(a, b)| *a += b),
                Self::Product => pairs.for_each(|(a, b)| *a *= b),
                Self::Min => pairs.for_each(|(a, b)| *a = a.least(*b)),
                Self::Max => pairs.for_each(|(a, b)| *a = a.greatest(*b)),
                Self::And | Self::Or | Self::Xor => {}
            }
            T::narrow(ours, into);
        }
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No reduction has this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseReductionError {
    /// The name.
    pub name: String,
}

impl fmt::Display for ParseReductionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = ALL.iter().map(|(_, name)| *name).collect();
        write!(f, "`{}` is no reduction; there are {}", self.name, names.join(", "))
    }
}

impl std::error::Error for ParseReductionError {}

impl FromStr for Reduction {
    type Err = ParseReductionError;

    fn from_str(name: &str) -> Result<Self, ParseReductionError> {
        let found = ALL.iter().find(|(_, known)| *known == name);
        found.map(|(reduction, _)| *reduction).ok_or_else(|| ParseReductionError { name: name.to_owned() })
    }
}

/// Divides elements by a number of contributions. Types without fractions stay as they are.
pub fn divide(data_type: DataType, elements: &mut [u8], by: u32) {
    match data_type {
        DataType::F32 => elements.as_chunks_mut::<4>().0.iter_mut().for_each(|element| {
            *element = (f32::from_le_bytes(*element) / by as f32).to_le_bytes();
        }),
        DataType::F64 => elements.as_chunks_mut::<8>().0.iter_mut().for_each(|element| {
            *element = (f64::from_le_bytes(*element) / f64::from(by)).to_le_bytes();
        }),
        DataType::F16 => divide_halves::<f16>(elements, by),
        DataType::Bf16 => divide_halves::<bf16>(elements, by),
        DataType::U8 | DataType::I8 | DataType::I16 | DataType::I32 | DataType::I64 | DataType::Bool => {}
    }
}

fn divide_halves<T: Half>(elements: &mut [u8], by: u32) {
    let mut wide = [0.0; BLOCK];
    for block in elements.chunks_mut(2 * BLOCK) {
        let wide = &mut wide[..block.len() / 2];
        T::widen(block, wide);
        wide.iter_mut().for_each(|element| *element /= by as f32);
        T::narrow(wide, block);
    }
}

/// Replaces each element of `into` by its combination with that of `with`.
fn each<T: Element<N>, const N: usize>(into: &mut [u8], with: &[u8], combine: impl Fn(T, T) -> T) {
    for (a, b) in into.as_chunks_mut::<N>().0.iter_mut().zip(with.as_chunks::<N>().0) {
        *a = combine(T::read(*a), T::read(*b)).write();
    }
}

trait Element<const N: usize>: Copy {
    fn read(bytes: [u8; N]) -> Self;
    fn write(self) -> [u8; N];
}

trait Integer<const N: usize>: Element<N> + Ord {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

trait Float<const N: usize>: Element<N> {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
}

macro_rules! elements {
    ($($type:ty, $bytes:literal;)*) => {$(
        impl Element<$bytes> for $type {
            fn read(bytes: [u8; $bytes]) -> Self {
                Self::from_le_bytes(bytes)
            }

            fn write(self) -> [u8; $bytes] {
                self.to_le_bytes()
            }
        }
    )*};
}

macro_rules! integers {
    ($($type:ty, $bytes:literal;)*) => {$(
        impl Integer<$bytes> for $type {
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            fn and(self, other: Self) -> Self {
                self & other
            }

            fn or(self, other: Self) -> Self {
                self | other
            }

            fn xor(self, other: Self) -> Self {
                self ^ other
            }
        }
    )*};
}

macro_rules! floats {
    ($($type:ty, $bytes:literal;)*) => {$(
        impl Float<$bytes> for $type {
            fn sum(self, other: Self) -> Self {
                self + other
            }

            fn product(self, other: Self) -> Self {
                self * other
            }

            fn least(self, other: Self) -> Self {
                if self.is_nan() || self < other { self } else { other }
            }

            fn greatest(self, other: Self) -> Self {
                if self.is_nan() || self > other { self } else { other }
            }
        }
    )*};
}

elements! { u8, 1; i8, 1; i16, 2; i32, 4; i64, 8; f32, 4; f64, 8; }
integers! { u8, 1; i8, 1; i16, 2; i32, 4; i64, 8; }
floats! { f32, 4; f64, 8; }

trait Half: Copy {
    fn widen(halves: &[u8], wide: &mut [f32]);
    fn narrow(wide: &[f32], halves: &mut [u8]);
}

macro_rules! halves {
    ($($type:ty;)*) => {$(
        impl Half for $type {
            fn widen(halves: &[u8], wide: &mut [f32]) {
                let mut elements = [<$type>::ZERO; BLOCK];
                let elements = &mut elements[..wide.len()];
                for (element, bytes) in elements.iter_mut().zip(halves.as_chunks::<2>().0) {
                    *element = <$type>::from_le_bytes(*bytes);
                }
                elements.convert_to_f32_slice(wide);
            }

            fn narrow(wide: &[f32], halves: &mut [u8]) {
                let mut elements = [<$type>::ZERO; BLOCK];
                let elements = &mut elements[..wide.len()];
                elements.convert_from_f32_slice(wide);
                for (element, bytes) in elements.iter().zip(halves.as_chunks_mut::<2>().0) {
                    *bytes = element.to_le_bytes();
                }
            }
        }
    )*};
}

halves! { f16; bf16; }

#[cfg(test)]
mod tests {
    use super::*;

    fn combined<const N: usize>(reduction: Reduction, data_type: DataType, a: &[[u8; N]], b: &[[u8; N]]) -> Vec<u8> {
        let mut into = a.concat();
        reduction.combine(data_type, &mut into, &b.concat());
        into
    }

    #[test]
    fn integers_wrap_and_have_bits() {
        let of = |reduction, a: i8, b: i8| {
            combined(reduction, DataType::I8, &[a.to_le_bytes()], &[b.to_le_bytes()])[0] as i8
        };
        assert_eq!(of(Reduction::Sum, 127, 2), -127);
        assert_eq!(of(Reduction::Product, 64, 4), 0);
        assert_eq!((of(Reduction::Min, -3, 5), of(Reduction::Max, -3, 5)), (-3, 5));
        assert_eq!((of(Reduction::And, 6, 3), of(Reduction::Or, 6, 3), of(Reduction::Xor, 6, 3)), (2, 7, 5));
    }

    #[test]
    fn floats_keep_a_nan() {
        let of = |reduction, a: f64, b: f64| {
            let bytes = combined(reduction, DataType::F64, &[a.to_le_bytes()], &[b.to_le_bytes()]);
            f64::from_le_bytes(bytes.try_into().unwrap_or_default())
        };
        assert_eq!((of(Reduction::Sum, 1.5, 2.0), of(Reduction::Product, 1.5, 2.0)), (3.5, 3.0));
        for reduction in [Reduction::Min, Reduction::Max] {
            assert!(of(reduction, f64::NAN, 1.0).is_nan() && of(reduction, 1.0, f64::NAN).is_nan());
        }
        assert_eq!((of(Reduction::Min, 1.0, 2.0), of(Reduction::Max, 1.0, 2.0)), (1.0, 2.0));
    }

    #[test]
    fn halves_are_combined_in_single_precision_and_rounded() {
        let count = 2 * BLOCK + 3;
        let numbers = |from: usize| (0..count).map(move |at| (from + at % 100) as f32);
        let bytes = |from| numbers(from).map(|x| f16::from_f32(x).to_le_bytes()).collect::<Vec<_>>();
        let sums = combined(Reduction::Sum, DataType::F16, &bytes(1), &bytes(7));
        for ((sum, a), b) in sums.as_chunks::<2>().0.iter().zip(numbers(1)).zip(numbers(7)) {
            assert_eq!(f16::from_le_bytes(*sum).to_f32(), a + b);
        }
        let one = |x: f32| [bf16::from_f32(x).to_le_bytes()];
        let rounded = combined(Reduction::Sum, DataType::Bf16, &one(256.0), &one(1.0));
        assert_eq!(bf16::from_le_bytes([rounded[0], rounded[1]]).to_f32(), 256.0);
    }

    #[test]
    fn truths_stay_zero_or_one() {
        let of = |reduction, a: u8, b: u8| combined(reduction, DataType::Bool, &[[a]], &[[b]])[0];
        assert_eq!((of(Reduction::Sum, 1, 1), of(Reduction::Product, 1, 0), of(Reduction::Xor, 1, 1)), (1, 0, 0));
        assert_eq!((of(Reduction::Min, 1, 1), of(Reduction::Max, 0, 0)), (1, 0));
    }

    #[test]
    fn sums_are_divided_by_their_parts() {
        let mut elements = [6.0_f32, -3.0].map(f32::to_le_bytes).concat();
        divide(DataType::F32, &mut elements, 3);
        assert_eq!(elements, [2.0_f32, -1.0].map(f32::to_le_bytes).concat());
        let mut halves = [6.0_f32, 9.0].map(|x| bf16::from_f32(x).to_le_bytes()).concat();
        divide(DataType::Bf16, &mut halves, 3);
        assert_eq!(halves, [2.0_f32, 3.0].map(|x| bf16::from_f32(x).to_le_bytes()).concat());
    }

    #[test]
    fn bits_have_no_floats_and_averages_no_integers() {
        for data_type in DataType::all() {
            assert_eq!(Reduction::Xor.is_of(data_type), !data_type.is_float());
            assert_eq!(Reduction::Average.is_of(data_type), data_type.is_float());
        }
        for (number, reduction) in Reduction::all().enumerate() {
            assert_eq!(Reduction::from_number(number as u8), Some(reduction));
            assert_eq!(reduction.name().parse(), Ok(reduction));
        }
    }
}
