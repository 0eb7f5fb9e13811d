//! Sizes on command lines: `4096`, `64K`, `1MiB`, `2g`.

use std::fmt;

use kvplane::ParseBytesError;
pub(crate) use kvplane::parse_bytes as parse;

/// Error of a size on a command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum SizeError {
    /// The text is no size.
    NotSize(ParseBytesError),
    /// The size is 0.
    Zero,
    /// The bandwidth is 0.
    ZeroBandwidth,
    /// No object is that long.
    LongObject { text: String },
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSize(error) => write!(f, "{error}"),
            Self::Zero => f.write_str("at least one byte is needed"),
            Self::ZeroBandwidth => f.write_str("a bandwidth of 0 bytes per second is not possible"),
            Self::LongObject { text } => write!(f, "{text}: no object is that long"),
        }
    }
}

impl std::error::Error for SizeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NotSize(error) => Some(error),
            _ => None,
        }
    }
}

/// Parses like [`parse`], but refuses 0.
pub(crate) fn parse_some(text: &str) -> Result<u64, SizeError> {
    match parse(text).map_err(SizeError::NotSize)? {
        0 => Err(SizeError::Zero),
        bytes => Ok(bytes),
    }
}

/// Parses bytes per second, and refuses 0.
pub(crate) fn parse_bandwidth(text: &str) -> Result<u64, SizeError> {
    match parse(text).map_err(SizeError::NotSize)? {
        0 => Err(SizeError::ZeroBandwidth),
        bytes => Ok(bytes),
    }
}

/// Parses a mean object size; the node checks its range.
pub(crate) fn parse_object(text: &str) -> Result<u32, SizeError> {
    let bytes = parse(text).map_err(SizeError::NotSize)?;
    u32::try_from(bytes).map_err(|_| SizeError::LongObject { text: text.to_owned() })
}

/// Formats bytes in the largest unit that divides them.
pub(crate) fn show(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let found = units.into_iter().find(|&(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    found.map_or_else(|| format!("{bytes} B"), |(shift, unit)| format!("{} {unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        assert_eq!((parse("64K"), parse_some("1MiB")), (Ok(65_536), Ok(1 << 20)));
        assert!(parse("9x").is_err() && parse_some("0").is_err());
        assert_eq!((show(65_536), show(1000), show(0)), ("64 KiB".to_owned(), "1000 B".to_owned(), "0 B".to_owned()));
    }
}
