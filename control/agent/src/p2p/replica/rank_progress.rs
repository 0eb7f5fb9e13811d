//! Progress of a rank through its schedule: the parents that it fetches from, and what they failed to deliver.

use kvplane_cluster::p2p::{Follow, HALVES, Layout, ShardSet};
use kvplane_rpc::p2p::{FetchFailure, RankParent};

use super::order::ShardOrder;

/// Progress of a rank through its schedule. Time is an argument, since the start of the fetch.
pub(super) struct RankProgress {
    follow: Follow,
    /// Parents of the halves, where they are known.
    parents: [Option<RankParent>; HALVES],
    /// Failures of fetches from parents that are not reported yet.
    failures: Vec<FetchFailure>,
}

impl RankProgress {
    /// Creates the progress of a rank that knows no parent yet.
    pub(super) const fn new(follow: Follow) -> Self {
        Self { follow, parents: [None, None], failures: Vec::new() }
    }

    /// Returns a half's parent, if it is known.
    pub(super) fn parent(&self, half: usize) -> Option<RankParent> {
        self.parents[half].clone()
    }

    /// Notes a half's parent, or that it is not known.
    pub(super) fn set_parent(&mut self, half: usize, parent: Option<RankParent>) {
        self.parents[half] = parent;
    }

    /// Returns true if a half's parent is still to be followed; leaves parents that were waited for long enough.
    pub(super) fn follows(&mut self, half: usize, now_ns: u64) -> bool {
        self.follow.tick(now_ns);
        self.follow.follows(half)
    }

    /// Returns true if more shards of a half could be in flight.
    pub(super) fn has_room(&self, half: usize) -> bool {
        self.follow.has_room(half)
    }

    /// Returns true while no shard has to be fetched from elsewhere.
    pub(super) fn is_on_schedule(&self) -> bool {
        self.follow.elsewhere().next().is_none()
    }

    /// Notes the shards of a half's parent, as words of 64 shards.
    pub(super) fn learn(&mut self, half: usize, words: &[u64]) {
        self.follow.learn(half, words);
    }

    /// Leaves a half's parent, which cannot be reached.
    pub(super) fn leave(&mut self, half: usize) {
        self.follow.leave(half);
    }

    /// Notes the arrival of a shard. Returns true if more shards of a half could be in flight, before new orders.
    pub(super) fn arrived(&mut self, shard: u32, now_ns: u64) -> bool {
        self.follow.arrived(shard, now_ns);
        (0..HALVES).any(|half| self.follow.has_room(half))
    }

    /// Takes the failure of a fetch from a parent, which is left; gives another failure back.
    pub(super) fn claim_failure(&mut self, failure: FetchFailure) -> Option<FetchFailure> {
        if !self.follow.failed(failure.shard) {
            return Some(failure);
        }
        self.failures.push(failure);
        None
    }

    /// Returns the failures of fetches from parents that are not reported yet.
    pub(super) fn take_failures(&mut self) -> Vec<FetchFailure> {
        std::mem::take(&mut self.failures)
    }

    /// Keeps failures for the next report.
    pub(super) fn keep_failures(&mut self, failures: Vec<FetchFailure>) {
        self.failures.extend(failures);
    }

    /// Returns those shards, of an object of so many, that the schedule does not deliver and `is_wanted` accepts.
    pub(super) fn elsewhere(&self, is_wanted: impl Fn(u32) -> bool, shards: u32) -> ShardSet {
        let mut want = ShardSet::empty(shards);
        for shard in self.follow.elsewhere().filter(|&shard| is_wanted(shard)) {
            want.insert(shard);
        }
        want
    }

    /// Orders the shards that parents are known to have, as far as they can be in flight.
    pub(super) fn orders(&mut self, layout: &Layout, now_ns: u64) -> Vec<ShardOrder> {
        let Self { follow, parents, .. } = self;
        let mut orders = Vec::new();
        for (half, parent) in parents.iter().enumerate() {
            let Some(parent) = parent else { continue };
            while let Some(shard) = follow.next(half, now_ns) {
                let Some(place) = layout.place(shard) else { continue };
                let address = parent.addresses[place.buffer] + place.offset;
                orders.push(ShardOrder { shard, source: parent.member, segment: parent.segment.to_string(), address });
            }
        }
        orders
    }
}
