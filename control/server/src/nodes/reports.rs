//! Reports of nodes about themselves, by node. A new incarnation of a node starts without a report.

use std::collections::BTreeMap;

/// Reports of one incarnation of a node.
#[derive(Debug, Default)]
pub(crate) struct NodeReport<T> {
    pub(crate) incarnation: u64,
    heard_ns: u64,
    pub(crate) what: T,
}

impl<T> NodeReport<T> {
    /// Returns the time since the node's last report, in nanoseconds.
    pub(crate) const fn age_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.heard_ns)
    }
}

/// Reports of all nodes. Bounded by the number of members.
#[derive(Debug, Default)]
pub(crate) struct Reports<T> {
    nodes: BTreeMap<u64, NodeReport<T>>,
}

impl<T: Default> Reports<T> {
    /// Records the time of a node's report, and returns the state known of this incarnation.
    pub(crate) fn hear(&mut self, node: u64, incarnation: u64, now_ns: u64) -> &mut T {
        let reported = self.nodes.entry(node).or_default();
        if reported.incarnation != incarnation {
            *reported = NodeReport { incarnation, ..NodeReport::default() };
        }
        reported.heard_ns = now_ns;
        &mut reported.what
    }

    /// Iterates over one node, if it has reported, or over all.
    pub(crate) fn chosen(&self, node: Option<u64>) -> impl Iterator<Item = (u64, &NodeReport<T>)> {
        self.nodes.iter().filter(move |(number, _)| node.is_none_or(|node| node == **number)).map(|(n, of)| (*n, of))
    }

    /// Iterates like [`Self::chosen`], with mutable reports.
    pub(crate) fn chosen_mut(&mut self, node: Option<u64>) -> impl Iterator<Item = (u64, &mut T)> {
        let chosen = self.nodes.iter_mut().filter(move |(number, _)| node.is_none_or(|node| node == **number));
        chosen.map(|(number, reported)| (*number, &mut reported.what))
    }

    /// Keeps only the incarnations that `keep` accepts.
    pub(crate) fn retain(&mut self, keep: impl Fn(u64, u64) -> bool) {
        self.nodes.retain(|number, reported| keep(*number, reported.incarnation));
    }
}
