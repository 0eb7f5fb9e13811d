//! Parsing of sizes on command lines and in names: `4096`, `64K`, `1MiB`, `2g`.

use core::fmt;

/// Error of a size in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ParseBytesError {
    /// The text is no whole number, or its unit is unknown.
    NotSize { text: String },
    /// The size does not fit into 64 bits.
    TooLarge { text: String },
}

impl fmt::Display for ParseBytesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSize { text } => {
                write!(f, "{text:?} is not a size: give bytes, or a whole number with K, M, G or T")
            }
            Self::TooLarge { text } => write!(f, "{text:?} exceeds 2^64 bytes"),
        }
    }
}

impl core::error::Error for ParseBytesError {}

/// Parses a size in bytes: a whole number, optionally with the unit K, M, G or T (powers of 1024, also as KB or KiB, in
/// any case).
///
/// # Errors
/// When `text` is no such number, or exceeds 64 bits; the error names the text and the accepted forms.
pub fn parse_bytes(text: &str) -> Result<u64, ParseBytesError> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let wrong = || ParseBytesError::NotSize { text: text.to_owned() };
    let too_large = || ParseBytesError::TooLarge { text: text.to_owned() };
    if number.is_empty() {
        return Err(wrong());
    }
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| too_large())?;
    number.checked_mul(1 << shift).ok_or_else(too_large)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_or_rejected_with_a_reason() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("64K", 65_536),
            ("64 kb", 65_536),
            ("1MiB", 1 << 20),
            ("2g", 2 << 30),
            ("3tb", 3 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "-1", "+1", "1.5G", "1e9", "9x", "9ib", "1KiBib", "1 0", "١K"] {
            assert!(parse_bytes(text).unwrap_err().to_string().contains("K, M, G or T"), "{text}");
        }
        for text in ["99999999999T", "18446744073709551616", "16777216T"] {
            assert!(parse_bytes(text).unwrap_err().to_string().contains("exceeds 2^64 bytes"), "{text}");
        }
    }
}
