//! Tails of objects that came back from the SSD: an object is read without what stands before it, so its tail follows
//! when it stays in memory.
//!
//! An object that has its tail on the SSD only and loses it there leaves memory too: it would be without a name.

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;
use kvplane_tier::{GetError, Memory, Priority, RecordView, Span, Token};

use super::super::tail::TailHead;
use super::super::tenants::tenant_of;
use super::{Call, Service};
use crate::TAIL_BYTES_MOST;

/// The most objects that wait for their tails.
const WAITING_MOST: usize = 65_536;

/// Whether a tail is this object's, as far as it says: one without a name may be.
pub(super) fn is_of(tail: &[u8], digest: Digest) -> bool {
    TailHead::split(tail).is_some_and(|(head, name)| head.key_bytes == 0 || name.digest() == digest)
}

/// Whether reclaim is to keep the object with this tail.
pub(super) fn is_hard_pinned(tail: &[u8]) -> bool {
    TailHead::split(tail).is_some_and(|(head, _)| head.options.hard_pin)
}

/// Bytes of an object's tail, where its record has one.
pub(super) fn tail_bytes_of(view: &RecordView) -> u32 {
    let bytes = u32::from(view.key_bytes);
    if bytes <= TAIL_BYTES_MOST { bytes } else { 0 }
}

impl Service {
    /// An object that came back stays: its tail is to follow.
    pub(super) fn want_tail(&mut self, digest: Digest) {
        let (Some(tiered), Some(store)) = (&mut self.tiered, &mut self.store) else { return };
        let Some(version) = store.peek(digest).filter(|object| !object.has_tail).map(|object| object.version) else {
            return;
        };
        if tiered.locate(digest).is_some_and(|view| tail_bytes_of(&view) == 0) {
            return;
        }
        if tiered.tails.len() < WAITING_MOST {
            tiered.tails.push_back((digest, version));
        } else {
            store.drop_copy(digest);
        }
    }

    /// Has tails read, as far as the tier takes it.
    pub(super) fn read_tails(&mut self) -> bool {
        let mut progress = false;
        while let (Some(tiered), Some(store)) = (&mut self.tiered, &mut self.store)
            && let Some((digest, version)) = tiered.tails.front().copied()
        {
            let here = store.peek(digest).is_some_and(|object| object.version == version && !object.has_tail);
            let there = tiered.locate(digest).is_some_and(|view| view.version == version);
            let token = Token(tiered.next_call + 1);
            if here && there {
                let Some((pin, _)) = store.hold(digest) else { return progress };
                match tiered.tier.get_key(digest, Priority::Background, token) {
                    Ok(()) => drop(tiered.call(Call::Tail { digest, version, pin })),
                    Err(error) => {
                        store.unpin(pin).expect("a pin of our own");
                        if error == GetError::Busy {
                            return progress;
                        }
                    }
                }
            } else if here {
                store.drop_copy(digest);
            }
            tiered.tails.pop_front();
            progress = true;
        }
        progress
    }

    /// A tail was read, or cannot be.
    pub(super) fn tail_read(&mut self, token: Token, read: Option<Version>, memory: &mut dyn Memory) {
        let (Some(tiered), Some(store)) = (&mut self.tiered, &mut self.store) else { return };
        let tail = tiered.tier.take_key(token).filter(|_| read.is_some());
        let Some(Call::Tail { digest, version, pin }) = tiered.calls.remove(&token.0) else { return };
        let object = store.held(pin).expect("a pin of our own");
        let mut kept = None;
        let good = match tail {
            Some(tail)
                if read == Some(version) && is_of(&tail, digest) && tail.len() as u64 <= store.tail_room(pin) =>
            {
                memory.write(&tail, Span::pool(object.tail_at, tail.len() as u32));
                store.set_tail(pin);
                kept = TailHead::split(&tail).map(|(head, name)| (head.options, tenant_of(&head, &name)));
                true
            }
            _ => false,
        };
        let mut has_room = true;
        if let Some((options, tenant)) = kept {
            let keep = self.keep_again(&options, tenant);
            let store = self.store.as_mut().expect("a tier is under a store");
            has_room = store.keep_as(pin, &keep);
        }
        let store = self.store.as_mut().expect("a tier is under a store");
        store.unpin(pin).expect("a pin of our own");
        if good && !has_room {
            // Beyond its tenant's quota it is in memory for who asked only; the SSD has it.
            store.drop_copy(digest);
        }
        if !good {
            self.drop_version(digest, version);
        }
    }

    /// Has tails read of which somebody waits to know whose the object is, as far as the tier takes it.
    pub(super) fn read_claimed(&mut self) -> bool {
        let mut progress = false;
        while let (Some(tiered), Some(&digest)) = (&mut self.tiered, self.tenancy.claims.wanted.front()) {
            let token = Token(tiered.next_call + 1);
            match tiered.tier.get_key(digest, Priority::Get, token) {
                Ok(()) => drop(tiered.call(Call::Claim { digest })),
                Err(GetError::Busy) => return progress,
                Err(_) => self.claim_read(digest, None),
            }
            self.tenancy.claims.wanted.pop_front();
            progress = true;
        }
        progress
    }

    /// It was read whose an object is, or cannot be.
    fn claimed_read(&mut self, token: Token, read: Option<Version>) {
        let Some(tiered) = &mut self.tiered else { return };
        let tail = tiered.tier.take_key(token);
        let Some(Call::Claim { digest }) = tiered.calls.remove(&token.0) else { return };
        let located = tiered.locate(digest).map(|view| view.version);
        let tail = tail.filter(|tail| read.is_some() && is_of(tail, digest));
        let tenant = tail.and_then(|tail| TailHead::split(&tail).map(|(head, name)| tenant_of(&head, &name)));
        self.claim_read(digest, read.or(located).map(|version| (version, tenant)));
    }

    /// A key was read.
    pub(super) fn key_read(&mut self, token: Token, version: Version, memory: &mut dyn Memory) {
        match self.tiered.as_ref().and_then(|tiered| tiered.calls.get(&token.0)) {
            Some(Call::Name { .. }) => self.name_read(token, Some(version)),
            Some(Call::Claim { .. }) => self.claimed_read(token, Some(version)),
            _ => self.tail_read(token, Some(version), memory),
        }
    }

    /// What was asked for could not be read.
    pub(super) fn missed(&mut self, token: Token, memory: &mut dyn Memory) {
        let call = self.tiered.as_ref().and_then(|tiered| tiered.calls.get(&token.0));
        match call {
            Some(Call::Tail { .. }) => self.tail_read(token, None, memory),
            Some(Call::Name { .. }) => self.name_read(token, None),
            Some(Call::Claim { .. }) => self.claimed_read(token, None),
            _ => self.read_done(token, None),
        }
    }
}
