//! Replica owners of this shard's slots as peers, with their backoff.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use kvplane_proto::map::ShardKey;

/// Backoff between attempts with a replica owner that does not answer; doubles up to the maximum.
const RETRY_NS: u64 = 20_000_000;
const RETRY_MOST_NS: u64 = 500_000_000;

/// One replica owner.
#[derive(Clone, Copy, Debug, Default)]
struct Peer {
    failures: u32,
    retry_ns: u64,
    /// True while a removal request to it is in flight.
    dropping: bool,
}

/// State of each replica owner.
#[derive(Debug, Default)]
pub(super) struct ReplicaOwners {
    peers: BTreeMap<ShardKey, Peer>,
}

impl ReplicaOwners {
    /// Keeps the state of these replica owners only.
    pub(super) fn follow(&mut self, owners: &[ShardKey]) {
        // One by one: many slots have few different owners.
        let mut here = BTreeSet::new();
        owners.iter().for_each(|key| _ = here.insert(*key));
        self.peers.retain(|key, _| here.contains(key));
        for key in here {
            self.peers.entry(key).or_default();
        }
    }

    /// Forgets earlier failures.
    pub(super) fn forgive(&mut self) {
        self.peers.values_mut().for_each(|peer| (peer.failures, peer.retry_ns) = (0, 0));
    }

    /// Returns true if a replica owner is in backoff.
    pub(super) fn rests(&self, key: ShardKey, now_ns: u64) -> bool {
        self.peers.get(&key).is_some_and(|peer| peer.retry_ns > now_ns)
    }

    /// Returns true if a removal request may be sent to a replica owner.
    pub(super) fn may_drop(&self, key: ShardKey, now_ns: u64) -> bool {
        self.peers.get(&key).is_some_and(|peer| !peer.dropping && peer.retry_ns <= now_ns)
    }

    pub(super) fn begin_drop(&mut self, key: ShardKey) {
        self.peers.entry(key).or_default().dropping = true;
    }

    pub(super) fn end_drop(&mut self, key: ShardKey) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.dropping = false;
        }
    }

    /// Resets the backoff of a replica owner that has answered.
    pub(super) fn answered(&mut self, key: ShardKey) {
        if let Some(peer) = self.peers.get_mut(&key) {
            (peer.failures, peer.retry_ns) = (0, 0);
        }
    }

    /// Backs off after a replica owner has not answered. Requests that were in flight together and failed together
    /// count as one failure.
    pub(super) fn not_answered(&mut self, key: ShardKey, now_ns: u64) {
        if let Some(peer) = self.peers.get_mut(&key).filter(|peer| peer.retry_ns <= now_ns) {
            peer.failures += 1;
            peer.retry_ns = now_ns.saturating_add((RETRY_NS << peer.failures.min(8)).min(RETRY_MOST_NS));
        }
    }

    /// Returns the time at which the next backoff ends.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        self.peers.values().map(|peer| peer.retry_ns).filter(|at_ns| *at_ns > now_ns).min()
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

    use super::*;

    #[test]
    fn simultaneous_failures_count_once() {
        let key = ShardKey { node: NodeId(1), incarnation: Incarnation(1), shard: ShardId(0) };
        let mut owners = ReplicaOwners::default();
        owners.follow(&[key]);
        (0..5).for_each(|_| owners.not_answered(key, 0));
        assert_eq!(owners.poll_timeout(0), Some(2 * RETRY_NS));
        assert!(owners.rests(key, 0) && !owners.may_drop(key, 0) && owners.may_drop(key, 2 * RETRY_NS));
        owners.answered(key);
        owners.begin_drop(key);
        assert!(!owners.rests(key, 0) && !owners.may_drop(key, 0));
        owners.end_drop(key);
        assert!(owners.may_drop(key, 0));
    }
}
