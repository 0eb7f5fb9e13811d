//! Server side of the data path, without I/O: takes request frames from peers, puts out replies and the extents of
//! payloads.
//!
//! One [`Service`] belongs to one shard. It serves objects of the shard's [`Store`], and *segments*: registered memory
//! that peers read and write by offset. A storage node has both, an embedded client only segments.
//!
//! The host owns connections and memory. It reports each connection ([`Service::peer_joined`]), each frame
//! ([`Service::request`]), each payload that was received ([`Service::payload_done`]) and each payload that was sent
//! ([`Service::sent`]), and drains [`Service::poll_output`].
//!
//! Invariants:
//!
//! * Whatever a peer holds (pins, reservations, a payload in flight) is released when the host reports that the
//!   connection is gone and its I/O has ended.
//! * A put is answered only after its whole payload was received, also when it fails.
//! * An object's bytes are received into a fresh extent, so that a late writer cannot reach bytes of a committed
//!   object.
//! * Once a client has fenced one of its connections, no further request of that connection is carried out.

mod claims;
mod control;
mod damage;
mod device_moves;
mod device_pool;
mod fetches;
mod image_file;
mod inspection;
mod kept_memory;
mod lists;
mod local;
mod migration;
mod objects;
mod put_sessions;
mod puts;
mod replication;
mod segments;
mod shard;
mod shared_objects;
mod sharing;
mod tiering;
mod types;
mod writes;

#[cfg(test)]
mod tests;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, Incarnation, SegmentId, Slot};
use kvplane_proto::map::SlotOwners;
pub use kvplane_proto::message::PutAck;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::{Limits, Status};
use kvplane_tier::{BlockOp, Tier};

use self::claims::{Claim, ClaimedRequest, Claims};
pub use self::control::Control;
pub use self::damage::{RecordRepairCounters, RepairCounters, ScrubPace};
pub use self::device_moves::DeviceMoves;
pub use self::device_pool::{DEVICE_OBJECT_BYTES, MoveId, MoveOutcome};
pub use self::fetches::{Fetch, FetchDone, FetchLimits, Want};
pub use self::image_file::{ImageFile, ImageOutcome, MemoryImage, OpenImageError};
pub use self::inspection::{Inspection, SnapshotPage};
pub use self::kept_memory::{Discard, FormerImage, KeptReport, LayoutChange};
use self::lists::Lists;
pub use self::migration::MoveCounters;
use self::objects::Objects;
use self::puts::{Puts, ReceivedPut};
pub use self::replication::{CopyCounters, ReplicaProgress, copy_of};
pub use self::segments::Segments;
use self::shard::Shard;
use self::shard::context::RequestContext;
use self::shard::effects::Effect;
use self::shard::sessions::PendingPayload;
pub use self::shard::tail::{TAIL_HEAD_BYTES, TAIL_MOST, TailHead, tenant_of_tail};
pub use self::shard::timing::{
    HOT_KEPT, HotObject, HotObjects, LeavingPayload, OperationTimes, SLOW_AFTER_NS, SLOW_KEPT, ServiceTimes,
    SlowOperation, TENANTS_TIMED, TenantOperation, TenantTimes, TimedTenant, Timing,
};
pub use self::shared_objects::SharedObjects;
pub use self::tiering::{
    Admission, SsdUsage, TierCounters, TierOrder, TierPolicy, TierSnapshot, Tiering, VoidCause, WritePolicy,
};
pub use self::types::{
    CloseReason, Extents, Hold, Identity, MapStanding, Memory, MemoryExtent, Output, Path, PayloadTo, PeerKey,
    PoolBytes, PoolMemory, RegisterError, SegmentInfo, ServiceCounters, TailWrite, TicketId,
};
pub use self::writes::{DetachedWrite, Writes};
use crate::entry::Entry;
use crate::store::Store;

/// Server side of one shard. Single-threaded; owned by the shard's loop.
pub struct Service {
    objects: Objects,
    puts: Puts,
    segments: Segments,
    /// Pages of keys that are being prepared.
    lists: Lists,
    /// Requests that wait until the tenants of their objects are known.
    claims: Claims,
}

impl Service {
    /// Creates a service that owns no slots and no segments yet.
    ///
    /// # Panics
    /// If a name is over the limit: the mistake is reported at the start rather than at a peer's request.
    #[must_use]
    pub fn new(mut identity: Identity, store: Store) -> Self {
        for name in [&identity.cluster, &identity.segment_name] {
            let (bytes, limit) = (name.len(), Limits::NAME_BYTES);
            assert!(bytes <= limit, "a name of {bytes} bytes is over the limit of {limit}: {name}");
        }
        let incarnation = identity.node.0 ^ identity.incarnation.0.rotate_left(32);
        let name = core::mem::take(&mut identity.segment_name);
        Self {
            objects: Objects::new(identity, store),
            puts: Puts::default(),
            segments: Segments::new(name, (incarnation ^ incarnation >> 32) as u32),
            lists: Lists::default(),
            claims: Claims::default(),
        }
    }

    /// Registers a connection that was accepted.
    ///
    /// # Panics
    /// If the index is in use: the host reports a connection's end before it reuses its index.
    pub fn peer_joined(&mut self, peer: PeerKey, path: Path, now_ns: u64) {
        let shard = self.objects.shard_mut();
        shard.now_ns = now_ns;
        shard.sessions.join(peer, path, now_ns);
    }

    /// Ends a connection that is gone and whose I/O has ended: releases everything that it held.
    ///
    /// For shared memory this means that the peer's process is dead or has unmapped the pool. The end of the socket
    /// proves it, because the kernel closes the socket after the process's memory is gone.
    pub fn peer_gone(&mut self, peer: PeerKey, now_ns: u64) {
        let shard = &mut self.objects.local.shard;
        shard.now_ns = now_ns;
        shard.answers.outputs.arrived(now_ns);
        let Some(mut departed) = shard.sessions.leave(peer) else { return };
        if let Some(pending) = departed.session.pending.take() {
            self.segments.end_write(pending, &mut shard.answers.outputs);
        }
        for ticket in departed.tickets {
            self.puts.end_ticket(&mut self.objects, ticket, None);
        }
        let store = &mut self.objects.local.shard.store;
        for pin in departed.pins {
            store.unpin(pin).expect("a session's pin is held");
        }
        for reservation in departed.reservations {
            store.abort(reservation).expect("a session's reservation is held");
        }
    }

    /// Returns the next output for the host. Read a frame's [`Self::body`] and [`Self::extents`] before the next poll.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.objects.shard().answers.assert_tails_written();
        self.act_on_effects();
        while let Some(claim) = self.claims.take_ready() {
            self.carry_out_claimed(&claim);
        }
        let shard = self.objects.shard_mut();
        shard.answers.poll(shard.now_ns)
    }

    /// Returns the body of an [`Output::Frame`]; valid until `poll_output` has returned `None`.
    #[must_use]
    pub fn body(&self, range: core::ops::Range<usize>) -> &[u8] {
        self.objects.shard().answers.bytes(range)
    }

    /// Returns the extents of a scattered payload; valid until `poll_output` has returned `None`.
    #[must_use]
    pub fn extents(&self, range: core::ops::Range<usize>) -> &[MemoryExtent] {
        self.objects.shard().answers.extents(range)
    }

    /// Returns the next tail to be written to the pool. Only tails of reservations that still hold their memory are
    /// returned: the tail of an ended reservation would damage the object that has the memory by now.
    ///
    /// The host writes all pending tails at once: before the payload of the request that it has just passed on, before
    /// the next request, and before it polls the next output. The service panics if the host does not.
    pub fn poll_tail(&mut self) -> Option<TailWrite> {
        self.objects.shard_mut().poll_tail()
    }

    /// Returns the time at which [`Self::handle_timeout`] is to be called next.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let Objects { local, migration, replication, damage } = &self.objects;
        let own = [local.shard.sessions.poll_timeout(), self.puts.poll_timeout(), self.claims.poll_timeout()];
        let tiering = local.tiering.as_ref().and_then(|tiering| tiering.poll_timeout());
        let sharing = local.sharing.as_ref().and_then(|sharing| sharing.poll_timeout());
        let work =
            [tiering, sharing, migration.poll_timeout(local.shard.now_ns), replication.poll_timeout(&local.shard)];
        let work = work.into_iter().chain([damage.poll_timeout()]);
        own.into_iter().chain(work).flatten().min()
    }

    /// Returns the registered memory, to register more or to use some by address.
    pub const fn segments_mut(&mut self) -> &mut Segments {
        &mut self.segments
    }

    /// Returns the objects in memory, for their statistics: without a pool where the shard has segments only.
    #[must_use]
    pub const fn store(&self) -> &Store {
        &self.objects.shard().store
    }

    /// Returns a read-only view for metrics and diagnostics.
    #[must_use]
    pub const fn inspect(&self) -> Inspection<'_> {
        Inspection::new(&self.objects, &self.segments)
    }

    /// Returns a mutable view for the host's settings and commands.
    pub const fn control(&mut self) -> Control<'_> {
        Control::new(&mut self.objects)
    }

    /// Returns the tier, if there is one: statistics of the device, commands, and reports.
    pub fn tier_mut(&mut self) -> Option<&mut Tiering> {
        self.objects.local.tiering.as_deref_mut()
    }

    /// Handles a request and returns where its payload goes. The host writes the tails of [`Self::poll_tail`] to the
    /// pool, then calls [`Self::payload_done`] when the payload was received, also for `Discard`.
    pub fn request(&mut self, peer: PeerKey, header: &Header, body: &[u8], now_ns: u64) -> PayloadTo {
        let shard = self.objects.shard_mut();
        shard.answers.assert_tails_written();
        shard.tick(now_ns);
        shard.answers.outputs.arrived(now_ns);
        let Some(session) = shard.sessions.get_mut(peer) else { return PayloadTo::Discard };
        (session.arrived_ns, session.payload_bytes) = (now_ns, header.payload_bytes);
        shard.counters.requests += 1;
        if let Kind::Request(operation) = header.kind {
            shard.answers.timed.asked(operation, header.items);
        }
        match self.dispatch(peer, header, body) {
            Ok(to) => to,
            Err(reason) => {
                self.objects.shard_mut().close(peer, reason);
                PayloadTo::Discard
            }
        }
    }

    fn dispatch(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let Kind::Request(operation) = header.kind else { return Err(CloseReason::Malformed("a reply")) };
        let Shard { sessions, answers, ownership, now_ns, .. } = self.objects.shard_mut();
        let session = sessions.get_mut(peer).expect("a session that was just looked up");
        if session.pending.is_some() {
            return Err(CloseReason::Malformed("a request before the payload of the previous one was complete"));
        }
        let takes_payload = matches!(operation, Operation::Put | Operation::Write | Operation::WriteMany)
            || operation == Operation::Fill && session.path == Path::Stream;
        if header.payload_bytes > 0 && !takes_payload {
            return Err(CloseReason::Malformed("a payload with a request that takes none"));
        }
        if operation == Operation::Hello {
            return sessions.hello(answers, ownership, peer, header, body).map(|()| PayloadTo::Discard);
        }
        if operation == Operation::Prove {
            return sessions.prove(answers, ownership, peer, *now_ns, header, body).map(|()| PayloadTo::Discard);
        }
        if !session.greeted {
            return Err(CloseReason::NotGreeted);
        }
        let context = RequestContext::new(peer, session, header);
        if !sessions.may_change(answers, peer, operation, header) {
            return Ok(PayloadTo::Discard);
        }
        if !Claims::concern(&context, header) {
            return self.carry_out(&context, header, body);
        }
        let request = ClaimedRequest { header, body, round: 0, arrived_ns: *now_ns };
        match self.claims.take(&mut self.objects, &context, request)? {
            Some((header, body)) => self.carry_out(&context, &header, &body),
            None => Ok(PayloadTo::Discard),
        }
    }

    /// Carries out a permitted request: each operation belongs to one component.
    fn carry_out(&mut self, context: &RequestContext, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let Kind::Request(operation) = header.kind else { return Err(CloseReason::Malformed("a reply")) };
        let Self { objects, puts, segments, lists, .. } = self;
        let peer = context.peer;
        let Shard { sessions, answers, .. } = &mut objects.local.shard;
        let path = sessions.get_mut(peer).expect("a session that was just looked up").path;
        match (operation, path) {
            (Operation::Exists, _) => objects.exists(context, header, body),
            (Operation::Size, _) => objects.size(context, header, body),
            (Operation::Remove, _) => objects.remove(context, header, body),
            (Operation::RemoveCopy, _) => objects.remove_replicas(context, header, body),
            (Operation::Retain, _) => objects.retain(context, header, body),
            (Operation::Fence, _) => sessions.fence(answers, peer, header, body),
            (Operation::OpenSegment, _) => {
                segments.open(answers, peer, header, body);
                Ok(())
            }
            (Operation::List, _) => lists.begin(objects, context, header, body),
            (Operation::Get, Path::Stream) => objects.get(context, header, body),
            (Operation::GetRange, Path::Stream) => puts.get_ranges(objects, context, header, body),
            (Operation::Put, _) | (Operation::Write, Path::Stream) if header.payload_bytes == 0 => {
                // A mistake of the caller, not a broken peer.
                answers.answer(peer, operation, header, Status::Empty);
                Ok(())
            }
            (Operation::Put, _) => return puts.put(objects, context, header, body),
            (Operation::Read, Path::Stream) => segments.read(answers, peer, header, body),
            (Operation::ReadMany, Path::Stream) => segments.read_many(answers, peer, header, body),
            (Operation::Write, Path::Stream) => {
                let write = segments.write(header, body)?;
                objects.local.shard.expect_payload(peer, write.pending);
                return Ok(write.to);
            }
            (Operation::WriteMany, Path::Stream) => {
                let write = segments.write_many(answers, header, body)?;
                objects.local.shard.expect_payload(peer, write.pending);
                return Ok(write.to);
            }
            (Operation::Lookup, Path::Shared) => objects.lookup(context, header, body),
            (Operation::Reserve, Path::Shared) => puts.reserve(objects, context, header, body),
            (Operation::Commit, Path::Shared) => puts.commit(objects, peer, header, body),
            (Operation::Abort, Path::Shared) => puts.abort(objects, peer, header, body),
            (Operation::Release, Path::Shared) => puts.release(objects, peer, header, body),
            (Operation::Begin, _) => puts.begin(objects, context, header, body),
            (Operation::Fill, path) => return puts.fill_on(objects, path, context, header, body),
            (Operation::Seal, _) => puts.seal(objects, peer, header, body),
            (Operation::Discard, _) => puts.discard(objects, peer, header, body),
            (Operation::Peek, Path::Shared) => puts.peek(objects, context, header, body),
            _ => {
                answers.answer(peer, operation, header, Status::Unsupported);
                Ok(())
            }
        }?;
        Ok(PayloadTo::Discard)
    }

    /// Carries out a request once the tenants that it waited for are known.
    fn carry_out_claimed(&mut self, claim: &Claim) {
        let Claim { peer, header, body, round, arrived_ns, .. } = claim;
        let Kind::Request(operation) = header.kind else { return };
        let Shard { sessions, answers, .. } = self.objects.shard_mut();
        let Some(session) = sessions.get_mut(*peer) else { return };
        let context = RequestContext::new(*peer, session, header);
        answers.outputs.arrived(*arrived_ns);
        if sessions.may_change(answers, *peer, operation, header) {
            let request = ClaimedRequest { header, body, round: round + 1, arrived_ns: *arrived_ns };
            let done = match self.claims.take(&mut self.objects, &context, request) {
                Ok(Some((header, body))) => self.carry_out(&context, &header, &body).err(),
                Ok(None) => None,
                Err(reason) => Some(reason),
            };
            if let Some(reason) = done {
                self.objects.shard_mut().close(*peer, reason);
            }
        }
        let shard = self.objects.shard_mut();
        shard.answers.outputs.arrived(shard.now_ns);
    }

    /// Carries out the effects that lower components have noted for those above them.
    fn act_on_effects(&mut self) {
        let Self { objects: Objects { local, migration, replication, damage }, lists, claims, .. } = self;
        while let Some(effect) = local.shard.effects.take() {
            let shard = &mut local.shard;
            match effect {
                Effect::SlotsServed => replication.look_for_unreplicated(shard),
                Effect::RecordsChanged => replication.walk_ssd_again(shard),
                Effect::LacksReplica => replication.walk_again(shard),
                Effect::Replicated(digest) => {
                    if let Some(tiering) = &mut local.tiering {
                        tiering.promotion.end_pass(&tiering.ssd, shard, digest);
                    }
                }
                Effect::Written { digest, is_settled } => migration.written(local, digest, is_settled),
                Effect::Imported { digest, version } => {
                    let waits = replication.waits_of(shard, digest);
                    replication.replicate(shard, digest, version, waits, None);
                }
                Effect::TenantSettled(digest) => claims.settle(digest),
                Effect::Name(name) => lists.take_name(name),
                Effect::Suspect(digest) => damage.suspect(digest),
                Effect::Damaged { digest, version } => damage.damaged(local, digest, version, Vec::new()),
            }
        }
    }

    /// Completes the payload of the last request: it was received where it was sent to. `checksum` is the checksum of
    /// its bytes, where computed.
    pub fn payload_done(&mut self, peer: PeerKey, checksum: Option<u64>, now_ns: u64) {
        let Self { objects, puts, segments, .. } = self;
        let shard = &mut objects.local.shard;
        shard.answers.assert_tails_written();
        shard.tick(now_ns);
        let Some(session) = shard.sessions.get_mut(peer) else { return };
        let (arrived_ns, bytes) = (session.arrived_ns, session.payload_bytes);
        let Some(pending) = session.pending.take() else { return };
        shard.answers.outputs.received(arrived_ns, bytes, now_ns);
        match pending {
            PendingPayload::Refused { request, operation, status: Status::WrongOwner, .. } => {
                shard.refuse(peer, operation, request, Status::WrongOwner);
            }
            PendingPayload::Refused { request, operation, status, argument } => {
                shard.answers.status(peer, operation, request, status, argument);
            }
            PendingPayload::Put { request, reservation, expected, names_owners } => {
                let put = ReceivedPut { request, reservation, expected, names_owners };
                puts.finish_put(objects, peer, &put, checksum);
            }
            PendingPayload::Fill { request, ticket, expected } => {
                puts.finish_fill(objects, peer, request, ticket, expected, checksum);
            }
            pending @ (PendingPayload::Write { .. } | PendingPayload::WriteMany { .. }) => {
                let is_good = segments.finish_write(&mut shard.answers, peer, pending, checksum);
                shard.counters.corrupt += u64::from(!is_good);
            }
        }
    }

    /// Releases the memory of a reply's payload, which was sent, or never will be.
    pub fn sent(&mut self, hold: Hold) {
        let shard = &mut self.objects.local.shard;
        match hold {
            Hold::Pin(pin) => shard.unpin(pin),
            Hold::Segment { segment, read } => self.segments.finish_read(segment, read, &mut shard.answers.outputs),
            Hold::Segments { read } => self.segments.finish_read_many(read, &mut shard.answers.outputs),
            Hold::Ticket(ticket) => drop(self.puts.end_ticket(&mut self.objects, ticket, None)),
        }
    }

    /// Unregisters memory: peers cannot use it from now on. [`Output::Unregistered`] reports when no I/O uses it any
    /// more; a stale id is answered at once.
    pub fn unregister(&mut self, segment: SegmentId) {
        self.segments.unregister(segment, &mut self.objects.local.shard.answers.outputs);
    }

    /// Ends a use that [`Segments::acquire_by_address`] began. All I/O on the range has ended.
    ///
    /// # Panics
    /// If the segment is not in use.
    pub fn release_by_address(&mut self, segment: SegmentId) {
        self.segments.release(segment, &mut self.objects.local.shard.answers.outputs);
    }

    /// Closes the connections that still write or read a segment whose unregistration takes too long.
    pub fn evict_users(&mut self, segment: SegmentId) {
        let shard = &mut self.objects.local.shard;
        let writers = shard.sessions.select(|session| match &session.pending {
            Some(PendingPayload::Write { segment: used, .. }) => *used == segment,
            Some(PendingPayload::WriteMany { segments, .. }) => segments.contains(&segment),
            _ => false,
        });
        let users: Vec<PeerKey> = writers.into_iter().chain(self.segments.readers(segment)).collect();
        users.into_iter().for_each(|peer| shard.close(peer, CloseReason::SegmentGone));
    }

    /// Refuses a read with this status, in place of the reply, whose payload is not sent.
    pub fn refuse_read(&mut self, peer: PeerKey, answer: &Header, hold: Hold, status: Status) {
        self.sent(hold);
        if let Kind::Reply(operation) = answer.kind {
            self.objects.shard_mut().answers.status(peer, operation, answer.request, status, 0);
        }
    }

    /// Returns the writes to segments whose payloads arrive.
    pub const fn writes(&mut self) -> Writes<'_> {
        Writes { shard: &mut self.objects.local.shard, segments: &mut self.segments }
    }

    /// Handles expired deadlines of handshakes, reservations, put sessions, tickets, claims and waits for replicas.
    pub fn handle_timeout(&mut self, now_ns: u64) {
        let Self { objects, puts, claims, .. } = self;
        let shard = &mut objects.local.shard;
        shard.now_ns = now_ns;
        shard.answers.outputs.arrived(now_ns);
        while let Some(peer) = shard.sessions.take_silent(now_ns) {
            shard.close(peer, CloseReason::NotGreeted);
        }
        while let Some((reservation, peer, path)) = objects.local.shard.sessions.take_overdue(now_ns) {
            puts.expire(objects, reservation, peer, path);
        }
        puts.expire_sessions(objects);
        let shard = &mut objects.local.shard;
        shard.sessions.end_tickets(&mut shard.answers.outputs, now_ns);
        claims.expire(shard);
        objects.replication.expire_waits(shard);
    }

    /// Ends a round of the host, whose outputs were sent; `clock` is read now and then.
    #[inline]
    pub fn round_over(&mut self, clock: impl FnOnce() -> u64) {
        self.objects.shard_mut().answers.timed.round_over(clock);
    }

    /// Returns the timing state to keep for the frame that was polled last, until its payload was sent.
    #[must_use]
    #[inline]
    pub const fn leaving(&self, header: &Header, now_ns: u64) -> LeavingPayload {
        self.objects.shard().answers.outputs.leaving(header, now_ns)
    }

    /// Records that a payload was sent; the hold on its memory is released after this.
    #[inline]
    pub fn left(&mut self, leaving: &LeavingPayload, hold: Hold, now_ns: u64) {
        let Shard { answers, store, .. } = self.objects.shard_mut();
        answers.timed.left(leaving, now_ns, || match hold {
            Hold::Pin(pin) => store.pinned(pin).map(Entry::digest),
            _ => None,
        });
    }

    /// Serves these slots from now on, by a map of which only the epoch is known. See [`Self::own`].
    pub fn set_owned(&mut self, epoch: Epoch, owned: impl Fn(u16) -> bool) {
        self.own(epoch, MapStanding { state: 0, since: epoch, kept: Epoch(0) }, owned);
    }

    /// Serves these slots from now on. With a tier, new slots are served as soon as the change is durable. Objects of
    /// slots that were lost are removed: if such a slot comes back later, they may be older than versions that other
    /// owners committed meanwhile.
    pub fn own(&mut self, epoch: Epoch, standing: MapStanding, owned: impl Fn(u16) -> bool) {
        self.change_owners(epoch, standing, &owned, None);
    }

    /// Serves the slots that a map of this cluster state assigns to this shard. Like [`Self::own`], but with migration:
    /// objects of lost slots stay for their new owners to fetch, and objects of gained slots are fetched from their
    /// former owners (see [`Self::poll_fetch`]).
    pub fn follow(&mut self, state: u64, owners: &SlotOwners) {
        let me = self.objects.shard().ownership.key();
        let standing = MapStanding { state, since: owners.since, kept: owners.kept };
        let owned = |slot| owners.owner(Slot(slot)) == Some(me);
        self.change_owners(owners.epoch, standing, &owned, Some(owners));
        let Shard { sessions, answers, ownership, .. } = self.objects.shard_mut();
        ownership.note_incarnations(owners);
        if sessions.needs_tickets() {
            sessions.end_former_incarnations(&mut answers.outputs, ownership);
        }
    }

    fn change_owners(
        &mut self,
        epoch: Epoch,
        standing: MapStanding,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        let Some(change) = self.objects.lose_slots(epoch, standing, owned, owners) else { return };
        if change.has_lost {
            self.puts.end_void_sessions(&mut self.objects);
        }
        self.objects.gain_slots(&change, owned, owners);
        self.act_on_effects();
    }

    /// Starts a new incarnation of the shard after its former one was declared dead, so that its objects may be older
    /// than versions that other owners committed meanwhile. Objects in memory are dropped, those on an SSD are kept to
    /// be reconciled, every connection is closed, and no slot is owned until the next [`Self::set_owned`].
    pub fn begin_incarnation(&mut self, incarnation: Incarnation) {
        if self.objects.begin_incarnation(incarnation) {
            self.puts.end_void_sessions(&mut self.objects);
        }
        self.set_owned(self.objects.shard().ownership.epoch(), |_| false);
        let shard = self.objects.shard_mut();
        shard.ownership.forget_epoch();
        for peer in shard.sessions.select(|_| true) {
            shard.close(peer, CloseReason::Refused(Status::WrongOwner));
        }
    }

    /// Attaches a tier to the shard. The store's objects must begin at multiples of the tier's alignment.
    ///
    /// # Panics
    /// If the store has no pool, or units that do not suit direct I/O: a mistake of the host.
    pub fn attach_tier(&mut self, tier: Tier, policy: TierPolicy) {
        self.objects.local.attach(tier, policy);
    }

    /// Lets the tier work: passes it queued requests, and passes device operations to `start`. Returns true if there
    /// was any progress.
    pub fn drive_tier(
        &mut self,
        now_ns: u64,
        memory: &mut dyn kvplane_tier::Memory,
        start: &mut dyn FnMut(BlockOp),
    ) -> bool {
        let Objects { local, migration, .. } = &mut self.objects;
        let Some(tiering) = &mut local.tiering else { return false };
        local.shard.now_ns = now_ns;
        let progress = migration.with_sources(|sources| tiering.drive(&mut local.shard, sources, memory, start));
        self.act_on_effects();
        progress
    }

    /// Returns the next request to another shard, if there is one; polled until `None` in every round. The answer goes
    /// to [`Self::fetched`].
    pub fn poll_fetch(&mut self, now_ns: u64) -> Option<Fetch> {
        let Objects { local, migration, replication, damage } = &mut self.objects;
        local.shard.now_ns = local.shard.now_ns.max(now_ns);
        let bytes_per_s = migration.limits().bytes_per_s;
        let fetch = replication.poll(local, bytes_per_s).or_else(|| damage.poll(local));
        let fetch = fetch.or_else(|| migration.poll(local));
        self.act_on_effects();
        fetch
    }

    /// Takes the answer of another shard, or the failure to get one. No I/O writes to the object's extent any more.
    pub fn fetched(&mut self, token: u64, done: FetchDone, now_ns: u64) {
        let Objects { local, migration, replication, damage } = &mut self.objects;
        local.shard.now_ns = local.shard.now_ns.max(now_ns);
        if !replication.fetched(&mut local.shard, token, &done) && !damage.fetched(local, token, &done) {
            migration.fetched(local, token, done);
        }
        self.act_on_effects();
    }

    /// Returns the moves between the pool and the device pool.
    pub const fn device_moves(&mut self) -> DeviceMoves<'_> {
        DeviceMoves { local: &mut self.objects.local }
    }

    /// Advances by one step what reads the pool: each list, and the checks of objects against their checksums. Returns
    /// true if there was anything to do. The host calls it in every round.
    pub fn drive_pool(&mut self, pool: &dyn PoolBytes, now_ns: u64) -> bool {
        let progress = self.lists.drive(&mut self.objects, pool);
        let Objects { local, damage, .. } = &mut self.objects;
        local.shard.now_ns = local.shard.now_ns.max(now_ns);
        let progress = damage.drive(local, pool) || progress;
        self.act_on_effects();
        progress
    }
}

const _: () = assert!(Limits::HELLO_NS < Limits::RESERVATION_NS);
