//! Deadlines of requests: one for each, sorted.

use std::collections::{BTreeMap, BTreeSet};

/// Deadlines of requests.
#[derive(Debug, Default)]
pub(in crate::conductor) struct Due {
    sorted: BTreeSet<(u64, u64)>,
    of: BTreeMap<u64, u64>,
}

impl Due {
    /// Sets the deadline of a request, replacing an earlier one.
    pub(in crate::conductor) fn set(&mut self, id: u64, due_ns: u64) {
        self.clear(id);
        self.sorted.insert((due_ns, id));
        self.of.insert(id, due_ns);
    }

    /// Removes the deadline of a request that has ended.
    pub(in crate::conductor) fn clear(&mut self, id: u64) {
        if let Some(due_ns) = self.of.remove(&id) {
            self.sorted.remove(&(due_ns, id));
        }
    }

    /// Removes and returns the next request whose deadline has passed.
    pub(in crate::conductor) fn next(&mut self, now_ns: u64) -> Option<u64> {
        let (due_ns, id) = *self.sorted.first()?;
        (due_ns <= now_ns).then(|| {
            self.clear(id);
            id
        })
    }

    /// Returns the first deadline.
    pub(in crate::conductor) fn first_ns(&self) -> Option<u64> {
        self.sorted.first().map(|(due_ns, _)| *due_ns)
    }
}
