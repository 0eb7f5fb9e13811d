//! Replicas of objects that are there already: an operator, or many readers, want one, and it is made within the rate of
//! what moves in the background.
//!
//! A wish is a mark at the object and lasts as long as that does; what is on an SSD is written there once more with it.
//! A repeated wish answers how far the replica is.

use std::collections::VecDeque;

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;

use super::Replication;
use super::pushes::QUEUE_MOST;
use crate::Replica;
use crate::service::local::LocalStore;
use crate::service::shard::Shard;
use crate::service::shard::context::RequestContext;

/// How long an object that is prefetched for its replica may stay without being read.
const AHEAD_NS: u64 = 10_000_000_000;

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
    fn add(&mut self, digest: Digest) -> bool {
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

impl Replication {
    /// An object of ours is to have a replica, however it was put, and to have it again whenever it is lost, like one
    /// that was put with two. What is on an SSD only is read into memory first; what is neither here nor there
    /// `may_come` from a former owner.
    pub(in crate::service) fn want(
        &mut self,
        local: &mut LocalStore,
        digest: Digest,
        may_come: bool,
    ) -> ReplicaProgress {
        let wished = self.want_for_now(local, digest, may_come);
        if matches!(wished, ReplicaProgress::Coming | ReplicaProgress::There(_)) {
            local.write_promise(digest);
        }
        wished
    }

    /// A replica of an object of ours is wanted for as long as the object stays in memory: nothing is written to the
    /// SSD.
    fn want_for_now(&mut self, local: &mut LocalStore, digest: Digest, may_come: bool) -> ReplicaProgress {
        let shard = &mut local.shard;
        if !shard.ownership.owns(digest) {
            return ReplicaProgress::Elsewhere;
        }
        let object = shard.peek(digest).map(|object| (object.extent.bytes, object.version));
        let Some((bytes, version)) = object else {
            let Some(view) = local.on_ssd(digest) else {
                return if may_come { ReplicaProgress::Coming } else { ReplicaProgress::Missing };
            };
            local.prefetch(&view, local.shard.now_ns.saturating_add(AHEAD_NS), true);
            return ReplicaProgress::Coming;
        };
        if !shard.replicas.has_owner(digest) {
            return ReplicaProgress::Alone;
        }
        // A push of an older version, still in flight, makes no replica of this one and looks for none when it ends.
        let sending = self.pushes.is_sending(digest, version);
        let Some(store) = shard.store.as_mut().filter(|store| !store.is_copy(digest)) else {
            return ReplicaProgress::Elsewhere;
        };
        if store.is_copied(digest) && !sending {
            return ReplicaProgress::There(bytes);
        }
        if store.replica(digest) == Replica::None {
            store.want_copy(digest);
        }
        if !sending && !self.wishes.add(digest) {
            self.walk_again(shard);
        }
        ReplicaProgress::Coming
    }

    /// An object in memory is given to a client over a stream. One that is hot gets a replica, within the rate of what
    /// moves in the background. What clients of this host read out of the pool by themselves does not count: a replica
    /// elsewhere would not relieve it.
    #[inline]
    pub(in crate::service) fn note_given(
        &mut self,
        local: &mut LocalStore,
        context: &RequestContext,
        digest: Digest,
        bytes: u64,
    ) {
        local.shard.note_get(digest, bytes);
        if self.heat.asked(digest, bytes, local.shard.now_ns) {
            self.replicate_hot(local, context, digest);
        }
    }

    #[cold]
    fn replicate_hot(&mut self, local: &mut LocalStore, context: &RequestContext, digest: Digest) {
        let shard = &local.shard;
        let copied = shard.store.as_ref().is_none_or(|store| store.is_copied(digest) || store.is_copy(digest));
        if copied || context.fetches || !shard.replicas.has_owner(digest) {
            return;
        }
        if self.want_for_now(local, digest, false) == ReplicaProgress::Coming {
            self.counters.hot += 1;
        }
    }
}
