//! Sizes on command lines: `4096`, `64K`, `1MiB`, `2g`.

pub(crate) use kvplane::parse_bytes as parse;

/// Parses like [`parse`], but refuses 0.
pub(crate) fn parse_some(text: &str) -> Result<u64, String> {
    match parse(text)? {
        0 => Err("at least one byte is needed".to_owned()),
        bytes => Ok(bytes),
    }
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
