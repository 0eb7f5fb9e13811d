//! Ranges of durations in flags: a time that is longer is a mistake, and its sum with a clock would overflow.

use clap::builder::RangedU64ValueParser;

/// Longest time that a flag takes, in seconds: a day.
const LONGEST_S: u64 = 86_400;

/// Returns the parser of seconds, up to a day.
pub(crate) fn seconds() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(0..=LONGEST_S)
}

/// Returns the parser of milliseconds, up to a day.
pub(crate) fn milliseconds() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(0..=LONGEST_S * 1000)
}

/// Returns the parser of microseconds, up to a day.
pub(crate) fn microseconds() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(0..=LONGEST_S * 1_000_000)
}

#[cfg(test)]
mod tests {
    use clap::Subcommand;

    use crate::command::Command;

    /// Returns the error of arguments that are refused.
    fn parse(arguments: &[&str]) -> Option<String> {
        let program = Command::augment_subcommands(clap::Command::new("kvplane"));
        let parsed = program.try_get_matches_from([&["kvplane"], arguments].concat());
        parsed.err().map(|error| error.to_string())
    }

    #[test]
    fn flags_refuse_durations_of_more_than_a_day() {
        let most = u64::MAX.to_string();
        let refused: [&[&str]; 12] = [
            &["node", "--drain", &most],
            &["dev", "--drain", &most],
            &["ctl", "drain", "7", "--wait", &most],
            &["ctl", "copy", "a", "--wait", &most],
            &["ctl", "upgrade", "7", "--wait", &most],
            &["ctl", "upgrade", "7", "--or-drain", &most],
            &["ctl", "--hedge-ms", "99999999999", "get", "a"],
            &["ctl", "pins", "retain", "--retention", "1", "--ttl-ms", &most, "a"],
            &["ctl", "pins", "soft", "--ttl-ms", &most, "a"],
            &["p2p", "get", "name", "directory", "--deadline", &most],
            &["p2p", "get", "name", "directory", "--seed", &most],
            &["control", "--adoption-wait", "4294967295"],
        ];
        for arguments in refused {
            let said = parse(arguments).unwrap_or_else(|| panic!("{arguments:?} is accepted"));
            assert!(said.contains("is not in"), "{arguments:?}: {said}");
        }
        assert_eq!(parse(&["node", "--drain", "86400"]), None);
    }
}
