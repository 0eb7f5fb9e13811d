//! Requests for put sessions.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{RequestId, ReservationId, Version};
use kvplane_proto::message::{
    Bitmap, CommitReply, FillItem, IdItem, Kind, LookupReply, Operation, RangeItem, ReserveReply,
};
use kvplane_proto::{Digest, FrameFlags, ItemFlags, Limits, Status};

use super::super::Service;
use super::super::answers::items_of;
use super::super::context::RequestContext;
use super::super::deferred::no_lookup;
use super::super::objects::CommittedObject;
use super::super::sessions::PendingPayload;
use super::super::types::{CloseReason, Hold, Output, Path, PayloadTo, PeerKey, Place, Places};
use super::{Readable, TicketId};
use crate::drafts::{Complete, DraftId, SealError};

impl Service {
    fn client_of(&self, peer: PeerKey) -> u64 {
        self.sessions.get(peer).map_or(0, |session| session.client)
    }

    pub(in crate::service) fn begin(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let puts = Self::puts(header, body)?;
        let idle_ms = match header.deadline_us {
            0 => Limits::DRAFT_IDLE_MS,
            idle_us => (idle_us / 1000).clamp(1, Limits::DRAFT_IDLE_MOST_MS),
        };
        let client = self.client_of(context.peer);
        let mut replies = Vec::with_capacity(puts.len());
        for (item, name) in puts {
            let begun = self.room_for(context, &item, &name, true).and_then(|(reservation, _)| {
                let whose = (client, u64::from(idle_ms) * 1_000_000, self.now_ns);
                let of = (item.digest, item.bytes);
                let number = self.put_sessions.begin(self.ownership.key(), whose, of, reservation);
                if number.is_none() {
                    self.abort_one(reservation);
                }
                number.ok_or(Status::Busy)
            });
            replies.push(match begun {
                Ok(reservation) => ReserveReply { status: Status::Ok, reservation, offset: 0 },
                Err(status) => ReserveReply { status, reservation: ReservationId::default(), offset: 0 },
            });
        }
        self.answers.records(context.peer, Operation::Begin, header.request, &replies);
        Ok(PayloadTo::Discard)
    }

    /// A range that is to be filled: where it is, and the ticket for that, lent to the peer.
    fn start_fill(&mut self, context: &RequestContext, item: &FillItem) -> Result<(TicketId, Place), Status> {
        let (client, shard) = (self.client_of(context.peer), self.ownership.key());
        let found = self.put_sessions.find(shard, client, item.draft);
        let Some((draft, digest, reservation)) = found else { return Err(Status::Stale) };
        self.may_ask(context, digest)?;
        let Some(store) = &self.store else { return Err(Status::Stale) };
        let of = (client, draft, reservation);
        let (ticket, place) = self.put_sessions.fill(store, of, (item.offset, item.bytes), self.now_ns)?;
        self.sessions.lend_ticket(context.peer, ticket);
        Ok((ticket, place))
    }

    pub(in crate::service) fn fill(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let mut items = items_of::<FillItem>(header, body)?;
        let (Some(item), None) = (items.next(), items.next()) else {
            return Err(CloseReason::Malformed("a fill of not one range"));
        };
        if item.bytes != header.payload_bytes {
            return Err(CloseReason::Malformed("a fill of another length than its payload's"));
        }
        let Some(expected) = header.checksum() else {
            return Err(CloseReason::Malformed("a fill without checksum"));
        };
        let request = header.request;
        let (pending, to) = match self.start_fill(context, &item) {
            Ok((ticket, place)) => (PendingPayload::Fill { request, ticket, expected }, PayloadTo::Place(place)),
            Err(status) => {
                let operation = Operation::Fill;
                (PendingPayload::Refused { request, operation, status, argument: 0 }, PayloadTo::Discard)
            }
        };
        self.sessions.get_mut(context.peer).expect("a session that was just looked up").pending = Some(pending);
        Ok(to)
    }

    /// The payload of a fill is in place.
    pub(in crate::service) fn finish_fill(
        &mut self,
        peer: PeerKey,
        request: RequestId,
        ticket: TicketId,
        expected: u64,
        computed: Option<u64>,
    ) {
        let held = self.sessions.take_ticket(peer, ticket);
        assert!(held, "the ticket of a payload under way was lost");
        let good = computed == Some(expected);
        self.counters.corrupt += u64::from(!good);
        let status = self.end_ticket(ticket, good.then_some(expected));
        let status = if good { status } else { Status::Corrupt };
        self.answers.status(peer, Operation::Fill, request, status, 0);
    }

    pub(in crate::service) fn fill_shared(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let items = items_of::<FillItem>(header, body)?;
        let mut replies = Vec::with_capacity(items.len());
        for item in items {
            replies.push(match self.start_fill(context, &item) {
                Ok((ticket, place)) => {
                    ReserveReply { status: Status::Ok, reservation: ticket.reservation(), offset: place.offset }
                }
                Err(status) => ReserveReply { status, reservation: ReservationId::default(), offset: 0 },
            });
        }
        self.answers.records(context.peer, Operation::Fill, header.request, &replies);
        Ok(PayloadTo::Discard)
    }

    /// A ticket is given back, with the checksum of what was filled. What became of the fill.
    pub(in crate::service) fn end_ticket(&mut self, id: TicketId, checksum: Option<u64>) -> Status {
        let store = self.store.as_mut().expect("a ticket is of a store's");
        self.put_sessions.end_ticket(store, id, checksum, self.now_ns)
    }

    pub(in crate::service) fn seal(
        &mut self,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let items = items_of::<IdItem>(header, body)?;
        let client = self.client_of(peer);
        let mut outcomes = Vec::with_capacity(items.len());
        for IdItem { id } in items {
            outcomes.push(match self.put_sessions.complete(self.ownership.key(), client, id) {
                Ok((draft, complete)) => self.seal_one(draft, &complete),
                // Whether that was acknowledged, or a copy of what it replaced still has to go, is not known any more.
                Err(SealError::Sealed(..)) if self.owes_any() => {
                    Err(CommitReply { status: Status::Busy, version: Version(0), flags: ItemFlags::NONE })
                }
                Err(SealError::Sealed(digest, version)) => {
                    Err(CommitReply { status: self.kept(digest, version), version, flags: ItemFlags::NONE })
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
        self.answer_commits(peer, Operation::Seal, header, outcomes);
        Ok(PayloadTo::Discard)
    }

    /// A draft becomes an object. Its readers hold that from now on.
    fn seal_one(&mut self, draft: DraftId, complete: &Complete) -> Result<CommittedObject, CommitReply> {
        let Complete { reservation, checksum, readers } = *complete;
        let refused = |status| CommitReply { status, version: Version(0), flags: ItemFlags::NONE };
        let store = self.store.as_mut().expect("a reservation is of a store");
        let (digest, _) = store.reserved_for(reservation).expect("an open draft has its room");
        // What is refused loses its room at once: not while somebody reads there.
        let has_pins = store.free_pins() >= readers;
        let refusable = !self.ownership.owns(digest) || self.has_rival(reservation, digest);
        if readers > 0 && (refusable || !has_pins) {
            return Err(refused(Status::Busy));
        }
        let made = self.commit_one(reservation, checksum).map_err(refused);
        let store = self.store.as_mut().expect("a reservation is of a store");
        self.put_sessions.seal(store, draft, readers, digest, made.as_ref().ok().map(|made| made.version));
        made
    }

    pub(in crate::service) fn discard(
        &mut self,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let items = items_of::<IdItem>(header, body)?;
        let (client, count) = (self.client_of(peer), items.len());
        let mut there = Vec::with_capacity(count);
        for IdItem { id } in items {
            let found = self.put_sessions.find(self.ownership.key(), client, id);
            there.push(found.is_some());
            if let Some((draft, _, reservation)) = found {
                self.end_draft(draft, reservation);
            }
        }
        self.answers.items(peer, Operation::Discard, header.request, count, |body| Bitmap::encode(there, body));
        Ok(PayloadTo::Discard)
    }

    /// A draft is over. Who is sending a range of it is cut off; who writes by itself is waited for.
    fn end_draft(&mut self, draft: DraftId, reservation: ReservationId) {
        let store = self.store.as_mut().expect("a reservation is of a store");
        if self.put_sessions.end(store, draft, reservation) {
            return;
        }
        let sends = self.sessions.select(|session| match &session.pending {
            Some(PendingPayload::Fill { ticket, .. }) => self.put_sessions.fills(*ticket, draft),
            _ => false,
        });
        for peer in sends {
            self.sessions.close(&mut self.answers.outputs, peer, CloseReason::PutDeadline);
        }
    }

    /// Ends the drafts that were left alone for too long.
    pub(in crate::service) fn expire_drafts(&mut self) {
        while let Some((draft, reservation)) = self.put_sessions.overdue(self.now_ns) {
            self.counters.expired += 1;
            self.end_draft(draft, reservation);
        }
    }

    /// Ends the drafts of objects that are another's now.
    pub(in crate::service) fn end_void_drafts(&mut self) {
        for (draft, reservation) in self.put_sessions.void(|digest| self.ownership.owns(digest)) {
            self.end_draft(draft, reservation);
        }
    }

    /// A range of an object that is being written.
    fn find_draft(&mut self, digest: Digest, offset: u64, bytes: u64) -> Result<Readable, (Status, u64)> {
        let Some(store) = &self.store else { return Err((Status::NotFound, 0)) };
        let found = self.put_sessions.read(store, digest, offset, bytes)?;
        self.counters.get_bytes += bytes;
        Ok(found)
    }

    /// Answers for a range over a stream.
    pub(in crate::service) fn get_of_draft(&mut self, peer: PeerKey, item: &RangeItem) -> Result<(), (Status, u64)> {
        let Readable { ticket, place, .. } = self.find_draft(item.digest, item.offset, item.bytes)?;
        let header = Header::reply(Kind::Reply(Operation::GetRange), item.request, Status::Ok)
            .with_payload(place.bytes, Some(0));
        let payload = Some((Places::One(place), Hold::Ticket(ticket)));
        self.answers.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload });
        Ok(())
    }

    pub(in crate::service) fn peek(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let items = items_of::<RangeItem>(header, body)?;
        let mut replies = Vec::with_capacity(items.len());
        for RangeItem { digest, offset, bytes, .. } in items {
            let reply = match self.lookup_one(context, digest, false) {
                Err(Status::NotFound) if header.flags.has(FrameFlags::UNCOMMITTED) => {
                    let found = self.find_draft(digest, offset, bytes).map_err(|(status, _)| status);
                    found.map(|Readable { ticket, place, object_bytes }| {
                        self.sessions.lend_ticket(context.peer, ticket);
                        LookupReply {
                            status: Status::Ok,
                            pin: ticket.pin(),
                            offset: place.offset - offset,
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
        self.answers.records(context.peer, Operation::Peek, header.request, &replies);
        Ok(PayloadTo::Discard)
    }

    /// Carries out a fill: over shared memory the client writes by itself, else its payload follows.
    pub(in crate::service) fn fill_on(
        &mut self,
        path: Path,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        match path {
            Path::Shared => self.fill_shared(context, header, body),
            Path::Stream if header.payload_bytes == 0 => {
                self.answers.answer(context.peer, Operation::Fill, header, Status::Empty);
                Ok(PayloadTo::Discard)
            }
            Path::Stream => self.fill(context, header, body),
        }
    }
}
