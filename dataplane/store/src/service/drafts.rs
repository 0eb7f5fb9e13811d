//! Objects that are written in ranges: drafts, and who writes and reads them at the moment.
//!
//! A *ticket* is somebody's hold on a range of a draft: who fills it, or reads what is there. Over shared memory
//! tickets are lent as reservations and pins are, under ids that are told apart by their highest bit. A ticket of a
//! peer comes back with its connection.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{PinId, RequestId, ReservationId, Version};
use kvplane_proto::message::{
    Bitmap, CommitReply, FillItem, IdItem, Kind, LookupReply, Operation, RangeItem, ReserveReply,
};
use kvplane_proto::{Digest, FrameFlags, ItemFlags, Limits, Status};

use super::Service;
use super::context::RequestContext;
use super::deferred::no_lookup;
use super::session::Pending;
use super::stream_read::Wanted;
use super::types::{CloseReason, Hold, Memory, Output, Path, PayloadTo, PeerKey, Place, Places};
use crate::drafts::{Complete, DraftId, FillError, Numbers, SealError};

/// Ids of tickets have this bit in their index.
const TICKET: u32 = 1 << 31;

/// Somebody's hold on a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ticket {
    /// Fills it.
    Fill { draft: DraftId, offset: u64, bytes: u64 },
    /// Reads it.
    Read { draft: DraftId },
    /// Reads it, and the draft is an object by now.
    Pinned { pin: PinId },
}

/// All tickets.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    places: Vec<(u32, Option<Ticket>)>,
    vacant: Vec<u32>,
}

/// A ticket's place and generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TicketId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl TicketId {
    const fn reservation(self) -> ReservationId {
        ReservationId { index: self.index | TICKET, generation: self.generation }
    }

    const fn pin(self) -> PinId {
        PinId { index: self.index | TICKET, generation: self.generation }
    }

    /// The ticket that an id names, if it names one.
    pub(super) const fn of(index: u32, generation: u32) -> Option<Self> {
        if index & TICKET != 0 { Some(Self { index: index & !TICKET, generation }) } else { None }
    }
}

impl Tickets {
    fn add(&mut self, ticket: Ticket) -> Option<TicketId> {
        let index = match self.vacant.pop() {
            Some(index) => index,
            None if self.places.len() < Limits::DRAFT_TICKETS as usize => {
                self.places.push((0, None));
                self.places.len() as u32 - 1
            }
            None => return None,
        };
        let place = &mut self.places[index as usize];
        *place = (place.0.wrapping_add(1).max(1), Some(ticket));
        Some(TicketId { index, generation: place.0 })
    }

    fn take(&mut self, id: TicketId) -> Ticket {
        let place = &mut self.places[id.index as usize];
        assert_eq!(place.0, id.generation, "a ticket that is held");
        self.vacant.push(id.index);
        place.1.take().expect("a ticket that is held")
    }
}

const fn fill_status(error: FillError) -> Status {
    match error {
        FillError::Stale => Status::Stale,
        FillError::Empty => Status::Empty,
        FillError::OutOfRange => Status::OutOfRange,
        FillError::Filled => Status::Exists,
        FillError::Overlap | FillError::TooMany => Status::BadRequest,
        FillError::Busy => Status::Busy,
    }
}

impl Service {
    fn client_of(&mut self, peer: PeerKey) -> u64 {
        self.session(peer).map_or(0, |session| session.client)
    }

    /// The draft that a client means.
    fn draft_of(&self, number: u64) -> DraftId {
        Numbers::of(self.key()).draft(number)
    }

    pub(super) fn begin(
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
                let idle_ns = u64::from(idle_ms) * 1_000_000;
                let of = (item.digest, item.bytes);
                let draft = self.drafts.begin(client, of, reservation, idle_ns, self.now_ns);
                if draft.is_none() {
                    self.abort_one(reservation);
                }
                draft.ok_or(Status::Busy)
            });
            replies.push(match begun {
                Ok(draft) => {
                    let reservation = ReservationId::from_bits(Numbers::of(self.key()).number(draft));
                    ReserveReply { status: Status::Ok, reservation, offset: 0 }
                }
                Err(status) => ReserveReply { status, reservation: ReservationId::default(), offset: 0 },
            });
        }
        self.answers.records(context.peer, Operation::Begin, header.request, &replies);
        Ok(PayloadTo::Discard)
    }

    /// A range that is to be filled: where it is, and the ticket for that, lent to the peer.
    fn start_fill(&mut self, context: &RequestContext, item: &FillItem) -> Result<(TicketId, Place), Status> {
        let FillItem { offset, bytes, .. } = *item;
        let (client, draft) = (self.client_of(context.peer), self.draft_of(item.draft));
        let Some((digest, reservation)) = self.drafts.of(client, draft) else { return Err(Status::Stale) };
        self.may_ask(context, digest)?;
        self.drafts.fill(client, draft, offset, bytes, self.now_ns).map_err(fill_status)?;
        let Some(ticket) = self.tickets.add(Ticket::Fill { draft, offset, bytes }) else {
            self.drafts.filled(draft, (offset, bytes), None, self.now_ns);
            return Err(Status::Busy);
        };
        self.sessions.lend_ticket(context.peer, ticket);
        let extent = self.store.as_ref().and_then(|store| store.reserved_extent(reservation));
        let extent = extent.expect("an open draft has its room");
        Ok((ticket, Place { memory: Memory::Pool, offset: extent.offset + offset, bytes }))
    }

    pub(super) fn fill(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let mut items = Self::items::<FillItem>(header, body)?;
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
            Ok((ticket, place)) => (Pending::Fill { request, ticket, expected }, PayloadTo::Place(place)),
            Err(status) => {
                let operation = Operation::Fill;
                (Pending::Refused { request, operation, status, argument: 0 }, PayloadTo::Discard)
            }
        };
        self.session(context.peer).expect("a session that was just looked up").pending = Some(pending);
        Ok(to)
    }

    /// The payload of a fill is in place.
    pub(super) fn finish_fill(
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
        self.answer_id(peer, Operation::Fill, request, status, 0);
    }

    pub(super) fn fill_shared(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let items = Self::items::<FillItem>(header, body)?;
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
    pub(super) fn end_ticket(&mut self, id: TicketId, checksum: Option<u64>) -> Status {
        let (freed, status) = match self.tickets.take(id) {
            Ticket::Fill { draft, offset, bytes } => {
                let is_open = self.drafts.is_open(draft);
                let freed = self.drafts.filled(draft, (offset, bytes), checksum, self.now_ns);
                (freed, if is_open { Status::Ok } else { Status::Stale })
            }
            Ticket::Read { draft } => (self.drafts.read(draft), Status::Ok),
            Ticket::Pinned { pin } => {
                if let Some(store) = &mut self.store {
                    store.unpin(pin).expect("a reader's pin is held");
                }
                (None, Status::Ok)
            }
        };
        if let Some(reservation) = freed {
            self.abort_one(reservation);
        }
        status
    }

    pub(super) fn seal(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let items = Self::items::<IdItem>(header, body)?;
        let client = self.client_of(peer);
        let mut outcomes = Vec::with_capacity(items.len());
        for IdItem { id } in items {
            let draft = self.draft_of(id);
            outcomes.push(match self.drafts.complete(client, draft) {
                Ok(complete) => self.seal_one(draft, &complete),
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
    fn seal_one(&mut self, draft: DraftId, complete: &Complete) -> Result<super::objects::Made, CommitReply> {
        let Complete { reservation, checksum, readers } = *complete;
        let refused = |status| CommitReply { status, version: Version(0), flags: ItemFlags::NONE };
        let store = self.store.as_mut().expect("a reservation is of a store");
        let (digest, _) = store.reserved_for(reservation).expect("an open draft has its room");
        // What is refused loses its room at once: not while somebody reads there.
        let has_pins = store.free_pins() >= readers;
        let refusable = !super::owns(&self.owned, digest) || self.has_rival(reservation, digest);
        if readers > 0 && (refusable || !has_pins) {
            return Err(refused(Status::Busy));
        }
        let made = self.commit_one(reservation, checksum).map_err(refused);
        if readers > 0 && made.is_ok() {
            let store = self.store.as_mut().expect("a reservation is of a store");
            let tickets = self.tickets.places.iter_mut().filter_map(|place| place.1.as_mut());
            for ticket in tickets.filter(|ticket| **ticket == Ticket::Read { draft }) {
                let (pin, _) = store.hold(digest).expect("there were free pins");
                *ticket = Ticket::Pinned { pin };
            }
        }
        self.drafts.seal(draft, made.as_ref().ok().map(|made| made.version));
        made
    }

    pub(super) fn discard(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let items = Self::items::<IdItem>(header, body)?;
        let (client, count) = (self.client_of(peer), items.len());
        let mut there = Vec::with_capacity(count);
        for IdItem { id } in items {
            let draft = self.draft_of(id);
            let found = self.drafts.of(client, draft);
            there.push(found.is_some());
            if let Some((_, reservation)) = found {
                self.end_draft(draft, reservation);
            }
        }
        self.answers.items(peer, Operation::Discard, header.request, count, |body| Bitmap::encode(there, body));
        Ok(PayloadTo::Discard)
    }

    /// A draft is over. Who is sending a range of it is cut off; who writes by itself is waited for.
    fn end_draft(&mut self, draft: DraftId, reservation: ReservationId) {
        if let Some(freed) = self.drafts.end(draft) {
            self.abort_one(freed);
            return;
        }
        if let Some(store) = &mut self.store {
            store.expire(reservation);
        }
        let of_it = |session: &super::session::Session| match &session.pending {
            Some(Pending::Fill { ticket, .. }) => {
                let ticket = self.tickets.places[ticket.index as usize].1;
                matches!(ticket, Some(Ticket::Fill { draft: filled, .. }) if filled == draft)
            }
            _ => false,
        };
        for peer in self.sessions.select(of_it) {
            self.close(peer, CloseReason::PutDeadline);
        }
    }

    /// Ends the drafts that were left alone for too long.
    pub(super) fn expire_drafts(&mut self) {
        while let Some((draft, reservation)) = self.drafts.due(self.now_ns) {
            self.counters.expired += 1;
            self.end_draft(draft, reservation);
        }
    }

    /// Ends the drafts of objects that are another's now.
    pub(super) fn end_void_drafts(&mut self) {
        let owned = &self.owned;
        let void = self.drafts.open().filter(|(_, digest)| !super::owns(owned, *digest));
        let void: Vec<DraftId> = void.map(|(draft, _)| draft).collect();
        for draft in void {
            let reservation = self.drafts.reservation(draft);
            self.end_draft(draft, reservation);
        }
    }

    /// A range of an object that is being written: whose it is, where it lies, and how long the object is.
    fn find_draft(&mut self, digest: Digest, offset: u64, bytes: u64) -> Result<(TicketId, Place, u64), (Status, u64)> {
        let Some(found) = self.drafts.find(digest, offset, bytes) else { return Err((Status::NotFound, 0)) };
        Wanted::Range { offset, bytes }.check(found.bytes).map_err(|status| (status, found.bytes))?;
        if !found.is_there {
            return Err((Status::Pending, found.bytes));
        }
        let ticket = self.tickets.add(Ticket::Read { draft: found.draft }).ok_or((Status::Busy, 0))?;
        self.drafts.reading(found.draft);
        let extent = self.store.as_ref().and_then(|store| store.reserved_extent(found.reservation));
        let extent = extent.expect("an open draft has its room");
        self.counters.get_bytes += bytes;
        Ok((ticket, Place { memory: Memory::Pool, offset: extent.offset + offset, bytes }, found.bytes))
    }

    /// Answers for a range over a stream.
    pub(super) fn get_of_draft(&mut self, peer: PeerKey, item: &RangeItem) -> Result<(), (Status, u64)> {
        let (ticket, place, _) = self.find_draft(item.digest, item.offset, item.bytes)?;
        let header = Header::reply(Kind::Reply(Operation::GetRange), item.request, Status::Ok)
            .with_payload(place.bytes, Some(0));
        let payload = Some((Places::One(place), Hold::Ticket(ticket)));
        self.answers.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload });
        Ok(())
    }

    pub(super) fn peek(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let items = Self::items::<RangeItem>(header, body)?;
        let mut replies = Vec::with_capacity(items.len());
        for RangeItem { digest, offset, bytes, .. } in items {
            let reply = match self.lookup_one(context, digest, false) {
                Err(Status::NotFound) if header.flags.has(FrameFlags::UNCOMMITTED) => {
                    let found = self.find_draft(digest, offset, bytes).map_err(|(status, _)| status);
                    found.map(|(ticket, place, object_bytes)| {
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

    /// Whether a path can do what drafts need of it.
    pub(super) fn fill_on(
        &mut self,
        path: Path,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        match path {
            Path::Shared => self.fill_shared(context, header, body),
            Path::Stream if header.payload_bytes == 0 => {
                self.answer(context.peer, Operation::Fill, header, Status::Empty);
                Ok(PayloadTo::Discard)
            }
            Path::Stream => self.fill(context, header, body),
        }
    }
}
