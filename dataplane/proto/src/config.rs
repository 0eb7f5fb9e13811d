//! What is wrong with settings, said in the same words by every crate that has some.

use core::fmt;

/// A field of some settings that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// The value is outside its range.
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// What it was.
        value: u64,
        /// The least it may be.
        least: u64,
        /// The most it may be.
        most: u64,
    },
    /// The value is not a multiple of the unit it must be counted in, or no power of two where it must be.
    NotMultiple {
        /// Name of the field.
        field: &'static str,
        /// What it was.
        value: u64,
        /// What it must be a multiple of; 0 for a power of two.
        unit: u64,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange { field, value, least, most } => {
                write!(f, "{field} is {value}: set it between {least} and {most}")
            }
            Self::NotMultiple { field, value, unit: 0 } => write!(f, "{field} is {value}: set it to a power of two"),
            Self::NotMultiple { field, value, unit } => {
                write!(f, "{field} is {value}: set it to a multiple of {unit}")
            }
        }
    }
}

impl core::error::Error for ConfigError {}
