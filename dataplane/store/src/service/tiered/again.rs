//! Writes once more: of what the device failed to take, and at once of what somebody waits for.
//!
//! An object whose write failed stays in memory and is tried again after a pause, a few times: each try that fails
//! costs a segment, and a device that fails them all takes no more writes soon. Nobody is told: who waited for the
//! write was refused, and that object is gone.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::message::PutAck;

use super::{Held, Service, Tiered};

/// How often a write that failed is tried again.
const TRIES_MOST: u8 = 4;
/// The first pause; each one after that is four times as long.
const PAUSE_NS: u64 = 1_000_000_000;

/// Objects that are to be written once more, by when.
#[derive(Debug, Default)]
pub(super) struct Retries {
    waiting: BTreeMap<(u64, Digest, Version), Held>,
}

impl Retries {
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.waiting.first_key_value().map(|((due_ns, ..), _)| *due_ns)
    }
}

impl Tiered {
    /// Whether an object whose write failed is to be written once more; it stays pinned until then.
    pub(super) fn try_again(&mut self, held: &Held, now_ns: u64) -> bool {
        if held.tries == TRIES_MOST || self.tier.degraded().is_some() {
            return false;
        }
        let due_ns = now_ns.saturating_add(PAUSE_NS << (2 * held.tries));
        let again = Held { tries: held.tries + 1, ..*held };
        self.retries.waiting.insert((due_ns, held.digest, held.version), again);
        true
    }

    /// Those whose pause is over get in line; all of them where nothing is written any more, or soon.
    pub(super) fn end_pauses(&mut self, now_ns: u64) {
        let all = self.closing || self.tier.degraded().is_some();
        while let Some(first) = self.retries.waiting.first_entry()
            && (all || first.key().0 <= now_ns)
        {
            self.writes.push_back(first.remove());
        }
    }
}

impl Service {
    /// Whether a put that asked for this would wait for what is on its way to the SSD.
    pub(in crate::service) fn is_awaited(&self, digest: Digest, asked: Option<PutAck>) -> bool {
        let Some(tiered) = &self.tiered else { return false };
        tiered.policy.ack_of(asked) != PutAck::Memory && tiered.is_writing(digest)
    }

    /// Somebody would wait for what may still wait to be written: it gets in line, and is written as is asked for now.
    pub(in crate::service) fn write_at_once(&mut self, digest: Digest, asked: Option<PutAck>) {
        if !self.is_awaited(digest, asked) {
            return;
        }
        let Some(tiered) = &mut self.tiered else { return };
        let of = |held: &Held| held.digest == digest;
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
