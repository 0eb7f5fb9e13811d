//! Replicas of objects that are there already: an operator, or many readers, want one, and it is made within the rate
//! of what moves in the background.
//!
//! A wish is a mark at the object and lasts as long as that does; what is on an SSD is written there once more with it.
//! A repeated wish answers how far the replica is.

use std::collections::VecDeque;

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;

use super::pushes::QUEUE_MOST;
use crate::service::shard::Shard;

/// How far the replica of an object is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReplicaProgress {
    /// This shard is not the owner of the object.
    #[default]
    Elsewhere,
    /// It is, and there is no object.
    Missing,
    /// The slot has no replica owner.
    Alone,
    /// It is being made, or will be.
    Coming,
    /// The replica owner has a replica, of so many bytes. It may have evicted it since.
    There(u64),
}

/// Objects that were there when a replica of them was wanted, and when the next has its turn.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    queue: VecDeque<Digest>,
    due_ns: u64,
}

impl Wishes {
    /// An object is to have a replica; false where too many wait.
    pub(super) fn add(&mut self, digest: Digest) -> bool {
        let waits = self.queue.contains(&digest);
        if !waits && self.queue.len() < QUEUE_MOST {
            self.queue.push_back(digest);
            return true;
        }
        waits
    }

    /// The next object that has its turn, if the rate allows.
    pub(super) fn next(&mut self, shard: &Shard, bytes_per_s: u64) -> Option<(Digest, Version)> {
        while self.due_ns <= shard.now_ns {
            let digest = self.queue.pop_front()?;
            let object = shard.peek(digest);
            let Some(object) = object.filter(|_| shard.ownership.owns(digest)) else { continue };
            let pause_ns = u128::from(object.extent.bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1));
            // A shard that moves nothing by itself was asked all the same.
            let pause_ns = u64::try_from(pause_ns).unwrap_or(u64::MAX).min(1_000_000_000);
            self.due_ns = shard.now_ns.saturating_add(pause_ns);
            return Some((digest, object.version));
        }
        None
    }

    /// When the next has its turn.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        (!self.queue.is_empty() && self.due_ns > now_ns).then_some(self.due_ns)
    }
}
