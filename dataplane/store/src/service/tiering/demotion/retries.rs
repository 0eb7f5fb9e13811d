//! Repeated writes: retries of objects that the device failed to write, and rewrites of changed records.
//!
//! An object whose write failed stays in memory and is retried after a pause, a few times: each failed attempt costs a
//! segment, and a device that fails them all is degraded soon. No reply waits for a retry: the put that waited for the
//! write was refused, and its object dropped. A request that waits for the object on the SSD during a pause fails at
//! once, instead of being busy until its deadline.
//!
//! An object is also written again when its replication was turned on or off and its record on the SSD differs: the
//! next incarnation reads from the record which replicas it has to make.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;

use super::{Demotion, DirtyObject};
use crate::service::tiering::ssd::Ssd;

/// Most retries of a failed write.
const TRIES_MOST: u8 = 4;
/// First pause; each further one is four times as long.
const PAUSE_NS: u64 = 1_000_000_000;

/// Objects to be written again, by time.
#[derive(Debug, Default)]
pub(super) struct Retries {
    waiting: BTreeMap<(u64, Digest, Version), DirtyObject>,
    /// Keys of these objects.
    paused: BTreeSet<(Digest, Version)>,
}

impl Retries {
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.waiting.first_key_value().map(|((due_ns, ..), _)| *due_ns)
    }

    /// Returns the objects that wait for their next attempt.
    pub(super) fn objects_mut(&mut self) -> impl Iterator<Item = &mut DirtyObject> {
        self.waiting.values_mut()
    }
}

impl Demotion {
    /// Schedules a retry of a failed write; the object stays pinned until then. False if it is not to be retried.
    pub(super) fn try_again(&mut self, ssd: &Ssd, held: &DirtyObject, now_ns: u64) -> bool {
        if held.tries == TRIES_MOST || ssd.is_degraded() {
            return false;
        }
        let due_ns = now_ns.saturating_add(PAUSE_NS << (2 * held.tries));
        let again = DirtyObject { tries: held.tries + 1, ..*held };
        self.retries.waiting.insert((due_ns, held.digest, held.version), again);
        self.retries.paused.insert((held.digest, held.version));
        true
    }

    /// Enqueues the writes whose pause is over; all of them if writes stop, now or soon.
    pub(super) fn end_pauses(&mut self, ssd: &Ssd, now_ns: u64) {
        let all = self.closing || ssd.is_degraded();
        while let Some(first) = self.retries.waiting.first_entry()
            && (all || first.key().0 <= now_ns)
        {
            let held = first.remove();
            self.retries.paused.remove(&(held.digest, held.version));
            self.writes.push_back(held);
        }
    }

    /// Returns the replication flag of an object's record on the SSD, or of one in flight there. `None` without a
    /// record, and while a write is queued: it will carry the flag as of then.
    pub(super) fn promise_of(&self, ssd: &Ssd, digest: Digest) -> Option<bool> {
        let of = |held: &DirtyObject| held.digest == digest;
        let mut waiting = self.writes.iter().chain(&self.dirty).chain(self.retries.waiting.values());
        if waiting.any(of) {
            return None;
        }
        let given = self.calls.values().rev().find(|call| of(&call.object)).map(|call| call.object.copied);
        given.or_else(|| ssd.locate(digest).map(|view| view.copied))
    }

    /// Returns true if a version waits for its next attempt. No reply waits for it any more.
    pub(super) fn is_paused(&self, digest: Digest, version: Version) -> bool {
        self.retries.paused.contains(&(digest, version))
    }
}
