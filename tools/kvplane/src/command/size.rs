//! Sizes on command lines: `4096`, `64K`, `1MiB`, `2g`.

/// Bytes named by `text`; the units are powers of 1024.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let wrong = || format!("{text:?} is no size: give bytes, or a number with K, M, G or T");
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let unit = unit.trim().to_ascii_lowercase();
    let shift = match unit.trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(wrong()),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is more bytes than there are"))
}

/// As [`parse`], but at least one byte.
pub(crate) fn parse_some(text: &str) -> Result<u64, String> {
    match parse(text)? {
        0 => Err("at least one byte is needed".to_owned()),
        bytes => Ok(bytes),
    }
}

/// Bytes for people: the largest unit that divides them.
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
        for (text, bytes) in
            [("0", 0), ("4096", 4096), ("64K", 65_536), ("1MiB", 1 << 20), ("2g", 2 << 30), ("3tb", 3 << 40)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "-1", "1.5G", "9x", "99999999999T"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!((show(65_536), show(1000), show(0)), ("64 KiB".to_owned(), "1000 B".to_owned(), "0 B".to_owned()));
    }
}
