//! Error of invalid settings, shared by every crate that has settings.

use core::fmt;

/// A setting with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// The value is outside its range, `least..=most`.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    OutOfRange { field: &'static str, value: u64, least: u64, most: u64 },
    /// The value is not a multiple of its unit, or not a power of two.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    NotMultiple {
        field: &'static str,
        value: u64,
        /// Unit that the value has to be a multiple of; 0 if it has to be a power of two.
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
