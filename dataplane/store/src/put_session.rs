//! Put sessions: objects that are written in ranges, in any order, and become visible at a commit when they are
//! complete.
//!
//! A put session has memory in the pool from the start, like a put. Each range goes through three states: unwritten,
//! being filled, filled. Filled bytes never change again, so that they may be read before the object is complete. The
//! checksum of the object is combined from those of the ranges.
//!
//! A put session ([`LIFECYCLE`]) ends when it is committed, discarded, or idle for too long. While a range of it is
//! being written or read, its memory is kept: a put session that has ended is `Dying` until the last of these has
//! finished. So late bytes go into the dead put session, and never into memory that was reused.
//!
//! The memory is a reservation of the store; the clients are known to the caller.

mod numbers;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::checksum::joined_payload_checksum;
use kvplane_proto::ids::{ReservationId, Version};
use kvplane_proto::{Digest, Limits};
pub use numbers::Numbers;

/// Id of a put session, with a generation. Clients use another number: see [`Numbers`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PutSessionId(pub u64);

impl PutSessionId {
    const fn new(index: u32, generation: u32) -> Self {
        Self((generation as u64) << 32 | index as u64)
    }

    const fn index(self) -> usize {
        self.0 as u32 as usize
    }

    const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// State of a put session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// There is none.
    Vacant,
    /// It accepts ranges.
    Open,
    /// It has ended, but a range of it is still being written or read.
    Dying,
}

/// Transition of a put session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// It begins.
    Begin,
    /// It is complete and committed.
    Seal,
    /// It is discarded, or was idle for too long, while it is not in use.
    End,
    /// It is discarded, or was idle for too long, while it is in use.
    EndInUse,
    /// Its last user has finished.
    LastLeft,
}

/// Every permitted transition; any other is a bug.
pub const LIFECYCLE: [(State, Event, State); 5] = [
    (State::Vacant, Event::Begin, State::Open),
    (State::Open, Event::Seal, State::Vacant),
    (State::Open, Event::End, State::Vacant),
    (State::Open, Event::EndInUse, State::Dying),
    (State::Dying, Event::LastLeft, State::Vacant),
];

fn step(from: State, event: Event) -> State {
    let found = LIFECYCLE.iter().find(|(state, on, _)| (*state, *on) == (from, event));
    let Some((_, _, to)) = found else { panic!("a put session that is {from:?} met {event:?}") };
    *to
}

/// Failure to fill a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillError {
    /// The put session has ended, or belongs to another client.
    Stale,
    /// A range of 0 bytes.
    Empty,
    /// It exceeds the put session's length.
    OutOfRange,
    /// All of it is filled already; it is left as it is.
    Filled,
    /// A part of it is filled already.
    Overlap,
    /// The limit of separate ranges is reached, and it touches none of them.
    TooMany,
    /// A part of it is being filled; or the ranges being filled may exceed the limit of separate ranges.
    Busy,
}

/// Failure to commit a put session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SealError {
    /// It has ended, or belongs to another client.
    Stale,
    /// It was committed before, as this version of that object.
    Sealed(Digest, Version),
    /// A range is being filled.
    Busy,
    /// A part of it was not written.
    Incomplete,
}

/// Put session to begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewPutSession {
    /// Number of its client.
    pub client: u64,
    /// Digest of its object.
    pub digest: Digest,
    /// Length of its object.
    pub bytes: u64,
    /// Memory of its object.
    pub reservation: ReservationId,
    /// Time that it may be idle.
    pub idle_ns: u64,
}

/// Put session that is complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Complete {
    /// Memory of the object.
    pub reservation: ReservationId,
    /// Checksum of the object.
    pub checksum: u64,
    /// Number of readers of its ranges.
    pub readers: u32,
}

/// Range that a reader wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadableRange {
    /// Put session that the range belongs to.
    pub session: PutSessionId,
    /// Memory of the object.
    pub reservation: ReservationId,
    /// Length of the object.
    pub bytes: u64,
    /// True if all of the range is filled.
    pub is_there: bool,
}

#[derive(Debug)]
struct PutSession {
    generation: u32,
    state: State,
    client: u64,
    digest: Digest,
    /// Number of the put session, counted over all that were begun.
    order: u64,
    bytes: u64,
    reservation: ReservationId,
    idle_ns: u64,
    deadline_ns: u64,
    /// Filled stretches by their start: their end, and their checksum.
    filled: BTreeMap<u64, (u64, u64)>,
    filling: Vec<(u64, u64)>,
    readers: u32,
    /// Version that the former put session at this index was committed as, if it was.
    sealed: Option<Version>,
}

/// Put sessions of one shard, at most [`Limits::PUT_SESSIONS`].
#[derive(Debug, Default)]
pub struct PutSessionTable {
    sessions: Vec<PutSession>,
    vacant: Vec<u32>,
    /// Open put sessions of each object, in the order in which they were begun.
    by_object: BTreeMap<(Digest, u64), u32>,
    /// Number of put sessions begun.
    begun: u64,
    deadlines: BTreeSet<(u64, u32)>,
    /// Number of put sessions of each client, including dying ones.
    held: BTreeMap<u64, usize>,
}

impl PutSessionTable {
    /// Returns the number of put sessions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sessions.len() - self.vacant.len()
    }

    /// Returns true if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Begins a put session; `None` if the limit is reached, or the client has as many as are left: however many some
    /// clients have, there is always room for a new one (the dynamic threshold of Choudhury and Hahne, 1998, with a
    /// factor of 1).
    pub fn begin(&mut self, new: &NewPutSession, now_ns: u64) -> Option<PutSessionId> {
        let NewPutSession { client, digest, bytes, reservation, idle_ns } = *new;
        if self.held.get(&client).is_some_and(|held| *held >= Limits::PUT_SESSIONS - self.len()) {
            return None;
        }
        let index = match self.vacant.pop() {
            Some(index) => index,
            None if self.sessions.len() < Limits::PUT_SESSIONS => {
                self.sessions.push(PutSession {
                    generation: 0,
                    state: State::Vacant,
                    client: 0,
                    digest,
                    order: 0,
                    bytes: 0,
                    reservation,
                    idle_ns: 0,
                    deadline_ns: 0,
                    filled: BTreeMap::new(),
                    filling: Vec::new(),
                    readers: 0,
                    sealed: None,
                });
                self.sessions.len() as u32 - 1
            }
            None => return None,
        };
        let session = &mut self.sessions[index as usize];
        session.state = step(session.state, Event::Begin);
        session.generation = session.generation.wrapping_add(1).max(1);
        session.deadline_ns = now_ns.saturating_add(idle_ns);
        (session.client, session.digest, session.bytes) = (client, digest, bytes);
        (session.reservation, session.idle_ns, session.sealed) = (reservation, idle_ns, None);
        *self.held.entry(client).or_default() += 1;
        self.begun += 1;
        session.order = self.begun;
        self.deadlines.insert((session.deadline_ns, index));
        self.by_object.insert((digest, session.order), index);
        Some(PutSessionId::new(index, session.generation))
    }

    fn get(&mut self, id: PutSessionId) -> Option<&mut PutSession> {
        let session = self.sessions.get_mut(id.index())?;
        (session.generation == id.generation() && session.state != State::Vacant).then_some(session)
    }

    fn open_of(&mut self, client: u64, id: PutSessionId) -> Option<&mut PutSession> {
        self.get(id).filter(|session| session.state == State::Open && session.client == client)
    }

    /// Returns the object and the memory of a client's open put session.
    pub fn of(&mut self, client: u64, id: PutSessionId) -> Option<(Digest, ReservationId)> {
        self.open_of(client, id).map(|session| (session.digest, session.reservation))
    }

    /// Returns true if a put session accepts ranges.
    #[must_use]
    pub fn is_open(&self, id: PutSessionId) -> bool {
        let session = self.sessions.get(id.index());
        session.is_some_and(|session| session.generation == id.generation() && session.state == State::Open)
    }

    /// Begins to fill a range, until [`Self::filled`].
    ///
    /// # Errors
    /// See [`FillError`]; nothing has changed then.
    pub fn fill(
        &mut self,
        client: u64,
        id: PutSessionId,
        offset: u64,
        bytes: u64,
        now_ns: u64,
    ) -> Result<(), FillError> {
        let session = self.open_of(client, id).ok_or(FillError::Stale)?;
        if bytes == 0 {
            return Err(FillError::Empty);
        }
        let end = offset.checked_add(bytes).filter(|end| *end <= session.bytes).ok_or(FillError::OutOfRange)?;
        if session.covers(offset, end) {
            return Err(FillError::Filled);
        }
        if session.filled.range(..end).next_back().is_some_and(|(_, (until, _))| *until > offset) {
            return Err(FillError::Overlap);
        }
        if session.filling.iter().any(|(from, until)| *from < end && offset < *until) {
            return Err(FillError::Busy);
        }
        // A range that touches a filled one adds no separate stretch.
        if !session.touches(offset, end) {
            if session.filled.len() >= Limits::PUT_SESSION_RANGES {
                return Err(FillError::TooMany);
            }
            if session.filled.len() + session.filling.len() >= Limits::PUT_SESSION_RANGES {
                return Err(FillError::Busy);
            }
        }
        session.filling.push((offset, end));
        self.renew(id, now_ns);
        Ok(())
    }

    /// Ends a fill: with the checksum of its bytes, if they were received. Returns the memory to free, if this was the
    /// last user of a dying put session.
    ///
    /// # Panics
    /// If the fill was not in flight.
    pub fn filled(
        &mut self,
        id: PutSessionId,
        offset: u64,
        bytes: u64,
        checksum: Option<u64>,
        now_ns: u64,
    ) -> Option<ReservationId> {
        let session = self.get(id).expect("a put session stays while it is filled");
        let at = session.filling.iter().position(|range| *range == (offset, offset + bytes));
        session.filling.swap_remove(at.expect("a fill that was in flight"));
        if session.state == State::Open {
            if let Some(checksum) = checksum {
                session.add(offset, offset + bytes, checksum);
                self.renew(id, now_ns);
            }
            return None;
        }
        self.left(id)
    }

    /// Looks for a range of an object in the latest of its open put sessions. `None` if there is none.
    #[must_use]
    pub fn find(&self, digest: Digest, offset: u64, bytes: u64) -> Option<ReadableRange> {
        let (_, &index) = self.by_object.range((digest, 0)..=(digest, u64::MAX)).next_back()?;
        let session = &self.sessions[index as usize];
        Some(ReadableRange {
            session: PutSessionId::new(index, session.generation),
            reservation: session.reservation,
            bytes: session.bytes,
            is_there: offset.checked_add(bytes).is_some_and(|end| session.covers(offset, end)),
        })
    }

    /// Begins to read a filled range, until [`Self::read`].
    ///
    /// # Panics
    /// If the put session is not open.
    pub fn reading(&mut self, id: PutSessionId) {
        let session = self.get(id).filter(|session| session.state == State::Open);
        session.expect("a put session that was just found").readers += 1;
    }

    /// Ends a read. Returns the memory to free, like [`Self::filled`].
    ///
    /// # Panics
    /// If there was no reader.
    pub fn read(&mut self, id: PutSessionId) -> Option<ReservationId> {
        let session = self.get(id).expect("a put session stays while it is read");
        session.readers = session.readers.checked_sub(1).expect("a reader was counted");
        if session.state == State::Dying { self.left(id) } else { None }
    }

    /// Returns a put session that is complete.
    ///
    /// # Errors
    /// See [`SealError`].
    pub fn complete(&mut self, client: u64, id: PutSessionId) -> Result<Complete, SealError> {
        if let Some(session) = self.sessions.get(id.index())
            && (session.generation, session.state, session.client) == (id.generation(), State::Vacant, client)
            && let Some(version) = session.sealed
        {
            return Err(SealError::Sealed(session.digest, version));
        }
        let session = self.open_of(client, id).ok_or(SealError::Stale)?;
        if !session.filling.is_empty() {
            return Err(SealError::Busy);
        }
        match session.filled.first_key_value() {
            Some((0, (end, checksum))) if *end == session.bytes => {
                Ok(Complete { reservation: session.reservation, checksum: *checksum, readers: session.readers })
            }
            _ => Err(SealError::Incomplete),
        }
    }

    /// Ends a put session that was committed, or whose commit was refused (then without a version); its readers hold
    /// the object instead.
    ///
    /// # Panics
    /// If it is not open, or a range is being filled.
    pub fn seal(&mut self, id: PutSessionId, version: Option<Version>) {
        let session = self.get(id).expect("a put session that was just complete");
        assert!(session.filling.is_empty(), "a put session was sealed while it was filled");
        (session.readers, session.sealed) = (0, version);
        self.vacate(id, Event::Seal);
    }

    /// Ends a put session. Returns its memory, if it is not in use; otherwise the memory is returned when its last user
    /// has finished.
    ///
    /// # Panics
    /// If it is not open.
    pub fn end(&mut self, id: PutSessionId) -> Option<ReservationId> {
        let session = self.get(id).expect("an open put session");
        if session.is_used() {
            session.state = step(session.state, Event::EndInUse);
            self.forget(id);
            return None;
        }
        let reservation = session.reservation;
        self.vacate(id, Event::End);
        Some(reservation)
    }

    /// Returns the time at which [`Self::due`] has something.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        self.deadlines.first().map(|entry| entry.0)
    }

    /// Returns a put session that has been idle for too long.
    #[must_use]
    pub fn due(&self, now_ns: u64) -> Option<(PutSessionId, ReservationId)> {
        let &(at_ns, index) = self.deadlines.first()?;
        let session = &self.sessions[index as usize];
        (at_ns <= now_ns).then_some((PutSessionId::new(index, session.generation), session.reservation))
    }

    /// Returns the memory of a put session.
    ///
    /// # Panics
    /// If there was never such a put session.
    #[must_use]
    pub fn reservation(&self, id: PutSessionId) -> ReservationId {
        self.sessions[id.index()].reservation
    }

    /// Returns all open put sessions, and their objects.
    pub fn open(&self) -> impl Iterator<Item = (PutSessionId, Digest)> {
        let open = (0..).zip(&self.sessions).filter(|(_, session)| session.state == State::Open);
        open.map(|(index, session)| (PutSessionId::new(index, session.generation), session.digest))
    }

    fn renew(&mut self, id: PutSessionId, now_ns: u64) {
        let session = &mut self.sessions[id.index()];
        self.deadlines.remove(&(session.deadline_ns, id.index() as u32));
        session.deadline_ns = session.deadline_ns.max(now_ns.saturating_add(session.idle_ns));
        self.deadlines.insert((session.deadline_ns, id.index() as u32));
    }

    /// Removes a put session from the searches and the deadlines.
    fn forget(&mut self, id: PutSessionId) {
        let session = &mut self.sessions[id.index()];
        self.deadlines.remove(&(session.deadline_ns, id.index() as u32));
        session.filled.clear();
        self.by_object.remove(&(session.digest, session.order));
    }

    fn left(&mut self, id: PutSessionId) -> Option<ReservationId> {
        let session = &self.sessions[id.index()];
        if session.is_used() {
            return None;
        }
        let reservation = session.reservation;
        self.vacate(id, Event::LastLeft);
        Some(reservation)
    }

    fn vacate(&mut self, id: PutSessionId, event: Event) {
        self.forget(id);
        let session = &mut self.sessions[id.index()];
        session.state = step(session.state, event);
        let held = self.held.get_mut(&session.client).expect("a client with a put session is counted");
        *held -= 1;
        if *held == 0 {
            self.held.remove(&session.client);
        }
        // At the other end from which the next is taken, so that its outcome is remembered for a while.
        self.vacant.insert(0, id.index() as u32);
    }
}

impl PutSession {
    fn is_used(&self) -> bool {
        !self.filling.is_empty() || self.readers > 0
    }

    /// Returns true if all of a range is filled.
    fn covers(&self, offset: u64, end: u64) -> bool {
        self.filled.range(..=offset).next_back().is_some_and(|(_, (until, _))| end <= *until)
    }

    /// Returns true if a filled stretch ends at the start of a range, or begins at its end.
    fn touches(&self, offset: u64, end: u64) -> bool {
        let before = self.filled.range(..offset).next_back();
        before.is_some_and(|(_, (until, _))| *until == offset) || self.filled.contains_key(&end)
    }

    /// Adds a stretch, and joins it with those that it touches.
    fn add(&mut self, offset: u64, end: u64, checksum: u64) {
        let (mut from, mut until, mut sum) = (offset, end, checksum);
        if let Some((&start, &(stop, before))) = self.filled.range(..offset).next_back()
            && stop == offset
        {
            (from, sum) = (start, joined_payload_checksum(before, sum, end - offset));
        }
        if let Some((stop, after)) = self.filled.remove(&end) {
            (until, sum) = (stop, joined_payload_checksum(sum, after, stop - end));
        }
        self.filled.insert(from, (until, sum));
    }
}
