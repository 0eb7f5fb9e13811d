//! Requested replicas of existing objects: for an operator, or for hot objects; made within the rate of background
//! work.
//!
//! A request is a mark of the object and lasts as long as the object does; an object on an SSD is written there once
//! more with the mark. A repeated request returns the progress of the replica.

use std::collections::VecDeque;

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;

use super::pushes::QUEUE_MOST;
use crate::service::shard::Shard;

/// Existing objects that are to be replicated, and the time of the next.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    queue: VecDeque<Digest>,
    due_ns: u64,
}

impl Wishes {
    /// Enqueues an object to be replicated; false if the queue is full.
    pub(super) fn add(&mut self, digest: Digest) -> bool {
        let waits = self.queue.contains(&digest);
        if !waits && self.queue.len() < QUEUE_MOST {
            self.queue.push_back(digest);
            return true;
        }
        waits
    }

    /// Returns the next object, if the rate allows one.
    pub(super) fn next(&mut self, shard: &Shard, bytes_per_s: u64) -> Option<(Digest, Version)> {
        while self.due_ns <= shard.now_ns {
            let digest = self.queue.pop_front()?;
            let object = shard.peek(digest);
            let Some(object) = object.filter(|_| shard.ownership.owns(digest)) else { continue };
            let pause_ns = u128::from(object.extent.bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1));
            // At most 1 s an object: a rate of 0 turns background work off, and must not stop requested replicas.
            let pause_ns = u64::try_from(pause_ns).unwrap_or(u64::MAX).min(1_000_000_000);
            self.due_ns = shard.now_ns.saturating_add(pause_ns);
            return Some((digest, object.version));
        }
        None
    }

    /// Returns the time of the next object.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        (!self.queue.is_empty() && self.due_ns > now_ns).then_some(self.due_ns)
    }
}
