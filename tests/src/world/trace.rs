//! What happened, as one number for the whole run and as lines for its last moments.

use std::collections::VecDeque;

use kvplane_proto::rng::mix64;

/// Events that a failure shows.
const SHOWN: usize = 60;

/// The folded history.
#[derive(Default)]
pub(crate) struct Trace {
    hash: u64,
    pub(crate) events: u64,
    last: VecDeque<(u64, String)>,
    /// Lines are made only where somebody will read them: a run is repeated for its lines when it failed.
    keep_lines: bool,
}

impl Trace {
    pub(crate) fn new(keep_lines: bool) -> Self {
        Self { keep_lines, ..Self::default() }
    }

    pub(crate) fn fold(&mut self, word: u64) {
        self.hash = mix64(self.hash ^ word);
    }

    pub(crate) fn line(&mut self, now_ns: u64, line: impl FnOnce() -> String) {
        if !self.keep_lines {
            return;
        }
        if self.last.len() == SHOWN {
            self.last.pop_front();
        }
        self.last.push_back((now_ns, line()));
    }

    pub(crate) const fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.last.iter().map(|(at_ns, line)| format!("{:>14.6} ms  {line}", *at_ns as f64 / 1e6)).collect()
    }
}
