//! Text format of Prometheus: families of series, written in one go at a scrape.
//!
//! Nothing is registered and nothing is kept: each component passes its counters, family by family (ADR 0005).

use core::fmt::{self, Write};
use std::collections::BTreeMap;

use kvplane_proto::histogram::Histogram;

/// Exponents of the bounds of histograms, which are powers of two of nanoseconds, from 1 µs to 17 s: all of them are
/// bounds of [`Histogram`] too.
const FIRST_BOUND: u32 = 10;
const LAST_BOUND: u32 = 34;

/// Labels of a series: names and values.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// Text being written.
#[derive(Default)]
pub struct Text {
    out: String,
    family: &'static str,
}

impl Text {
    fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        self.family = name;
        self.out.extend(["# HELP ", name, " ", help, "\n# TYPE ", name, " ", kind, "\n"]);
    }

    /// Begins a family of counters.
    pub fn counter(&mut self, name: &'static str, help: &str) {
        debug_assert!(name.ends_with("_total"), "{name}");
        self.family(name, "counter", help);
    }

    /// Begins a family of gauges.
    pub fn gauge(&mut self, name: &'static str, help: &str) {
        self.family(name, "gauge", help);
    }

    /// Begins a family of histograms of times.
    pub fn histogram(&mut self, name: &'static str, help: &str) {
        debug_assert!(name.ends_with("_seconds"), "{name}");
        self.family(name, "histogram", help);
    }

    /// Writes a number of the current family.
    pub fn number(&mut self, labels: Labels<'_>, value: u64) {
        self.sample("", labels, None, value);
    }

    /// Writes a histogram of the current family.
    pub fn times(&mut self, labels: Labels<'_>, times: &Histogram) {
        let mut buckets = times.buckets().peekable();
        let mut count = 0;
        for power in FIRST_BOUND..=LAST_BOUND {
            while let Some((_, more)) = buckets.next_if(|(bound_ns, _)| *bound_ns <= 1 << power) {
                count += more;
            }
            self.sample("_bucket", labels, Some(&seconds(1 << power)), count);
        }
        self.sample("_bucket", labels, Some("+Inf"), times.count());
        self.sample("_sum", labels, None, seconds(times.sum_ns()));
        self.sample("_count", labels, None, times.count());
    }

    fn sample(&mut self, suffix: &str, labels: Labels<'_>, bound: Option<&str>, value: impl core::fmt::Display) {
        self.out.extend([self.family, suffix]);
        let mut before = '{';
        for (name, value) in labels.iter().copied().chain(bound.map(|bound| ("le", bound))) {
            self.out.push(before);
            self.out.extend([name, "=\"", &escaped(value), "\""]);
            before = ',';
        }
        if before == ',' {
            self.out.push('}');
        }
        // Writing to a string does not fail.
        let _ = writeln!(self.out, " {value}");
    }

    /// Returns the text.
    pub fn finish(self) -> String {
        self.out
    }
}

/// Formats nanoseconds as seconds, exactly.
fn seconds(ns: u64) -> String {
    let text = format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Escapes a label's value: names come from peers.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Line that a scraper would reject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// A family is declared without its type.
    NoType(String),
    /// A family is declared a second time.
    DeclaredTwice(String),
    /// A series has no value.
    NoValue(String),
    /// A series belongs to no declared family.
    NoFamily(String),
    /// A value is not a number.
    NotNumber(String),
    /// A series is listed a second time.
    ListedTwice(String),
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, why) = match self {
            Self::NoType(line) => (line, "the family has no type"),
            Self::DeclaredTwice(line) => (line, "the family is declared twice"),
            Self::NoValue(line) => (line, "the series has no value"),
            Self::NoFamily(line) => (line, "the series has no family"),
            Self::NotNumber(line) => (line, "the value is not a number"),
            Self::ListedTwice(line) => (line, "the series is listed twice"),
        };
        write!(f, "{line:?}: {why}")
    }
}

impl core::error::Error for ParseError {}

/// Parses such a text: samples by their names and labels.
///
/// # Errors
/// The first line that a scraper would reject, and the reason.
pub fn parse(text: &str) -> Result<BTreeMap<String, f64>, ParseError> {
    let (mut samples, mut types) = (BTreeMap::new(), BTreeMap::new());
    for line in text.lines().filter(|line| !line.starts_with("# HELP ")) {
        let own = || line.to_owned();
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or_else(|| ParseError::NoType(own()))?;
            if types.insert(name, kind).is_some() {
                return Err(ParseError::DeclaredTwice(own()));
            }
            continue;
        }
        let (series, value) = line.rsplit_once(' ').ok_or_else(|| ParseError::NoValue(own()))?;
        let name = series.split('{').next().unwrap_or_default();
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| types.get(name.strip_suffix(end)?));
        if !types.contains_key(name) && family != Some(&"histogram") {
            return Err(ParseError::NoFamily(own()));
        }
        let value: f64 = value.parse().map_err(|_| ParseError::NotNumber(own()))?;
        if samples.insert(series.to_owned(), value).is_some() {
            return Err(ParseError::ListedTwice(own()));
        }
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_of_peers_cannot_break_the_format() {
        let mut text = Text::default();
        text.counter("x_total", "What.");
        text.number(&[("peer", "a\"b\\c\nd{}"), ("rail", "0")], 7);
        text.number(&[], 8);
        let expected = "# HELP x_total What.\n# TYPE x_total counter\n\
                        x_total{peer=\"a\\\"b\\\\c\\nd{}\",rail=\"0\"} 7\nx_total 8\n";
        assert_eq!(text.finish(), expected);
    }

    #[test]
    fn times_are_in_seconds() {
        assert_eq!(
            [0, 1, 1024, 1_000_000_000, 17_179_869_184].map(seconds),
            ["0", "0.000000001", "0.000001024", "1", "17.179869184"]
        );
    }

    proptest! {
        #[test]
        fn histograms_are_cumulative_and_keep_to_their_bounds(times in prop::collection::vec(0u64..1 << 37, 0..100)) {
            let mut histogram = Histogram::new();
            times.iter().for_each(|&ns| histogram.add(ns));
            let mut text = Text::default();
            text.histogram("t_seconds", "Times.");
            text.times(&[("a", "b")], &histogram);
            let samples = parse(&text.finish()).unwrap();
            for power in FIRST_BOUND..=LAST_BOUND {
                let found = samples[&format!("t_seconds_bucket{{a=\"b\",le=\"{}\"}}", seconds(1 << power))];
                prop_assert_eq!(found as usize, times.iter().filter(|&&ns| ns < 1 << power).count());
            }
            prop_assert_eq!(samples["t_seconds_bucket{a=\"b\",le=\"+Inf\"}"] as usize, times.len());
            prop_assert_eq!(samples["t_seconds_count{a=\"b\"}"] as usize, times.len());
            let sum = times.iter().sum::<u64>() as f64 / 1e9;
            let off = (samples["t_seconds_sum{a=\"b\"}"] - sum).abs();
            prop_assert!(off <= sum * 1e-9);
        }
    }
}
