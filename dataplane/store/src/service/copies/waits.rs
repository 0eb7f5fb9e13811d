//! Answers that wait for a second owner: to drop a copy, or to take one.

use kvplane_proto::ids::Version;
use kvplane_proto::{Digest, FrameFlags, ItemFlags, Status};

use super::super::Service;
use super::super::context::RequestContext;
use super::super::deferred::{Replies, Slot};
use super::first::{QUEUE_MOST, all_of};
use crate::{ObjectView, Replica};

/// How long an answer waits for a second owner: to drop a copy, or to take one.
const WAIT_NS: u64 = 1_000_000_000;
/// Answers that wait for one drop or one copy.
const WAITERS_MOST: usize = 1024;

/// What an answer waits for with the second owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::service) struct CopyWaits {
    pub(in crate::service) drop: bool,
    pub(in crate::service) copy: bool,
}

impl CopyWaits {
    /// How many times its slot is settled.
    pub(in crate::service) fn count(self) -> usize {
        usize::from(self.drop) + usize::from(self.copy)
    }
}

impl super::Copies {
    /// An answer waits until then at most.
    pub(super) const fn due(&mut self, until_ns: u64) {
        if self.due_ns == 0 || until_ns < self.due_ns {
            self.due_ns = until_ns;
        }
    }
}

impl Service {
    /// What the answer of a put waits for.
    pub(in crate::service) fn copy_waits(&mut self, digest: Digest) -> CopyWaits {
        self.note_orphans();
        let possible = self.copies.seconds.contains_key(&digest.slot());
        let copy = possible && self.store.as_ref().is_some_and(|store| store.replica(digest) == Replica::Awaited);
        CopyWaits { drop: self.owes(digest), copy }
    }

    /// An object was made: a copy of it is made next if one is wanted, and `told` is told of what was waited for.
    pub(in crate::service) fn copy_made(
        &mut self,
        digest: Digest,
        version: Version,
        waits: CopyWaits,
        told: Option<Slot>,
    ) {
        if let (true, Some(slot)) = (waits.drop, told) {
            self.wait_for_drop(digest, slot);
        }
        let possible = self.copies.seconds.contains_key(&digest.slot());
        let replica = self.store.as_ref().map_or(Replica::None, |store| store.replica(digest));
        if !possible || !replica.is_owed_a_copy() {
            return;
        }
        if let (true, Some(slot)) = (waits.copy, told) {
            let until_ns = self.now_ns.saturating_add(WAIT_NS);
            self.copies.awaited.entry(digest).or_default().push((version, slot, until_ns));
            self.copies.due(until_ns);
        }
        if self.copies.queue.len() < QUEUE_MOST {
            self.copies.queue.push_back((digest, version));
        } else {
            self.walk_again();
            self.copy_told(digest, version, false);
        }
    }

    /// An answer waits until a copy is gone.
    pub(in crate::service) fn wait_for_drop(&mut self, digest: Digest, slot: Slot) {
        let until_ns = self.now_ns.saturating_add(WAIT_NS);
        let all = all_of(digest.slot());
        let owed = if self.copies.owed.contains_key(&digest) { digest } else { all };
        match self.copies.owed.get_mut(&owed).filter(|owed| owed.waiters.len() < WAITERS_MOST) {
            Some(owed) => {
                owed.waiters.push((slot, until_ns));
                self.copies.due(until_ns);
            }
            None => self.refuse_waiter(slot, Status::Busy),
        }
    }

    /// The removals of a request that wait for copies to go.
    pub(in crate::service) fn owed_among(&mut self, digests: &[Digest]) -> Vec<usize> {
        self.note_orphans();
        if self.copies.owed.is_empty() {
            return Vec::new();
        }
        (0..digests.len()).filter(|at| self.owes(digests[*at])).collect()
    }

    pub(super) fn refuse_waiter(&mut self, slot: Slot, why: Status) {
        self.copies.counters.refused += 1;
        self.settle(slot, |replies, item| match replies {
            Replies::Put(status, ..) | Replies::Bits(_, status) | Replies::Copies(_, status) => *status = why,
            Replies::Commits(_, replies) => replies[item].status = why,
            Replies::Lookups(_) | Replies::Found(..) | Replies::Sizes(_) => {}
        });
    }

    /// What is known of an object's copy: those who wait for that are told.
    pub(super) fn copy_told(&mut self, digest: Digest, version: Version, there: bool) {
        let Some(waiting) = self.copies.awaited.get_mut(&digest) else { return };
        let (told, later) = core::mem::take(waiting).into_iter().partition(|(of, ..)| *of <= version);
        *waiting = later;
        if waiting.is_empty() {
            self.copies.awaited.remove(&digest);
        }
        let told: Vec<(Version, Slot, u64)> = told;
        for (of, slot, _) in told {
            let here = there && of == version;
            self.settle(slot, |replies, item| match replies {
                Replies::Put(_, _, is_replicated) if here => *is_replicated = true,
                Replies::Commits(_, replies) if here => replies[item].flags = ItemFlags::REPLICATED,
                _ => {}
            });
        }
    }

    /// No client reads any more what former second owners have: whose answers waited for that alone.
    fn lapsed(&mut self) -> Vec<Slot> {
        let (now_ns, mut over) = (self.now_ns, Vec::new());
        self.copies.owed.retain(|_, owed| {
            if owed.lapses_ns > 0 && owed.lapses_ns <= now_ns {
                owed.lapses_ns = 0;
                if !owed.drops {
                    over.extend(owed.waiters.drain(..).map(|(slot, _)| slot));
                }
            }
            owed.drops || owed.lapses_ns > 0
        });
        over
    }

    /// Grants a client that wants one a lease on the replica of an object: true where the replica owner has the object
    /// for sure, and was the replica owner already in the client's map.
    pub(in crate::service) fn grant_replica_lease(
        &mut self,
        context: &RequestContext,
        digest: Digest,
        object: &ObjectView,
    ) -> bool {
        let copies = &self.copies;
        let wants = context.flags.has(FrameFlags::REPLICA_LEASE);
        let known = object.copied && wants && context.epoch >= copies.seconds_since;
        let second = copies.seconds.get(&digest.slot()).filter(|_| known && self.ownership.owns(digest));
        let there = second.is_some() && !copies.pushes.contains_key(&digest) && !self.owes(digest);
        if there {
            self.copies.told_ns = self.now_ns;
        }
        there
    }

    /// Answers do not wait for a second owner for ever.
    pub(in crate::service) fn expire_copy_waits(&mut self) {
        let now_ns = self.now_ns;
        if self.copies.due_ns == 0 || self.copies.due_ns > now_ns {
            return;
        }
        let (mut refused, mut told) = (Vec::new(), self.lapsed());
        for owed in self.copies.owed.values_mut() {
            refused.extend(owed.waiters.extract_if(.., |(_, until_ns)| *until_ns <= now_ns).map(|(slot, _)| slot));
        }
        self.copies.awaited.retain(|_, waiting| {
            told.extend(waiting.extract_if(.., |(_, _, until_ns)| *until_ns <= now_ns).map(|(_, slot, _)| slot));
            !waiting.is_empty()
        });
        let copies = &self.copies;
        let drops = copies.owed.values().flat_map(|owed| &owed.waiters).map(|(_, until_ns)| *until_ns);
        let lapses = copies.owed.values().map(|owed| owed.lapses_ns).filter(|until_ns| *until_ns > 0);
        let awaited = copies.awaited.values().flatten().map(|(_, _, until_ns)| *until_ns);
        self.copies.due_ns = drops.chain(lapses).chain(awaited).min().unwrap_or(0);
        refused.into_iter().for_each(|slot| self.refuse_waiter(slot, Status::Busy));
        told.into_iter().for_each(|slot| self.settle(slot, |_, _| {}));
    }

    /// When something is due.
    pub(in crate::service) fn copies_timeout(&self) -> Option<u64> {
        let copies = &self.copies;
        if copies.seconds.is_empty() && copies.due_ns == 0 {
            return None;
        }
        let due = (copies.due_ns > 0).then_some(copies.due_ns);
        let busy = !copies.owed.is_empty() || !copies.queue.is_empty();
        let retries = copies.peers.values().map(|peer| peer.retry_ns).filter(|at_ns| busy && *at_ns > self.now_ns);
        let walk = (copies.walk.is_some() && copies.walk_ns > self.now_ns).then_some(copies.walk_ns);
        let ssd = self.ssd_walk_timeout();
        due.into_iter().chain(retries).chain(walk).chain(ssd).chain(self.wishes_timeout()).min()
    }
}
