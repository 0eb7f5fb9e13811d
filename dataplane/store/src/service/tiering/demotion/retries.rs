//! Writes once more: of what the device failed to take, and at once of what somebody waits for.
//!
//! An object whose write failed stays in memory and is tried again after a pause, a few times: each try that fails
//! costs a segment, and a device that fails them all takes no more writes soon. Nobody is told: who waited for the
//! write was refused, and that object is gone. Who asks for it on the SSD in a pause is told at once that the SSD did
//! not take it, rather than to come again until a deadline.
//!
//! An object is also written once more when it is to have a copy, or none, and its record on the SSD says otherwise:
//! the next incarnation reads there which copies it owes.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;

use super::{Demotion, DirtyObject};
use crate::service::tiering::ssd::Ssd;

/// How often a write that failed is tried again.
const TRIES_MOST: u8 = 4;
/// The first pause; each one after that is four times as long.
const PAUSE_NS: u64 = 1_000_000_000;

/// Objects that are to be written once more, by when.
#[derive(Debug, Default)]
pub(super) struct Retries {
    waiting: BTreeMap<(u64, Digest, Version), DirtyObject>,
    /// Which they are.
    paused: BTreeSet<(Digest, Version)>,
}

impl Retries {
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.waiting.first_key_value().map(|((due_ns, ..), _)| *due_ns)
    }

    /// Objects that wait for their next try.
    pub(super) fn objects_mut(&mut self) -> impl Iterator<Item = &mut DirtyObject> {
        self.waiting.values_mut()
    }
}

impl Demotion {
    /// Whether an object whose write failed is to be written once more; it stays pinned until then.
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

    /// Those whose pause is over get in line; all of them where nothing is written any more, or soon.
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

    /// The promise of a second copy in an object's record on the SSD, or in one that is in flight there. None without a
    /// record, and while one is queued: it is written with the promise that holds by then.
    pub(super) fn promise_of(&self, ssd: &Ssd, digest: Digest) -> Option<bool> {
        let of = |held: &DirtyObject| held.digest == digest;
        let mut waiting = self.writes.iter().chain(&self.dirty).chain(self.retries.waiting.values());
        if waiting.any(of) {
            return None;
        }
        let given = self.calls.values().rev().find(|call| of(&call.object)).map(|call| call.object.copied);
        given.or_else(|| ssd.locate(digest).map(|view| view.copied))
    }

    /// Whether a version waits for its next try: its put was answered before, as none waited for the write.
    pub(super) fn is_paused(&self, digest: Digest, version: Version) -> bool {
        self.retries.paused.contains(&(digest, version))
    }
}
