//! Types of elements.

use core::fmt;
use core::str::FromStr;

/// Type of a buffer's elements, in the machine's (little-endian) order of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it")]
#[repr(u8)]
pub enum DataType {
    U8,
    I8,
    I16,
    I32,
    I64,
    F16,
    Bf16,
    F32,
    F64,
    /// One byte, 0 or 1.
    Bool,
}

/// All types, by their number on the wire.
const ALL: [(DataType, &str, usize); 10] = [
    (DataType::U8, "u8", 1),
    (DataType::I8, "i8", 1),
    (DataType::I16, "i16", 2),
    (DataType::I32, "i32", 4),
    (DataType::I64, "i64", 8),
    (DataType::F16, "f16", 2),
    (DataType::Bf16, "bf16", 2),
    (DataType::F32, "f32", 4),
    (DataType::F64, "f64", 8),
    (DataType::Bool, "bool", 1),
];

impl DataType {
    /// Returns all types.
    pub fn all() -> impl Iterator<Item = Self> {
        ALL.iter().map(|(data_type, ..)| *data_type)
    }

    /// Returns the type of this number on the wire.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        ALL.get(usize::from(number)).map(|(data_type, ..)| *data_type)
    }

    /// Returns the name, such as `bf16`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        ALL[self as usize].1
    }

    /// Returns the bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        ALL[self as usize].2
    }

    /// Returns the bytes of a small whole number, the first [`Self::bytes`] of these; a truth is 1 unless it is 0.
    #[must_use]
    pub fn encode(self, number: u32) -> [u8; 8] {
        let mut bytes = [0; 8];
        let mut put = |encoded: &[u8]| bytes[..encoded.len()].copy_from_slice(encoded);
        match self {
            Self::U8 | Self::I8 => put(&[number as u8]),
            Self::Bool => put(&[u8::from(number != 0)]),
            Self::I16 => put(&(number as u16).to_le_bytes()),
            Self::I32 => put(&number.to_le_bytes()),
            Self::I64 => put(&u64::from(number).to_le_bytes()),
            Self::F16 => put(&half::f16::from_f32(number as f32).to_le_bytes()),
            Self::Bf16 => put(&half::bf16::from_f32(number as f32).to_le_bytes()),
            Self::F32 => put(&(number as f32).to_le_bytes()),
            Self::F64 => put(&f64::from(number).to_le_bytes()),
        }
        bytes
    }

    /// Returns true for the types with fractions.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No type has this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseDataTypeError {
    /// The name.
    pub name: String,
}

impl fmt::Display for ParseDataTypeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = ALL.iter().map(|(_, name, _)| *name).collect();
        write!(f, "`{}` is no type of elements; there are {}", self.name, names.join(", "))
    }
}

impl std::error::Error for ParseDataTypeError {}

impl FromStr for DataType {
    type Err = ParseDataTypeError;

    fn from_str(name: &str) -> Result<Self, ParseDataTypeError> {
        let found = ALL.iter().find(|(_, known, _)| *known == name);
        found.map(|(data_type, ..)| *data_type).ok_or_else(|| ParseDataTypeError { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_lead_back_to_their_types() {
        for (number, data_type) in DataType::all().enumerate() {
            assert_eq!(DataType::from_number(number as u8), Some(data_type));
            assert_eq!(data_type as usize, number);
            assert_eq!(data_type.name().parse(), Ok(data_type));
        }
        assert_eq!(DataType::from_number(10), None);
        assert!("f8".parse::<DataType>().is_err_and(|error| error.to_string().contains("f8")));
    }
}
