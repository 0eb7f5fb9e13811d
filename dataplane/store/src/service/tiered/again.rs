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

use kvplane_proto::ids::Version;
use kvplane_proto::message::PutAck;
use kvplane_proto::{Digest, Status};

use super::{Call, DirtyObject, Service, Tiering};

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
}

impl Tiering {
    /// Whether an object whose write failed is to be written once more; it stays pinned until then.
    pub(super) fn try_again(&mut self, held: &DirtyObject, now_ns: u64) -> bool {
        if held.tries == TRIES_MOST || self.tier.degraded().is_some() {
            return false;
        }
        let due_ns = now_ns.saturating_add(PAUSE_NS << (2 * held.tries));
        let again = DirtyObject { tries: held.tries + 1, ..*held };
        self.retries.waiting.insert((due_ns, held.digest, held.version), again);
        self.retries.paused.insert((held.digest, held.version));
        true
    }

    /// Those whose pause is over get in line; all of them where nothing is written any more, or soon.
    pub(super) fn end_pauses(&mut self, now_ns: u64) {
        let all = self.closing || self.tier.degraded().is_some();
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
    fn promise_of(&self, digest: Digest) -> Option<bool> {
        let of = |held: &DirtyObject| held.digest == digest;
        let mut waiting = self.writes.iter().chain(&self.dirty).chain(self.retries.waiting.values());
        if waiting.any(of) {
            return None;
        }
        let given = self.calls.values().rev().find_map(|call| match call {
            Call::Write { held, .. } if of(held) => Some(held.copied),
            _ => None,
        });
        given.or_else(|| self.locate(digest).map(|view| view.copied))
    }

    /// Whether a version waits for its next try: its put was answered before, as none waited for the write.
    pub(super) fn is_paused(&self, digest: Digest, version: Version) -> bool {
        self.retries.paused.contains(&(digest, version))
    }
}

impl Service {
    /// What a put of an object that is there already is told which would wait for the SSD: to come again while that is
    /// on its way there, and at once that the SSD did not take it. Nothing where it is there, or the put does not wait.
    pub(in crate::service) fn awaits_ssd(&mut self, digest: Digest, asked: Option<PutAck>) -> Option<Status> {
        self.write_at_once(digest, asked);
        let tiered = self.tiered.as_ref()?;
        if tiered.policy.ack_of(asked) == PutAck::Memory {
            return None;
        }
        let version = self.store.as_ref()?.peek(digest).map(|object| object.version);
        if version.is_some_and(|version| tiered.is_paused(digest, version)) {
            return Some(Status::NoSpace);
        }
        if tiered.is_writing(digest) {
            return Some(Status::Busy);
        }
        // What was never to be written is promised to nobody, unless this put says itself what it wants.
        if asked.is_none() || version.is_none() || tiered.tier.locate(digest).is_some() {
            return None;
        }
        self.hold_for_write(digest, None, asked);
        self.write_at_once(digest, asked);
        let begun = self.tiered.as_ref().is_some_and(|tiered| tiered.is_writing(digest));
        Some(if begun { Status::Busy } else { Status::NoSpace })
    }

    /// The record on the SSD of an object in memory says whether it has two owners, or is written once more.
    pub(in crate::service) fn write_promise(&mut self, digest: Digest) {
        let (Some(tiered), Some(store)) = (&self.tiered, &self.store) else { return };
        let promised = store.replica(digest).is_owed_a_copy();
        let says_so = tiered.promise_of(digest).is_none_or(|says| says == promised);
        if store.exists(digest) && !says_so {
            self.hold_for_write(digest, None, Some(PutAck::Buffered));
        }
    }

    /// Somebody would wait for what may still wait to be written: it gets in line, and is written as is asked for now.
    fn write_at_once(&mut self, digest: Digest, asked: Option<PutAck>) {
        let Some(tiered) = &mut self.tiered else { return };
        if tiered.policy.ack_of(asked) == PutAck::Memory || !tiered.is_writing(digest) {
            return;
        }
        let of = |held: &DirtyObject| held.digest == digest;
        // In their order: those that were replaced meanwhile are let go when it is their turn.
        while let Some(at) = tiered.dirty.iter().position(of) {
            tiered.writes.extend(tiered.dirty.remove(at));
        }
        if tiered.policy.ack_of(asked) == PutAck::Durable {
            let waiting = tiered.writes.iter_mut().chain(tiered.retries.waiting.values_mut());
            waiting.filter(|held| of(held)).for_each(|held| held.ack = asked);
        }
    }
}
