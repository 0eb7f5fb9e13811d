//! Observer of a shard's frames: derives the lent ranges, the versions that became visible, and the replies. It feeds
//! the checkers and changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{PinId, ReservationId, Version};
use kvplane_proto::message::{
    CommitItem, CommitReply, DigestItem, IdItem, Item, Kind, LookupReply, Operation, PutItem, ReserveReply,
    decode_items, decode_puts,
};
use kvplane_proto::rng::mix64;
use kvplane_proto::{Digest, FrameFlags, RequestId, Status};
use kvplane_store::Replica;
use kvplane_store::service::{Memory, MemoryExtent};

use crate::world::World;
use crate::world::check::ledger::Use;
use crate::world::cluster::node::ShardIncarnation;
use crate::world::network::Way;
use crate::world::network::pipe::{Destination, OutgoingFrame};
use crate::world::server::ServedRequest;

/// Range in which an object is being written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(super) digest: Digest,
    offset: u64,
    bytes: u64,
    pub(super) replace: bool,
}

/// Ranges of a shard's pool that a connection holds.
#[derive(Default)]
pub(crate) struct HeldHandles {
    /// Put over a stream.
    put: Option<Room>,
    reservations: BTreeMap<ReservationId, Room>,
    pins: BTreeMap<PinId, u64>,
    /// Removals that were not answered yet: their keys, and the version below which they remove.
    removes: BTreeMap<u64, (Vec<usize>, u64)>,
    /// Lookups that were not answered yet: the event of their arrival, and the shard's epoch then.
    lookups: BTreeMap<u64, (u64, u64)>,
    /// With a tier: objects that others of the same frame replaced at once, by the frame and their index in it.
    hidden: BTreeMap<(u64, usize), (Room, Vec<u8>)>,
    /// Objects being committed that exist already.
    pub(super) there: BTreeSet<Digest>,
    /// The client was notified that the shard wants to close.
    pub(crate) end_told: bool,
    /// A shard's client has requested something on the connection.
    pub(crate) fetches: bool,
}

impl HeldHandles {
    /// Returns the object of a put over a stream in progress.
    pub(crate) fn put_digest(&self) -> Option<Digest> {
        self.put.map(|room| room.digest)
    }

    /// Returns the range of a reservation.
    pub(super) fn room(&self, reservation: ReservationId) -> Option<&Room> {
        self.reservations.get(&reservation)
    }
}

impl World {
    /// Observes a request that was passed to the service.
    pub(crate) fn observe_request(&mut self, index: u32, header: &Header, body: &[u8], to: Destination) {
        let clients = self.scenario.clients;
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let incarnation = connection.incarnation;
        let is_greeting = matches!(header.kind, Kind::Request(Operation::Hello | Operation::Prove));
        connection.held.fetches |= connection.client >= clients && !is_greeting;
        match (header.kind, to) {
            (Kind::Request(Operation::Put), Destination::Pool { offset }) => {
                let Some((item, _)) = decode_puts(body, header.items).and_then(|mut puts| puts.next()) else { return };
                let (bytes, replace) = (header.payload_bytes, item.options().replace);
                connection.held.put = Some(Room { digest: item.digest, offset, bytes, replace });
                let lent = self.incarnations[incarnation].ledger.lend(index, Use::Write, offset, bytes);
                self.require(lent);
            }
            (Kind::Request(Operation::Release), _) => {
                for item in decode_items::<IdItem>(body, header.items).into_iter().flatten() {
                    if let Some(offset) = connection.held.pins.remove(&PinId::from_bits(item.id)) {
                        self.incarnations[incarnation].ledger.end(index, Use::Read, offset);
                    }
                }
            }
            (Kind::Request(Operation::Abort), _) => {
                for item in decode_items::<IdItem>(body, header.items).into_iter().flatten() {
                    if let Some(room) = connection.held.reservations.remove(&ReservationId::from_bits(item.id)) {
                        self.incarnations[incarnation].ledger.end(index, Use::Write, room.offset);
                    }
                }
            }
            _ => {}
        }
    }

    /// Observes the end of a put over a stream: its range is no longer written.
    pub(crate) fn observe_put_end(&mut self, index: u32) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        if let Some(room) = connection.held.put.take() {
            self.incarnations[connection.incarnation].ledger.end(index, Use::Write, room.offset);
        }
    }

    /// Observes a reply of the service.
    pub(crate) fn observe_answer(
        &mut self,
        index: u32,
        header: &Header,
        body: &[u8],
        payload: Option<MemoryExtent>,
        asked: Option<ServedRequest<'_>>,
    ) {
        let Kind::Reply(operation) = header.kind else { return };
        if operation == Operation::Get {
            if let Some(extent) = payload {
                self.observe_read(index, header.argument, extent, None);
            }
            return;
        }
        if operation == Operation::Lookup {
            // The reply may wait for the disk or a former owner.
            let held = self.connections.get_mut(&index).map(|connection| &mut connection.held);
            let asked = held.and_then(|held| held.lookups.remove(&header.request.to_bits()));
            if header.status == Status::Ok {
                self.observe_lookup(index, header, body, asked);
            }
            return;
        }
        if self.scenario.answers_late() && self.observe_late(index, operation, header, body) {
            return;
        }
        let same = |asked: &ServedRequest<'_>| asked.connection == index && asked.header.request == header.request;
        let Some(asked) = asked.filter(|asked| same(asked) && header.status == Status::Ok) else {
            return;
        };
        match operation {
            Operation::Put => {
                let room = self.connections.get_mut(&index).and_then(|connection| connection.held.put.take());
                if let Some(room) = room {
                    self.observe_commit(index, room, header.argument);
                }
            }
            Operation::Reserve => self.observe_reserve(index, header, body, asked),
            Operation::Commit => self.observe_commits(index, header, body, asked),
            Operation::Remove => self.observe_remove(index, asked),
            _ => {}
        }
    }

    /// Observes a delayed reply: with a tier, replies wait for the disk, and their operations took effect before.
    fn observe_late(&mut self, index: u32, operation: Operation, header: &Header, body: &[u8]) -> bool {
        let good = header.status == Status::Ok;
        let promises = self.scenario.tier.as_ref().is_some_and(crate::world::faults::tier::TierScenario::promises);
        match operation {
            Operation::Put if good => self.observe_acked(index, header.argument, promises),
            Operation::Commit if good => {
                for (at, item) in decode_items::<CommitReply>(body, header.items).into_iter().flatten().enumerate() {
                    if item.status == Status::Ok {
                        let version = item.version.0;
                        self.observe_hidden(index, (header.request.to_bits(), at), version);
                        self.observe_acked(index, version, promises);
                    }
                }
            }
            Operation::Remove => self.observe_removed(index, header),
            Operation::Put | Operation::Commit => {}
            _ => return false,
        }
        true
    }

    /// Observes, with a tier, the reply to a put: the version that it replaces is gone.
    fn observe_acked(&mut self, index: u32, version: u64, promises: bool) {
        let key = self.shadow.commit_of(version).map(|commit| commit.key);
        if promises && !key.is_some_and(|key| self.scenario.may_exceed(key)) {
            self.shadow.promise(version);
        }
        self.check_copies_of(index, version);
        self.observe_replaced(index, version);
    }

    /// Observes the reply to a put whose object was replaced before it could be inspected: only the reply has its
    /// version.
    fn observe_hidden(&mut self, index: u32, extent: (u64, usize), version: u64) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let incarnation = connection.incarnation;
        let Some((room, bytes)) = connection.held.hidden.remove(&extent) else { return };
        if self.shadow.commit_of(version).is_none() {
            let at = (self.lineage(incarnation), self.incarnations[incarnation].epoch);
            let committed = self.shadow.commit(version, room.digest, room.replace, at, &bytes);
            self.require(committed);
        }
    }

    /// Observes the reply for a version that replaces others.
    fn observe_replaced(&mut self, index: u32, version: u64) {
        let Some(connection) = self.connections.get(&index) else { return };
        let (client, epoch) = (connection.client, self.incarnations[connection.incarnation].epoch);
        let lineage = self.lineage(connection.incarnation);
        if let Some(key) = self.shadow.replaced(version, self.trace.events) {
            self.removals.remove_answered((client, key), epoch, lineage, self.now_ns);
        }
    }

    /// Observes the immediate effects of a request, whenever its reply comes.
    pub(crate) fn observe_begun(&mut self, index: u32, header: &Header, body: &[u8]) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let incarnation = connection.incarnation;
        if header.kind == Kind::Request(Operation::Lookup) {
            let asked = (self.trace.events, self.incarnations[incarnation].epoch);
            connection.held.lookups.insert(header.request.to_bits(), asked);
        }
        if !self.scenario.answers_late() {
            return;
        }
        match header.kind {
            Kind::Request(Operation::Commit) => {
                let mut rooms = Vec::new();
                for item in decode_items::<CommitItem>(body, header.items).into_iter().flatten() {
                    rooms.extend(connection.held.reservations.remove(&item.reservation));
                }
                for (at, room) in rooms.iter().enumerate() {
                    if rooms[at + 1..].iter().any(|later| later.replace && later.digest == room.digest) {
                        let bytes = self.incarnations[incarnation].bytes(room.offset, room.bytes);
                        let Some(connection) = self.connections.get_mut(&index) else { return };
                        connection.held.hidden.insert((header.request.to_bits(), at), (*room, bytes));
                    }
                }
                rooms.into_iter().for_each(|room| self.observe_made(index, room));
            }
            Kind::Request(Operation::Remove) => {
                let client = connection.client;
                let fetches = client >= self.scenario.clients;
                let items = decode_items::<DigestItem>(body, header.items).into_iter().flatten();
                let mut keys: Vec<usize> = items.filter_map(|item| self.shadow.key(item.digest)).collect();
                if header.flags.has(FrameFlags::REPLICATE) {
                    // Only replicas are dropped.
                    let store = self.incarnations[incarnation].service.store();
                    keys.retain(|key| !store.exists(self.shadow.digest(*key)));
                } else if fetches {
                    // The new owner has the objects, and may have pushed a replica already, which stays.
                    let store = self.incarnations[incarnation].service.store();
                    keys.retain(|key| !store.objects().is_copy(self.shadow.digest(*key)));
                    keys.retain(|key| self.takes_drop(incarnation, client, self.shadow.digest(*key)));
                }
                let Some(connection) = self.connections.get_mut(&index) else { return };
                let service = &self.incarnations[incarnation].service;
                let floor = service.store().next_version().0;
                connection.held.removes.insert(header.request.to_bits(), (keys.clone(), floor));
                if !fetches {
                    let heard = header.argument <= service.inspect().served_epoch().0;
                    if !heard || !keys.iter().all(|key| service.inspect().serves(self.shadow.digest(*key).slot())) {
                        // The slot is another shard's, or the requester knows a newer map than is served, which has not
                        // arrived here or is not durable yet: the request is refused, and changes nothing.
                        return;
                    }
                    if !self.is_bound(client) {
                        self.incarnations[incarnation].changed.extend(&keys);
                    }
                }
                let lineage = self.lineage(incarnation);
                keys.into_iter().for_each(|key| self.shadow.removal_begins(key, lineage, floor));
            }
            _ => {}
        }
    }

    /// Observes, with a tier, that the payload of a put over a stream was taken.
    pub(crate) fn observe_put_made(&mut self, index: u32) {
        let Some(connection) = self.connections.get_mut(&index).filter(|_| self.scenario.answers_late()) else {
            return;
        };
        if let Some(room) = connection.held.put.take() {
            self.observe_made(index, room);
        }
    }

    /// Observes the end of writes to a range: either it contains an object now, or the put failed.
    fn observe_made(&mut self, index: u32, room: Room) {
        let Some(connection) = self.connections.get(&index) else { return };
        let incarnation = &self.incarnations[connection.incarnation];
        let view = incarnation.service.store().peek(room.digest);
        let made = view.filter(|view| view.extent.offset == room.offset && incarnation.is_new(view.version));
        match made {
            Some(view) if view.replica == Replica::Second => self.observe_copy(index, room.digest, &view),
            Some(view) => self.observe_commit(index, room, view.version.0),
            None => self.incarnations[connection.incarnation].ledger.end(index, Use::Write, room.offset),
        }
    }

    fn observe_removed(&mut self, index: u32, header: &Header) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let (client, incarnation) = (connection.client, connection.incarnation);
        let Some((keys, floor)) = connection.held.removes.remove(&header.request.to_bits()) else { return };
        let is_late = self.is_bound(client);
        if is_late && header.status != Status::WrongOwner {
            self.void_removed_late(incarnation, &keys);
        }
        if header.status != Status::Ok {
            return;
        }
        let (epoch, lineage) = (self.incarnations[incarnation].epoch, self.lineage(incarnation));
        for key in keys {
            self.incarnations[incarnation].changed.extend(is_late.then_some(key));
            self.shadow.removed(key, lineage, floor, self.trace.events);
            self.removals.remove_answered((client, key), epoch, lineage, self.now_ns);
            if self.is_user(client) {
                self.check_no_copy(incarnation, key, u64::MAX);
            }
        }
    }

    /// Observes a connection that ends with unanswered removals: those of a bound client may have been carried out.
    pub(crate) fn removals_cut_off(&mut self, index: u32) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let (client, incarnation) = (connection.client, connection.incarnation);
        let open = std::mem::take(&mut connection.held.removes);
        if self.is_bound(client) {
            open.into_values().for_each(|(keys, _)| self.void_removed_late(incarnation, &keys));
        }
    }

    /// Voids the objects of a bound client's delayed removal, which waits until the object's tenant is read. It removes
    /// objects that were put while it waited, even if their reply came first: of two requests in flight at the same
    /// time either may be the last.
    fn void_removed_late(&mut self, incarnation: usize, keys: &[usize]) {
        let floor = self.incarnations[incarnation].service.store().next_version().0;
        let lineage = self.lineage(incarnation);
        keys.iter().for_each(|key| self.shadow.removal_begins(*key, lineage, floor));
    }

    /// Observes that a version is returned, and its bytes are lent for reading. The version is as of now, or of the
    /// event and epoch of a delayed request.
    fn observe_read(&mut self, index: u32, version: u64, extent: MemoryExtent, asked: Option<(u64, u64)>) {
        let Some(connection) = self.connections.get(&index) else { return };
        let (client, incarnation) = (connection.client, connection.incarnation);
        let asked = asked.unwrap_or((u64::MAX, self.incarnations[incarnation].epoch));
        let answered = self.removals.get_answered(&self.shadow, client, version, asked, self.now_ns);
        self.require(answered);
        // Those of the device pool are lent to the copy that stages them.
        if extent.memory == Memory::Pool {
            let lent = self.incarnations[incarnation].ledger.lend(index, Use::Read, extent.offset, extent.bytes);
            self.require(lent);
        }
        let Some(commit) = self.shadow.commit_of(version).copied() else { return };
        let kept =
            self.shadow.check_read(commit.key, version, &self.incarnations[incarnation].written(version, extent));
        self.require(kept);
    }

    fn observe_lookup(&mut self, index: u32, header: &Header, body: &[u8], asked: Option<(u64, u64)>) {
        for item in decode_items::<LookupReply>(body, header.items).into_iter().flatten() {
            if item.status != Status::Ok {
                continue;
            }
            let extent = MemoryExtent { memory: Memory::Pool, offset: item.offset, bytes: item.bytes };
            self.observe_read(index, item.version.0, extent, asked);
            if let Some(connection) = self.connections.get_mut(&index) {
                connection.held.pins.insert(item.pin, item.offset);
                let ShardIncarnation { service, handles, .. } = &mut self.incarnations[connection.incarnation];
                let named = handles.pinned(service.store(), item.pin);
                self.require(named);
            }
        }
    }

    fn observe_reserve(&mut self, index: u32, header: &Header, body: &[u8], asked: ServedRequest<'_>) {
        let puts = decode_puts(asked.body, asked.header.items).into_iter().flatten();
        for ((item, _), reply) in puts.zip(decode_items::<ReserveReply>(body, header.items).into_iter().flatten()) {
            if reply.status != Status::Ok {
                continue;
            }
            let replace = item.options().replace;
            let room = Room { digest: item.digest, offset: reply.offset, bytes: item.bytes, replace };
            let Some(connection) = self.connections.get_mut(&index) else { return };
            connection.held.reservations.insert(reply.reservation, room);
            let ShardIncarnation { service, handles, .. } = &mut self.incarnations[connection.incarnation];
            let named = handles.reserved(service.store(), reply.reservation);
            let lent =
                self.incarnations[connection.incarnation].ledger.lend(index, Use::Write, room.offset, room.bytes);
            self.require(named.and(lent));
        }
    }

    fn observe_commits(&mut self, index: u32, header: &Header, body: &[u8], asked: ServedRequest<'_>) {
        let items = decode_items::<CommitItem>(asked.body, asked.header.items).into_iter().flatten();
        for (item, reply) in items.zip(decode_items::<CommitReply>(body, header.items).into_iter().flatten()) {
            let Some(connection) = self.connections.get_mut(&index) else { return };
            let Some(room) = connection.held.reservations.remove(&item.reservation) else { continue };
            if reply.status == Status::Ok {
                self.observe_commit(index, room, reply.version.0);
            } else {
                let incarnation = connection.incarnation;
                self.incarnations[incarnation].ledger.end(index, Use::Write, room.offset);
            }
        }
    }

    /// Observes that a version became visible: its range is no longer written, and its bytes are those of a put.
    fn observe_commit(&mut self, index: u32, room: Room, version: u64) {
        let Some(connection) = self.connections.get(&index) else { return };
        let index_of_incarnation = connection.incarnation;
        let may_be_made = self.check_made(index, &room, version);
        self.require(may_be_made);
        self.observe_change(index_of_incarnation, room.digest);
        let incarnation = &mut self.incarnations[index_of_incarnation];
        incarnation.ledger.end(index, Use::Write, room.offset);
        let grown = incarnation.see_version(Version(version));
        let bytes = incarnation.bytes(room.offset, room.bytes);
        let extent = (self.lineage(index_of_incarnation), self.incarnations[index_of_incarnation].epoch);
        let committed = self.shadow.commit(version, room.digest, room.replace, extent, &bytes);
        self.statistics.commits += 1;
        self.trace.fold(mix64(version) ^ room.digest.low());
        self.require(grown);
        self.require(committed);
        if !self.scenario.answers_late() {
            self.observe_replaced(index, version);
        }
    }

    /// Returns true if an incarnation carries out the removal of an object: a new owner's removal applies only to
    /// objects kept for it. The slot may be the incarnation's own again.
    fn takes_drop(&self, incarnation: usize, client: usize, digest: Digest) -> bool {
        client < self.scenario.clients || self.incarnations[incarnation].service.inspect().exports(digest.slot())
    }

    fn observe_remove(&mut self, index: u32, asked: ServedRequest<'_>) {
        let Some(connection) = self.connections.get(&index) else { return };
        let (client, incarnation) = (connection.client, connection.incarnation);
        let (epoch, lineage) = (self.incarnations[incarnation].epoch, self.lineage(incarnation));
        for item in decode_items::<DigestItem>(asked.body, asked.header.items).into_iter().flatten() {
            if !self.takes_drop(incarnation, client, item.digest) {
                continue;
            }
            self.observe_change(incarnation, item.digest);
            if let Some(key) = self.shadow.key(item.digest) {
                self.shadow.removed(key, lineage, u64::MAX, self.trace.events);
                self.removals.remove_answered((client, key), epoch, lineage, self.now_ns);
            }
        }
    }

    /// [`crate::world::scenario::Mischief::SwallowRemove`]: the host answers for the service, which does not
    /// receive the request.
    pub(crate) fn forge_remove(&mut self, index: u32, header: &Header, body: &[u8]) {
        let asked = ServedRequest { connection: index, header, body };
        self.observe_remove(index, asked);
        let bitmap = vec![0xff; (header.items as usize).div_ceil(8)];
        let reply = Header::reply(Kind::Reply(Operation::Remove), header.request, Status::Ok)
            .with_body(&bitmap, header.items as usize);
        self.send(index, Way::ToClient, OutgoingFrame::new(&reply, &bitmap, None));
    }

    /// [`crate::world::scenario::Mischief::DuplicatePut`]: the host removes the object of a put and submits the same
    /// bytes once more.
    pub(crate) fn put_again(&mut self, index: u32, header: &Header, destination: Destination, digest: Option<Digest>) {
        let (Destination::Pool { offset }, Some(digest)) = (destination, digest) else { return };
        let Some(connection) = self.connections.get(&index) else { return };
        let (incarnation, peer) = (connection.incarnation, connection.peer);
        let bytes = self.incarnations[incarnation].bytes(offset, header.payload_bytes);
        let mut again = Vec::new();
        PutItem::plain(digest, header.payload_bytes).encode(&mut again);
        let body = digest.to_bytes();
        let mut remove = Header::request(Kind::Request(Operation::Remove), RequestId::default());
        remove = remove.with_body(&body, 1);
        let _ = self.incarnations[incarnation].service.request(peer, &remove, &body, self.now_ns);
        self.drain_service(incarnation, Some(ServedRequest { connection: index, header: &remove, body: &body }));
        let body = again;
        let put = header.with_body(&body, 1);
        if let kvplane_store::service::PayloadTo::Extent(extent) =
            self.incarnations[incarnation].service.request(peer, &put, &body, self.now_ns)
        {
            let to = Destination::Pool { offset: extent.offset };
            self.observe_request(index, &put, &body, to);
            self.incarnations[incarnation].pool.copy_in(extent.offset, &bytes);
        }
        self.look_before_put(index);
        self.incarnations[incarnation].service.payload_done(peer, put.checksum(), self.now_ns);
        self.drain_service(incarnation, Some(ServedRequest { connection: index, header: &put, body: &body }));
        self.observe_put_end(index);
    }
}
