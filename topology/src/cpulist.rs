//! The kernel's list notation for sets of CPUs: `0-3,8,10-11`.
//!
//! Invariant: for any text, parsing allocates at most [`MAX_CPUS`] entries, because a number at or above the limit is
//! rejected before its range is walked. The kernel's stride notation (`0-31:2/4`) is accepted by some of its inputs but
//! never printed in sysfs or procfs, so it is not parsed here.

use std::collections::BTreeSet;
use std::fmt;

/// A set of logical CPU numbers, in ascending order.
pub type CpuSet = BTreeSet<usize>;

/// CPUs are numbered below this. The kernel's own largest configuration is 8,192.
pub const MAX_CPUS: usize = 8_192;

/// Error of parsing a CPU list.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum CpuListError {
    /// A part between commas is neither a number nor two numbers with a dash between them.
    Malformed {
        /// The part, cut to 32 characters.
        part: String,
    },
    /// A range ends before it starts.
    Reversed {
        /// First number of the range.
        first: usize,
        /// Last number of the range.
        last: usize,
    },
    /// A number is not below [`MAX_CPUS`].
    TooLarge { cpu: usize },
}

impl fmt::Display for CpuListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed { part } => {
                write!(f, "{part:?} in a CPU list is not a number or a range; write it like 0-3,8")
            }
            Self::Reversed { first, last } => {
                write!(f, "range {first}-{last} in a CPU list ends before it starts")
            }
            Self::TooLarge { cpu } => {
                write!(f, "CPU {cpu} in a CPU list is not below the limit of {MAX_CPUS}")
            }
        }
    }
}

impl std::error::Error for CpuListError {}

/// Parses a CPU list such as `0-3,8`. White space around the text and its parts is ignored; an empty text is the empty
/// set, as the kernel prints it.
///
/// # Errors
///
/// [`CpuListError`] names the first part that is not valid.
pub fn parse(text: &str) -> Result<CpuSet, CpuListError> {
    let mut cpus = CpuSet::new();
    if text.trim().is_empty() {
        return Ok(cpus);
    }
    for part in text.split(',') {
        let part = part.trim();
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first, part)?, number(last, part)?);
        if first > last {
            return Err(CpuListError::Reversed { first, last });
        }
        if last >= MAX_CPUS {
            return Err(CpuListError::TooLarge { cpu: last });
        }
        cpus.extend(first..=last);
    }
    Ok(cpus)
}

fn number(digits: &str, part: &str) -> Result<usize, CpuListError> {
    // `usize::from_str` accepts a leading plus sign, which no CPU list has.
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    match digits.parse() {
        Ok(number) if plain => Ok(number),
        Err(_) if plain => Err(CpuListError::TooLarge { cpu: usize::MAX }),
        _ => Err(CpuListError::Malformed { part: part.chars().take(32).collect() }),
    }
}

/// Formats `cpus` as the kernel does: `0-3,8`. The inverse of [`parse`].
#[must_use]
pub fn format(cpus: &CpuSet) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let parts: Vec<String> = ranges
        .into_iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    parts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_what_the_kernel_prints() {
        assert_eq!(parse("0-3,8\n"), Ok(CpuSet::from([0, 1, 2, 3, 8])));
        assert_eq!(parse("\n"), Ok(CpuSet::new()));
        assert_eq!(parse("5"), Ok(CpuSet::from([5])));
        assert_eq!(parse("0-8191").map(|cpus| cpus.len()), Ok(MAX_CPUS));
    }

    #[test]
    fn errors_name_the_malformed_part() {
        let malformed = |part: &str| Err(CpuListError::Malformed { part: part.into() });
        assert_eq!(parse("0,,2"), malformed(""));
        assert_eq!(parse("0-3:1/2"), malformed("0-3:1/2"));
        assert_eq!(parse("-1"), malformed("-1"));
        assert_eq!(parse("+1"), malformed("+1"));
        assert_eq!(parse("1-2-3"), malformed("1-2-3"));
        assert_eq!(parse("3-1"), Err(CpuListError::Reversed { first: 3, last: 1 }));
        assert_eq!(parse("0-8192"), Err(CpuListError::TooLarge { cpu: 8_192 }));
        let beyond_a_word = "0-99999999999999999999999";
        assert_eq!(parse(beyond_a_word), Err(CpuListError::TooLarge { cpu: usize::MAX }));
    }

    proptest! {
        #[test]
        fn any_set_survives_the_round_trip(cpus in prop::collection::btree_set(0..MAX_CPUS, 0..64)) {
            prop_assert_eq!(parse(&format(&cpus)), Ok(cpus));
        }

        #[test]
        fn any_text_is_answered_within_the_limit(text in "[0-9,\\- \\n:a]{0,40}|\\PC{0,40}") {
            if let Ok(cpus) = parse(&text) {
                prop_assert!(cpus.iter().all(|&cpu| cpu < MAX_CPUS));
            }
        }
    }
}
