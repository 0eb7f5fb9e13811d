//! Requests of put sessions.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{RequestId, ReservationId, Version};
use kvplane_proto::message::{
    Bitmap, CommitReply, FillItem, IdItem, Kind, LookupReply, Operation, RangeItem, ReserveReply,
};
use kvplane_proto::{Digest, FrameFlags, ItemFlags, Limits, Status};

use super::{PutRequest, Puts, puts_of};
use crate::put_session::{Complete, NewPutSession, PutSessionId, SealError};
use crate::service::objects::Objects;
use crate::service::put_sessions::Readable;
use crate::service::shard::Shard;
use crate::service::shard::answers::items_of;
use crate::service::shard::context::RequestContext;
use crate::service::shard::deferrals::no_lookup;
use crate::service::shard::sessions::PendingPayload;
use crate::service::types::{
    CloseReason, CommittedObject, Extents, Hold, MemoryExtent, Output, Path, PayloadTo, PeerKey, TicketId,
};

fn client_of(shard: &Shard, peer: PeerKey) -> u64 {
    shard.sessions.get(peer).map_or(0, |session| session.greeting.client)
}

impl Puts {
    pub(in crate::service) fn begin(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let puts = puts_of(header, body)?;
        let idle_ms = match header.deadline_us {
            0 => Limits::PUT_SESSION_IDLE_MS,
            idle_us => (idle_us / 1000).clamp(1, Limits::PUT_SESSION_IDLE_MOST_MS),
        };
        let client = client_of(&objects.local.shard, context.peer);
        let mut replies = Vec::with_capacity(puts.len());
        for (item, name) in puts {
            let put = PutRequest { item: &item, name: &name, is_session: true };
            let begun = self.reserve_own(objects, context, put).and_then(|(reservation, _)| {
                let idle_ns = u64::from(idle_ms) * 1_000_000;
                let new = NewPutSession { client, digest: item.digest, bytes: item.bytes, reservation, idle_ns };
                let shard = &mut objects.local.shard;
                let number = self.sessions.begin(shard.ownership.key(), &new, shard.now_ns);
                if number.is_none() {
                    shard.abort(reservation);
                }
                number.ok_or(Status::Busy)
            });
            replies.push(match begun {
                Ok(reservation) => ReserveReply { status: Status::Ok, reservation, offset: 0 },
                Err(status) => ReserveReply { status, reservation: ReservationId::default(), offset: 0 },
            });
        }
        objects.local.shard.answers.records(context.peer, Operation::Begin, header.request, &replies);
        Ok(())
    }

    /// Begins to fill a range: returns its ticket, which is lent to the peer, and its extent.
    fn start_fill(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        item: &FillItem,
    ) -> Result<(TicketId, MemoryExtent), Status> {
        let shard = &objects.local.shard;
        let found = self.sessions.find(shard.ownership.key(), client_of(shard, context.peer), item.session);
        let open = found.ok_or(Status::Stale)?;
        objects.local.may_ask(context, open.digest)?;
        let shard = &mut objects.local.shard;
        let store = &shard.store;
        let (ticket, extent) = self.sessions.fill(store, &open, item.offset, item.bytes, shard.now_ns)?;
        shard.sessions.lend_ticket(context.peer, ticket);
        Ok((ticket, extent))
    }

    pub(in crate::service) fn fill(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let mut items = items_of::<FillItem>(header, body)?;
        let (Some(item), None) = (items.next(), items.next()) else {
            return Err(CloseReason::Malformed("a fill that is not of exactly one range"));
        };
        if item.bytes != header.payload_bytes {
            return Err(CloseReason::Malformed("a fill whose length differs from its payload's"));
        }
        let Some(expected) = header.checksum() else {
            return Err(CloseReason::Malformed("a fill without a checksum"));
        };
        let request = header.request;
        let (pending, to) = match self.start_fill(objects, context, &item) {
            Ok((ticket, extent)) => (PendingPayload::Fill { request, ticket, expected }, PayloadTo::Extent(extent)),
            Err(status) => {
                let operation = Operation::Fill;
                (PendingPayload::Refused { request, operation, status, argument: 0 }, PayloadTo::Discard)
            }
        };
        objects.local.shard.expect_payload(context.peer, pending);
        Ok(to)
    }

    /// Completes a fill whose payload was received.
    pub(in crate::service) fn finish_fill(
        &mut self,
        objects: &mut Objects,
        peer: PeerKey,
        request: RequestId,
        ticket: TicketId,
        expected: u64,
        computed: Option<u64>,
    ) {
        let held = objects.local.shard.sessions.take_ticket(peer, ticket);
        assert!(held, "the ticket of a payload in flight was lost");
        let good = computed == Some(expected);
        objects.local.shard.counters.corrupt += u64::from(!good);
        let status = self.end_ticket(objects, ticket, good.then_some(expected));
        let status = if good { status } else { Status::Corrupt };
        objects.local.shard.answers.status(peer, Operation::Fill, request, status, 0);
    }

    pub(in crate::service) fn fill_shared(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let items = items_of::<FillItem>(header, body)?;
        let mut replies = Vec::with_capacity(items.len());
        for item in items {
            replies.push(match self.start_fill(objects, context, &item) {
                Ok((ticket, extent)) => {
                    ReserveReply { status: Status::Ok, reservation: ticket.reservation(), offset: extent.offset }
                }
                Err(status) => ReserveReply { status, reservation: ReservationId::default(), offset: 0 },
            });
        }
        objects.local.shard.answers.records(context.peer, Operation::Fill, header.request, &replies);
        Ok(())
    }

    /// Takes a ticket back, with the checksum of the bytes that were filled. Returns the outcome of the fill.
    pub(in crate::service) fn end_ticket(
        &mut self,
        objects: &mut Objects,
        id: TicketId,
        checksum: Option<u64>,
    ) -> Status {
        let store = &mut objects.local.shard.store;
        self.sessions.end_ticket(store, id, checksum, objects.local.shard.now_ns)
    }

    pub(in crate::service) fn seal(
        &mut self,
        objects: &mut Objects,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let items = items_of::<IdItem>(header, body)?;
        let client = client_of(&objects.local.shard, peer);
        let mut outcomes = Vec::with_capacity(items.len());
        for IdItem { id } in items {
            outcomes.push(match self.sessions.complete(objects.local.shard.ownership.key(), client, id) {
                Ok((put_session, complete)) => self.seal_one(objects, put_session, &complete),
                // It is not known any more whether the commit was acknowledged, or whether a replica of the object that
                // it replaced still has to be dropped.
                Err(SealError::Sealed(..)) if objects.replication.removals.owes_any(&mut objects.local.shard) => {
                    Err(CommitReply { status: Status::Busy, version: Version(0), flags: ItemFlags::NONE })
                }
                Err(SealError::Sealed(digest, version)) => {
                    Err(CommitReply { status: objects.local.kept(digest, version), version, flags: ItemFlags::NONE })
                }
                Err(error) => {
                    let status = match error {
                        SealError::Busy => Status::Busy,
                        SealError::Incomplete => Status::Pending,
                        SealError::Stale | SealError::Sealed(..) => Status::Stale,
                    };
                    Err(CommitReply { status, version: Version(0), flags: ItemFlags::NONE })
                }
            });
        }
        objects.answer_commits(peer, Operation::Seal, header, outcomes);
        Ok(())
    }

    /// Commits a put session. Its readers hold the object from now on.
    fn seal_one(
        &mut self,
        objects: &mut Objects,
        put_session: PutSessionId,
        complete: &Complete,
    ) -> Result<CommittedObject, CommitReply> {
        let Complete { reservation, checksum, readers } = *complete;
        let refused = |status| CommitReply { status, version: Version(0), flags: ItemFlags::NONE };
        let store = &mut objects.local.shard.store;
        let digest = store.reserved(reservation).expect("an open put session has its memory").digest();
        // A refused session loses its memory at once, which must not happen while it has readers.
        let has_pins = store.free_pins() >= readers;
        let refusable = !objects.local.shard.ownership.owns(digest) || objects.has_rival(reservation, digest);
        if readers > 0 && (refusable || !has_pins) {
            return Err(refused(Status::Busy));
        }
        let made = self.commit_one(objects, reservation, checksum).map_err(refused);
        let store = &mut objects.local.shard.store;
        self.sessions.seal(store, put_session, readers, digest, made.as_ref().ok().map(|made| made.version));
        made
    }

    pub(in crate::service) fn discard(
        &mut self,
        objects: &mut Objects,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let items = items_of::<IdItem>(header, body)?;
        let (client, count) = (client_of(&objects.local.shard, peer), items.len());
        let mut there = Vec::with_capacity(count);
        for IdItem { id } in items {
            let found = self.sessions.find(objects.local.shard.ownership.key(), client, id);
            there.push(found.is_some());
            if let Some(open) = found {
                self.end_put_session(objects, open.id, open.reservation);
            }
        }
        objects
            .local
            .shard
            .answers
            .items(peer, Operation::Discard, header.request, count, |body| Bitmap::encode(there, body));
        Ok(())
    }

    /// Ends a put session. Connections that are sending a range of it are closed; its writers over shared memory are
    /// waited for.
    fn end_put_session(&mut self, objects: &mut Objects, put_session: PutSessionId, reservation: ReservationId) {
        let store = &mut objects.local.shard.store;
        if self.sessions.end(store, put_session, reservation) {
            return;
        }
        let sends = objects.local.shard.sessions.select(|session| match &session.pending {
            Some(PendingPayload::Fill { ticket, .. }) => self.sessions.fills(*ticket, put_session),
            _ => false,
        });
        for peer in sends {
            objects.local.shard.sessions.close(
                &mut objects.local.shard.answers.outputs,
                peer,
                CloseReason::PutDeadline,
            );
        }
    }

    /// Ends the put sessions that have been idle for too long.
    pub(in crate::service) fn expire_sessions(&mut self, objects: &mut Objects) {
        while let Some((put_session, reservation)) = self.sessions.overdue(objects.local.shard.now_ns) {
            objects.local.shard.counters.expired += 1;
            self.end_put_session(objects, put_session, reservation);
        }
    }

    /// Ends the put sessions of objects that this shard does not own any more.
    pub(in crate::service) fn end_void_sessions(&mut self, objects: &mut Objects) {
        for (put_session, reservation) in self.sessions.void(|digest| objects.local.shard.ownership.owns(digest)) {
            self.end_put_session(objects, put_session, reservation);
        }
    }

    /// Returns a range of an object that is being written.
    fn find_put_session(
        &mut self,
        objects: &mut Objects,
        digest: Digest,
        offset: u64,
        bytes: u64,
    ) -> Result<Readable, (Status, u64)> {
        let store = &objects.local.shard.store;
        let found = self.sessions.read(store, digest, offset, bytes)?;
        objects.local.shard.counters.get_bytes += bytes;
        Ok(found)
    }

    /// Answers gets of ranges; also of objects that are being written, if the client accepts those.
    pub(in crate::service) fn get_ranges(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let uncommitted = header.flags.has(FrameFlags::UNCOMMITTED);
        for item in items_of::<RangeItem>(header, body)? {
            let got = match objects.get_range(context, &item) {
                Err((Status::NotFound, _)) if uncommitted && context.tenant.is_none() => {
                    self.get_of_put_session(objects, context.peer, &item)
                }
                got => got,
            };
            if let Err((status, argument)) = got {
                let answers = &mut objects.local.shard.answers;
                answers.status(context.peer, Operation::GetRange, item.request, status, argument);
            }
        }
        Ok(())
    }

    /// Answers a get of a range of a put session over a stream.
    fn get_of_put_session(
        &mut self,
        objects: &mut Objects,
        peer: PeerKey,
        item: &RangeItem,
    ) -> Result<(), (Status, u64)> {
        let Readable { ticket, extent, .. } = self.find_put_session(objects, item.digest, item.offset, item.bytes)?;
        let header = Header::reply(Kind::Reply(Operation::GetRange), item.request, Status::Ok)
            .with_payload(extent.bytes, Some(0));
        let payload = Some((Extents::One(extent), Hold::Ticket(ticket)));
        objects.local.shard.answers.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload });
        Ok(())
    }

    pub(in crate::service) fn peek(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let items = items_of::<RangeItem>(header, body)?;
        let mut replies = Vec::with_capacity(items.len());
        for RangeItem { digest, offset, bytes, .. } in items {
            let reply = match objects.lookup_one(context, digest, false) {
                Err(Status::NotFound) if header.flags.has(FrameFlags::UNCOMMITTED) => {
                    let found = self.find_put_session(objects, digest, offset, bytes).map_err(|(status, _)| status);
                    found.map(|Readable { ticket, extent, object_bytes }| {
                        objects.local.shard.sessions.lend_ticket(context.peer, ticket);
                        LookupReply {
                            status: Status::Ok,
                            pin: ticket.pin(),
                            offset: extent.offset - offset,
                            bytes: object_bytes,
                            version: Version(0),
                            checksum: 0,
                            flags: ItemFlags::NONE,
                        }
                    })
                }
                reply => reply,
            };
            replies.push(reply.unwrap_or_else(no_lookup));
        }
        objects.local.shard.answers.records(context.peer, Operation::Peek, header.request, &replies);
        Ok(())
    }

    /// Carries out a fill: over shared memory the client writes itself, otherwise its payload follows.
    pub(in crate::service) fn fill_on(
        &mut self,
        objects: &mut Objects,
        path: Path,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        match path {
            Path::Shared => self.fill_shared(objects, context, header, body).map(|()| PayloadTo::Discard),
            Path::Stream if header.payload_bytes == 0 => {
                objects.local.shard.answers.answer(context.peer, Operation::Fill, header, Status::Empty);
                Ok(PayloadTo::Discard)
            }
            Path::Stream => self.fill(objects, context, header, body),
        }
    }
}
