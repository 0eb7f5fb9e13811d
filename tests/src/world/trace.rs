//! Trace of a run: one hash for the whole run, and lines for its last moments.

use std::collections::VecDeque;

use kvplane_proto::rng::mix64;

/// Folded history.
#[derive(Default)]
pub(crate) struct Trace {
    hash: u64,
    pub(crate) events: u64,
    last: VecDeque<(u64, String)>,
    /// Number of lines to keep. Lines are made only if they will be shown: a failed run is repeated for its lines.
    kept: usize,
}

impl Trace {
    pub(crate) fn new(kept: usize) -> Self {
        Self { kept, ..Self::default() }
    }

    pub(crate) fn fold(&mut self, word: u64) {
        self.hash = mix64(self.hash ^ word);
    }

    pub(crate) fn line(&mut self, now_ns: u64, line: impl FnOnce() -> String) {
        if self.kept == 0 {
            return;
        }
        if self.last.len() == self.kept {
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
