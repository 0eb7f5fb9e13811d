//! Filter of a test runner's output that collects the lines about skipped tests.
//!
//! nextest, set to print the output of passing tests, prints it after its summary with eight lines of frame per test.
//! The filter keeps the summary, the failures and the skips, and drops the rest of that section. With `cargo test` it
//! drops nothing.

use std::time::Instant;

use crate::process;

/// Program that runs the tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runner {
    /// cargo-nextest.
    Nextest,
    /// `cargo test`.
    Cargo,
}

impl Runner {
    /// Returns nextest if it is installed, else `cargo test`.
    #[must_use]
    pub fn find() -> Self {
        if process::find_program("cargo-nextest").is_some() { Self::Nextest } else { Self::Cargo }
    }
}

/// Filter that sees each line once, in order.
#[derive(Debug)]
pub struct Filter {
    /// Skipped tests: the test's name if the runner prints it, and the reason.
    pub skipped: Vec<String>,
    runner: Runner,
    after_summary: bool,
    /// Name of the passing test whose output is being dropped.
    passed: Option<String>,
    /// Start of the running test program, if ends of tests get their time.
    began: Option<Instant>,
}

impl Filter {
    /// Creates a filter for the output of `runner`.
    #[must_use]
    pub const fn new(runner: Runner) -> Self {
        Self { skipped: Vec::new(), runner, after_summary: false, passed: None, began: None }
    }

    /// Creates a filter that also times the lines that it keeps, by [`Self::time_of`].
    #[must_use]
    pub fn timed(runner: Runner) -> Self {
        Self { began: Some(Instant::now()), ..Self::new(runner) }
    }

    /// Returns the seconds since the start of the test program, for a line that ends a test. libtest does not print
    /// them.
    pub fn time_of(&mut self, line: &str) -> Option<f64> {
        let began = self.began.as_mut()?;
        if line.starts_with("running ") && (line.ends_with(" tests") || line.ends_with(" test")) {
            *began = Instant::now();
        }
        let over = line.starts_with("test ") && line.contains(" ... ");
        over.then(|| began.elapsed().as_secs_f64())
    }

    /// Reads one line; returns true if it is to be shown.
    pub fn keeps(&mut self, line: &str) -> bool {
        let plain = without_colours(line);
        let plain = plain.trim();
        if self.runner == Runner::Cargo {
            if let Some(reason) = reason(plain) {
                self.skipped.push(reason.to_string());
            }
            return true;
        }
        if plain.starts_with("Summary [") {
            self.after_summary = true;
            return true;
        }
        if !self.after_summary {
            return true;
        }
        if let Some(status) = Status::of(plain) {
            self.passed = (status.word == "PASS").then(|| status.test.to_string());
        } else if plain.starts_with("error:") {
            self.passed = None;
        }
        let Some(test) = &self.passed else {
            return true;
        };
        if let Some(reason) = reason(plain) {
            self.skipped.push(format!("{test}: {reason}"));
        }
        false
    }
}

fn reason(line: &str) -> Option<&str> {
    line.strip_prefix("skipped:").map(str::trim)
}

/// Status line such as `PASS [   0.005s] (1/4) package test::name`.
struct Status<'a> {
    word: &'a str,
    test: &'a str,
}

impl<'a> Status<'a> {
    fn of(line: &'a str) -> Option<Self> {
        let (head, rest) = line.split_once('[')?;
        let (seconds, test) = rest.split_once(']')?;
        seconds.trim().strip_suffix('s')?.parse::<f64>().ok()?;
        let word = head.split_whitespace().next()?;
        let test = test.trim();
        // The counter `(1/4)` exists in later releases only.
        let test = if test.starts_with('(') { test.split_once(") ").map_or(test, |(_, test)| test) } else { test };
        Some(Self { word, test })
    }
}

/// Returns `line` without the terminal's escape sequences of the form ESC [ ... letter.
fn without_colours(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, sequence)) = rest.split_once("\u{1b}[") {
        plain.push_str(before);
        rest = sequence.trim_start_matches(|c: char| !c.is_ascii_alphabetic());
        rest = rest.get(1..).unwrap_or("");
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEXTEST: &str = "        PASS [   0.005s] (1/3) nx b
     Summary [   0.103s] 3 tests run: 2 passed, 1 failed, 1 skipped
        \u{1b}[32;1mPASS\u{1b}[0m [   0.006s] (1/3) \u{1b}[35mnx\u{1b}[0m a
  stdout ───

    running 1 test
    test a ... ok

  stderr ───
    skipped: no huge pages

        FAIL [   0.095s] (3/3) nx f
error: test run failed";

    #[test]
    fn nextest_shows_skips_and_failures_and_not_the_frames() {
        let mut filter = Filter::new(Runner::Nextest);
        let kept: Vec<&str> = NEXTEST.lines().filter(|line| filter.keeps(line)).map(str::trim).collect();
        assert_eq!(filter.skipped, ["nx a: no huge pages"]);
        assert_eq!(kept.len(), 4);
        assert!(kept[0].starts_with("PASS") && kept[1].starts_with("Summary"));
        assert!(kept[2].starts_with("FAIL") && kept[3].starts_with("error:"));
    }

    #[test]
    fn cargo_test_is_shown_whole() {
        let mut filter = Filter::new(Runner::Cargo);
        assert!(filter.keeps("running 1 test") && filter.keeps("skipped: no NUMA"));
        assert_eq!(filter.skipped, ["no NUMA"]);
    }

    #[test]
    fn ends_of_tests_are_timed_on_request() {
        let mut filter = Filter::timed(Runner::Cargo);
        assert!(filter.time_of("test a ... ok").is_some_and(|seconds| seconds >= 0.0));
        for line in ["running 2 tests", "test result: ok. 2 passed", "a test ... b", ""] {
            assert_eq!(filter.time_of(line), None, "{line}");
        }
        assert_eq!(Filter::new(Runner::Cargo).time_of("test a ... ok"), None);
    }

    #[test]
    fn colours_are_removed() {
        assert_eq!(without_colours("\u{1b}[32;1mPASS\u{1b}[0m é"), "PASS é");
        assert_eq!(without_colours("cut \u{1b}["), "cut ");
    }
}
