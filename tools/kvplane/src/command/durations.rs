//! Ranges of durations in flags: a time that is longer is a mistake, and its sum with a clock would overflow.

use clap::builder::RangedU64ValueParser;

/// Longest time that a flag takes, in seconds: a day.
const LONGEST_S: u64 = 86_400;

/// Returns the parser of seconds, up to a day.
pub(crate) fn seconds() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(0..=LONGEST_S)
}
