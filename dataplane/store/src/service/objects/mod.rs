//! Objects wherever they are: in memory, on the SSD, at a former owner of their slot, and at its replica owner.
//!
//! [`Objects`] carries out requests that read and remove objects, and connects its components: the consequences of one
//! component's work for another. Puts are carried out by [`super::puts`].

mod owners;
mod pins;
mod removals;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::ReservationId;
use kvplane_proto::message::{
    Bitmap, CommitReply, DigestItem, GetItem, Items, LookupReply, ObjectName, Operation, Part, PutAck, PutItem,
    RangeItem, RetainItem, SizeReply,
};
use kvplane_proto::{Digest, FrameFlags, ItemFlags, Status};

use super::damage::Damage;
use super::device_moves::{is_on_device, is_to_be_promoted, recall};
use super::local::{LocalStore, SsdWaits};
use super::migration::{Migration, Waiter};
use super::replication::records::{keep_replica, may_read_replica, readable_record};
use super::replication::{CopyWaits, Replication};
use super::shard::Shard;
use super::shard::answers::items_of;
use super::shard::context::RequestContext;
use super::shard::deferrals::{DeferredItem, Replies, lookup_of, no_lookup};
use super::shard::stream_read::{ReadSpan, Reader, StreamRead};
use super::shard::tail::TailHead;
use super::shared_objects::{in_shared_tier, is_below, read_shared};
use super::tiering::ObjectTenant;
use super::types::{CloseReason, CommittedObject, Hold, Identity, Memory, MemoryExtent, PeerKey, get_status};
use crate::entry::Entry;
use crate::store::Store;
use crate::{CommitError, GetError, Reserve, ReserveError};
use pins::ClientPins;

/// All objects of a shard.
pub(super) struct Objects {
    pub(super) local: LocalStore,
    /// Slots that migrate to or from other owners.
    pub(super) migration: Migration,
    /// Objects that are replicated.
    pub(super) replication: Replication,
    /// Objects whose bytes may be damaged, and those whose bytes are.
    pub(super) damage: Damage,
}

/// Conditions that the reply of a put waits for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PutWaits {
    ssd: SsdWaits,
    copies: CopyWaits,
}

impl PutWaits {
    /// Returns how many times the put's item is settled.
    pub(super) fn count(self) -> usize {
        let SsdWaits { write, removal, shared_removal } = self.ssd;
        usize::from(write) + usize::from(removal) + usize::from(shared_removal) + self.copies.count()
    }
}

impl Objects {
    pub(super) fn new(identity: Identity, store: Store) -> Self {
        Self {
            local: LocalStore::new(identity, store),
            migration: Migration::default(),
            replication: Replication::default(),
            damage: Damage::default(),
        }
    }

    /// Returns the shard.
    pub(super) const fn shard(&self) -> &Shard {
        &self.local.shard
    }

    pub(super) const fn shard_mut(&mut self) -> &mut Shard {
        &mut self.local.shard
    }

    /// Returns true if this shard answers for all objects of a request; otherwise the request is answered here.
    fn answers_for_all(
        &mut self,
        context: &RequestContext,
        operation: Operation,
        header: &Header,
        mut digests: impl Iterator<Item = Digest>,
    ) -> bool {
        // A new owner may name objects that are not exported to it any more when it drops them or requests their sizes:
        // these are skipped.
        let alone = matches!(operation, Operation::Remove | Operation::Size);
        let counts = |status: &Status| !alone || *status != Status::Stale;
        let shard = &mut self.local.shard;
        let refused = digests.find_map(|digest| shard.answers_for(context, digest).err().filter(counts));
        if let Some(status) = refused {
            shard.refuse(context.peer, operation, header.request, status);
        }
        refused.is_none()
    }

    /// Returns the digests of a request if this shard answers for all; otherwise the request is answered with
    /// `WrongOwner`.
    fn owned_digests<'a>(
        &mut self,
        context: &RequestContext,
        operation: Operation,
        header: &Header,
        body: &'a [u8],
    ) -> Result<Option<Items<'a, DigestItem>>, CloseReason> {
        let items = items_of::<DigestItem>(header, body)?;
        let answers = self.answers_for_all(context, operation, header, items.clone().map(|item| item.digest));
        Ok(answers.then_some(items))
    }

    /// Returns those of these objects that this shard answers for as their owner, not for a replica of them.
    fn of_owner(
        &self,
        context: &RequestContext,
        objects: impl Iterator<Item = (usize, Digest)>,
    ) -> impl Iterator<Item = (usize, Digest)> {
        objects.filter(|(_, digest)| !self.local.shard.reads_replica(context, *digest))
    }

    /// Pins objects in memory for a time, or ends that.
    pub(super) fn retain(&mut self, context: &RequestContext, header: &Header, body: &[u8]) -> Result<(), CloseReason> {
        let items = items_of::<RetainItem>(header, body)?;
        if self.answers_for_all(context, Operation::Retain, header, items.clone().map(|item| item.digest)) {
            ClientPins { local: &mut self.local, migration: &self.migration }.answer(context, header, items);
        }
        Ok(())
    }

    pub(super) fn exists(&mut self, context: &RequestContext, header: &Header, body: &[u8]) -> Result<(), CloseReason> {
        let Some(items) = self.owned_digests(context, Operation::Exists, header, body)? else { return Ok(()) };
        let until_ns = self.local.wants_ahead(header);
        let count = items.len();
        let (mut bits, mut heads) = (Vec::with_capacity(count), Vec::new());
        let store = &self.local.shard.store;
        store.objects().exist_as_heads(items.clone().map(|item| item.digest), |here, is_head| {
            if is_head {
                heads.resize(count, false);
                heads[bits.len()] = true;
            }
            bits.push(here);
        });
        if context.tenant.is_some() || context.flags.has(FrameFlags::READ_REPLICA) {
            for (bit, item) in bits.iter_mut().zip(items.clone()) {
                let is_hidden = self.local.shard.may_read_replica(context, item.digest) == Some(false);
                *bit &= !is_hidden && !self.local.is_anothers(context, item.digest);
            }
            heads.iter_mut().zip(&bits).for_each(|(head, bit)| *head &= *bit);
        }
        if self.local.tiering.is_some() {
            for (at, (bit, item)) in bits.iter_mut().zip(items.clone()).enumerate().filter(|(_, (bit, _))| !**bit) {
                let view = readable_record(&self.local, context, item.digest);
                if let Some(view) = view.filter(|_| !self.local.is_anothers(context, item.digest)) {
                    if let Some(until_ns) = until_ns {
                        self.local.prefetch(&view, until_ns, false);
                    }
                    *bit = true;
                    if view.names_parts {
                        heads.resize(count, false);
                        heads[at] = true;
                    }
                }
            }
        }
        if self.local.sharing.is_some() {
            for (at, (bit, item)) in bits.iter_mut().zip(items.clone()).enumerate().filter(|(_, (bit, _))| !**bit) {
                let view = in_shared_tier(&self.local, item.digest);
                if let Some(view) = view.filter(|_| !self.local.is_anothers(context, item.digest)) {
                    *bit = true;
                    if view.is_head {
                        heads.resize(count, false);
                        heads[at] = true;
                    }
                }
            }
        }
        let missing = bits.iter().zip(items).enumerate().filter(|(_, (bit, _))| !**bit);
        let missing = self.of_owner(context, missing.map(|(at, (_, item))| (at, item.digest)));
        let elsewhere = self.migration.elsewhere(&self.local.shard, context, missing);
        if !elsewhere.is_empty() {
            let replies = Replies::Found(bits, heads);
            self.migration.ask_sizes(&mut self.local, context.peer, header.request, replies, elsewhere);
            return Ok(());
        }
        let answers = &mut self.local.shard.answers;
        answers.items(context.peer, Operation::Exists, header.request, count, |body| {
            Bitmap::encode(bits, body);
            Bitmap::encode(heads, body);
        });
        Ok(())
    }

    pub(super) fn size(&mut self, context: &RequestContext, header: &Header, body: &[u8]) -> Result<(), CloseReason> {
        let Some(items) = self.owned_digests(context, Operation::Size, header, body)? else { return Ok(()) };
        let size = |item: DigestItem| {
            let (status, bytes) = match self.local.size_of(item.digest) {
                Some((bytes, true)) => (Status::Striped, bytes),
                Some((bytes, false)) => (Status::Ok, bytes),
                None => (Status::NotFound, 0),
            };
            SizeReply { status, bytes }
        };
        let mut replies: Vec<SizeReply> = items.clone().map(size).collect();
        for (reply, item) in replies.iter_mut().zip(items.clone()) {
            let shard = &self.local.shard;
            let is_hidden = !shard.is_for_peer(context, item.digest)
                || shard.is_peers_replica(context, item.digest)
                || shard.may_read_replica(context, item.digest) == Some(false);
            if is_hidden || self.local.is_anothers(context, item.digest) {
                *reply = SizeReply { status: Status::NotFound, bytes: 0 };
            }
        }
        let missing = replies.iter().zip(items).enumerate().filter(|(_, (reply, _))| reply.status == Status::NotFound);
        let missing = self.of_owner(context, missing.map(|(at, (_, item))| (at, item.digest)));
        let elsewhere = self.migration.elsewhere(&self.local.shard, context, missing);
        if !elsewhere.is_empty() {
            let replies = Replies::Sizes(replies);
            self.migration.ask_sizes(&mut self.local, context.peer, header.request, replies, elsewhere);
            return Ok(());
        }
        self.local.shard.answers.records(context.peer, Operation::Size, header.request, &replies);
        Ok(())
    }

    pub(super) fn get(&mut self, context: &RequestContext, header: &Header, body: &[u8]) -> Result<(), CloseReason> {
        let items = items_of::<GetItem>(header, body)?;
        self.local.shard.warm(items.clone().map(|item| item.digest));
        let all = header.flags.has(FrameFlags::HEADS);
        for item in items {
            let wanted = ReadSpan::Whole { capacity_bytes: item.capacity_bytes };
            let read = StreamRead { peer: context.peer, request: item.request, wanted, all };
            if let Err((status, argument)) = self.get_one(context, item.digest, read) {
                self.local.shard.answers.status(context.peer, Operation::Get, item.request, status, argument);
            }
        }
        Ok(())
    }

    /// Answers a get of a range, or fails with a status and, where it is known, the object's length.
    pub(super) fn get_range(&mut self, context: &RequestContext, item: &RangeItem) -> Result<(), (Status, u64)> {
        let RangeItem { digest, request, offset, bytes } = *item;
        let wanted = ReadSpan::Range { offset, bytes };
        self.get_one(context, digest, StreamRead { peer: context.peer, request, wanted, all: false })
    }

    fn get_one(&mut self, context: &RequestContext, digest: Digest, read: StreamRead) -> Result<(), (Status, u64)> {
        let shard = &mut self.local.shard;
        shard.answers_for(context, digest).map_err(|status| (status, shard.ownership.epoch().0))?;
        if context.tenant.is_some() && self.local.tenant_of(digest) == ObjectTenant::Unread {
            // It was in memory when the request was claimed, and another get of the request has evicted it since.
            return Err((Status::Busy, 0));
        }
        if self.local.is_anothers(context, digest) || self.local.shard.is_peers_replica(context, digest) {
            return Err((Status::NotFound, 0));
        }
        if let Some(here) = may_read_replica(&self.local, context, digest) {
            if !here {
                return Err((Status::NotFound, 0));
            }
            self.replication.count_served();
        }
        if self.damage.delays(&self.local.shard, context, digest) {
            let waits = self.damage.wait(&self.local.shard, context, digest, Reader::Stream(read));
            return waits.map_err(|status| (status, 0));
        }
        // An import reads the object once, and not because anybody wants it again.
        let is_hot = !context.fetches && is_to_be_promoted(&self.local, digest);
        let store = &mut self.local.shard.store;
        let (pin, object) = match store.get(digest) {
            Ok(found) => found,
            Err(error) => return self.get_elsewhere(context, digest, read, error),
        };
        if let Err(status) = read.check(object.extent.bytes, object.is_head) {
            store.unpin(pin).expect("a pin that was just taken");
            return Err((status, object.extent.bytes));
        }
        self.local.note_get(digest);
        if let Some(device) = self.local.device.as_mut().filter(|_| is_hot) {
            device.promote(digest, object.extent.bytes);
        }
        let bytes = read.wanted.bytes_of(object.extent.bytes);
        self.local.shard.counters.get_bytes += bytes;
        self.replication.note_given(&mut self.local, context, digest, bytes);
        let replicas = self.replication.grant_lease(&self.local.shard, context, digest, &object);
        self.local.shard.answer_get(&read, Hold::Pin(pin), &object, replicas);
        Ok(())
    }

    /// Reads an object that is not in memory from the SSD or the shared tier, or fetches it from a former owner.
    fn get_elsewhere(
        &mut self,
        context: &RequestContext,
        digest: Digest,
        read: StreamRead,
        error: GetError,
    ) -> Result<(), (Status, u64)> {
        let reader = Reader::Stream(read);
        let view = readable_record(&self.local, context, digest).filter(|_| error == GetError::NotFound);
        let Some(view) = view else {
            let shared = in_shared_tier(&self.local, digest).filter(|_| error == GetError::NotFound);
            if let Some(view) = shared {
                let bytes = view.bytes.into();
                read.check(bytes, view.is_head).map_err(|status| (status, bytes))?;
                return read_shared(&mut self.local, &view, reader).map_err(|status| (status, 0));
            }
            if error == GetError::NotFound && self.migration.may_have(&self.local.shard, context, digest) {
                let fetched = self.migration.fetch(&mut self.local, digest, Waiter::Reader(reader));
                return fetched.map_err(|status| (status, 0));
            }
            return Err((get_status(error), 0));
        };
        let bytes = view.payload_bytes.into();
        read.check(bytes, view.names_parts).map_err(|status| (status, bytes))?;
        self.local.read(&view, reader).map_err(|status| (status, 0))
    }

    /// Returns the extents of objects in the pool to a peer that copies them from shared memory.
    pub(super) fn lookup(&mut self, context: &RequestContext, header: &Header, body: &[u8]) -> Result<(), CloseReason> {
        let items = items_of::<DigestItem>(header, body)?;
        self.local.shard.warm(items.clone().map(|item| item.digest));
        let (mut replies, mut elsewhere) = (Vec::with_capacity(items.len()), Vec::new());
        let all = header.flags.has(FrameFlags::HEADS);
        for item in items {
            let is_late = self.damage.delays(&self.local.shard, context, item.digest);
            let reply = match is_late {
                true => Err(self.may_look_up(context, item.digest).err().unwrap_or(Status::Pending)),
                false => self.lookup_one(context, item.digest, all),
            };
            let reply = reply.unwrap_or_else(no_lookup);
            let is_elsewhere = match reply.status {
                // Its bytes are checked, or repaired.
                Status::Pending => true,
                Status::Busy => is_on_device(&self.local, item.digest),
                Status::NotFound => {
                    let is_owners = || {
                        !self.local.shard.reads_replica(context, item.digest)
                            && (is_below(&self.local, item.digest)
                                || self.migration.may_have(&self.local.shard, context, item.digest))
                    };
                    !self.local.is_hidden(context, item.digest)
                        && (readable_record(&self.local, context, item.digest).is_some() || is_owners())
                }
                _ => false,
            };
            if is_elsewhere {
                elsewhere.push((replies.len(), item.digest));
            }
            replies.push(reply);
        }
        if elsewhere.is_empty() {
            self.local.shard.answers.records(context.peer, Operation::Lookup, header.request, &replies);
            return Ok(());
        }
        // Objects in the device pool, on the SSD, in the shared tier or at former owners are read concurrently; the
        // reply waits for the last.
        let replies = Replies::Lookups(replies);
        let item_at = self.local.shard.defer(context.peer, header.request, replies, elsewhere.len());
        for (at, digest) in elsewhere {
            let item = item_at(at);
            let reader = Reader::Shared { item, all };
            let is_late = self.damage.delays(&self.local.shard, context, digest);
            let begun = match readable_record(&self.local, context, digest) {
                _ if is_late => self.damage.wait(&self.local.shard, context, digest, reader),
                None if is_on_device(&self.local, digest) => recall(&mut self.local, digest, Some(reader)),
                Some(view) if view.names_parts && !all => Err(Status::Striped),
                Some(view) => self.local.read(&view, reader),
                None if in_shared_tier(&self.local, digest).is_some() => match in_shared_tier(&self.local, digest) {
                    Some(view) if view.is_head && !all => Err(Status::Striped),
                    Some(view) => read_shared(&mut self.local, &view, reader),
                    None => Err(Status::NotFound),
                },
                None => self.migration.fetch(&mut self.local, digest, Waiter::Reader(reader)),
            };
            if let Err(status) = begun {
                self.local.shard.settle_lookup(item, no_lookup(status));
            }
        }
        Ok(())
    }

    /// Checks that a peer may look an object up: as the owner's, or as a replica.
    fn may_look_up(&mut self, context: &RequestContext, digest: Digest) -> Result<(), Status> {
        self.local.may_ask(context, digest)?;
        if self.local.shard.is_peers_replica(context, digest) {
            return Err(Status::NotFound);
        }
        match may_read_replica(&self.local, context, digest) {
            Some(false) => Err(Status::NotFound),
            Some(true) => {
                self.replication.count_served();
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Pins an object in memory for the peer, and returns its extent. One in the device pool is recalled and answered
    /// with `Busy`.
    pub(super) fn lookup_one(
        &mut self,
        context: &RequestContext,
        digest: Digest,
        all: bool,
    ) -> Result<LookupReply, Status> {
        self.may_look_up(context, digest)?;
        if self.damage.delays(&self.local.shard, context, digest) {
            return Err(Status::Busy);
        }
        let store = &mut self.local.shard.store;
        let (pin, object) = store.get(digest).map_err(get_status)?;
        if object.is_on_device {
            store.unpin(pin).expect("a pin that was just taken");
            recall(&mut self.local, digest, None)?;
            return Err(Status::Busy);
        }
        if object.is_head && !all {
            store.unpin(pin).expect("a pin that was just taken");
            return Err(Status::Striped);
        }
        self.local.note_get(digest);
        let shard = &mut self.local.shard;
        shard.counters.get_bytes += object.extent.bytes;
        shard.note_get(digest, object.extent.bytes);
        shard.sessions.lend_pin(context.peer, pin);
        shard.about(&object);
        let replicas = self.replication.grant_lease(shard, context, digest, &object);
        Ok(lookup_of(pin, &object, replicas))
    }

    /// Returns the conditions that the reply of a put waits for. To be called once for each put, as it counts the put.
    pub(super) fn waits_of(&mut self, made: &CommittedObject) -> PutWaits {
        if made.is_copy {
            return PutWaits::default();
        }
        let copies = self.replication.waits_of(&mut self.local.shard, made.digest);
        PutWaits { copies, ssd: self.local.waits_of(made) }
    }

    /// Acts on a put: the object is replicated, the records that it replaces get tombstones on the SSD, and then it is
    /// written to the SSD as the policy says. `told` is settled once for each condition that is waited for.
    pub(super) fn follow_put(&mut self, made: &CommittedObject, waits: PutWaits, told: Option<DeferredItem>) {
        if made.is_copy {
            keep_replica(&mut self.local, made.digest);
            return;
        }
        self.replication.replicate(&mut self.local.shard, made.digest, made.version, waits.copies, told);
        self.local.keep(made, waits.ssd, told);
    }

    /// Returns the status of a put with this acknowledgement level if there is an object already: exists, to be
    /// retried, or refused by the SSD. A replica of the previous object may have to be dropped first; and the object
    /// may come from an earlier attempt of the same put, whose reply was lost, and may not be on the SSD yet for which
    /// the put was to wait.
    pub(super) fn exists_already(&mut self, digest: Digest, asked: Option<PutAck>) -> Status {
        self.replication.removals.note_orphans(&mut self.local.shard);
        let awaited = self.local.awaits_ssd(digest, asked);
        if self.replication.removals.is_outstanding(digest) { Status::Busy } else { awaited.unwrap_or(Status::Exists) }
    }

    /// Reserves memory for an object and its tail, and enqueues the tail to be written.
    pub(super) fn reserve(
        &mut self,
        item: &PutItem,
        name: &ObjectName<'_>,
        asked: Option<PutAck>,
        wanted: Reserve,
    ) -> Result<(ReservationId, MemoryExtent), Status> {
        let store = &mut self.local.shard.store;
        let tail = TailHead::of(item);
        let tail_bytes = tail.map_or(0, |tail| tail.tail_bytes() as u32);
        let head = item.options().part == Part::Head;
        let wanted = Reserve { tail_bytes, has_tail: tail.is_some(), head, ..wanted };
        let (reservation, extent) = store.reserve_for(&wanted).map_err(|error| match error {
            ReserveError::Exists => self.exists_already(item.digest, asked),
            error => self.local.no_room(error, wanted.keep.account),
        })?;
        if let Some(tail) = tail {
            self.local.shard.write_tail(reservation, &tail, name);
        }
        Ok((reservation, MemoryExtent { memory: Memory::Pool, offset: extent.offset, bytes: extent.bytes }))
    }

    /// Returns true if an object exists that the put of a reservation may not replace: it was committed after the
    /// reservation was made, and may have been evicted to the SSD since.
    pub(super) fn has_rival(&self, reservation: ReservationId, digest: Digest) -> bool {
        let store = &self.local.shard.store;
        !store.reserved(reservation).is_some_and(Entry::replaces)
            && (store.exists(digest) || is_below(&self.local, digest))
    }

    /// Commits a replica whose bytes were received.
    pub(super) fn commit_replica(
        &mut self,
        reservation: ReservationId,
        digest: Digest,
        bytes: u64,
        checksum: u64,
    ) -> Result<CommittedObject, Status> {
        let shard = &mut self.local.shard;
        if shard.replicas.relation(digest.slot()).is_none() {
            shard.abort(reservation);
            return Err(Status::WrongOwner);
        }
        let store = &mut shard.store;
        match store.commit(reservation, checksum) {
            Ok(version) => {
                self.replication.count_taken();
                Ok(CommittedObject { version, digest, bytes, replaces: false, is_copy: true, ack: None })
            }
            Err(error) => {
                if error == CommitError::Expired {
                    shard.abort(reservation);
                }
                Err(Status::Stale)
            }
        }
    }

    /// Answers commits with their outcomes: at once, or when the SSD and the replica owner have acknowledged.
    pub(super) fn answer_commits(
        &mut self,
        peer: PeerKey,
        operation: Operation,
        header: &Header,
        outcomes: Vec<Result<CommittedObject, CommitReply>>,
    ) {
        let (mut replies, mut all, mut left) = (Vec::with_capacity(outcomes.len()), Vec::new(), 0);
        for outcome in outcomes {
            replies.push(match outcome {
                Ok(made) => {
                    let waits = self.waits_of(&made);
                    left += waits.count();
                    all.push((made, waits, replies.len()));
                    CommitReply { status: Status::Ok, version: made.version, flags: ItemFlags::NONE }
                }
                Err(reply) => reply,
            });
        }
        let shard = &mut self.local.shard;
        if left == 0 {
            shard.answers.records(peer, operation, header.request, &replies);
            all.into_iter().for_each(|(made, waits, _)| self.follow_put(&made, waits, None));
        } else {
            let names_owners = header.flags.has(FrameFlags::REPLICA_OWNERS);
            let item_at = shard.defer(peer, header.request, Replies::Commits(operation, replies, names_owners), left);
            for (made, waits, item) in all {
                self.follow_put(&made, waits, (waits.count() > 0).then(|| item_at(item)));
            }
        }
    }
}
