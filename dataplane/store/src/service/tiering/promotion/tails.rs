//! Tails of objects that were read from the SSD: an object is read without the tail in its record, so that the tail is
//! read afterwards if the object stays in memory.
//!
//! An object whose tail is only on the SSD and is lost there is dropped from memory too: it would be without a name.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::{PinId, Version};
use kvplane_tier::{GetError, Memory, Priority, RecordView, Span, Token};

use crate::TAIL_BYTES_MOST;
use crate::service::shard::Shard;
use crate::service::shard::tail::tenant_of;
use crate::service::shard::tail::{TailHead, is_of};
use crate::service::tiering::ssd::Ssd;

/// Most objects that wait for their tails.
const WAITING_MOST: usize = 65_536;

/// Returns the length of an object's tail; 0 if its record has none.
pub(super) fn tail_bytes_of(view: &RecordView) -> u32 {
    let bytes = u32::from(view.key_bytes);
    if bytes <= TAIL_BYTES_MOST { bytes } else { 0 }
}

/// Objects in memory whose tails are to be read or are being read.
#[derive(Debug, Default)]
pub(super) struct Tails {
    queue: VecDeque<(Digest, Version)>,
    calls: BTreeMap<u64, TailCall>,
}

/// Read of a tail in flight in the tier.
#[derive(Debug)]
struct TailCall {
    digest: Digest,
    version: Version,
    pin: PinId,
}

impl Tails {
    /// Enqueues the read of the tail of an object that stays in memory.
    pub(super) fn want(&mut self, ssd: &Ssd, shard: &mut Shard, digest: Digest) {
        let store = &mut shard.store;
        let Some(version) = store.peek(digest).filter(|object| !object.has_tail).map(|object| object.version) else {
            return;
        };
        if ssd.locate(digest).is_some_and(|view| tail_bytes_of(&view) == 0) {
            return;
        }
        if self.queue.len() < WAITING_MOST {
            self.queue.push_back((digest, version));
        } else {
            store.drop_copy(digest);
        }
    }

    /// Begins to read tails, as far as the tier accepts reads. Returns true if there was any progress.
    pub(super) fn read(&mut self, ssd: &mut Ssd, shard: &mut Shard) -> bool {
        let mut progress = false;
        let store = &mut shard.store;
        while let Some((digest, version)) = self.queue.front().copied() {
            let here = store.peek(digest).is_some_and(|object| object.version == version && !object.has_tail);
            let there = ssd.locate(digest).is_some_and(|view| view.version == version);
            if here && there {
                let Some((pin, _)) = store.hold(digest) else { return progress };
                let token = ssd.new_token();
                match ssd.tier.get_key(digest, Priority::Background, token) {
                    Ok(()) => drop(self.calls.insert(token.0, TailCall { digest, version, pin })),
                    Err(error) => {
                        store.unpin(pin).expect("a pin that the shard holds");
                        if error == GetError::Busy {
                            return progress;
                        }
                    }
                }
            } else if here {
                store.drop_copy(digest);
            }
            self.queue.pop_front();
            progress = true;
        }
        progress
    }

    /// Handles the end of the read of a tail. False if the token belongs to another read.
    pub(super) fn done(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        token: Token,
        read: Option<Version>,
        memory: &mut dyn Memory,
    ) -> bool {
        let Some(TailCall { digest, version, pin }) = self.calls.remove(&token.0) else { return false };
        let tail = ssd.tier.take_key(token).filter(|_| read.is_some());
        let store = &mut shard.store;
        let object = store.held(pin).expect("a pin that the shard holds");
        let room = store.pinned(pin).map_or(0, |entry| store.pool().tail_room(entry));
        let mut kept = None;
        let good = match tail {
            Some(tail) if read == Some(version) && is_of(&tail, digest) && tail.len() as u64 <= room => {
                memory.write(&tail, Span::pool(object.tail_at, tail.len() as u32));
                store.set_tail(pin);
                kept = TailHead::split(&tail).map(|(head, name)| (head.options, tenant_of(&head, &name)));
                true
            }
            _ => false,
        };
        let mut has_room = true;
        if let Some((options, tenant)) = kept {
            let keep = shard.keep_again(&options, tenant);
            let store = &mut shard.store;
            if options.replicas > 2 && store.objects().replica(digest).is_owed_a_copy() {
                // The record says only that it is to be replicated, the tail how many times.
                store.objects_mut().want_copies(digest, options.replicas - 1);
            }
            has_room = store.keep_as(pin, &keep);
        }
        let store = &mut shard.store;
        store.unpin(pin).expect("a pin that the shard holds");
        if good && !has_room {
            // Beyond its tenant's quota the object is in memory for its readers only; it stays on the SSD.
            store.drop_copy(digest);
        }
        if !good {
            shard.drop_version(digest, version);
        }
        true
    }
}
