//! Put sessions: objects that are written in ranges, and their current writers and readers.
//!
//! [`PutSessions`] connects the sessions' states ([`crate::put_session`]) to the store's reservations, which hold their
//! memory, and to tickets. A *ticket* is a hold on a range of a put session: of a writer that fills it, or of a reader
//! of bytes that were written. Over shared memory tickets are lent like reservations and pins, under ids with the
//! highest bit of the index set. A peer's tickets are taken back when its connection ends.
//!
//! This module does not know the connections (the shard's sessions do), nor how a put session is committed.

#[cfg(test)]
mod tests;

use kvplane_proto::ids::{PinId, ReservationId, Version};
use kvplane_proto::map::ShardKey;
use kvplane_proto::{Digest, Limits, Status};

use super::shard::stream_read::ReadSpan;
use super::types::{Memory, MemoryExtent, TicketId};
use crate::put_session::{Complete, FillError, NewPutSession, Numbers, PutSessionId, PutSessionTable, SealError};
use crate::store::Store;

/// Hold on a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ticket {
    /// Of a writer that fills it.
    Fill { put_session: PutSessionId, offset: u64, bytes: u64 },
    /// Of a reader.
    Read { put_session: PutSessionId },
    /// Of a reader, after the put session was committed.
    Pinned { pin: PinId },
}

/// Table of all tickets.
#[derive(Debug, Default)]
struct Tickets {
    extents: Vec<(u32, Option<Ticket>)>,
    vacant: Vec<u32>,
}

impl Tickets {
    fn add(&mut self, ticket: Ticket) -> Option<TicketId> {
        let index = match self.vacant.pop() {
            Some(index) => index,
            None if self.extents.len() < Limits::PUT_SESSION_TICKETS as usize => {
                self.extents.push((0, None));
                self.extents.len() as u32 - 1
            }
            None => return None,
        };
        let extent = &mut self.extents[index as usize];
        *extent = (extent.0.wrapping_add(1).max(1), Some(ticket));
        Some(TicketId { index, generation: extent.0 })
    }

    fn take(&mut self, id: TicketId) -> Ticket {
        let extent = &mut self.extents[id.index as usize];
        assert_eq!(extent.0, id.generation, "a ticket that is held");
        self.vacant.push(id.index);
        extent.1.take().expect("a ticket that is held")
    }

    fn at(&self, id: TicketId) -> Option<Ticket> {
        self.extents.get(id.index as usize)?.1
    }

    /// Turns the tickets of the readers of a committed put session into pins of the object.
    fn pin_readers(&mut self, put_session: PutSessionId, mut pin: impl FnMut() -> PinId) {
        for ticket in self.extents.iter_mut().filter_map(|extent| extent.1.as_mut()) {
            if *ticket == (Ticket::Read { put_session }) {
                *ticket = Ticket::Pinned { pin: pin() };
            }
        }
    }
}

/// Range of a put session that a reader may read: its ticket, its extent, and the length of the object.
pub(super) struct Readable {
    pub(super) ticket: TicketId,
    pub(super) extent: MemoryExtent,
    pub(super) object_bytes: u64,
}

/// Put session that accepts ranges.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OpenPutSession {
    pub(super) id: PutSessionId,
    client: u64,
    pub(super) digest: Digest,
    pub(super) reservation: ReservationId,
}

/// Put sessions of a shard, and the tickets for their ranges.
#[derive(Debug, Default)]
pub(super) struct PutSessions {
    put_sessions: PutSessionTable,
    tickets: Tickets,
}

impl PutSessions {
    /// Begins a put session. Returns the number by which its client names it; `None` if there are too many.
    pub(super) fn begin(&mut self, shard: ShardKey, new: &NewPutSession, now_ns: u64) -> Option<ReservationId> {
        let id = self.put_sessions.begin(new, now_ns)?;
        Some(ReservationId::from_bits(Numbers::of(shard).number(id)))
    }

    /// Returns the open put session that a client names by a number.
    pub(super) fn find(&mut self, shard: ShardKey, client: u64, number: u64) -> Option<OpenPutSession> {
        let id = Numbers::of(shard).session(number);
        let (digest, reservation) = self.put_sessions.of(client, id)?;
        Some(OpenPutSession { id, client, digest, reservation })
    }

    /// Begins to fill a range: returns its ticket and extent.
    pub(super) fn fill(
        &mut self,
        store: &Store,
        open: &OpenPutSession,
        offset: u64,
        bytes: u64,
        now_ns: u64,
    ) -> Result<(TicketId, MemoryExtent), Status> {
        let put_session = open.id;
        self.put_sessions.fill(open.client, put_session, offset, bytes, now_ns).map_err(fill_status)?;
        let Some(ticket) = self.tickets.add(Ticket::Fill { put_session, offset, bytes }) else {
            self.put_sessions.filled(put_session, offset, bytes, None, now_ns);
            return Err(Status::Busy);
        };
        Ok((ticket, place_of(store, open.reservation, offset, bytes)))
    }

    /// Begins to read a range of an object that is being written. An error comes with the object's length.
    pub(super) fn read(
        &mut self,
        store: &Store,
        digest: Digest,
        offset: u64,
        bytes: u64,
    ) -> Result<Readable, (Status, u64)> {
        let Some(found) = self.put_sessions.find(digest, offset, bytes) else { return Err((Status::NotFound, 0)) };
        ReadSpan::Range { offset, bytes }.check(found.bytes).map_err(|status| (status, found.bytes))?;
        if !found.is_there {
            return Err((Status::Pending, found.bytes));
        }
        let ticket = self.tickets.add(Ticket::Read { put_session: found.session }).ok_or((Status::Busy, 0))?;
        self.put_sessions.reading(found.session);
        let extent = place_of(store, found.reservation, offset, bytes);
        Ok(Readable { ticket, extent, object_bytes: found.bytes })
    }

    /// Takes a ticket back, with the checksum of the bytes that were filled. Returns the outcome of the fill.
    pub(super) fn end_ticket(&mut self, store: &mut Store, id: TicketId, checksum: Option<u64>, now_ns: u64) -> Status {
        let (freed, status) = match self.tickets.take(id) {
            Ticket::Fill { put_session, offset, bytes } => {
                let is_open = self.put_sessions.is_open(put_session);
                let freed = self.put_sessions.filled(put_session, offset, bytes, checksum, now_ns);
                (freed, if is_open { Status::Ok } else { Status::Stale })
            }
            Ticket::Read { put_session } => (self.put_sessions.read(put_session), Status::Ok),
            Ticket::Pinned { pin } => {
                store.unpin(pin).expect("a reader's pin is held");
                (None, Status::Ok)
            }
        };
        if let Some(reservation) = freed {
            store.abort(reservation).expect("a put session's memory is reserved");
        }
        status
    }

    /// Returns a client's put session that is complete and may be committed: no writer is left.
    pub(super) fn complete(
        &mut self,
        shard: ShardKey,
        client: u64,
        number: u64,
    ) -> Result<(PutSessionId, Complete), SealError> {
        let put_session = Numbers::of(shard).session(number);
        self.put_sessions.complete(client, put_session).map(|complete| (put_session, complete))
    }

    /// Closes a put session that was committed as this version, or refused. Its readers hold the object from now on.
    pub(super) fn seal(
        &mut self,
        store: &mut Store,
        put_session: PutSessionId,
        readers: u32,
        digest: Digest,
        version: Option<Version>,
    ) {
        if version.is_some() && readers > 0 {
            self.tickets.pin_readers(put_session, || store.hold(digest).expect("there are free pins").0);
        }
        self.put_sessions.seal(put_session, version);
    }

    /// Ends a put session. While it has writers or readers its memory is kept and false is returned: connections that
    /// send a range of it ([`Self::fills`]) are to be closed.
    pub(super) fn end(&mut self, store: &mut Store, put_session: PutSessionId, reservation: ReservationId) -> bool {
        let freed = self.put_sessions.end(put_session);
        match freed {
            Some(freed) => store.abort(freed).expect("a put session's memory is reserved"),
            None => store.expire(reservation),
        }
        freed.is_some()
    }

    /// Returns true if a ticket is that of a writer of this put session.
    pub(super) fn fills(&self, ticket: TicketId, put_session: PutSessionId) -> bool {
        matches!(self.tickets.at(ticket), Some(Ticket::Fill { put_session: filled, .. }) if filled == put_session)
    }

    /// Returns a put session that has been idle for too long, and its reservation.
    pub(super) fn overdue(&self, now_ns: u64) -> Option<(PutSessionId, ReservationId)> {
        self.put_sessions.due(now_ns)
    }

    /// Returns the open put sessions of objects that the shard does not own any more, with their reservations.
    pub(super) fn void(&self, owns: impl Fn(Digest) -> bool) -> Vec<(PutSessionId, ReservationId)> {
        let void = self.put_sessions.open().filter(|(_, digest)| !owns(*digest));
        void.map(|(put_session, _)| (put_session, self.put_sessions.reservation(put_session))).collect()
    }

    /// Returns the time at which the next put session expires.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.put_sessions.poll_timeout()
    }
}

fn place_of(store: &Store, reservation: ReservationId, offset: u64, bytes: u64) -> MemoryExtent {
    let extent = store.pool().extent(store.reserved(reservation).expect("an open put session has its memory"));
    MemoryExtent { memory: Memory::Pool, offset: extent.offset + offset, bytes }
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
