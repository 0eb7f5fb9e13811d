//! Room for what moves here; and what has moved stays with its former owner until the SSD here has it.

use kvplane_proto::message::{ObjectName, Part, PutAck, PutItem};
use kvplane_proto::{Digest, Status};

use super::super::Service;
use super::super::tail::TailHead;
use super::super::tiered::MoveProgress;
use super::super::types::{Memory, Place};
use super::imports::{Call, Fetch, ListedObject, Want};
use super::pump::End;
use crate::{Replica, Reserve};

impl Service {
    /// Backpressure of the SSD on what moves here: `Busy` while its backlog is full.
    pub(super) fn may_move(&mut self, bytes: u64) -> Result<(), Status> {
        let asked = self.tiered.is_some().then_some(PutAck::Buffered);
        self.may_put(bytes, asked)
    }

    /// An object of a source is here, in memory. The source drops its own when the SSD here has it, if there is one
    /// that takes it: it may be the only one that outlives a restart, or an eviction.
    pub(super) fn keep_moved(&mut self, source: u32, digest: Digest) {
        let (moved, now_ns) = (self.write_moved(digest), self.now_ns);
        let Some(entry) = self.moves.imports.sources.get_mut(&source) else { return };
        match moved {
            MoveProgress::Waits => _ = entry.unwritten.insert(digest),
            MoveProgress::Kept => self.drop_there(source, digest),
            MoveProgress::Refused => entry.look_again(now_ns),
        }
    }

    /// An object that moved here does not wait for the SSD any more: it is there, or memory has lost it, or the SSD did
    /// not take it.
    pub(in crate::service) fn moved_written(&mut self, digest: Digest) {
        let source = self.moves.imports.source_of(digest);
        let entry = self.moves.imports.sources.get_mut(&source);
        if !entry.is_some_and(|entry| entry.unwritten.remove(&digest)) {
            return;
        }
        if self.on_ssd(digest).is_some() {
            self.drop_there(source, digest);
        } else if let Some(entry) = self.moves.imports.sources.get_mut(&source) {
            entry.look_again(self.now_ns);
        }
        self.check_source(source);
    }

    /// Makes room for an object that was described, and asks for it.
    pub(super) fn begin_object(&mut self, listed: &ListedObject) -> Option<Fetch> {
        let (digest, bytes) = (listed.item.digest, listed.item.bytes);
        let name = ObjectName { tenant: &listed.tenant, key: &listed.key };
        let plain = PutItem::plain(digest, bytes).with_options(&listed.item.options());
        let key_bytes = listed.item.key_bytes;
        let put = PutItem { key_bytes, tenant_bytes: listed.item.tenant_bytes, ..plain };
        let tail = TailHead::of(&put).filter(|_| key_bytes == 0 || name.digest() == digest);
        let tail_bytes = tail.map_or(0, |tail| tail.tail_bytes() as u32);
        let options = put.options();
        let mut keep = self.keep_again(&options, options.tenant);
        if options.hard_pin && self.tier_fits(bytes) {
            // What the SSD keeps need not be pinned in memory beyond the share that may be.
            keep.hard_pin = self.store.as_ref().is_some_and(|store| store.pins_allow(bytes));
        }
        let head = options.part == Part::Head;
        let replica = if options.replicas > 1 { Replica::First } else { Replica::None };
        let wanted = Reserve {
            tail_bytes,
            has_tail: tail.is_some(),
            keep,
            head,
            replica,
            moves: true,
            ..Reserve::plain(digest, bytes)
        };
        let room = self.may_move(bytes).and_then(|()| {
            let store = self.store.as_mut().ok_or(Status::NotFound)?;
            Ok(store.reserve_for(&wanted))
        });
        // Objects that wait for the SSD are in the way for a while only: this one is not to be dropped for that.
        let room = room.and_then(|room| room.map_err(|error| self.no_room(error, keep.account)));
        let (reservation, extent) = match room {
            Ok(room) => room,
            Err(status) => {
                // What is in its way is on its way here too, or in use, and goes sooner or later. What is too long
                // for this shard stays where it is.
                let source = self.moves.imports.objects.get(&digest).map_or(0, |object| object.source);
                if status == Status::Exists {
                    self.keep_moved(source, digest);
                }
                let ends = matches!(status, Status::Exists | Status::TooLarge);
                self.object_ended(digest, if ends { End::Settled } else { End::Busy });
                return None;
            }
        };
        if let Some(tail) = tail {
            self.write_tail(reservation, &tail, &name);
        }
        let imports = &mut self.moves.imports;
        let object = imports.objects.get_mut(&digest).expect("an object on its way");
        object.place = Some((reservation, bytes));
        imports.pulls += 1;
        imports.pull_bytes += bytes;
        imports.allowance_bytes = imports.allowance_bytes.saturating_sub(i64::try_from(bytes).unwrap_or(i64::MAX));
        let source = object.source;
        let Some(key) = imports.sources.get(&source).map(|source| source.key) else {
            self.object_ended(digest, End::Settled);
            return None;
        };
        let place = Place { memory: Memory::Pool, offset: extent.offset, bytes };
        Some(self.moves.imports.ask(key, Want::Object(digest, place), Call::Object(digest)))
    }
}
