//! Reads from the shared tier into fresh extents of the pool, shared by all gets of the same object meanwhile.

use std::collections::BTreeMap;

use kvplane_proto::ids::{ReservationId, Version};
use kvplane_proto::{Digest, Status};
use kvplane_shared::{Refusal, SharedTier, SharedView};

use super::WaitingReader;
use crate::service::shard::Shard;
use crate::service::shard::effects::Effect;
use crate::service::shard::stream_read::Reader;
use crate::service::shard::tail::tenant_of;
use crate::service::shard::tail::{TailHead, is_of};
use crate::service::shard::timing::Timing;
use crate::service::types::{PoolMemory, reserve_status};
use crate::{Replica, Reserve};

/// Most gets that wait for one read.
const READERS_MOST: usize = 1024;

/// Read in flight.
#[derive(Debug)]
struct ReadCall {
    digest: Digest,
    reservation: ReservationId,
    /// Offset of its extent in the pool, and its length.
    offset: u64,
    bytes: u32,
    readers: Vec<(Reader, Timing)>,
}

/// Reads in flight.
#[derive(Debug, Default)]
pub(super) struct Reads {
    last: u64,
    calls: BTreeMap<u64, ReadCall>,
    reading: BTreeMap<Digest, (u64, Version)>,
}

impl Reads {
    /// Begins to read an object, or joins a read in flight.
    pub(super) fn read(
        &mut self,
        tier: &mut SharedTier,
        shard: &mut Shard,
        view: &SharedView,
        reader: Reader,
    ) -> Result<(), Status> {
        let (digest, timing) = (view.digest, shard.answers.outputs.timing());
        if let Some((token, version)) = self.reading.get(&digest)
            && *version == view.version
            && let Some(call) = self.calls.get_mut(token)
        {
            if call.readers.len() == READERS_MOST {
                return Err(Status::Busy);
            }
            call.readers.push((reader, timing));
            return Ok(());
        }
        let replica = if view.is_replicated { Replica::First } else { Replica::None };
        let plain = Reserve::plain(digest, view.bytes.into());
        let wanted = Reserve { tail_bytes: view.tail_bytes.into(), head: view.is_head, replica, ..plain };
        // No room is temporary: pins and puts have deadlines.
        let reserved = shard.store.reserve_for(&wanted).map_err(|error| match reserve_status(error) {
            Status::NoSpace => Status::Busy,
            status => status,
        });
        let (reservation, extent) = reserved?;
        self.last += 1;
        let token = self.last;
        if let Err(refusal) = tier.read(digest, token, shard.now_ns) {
            shard.abort(reservation);
            return Err(match refusal {
                Refusal::Busy => Status::Busy,
                Refusal::Paused | Refusal::NotHere | Refusal::Corrupt => Status::NotFound,
            });
        }
        let readers = vec![(reader, timing)];
        self.calls.insert(token, ReadCall { digest, reservation, offset: extent.offset, bytes: view.bytes, readers });
        self.reading.insert(digest, (token, view.version));
        Ok(())
    }

    /// Ends a read, with the object's version, checksum and bytes, or without the object. Its readers are appended to
    /// `done`.
    pub(super) fn done(
        &mut self,
        shard: &mut Shard,
        token: u64,
        found: Option<(Version, u64, &[u8])>,
        memory: &mut dyn PoolMemory,
        done: &mut Vec<WaitingReader>,
    ) {
        let Some(ReadCall { digest, reservation, offset, bytes, readers }) = self.calls.remove(&token) else { return };
        if self.reading.get(&digest).is_some_and(|(reading, _)| *reading == token) {
            self.reading.remove(&digest);
        }
        let found = found.filter(|_| shard.keeps(digest));
        match found {
            Some((version, checksum, all)) => {
                let (payload, tail) = all.split_at(bytes as usize);
                memory.write(offset, payload);
                // A put may have been faster.
                if shard.store.restore(reservation, checksum, version).is_ok() {
                    take_tail(shard, digest, tail, memory);
                    if shard.store.objects().replica(digest).is_owed_a_copy() {
                        shard.effects.note(Effect::LacksReplica);
                    }
                }
            }
            None => shard.abort(reservation),
        }
        done.extend(readers.into_iter().map(|(reader, timing)| (digest, reader, timing)));
    }
}

/// Writes the tail of an object that was just read behind it, and keeps the object as its tail says. Beyond its
/// tenant's quota, or with a tail of another object, it is kept without one: it leaves memory like any other.
fn take_tail(shard: &mut Shard, digest: Digest, tail: &[u8], memory: &mut dyn PoolMemory) {
    if tail.is_empty() || !is_of(tail, digest) {
        return;
    }
    let Some((pin, object)) = shard.store.hold(digest) else { return };
    let room = shard.store.pinned(pin).map_or(0, |entry| shard.store.pool().tail_room(entry));
    if tail.len() as u64 <= room {
        memory.write(object.tail_at, tail);
        shard.store.set_tail(pin);
        if let Some((head, name)) = TailHead::split(tail) {
            let keep = shard.keep_again(&head.options, tenant_of(&head, &name));
            if head.options.replicas > 2 && shard.store.objects().replica(digest).is_owed_a_copy() {
                // The entry says only that it is to be replicated, the tail how many times.
                shard.store.objects_mut().want_copies(digest, head.options.replicas - 1);
            }
            shard.store.keep_as(pin, &keep);
        }
    }
    shard.unpin(pin);
}
