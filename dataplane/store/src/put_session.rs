//! Put sessions: objects that are written in ranges, in any order, and become visible when all of them is there.
//!
//! A put session has room in the pool from the start, as a put has. Each range is in one state after another: nobody's,
//! being filled, filled. What is filled never changes again, so it may be read before the rest is there. The checksum
//! of the whole is put together from those of the ranges.
//!
//! A put session's incarnation ([`LIFECYCLE`]) ends when it is sealed, given up, or left alone for too long. While
//! somebody writes or reads a range of it, its room stays as it is: a put session that ended is `Dying` until the last
//! of them has gone. So late bytes land in the dead put session, and never in what is another's by then.
//!
//! Not here: the room itself, which is a reservation of the store's, and who is at the other end.

mod numbers;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::checksum::joined_payload_checksum;
use kvplane_proto::ids::{ReservationId, Version};
use kvplane_proto::{Digest, Limits};
pub use numbers::Numbers;

/// Names a put session, with a generation. Clients are told another number: see [`Numbers`].
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

/// Where a put session is in its incarnation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// There is none.
    Vacant,
    /// It takes ranges.
    Open,
    /// It is over, but somebody still writes or reads a range of it.
    Dying,
}

/// What happens to a put session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// Somebody begins it.
    Begin,
    /// All of it is there: it becomes an object.
    Seal,
    /// It is given up, or was left alone, while nobody uses it.
    End,
    /// The same while somebody does.
    EndInUse,
    /// The last who used it has gone.
    LastLeft,
}

/// Every step that a put session may take; any other is a bug of ours.
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

/// Why a range cannot be filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillError {
    /// The put session is over, or another's.
    Stale,
    /// A range of 0 bytes.
    Empty,
    /// It does not end within the put session.
    OutOfRange,
    /// All of it is filled already; nothing is changed.
    Filled,
    /// A part of it is filled already.
    Overlap,
    /// There are as many ranges that do not touch each other as may be, and it touches none of them.
    TooMany,
    /// A part of it is being filled; or what is being filled may be too many ranges that do not touch.
    Busy,
}

/// Why a put session does not become an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SealError {
    /// It is over, or another's.
    Stale,
    /// It was sealed before, and became this version of that object.
    Sealed(Digest, Version),
    /// A range is being filled.
    Busy,
    /// Some of it was not written.
    Incomplete,
}

/// A put session that is to begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewPutSession {
    /// Its client.
    pub client: u64,
    /// Its object,
    pub digest: Digest,
    /// and the length of that.
    pub bytes: u64,
    /// Its room.
    pub reservation: ReservationId,
    /// How long it may be left alone.
    pub idle_ns: u64,
}

/// A put session that is complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Complete {
    /// Its room.
    pub reservation: ReservationId,
    /// The checksum of all of it.
    pub checksum: u64,
    /// How many read ranges of it.
    pub readers: u32,
}

/// What a reader finds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadableRange {
    /// Which put session.
    pub session: PutSessionId,
    /// Its room.
    pub reservation: ReservationId,
    /// The length of the whole object.
    pub bytes: u64,
    /// Whether all of the range is there.
    pub is_there: bool,
}

#[derive(Debug)]
struct PutSession {
    generation: u32,
    state: State,
    client: u64,
    digest: Digest,
    /// The how manyth of all that were begun it is.
    order: u64,
    bytes: u64,
    reservation: ReservationId,
    idle_ns: u64,
    deadline_ns: u64,
    /// What is filled: where each stretch ends, and its checksum.
    filled: BTreeMap<u64, (u64, u64)>,
    filling: Vec<(u64, u64)>,
    readers: u32,
    /// What the former holder of this place became, if it was sealed.
    sealed: Option<Version>,
}

/// The put sessions of one shard, at most [`Limits::DRAFTS`].
#[derive(Debug, Default)]
pub struct PutSessionTable {
    sessions: Vec<PutSession>,
    vacant: Vec<u32>,
    /// The open put sessions of each object, in the order in which they were begun.
    by_object: BTreeMap<(Digest, u64), u32>,
    /// How many were begun.
    begun: u64,
    deadlines: BTreeSet<(u64, u32)>,
    /// How many each client has, dying ones too.
    held: BTreeMap<u64, usize>,
}

impl PutSessionTable {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sessions.len() - self.vacant.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Begins a put session; nothing where there are as many as may be, or the client has as many as are left: however
    /// many some take, there is always room for a newcomer (the dynamic threshold of Choudhury and Hahne, 1998, with a
    /// factor of 1).
    pub fn begin(&mut self, new: &NewPutSession, now_ns: u64) -> Option<PutSessionId> {
        let NewPutSession { client, digest, bytes, reservation, idle_ns } = *new;
        if self.held.get(&client).is_some_and(|held| *held >= Limits::DRAFTS - self.len()) {
            return None;
        }
        let index = match self.vacant.pop() {
            Some(index) => index,
            None if self.sessions.len() < Limits::DRAFTS => {
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

    /// What a client's put session was begun for.
    pub fn of(&mut self, client: u64, id: PutSessionId) -> Option<(Digest, ReservationId)> {
        self.open_of(client, id).map(|session| (session.digest, session.reservation))
    }

    /// Whether a put session takes ranges.
    #[must_use]
    pub fn is_open(&self, id: PutSessionId) -> bool {
        let session = self.sessions.get(id.index());
        session.is_some_and(|session| session.generation == id.generation() && session.state == State::Open)
    }

    /// A range is being filled from now on, until [`Self::filled`].
    ///
    /// # Errors
    /// See [`FillError`]; nothing happened.
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
        // What touches what is filled adds no stretch to it.
        if !session.touches(offset, end) {
            if session.filled.len() >= Limits::DRAFT_RANGES {
                return Err(FillError::TooMany);
            }
            if session.filled.len() + session.filling.len() >= Limits::DRAFT_RANGES {
                return Err(FillError::Busy);
            }
        }
        session.filling.push((offset, end));
        self.renew(id, now_ns);
        Ok(())
    }

    /// A fill is over: with the checksum of its bytes, if they are there. The room that nobody uses any more, if this
    /// was the last that a dying put session waited for.
    ///
    /// # Panics
    /// When it was not in flight.
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

    /// Looks for a range of an object that is being written, in the latest of its open put sessions. Nothing where none
    /// is.
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

    /// Somebody reads a range that is there, until [`Self::read`].
    ///
    /// # Panics
    /// When the put session is not open.
    pub fn reading(&mut self, id: PutSessionId) {
        let session = self.get(id).filter(|session| session.state == State::Open);
        session.expect("a put session that was just found").readers += 1;
    }

    /// A reader has gone. As [`Self::filled`].
    ///
    /// # Panics
    /// When there was none.
    pub fn read(&mut self, id: PutSessionId) -> Option<ReservationId> {
        let session = self.get(id).expect("a put session stays while it is read");
        session.readers = session.readers.checked_sub(1).expect("a reader that was there");
        if session.state == State::Dying { self.left(id) } else { None }
    }

    /// Whether a put session is complete.
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

    /// A put session is an object now, or was refused as one (then without a version); whoever reads it holds that
    /// instead.
    ///
    /// # Panics
    /// When it is not open, or a range is being filled.
    pub fn seal(&mut self, id: PutSessionId, version: Option<Version>) {
        let session = self.get(id).expect("a put session that was just complete");
        assert!(session.filling.is_empty(), "a put session was sealed while it was filled");
        (session.readers, session.sealed) = (0, version);
        self.vacate(id, Event::Seal);
    }

    /// A put session is over. Its room, if nobody uses it; else that comes when the last has gone.
    ///
    /// # Panics
    /// When it is not open.
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

    /// When [`Self::due`] has something.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        self.deadlines.first().map(|entry| entry.0)
    }

    /// A put session that was left alone for too long.
    #[must_use]
    pub fn due(&self, now_ns: u64) -> Option<(PutSessionId, ReservationId)> {
        let &(at_ns, index) = self.deadlines.first()?;
        let session = &self.sessions[index as usize];
        (at_ns <= now_ns).then_some((PutSessionId::new(index, session.generation), session.reservation))
    }

    /// The room of a put session.
    ///
    /// # Panics
    /// When there was never such a put session.
    #[must_use]
    pub fn reservation(&self, id: PutSessionId) -> ReservationId {
        self.sessions[id.index()].reservation
    }

    /// All that are open, and their objects.
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

    /// Nobody finds it any more, and nothing is due.
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
        let held = self.held.get_mut(&session.client).expect("whoever has a put session is counted");
        *held -= 1;
        if *held == 0 {
            self.held.remove(&session.client);
        }
        // At the other end than the next is taken from, so that what became of it is remembered for a while.
        self.vacant.insert(0, id.index() as u32);
    }
}

impl PutSession {
    fn is_used(&self) -> bool {
        !self.filling.is_empty() || self.readers > 0
    }

    /// Whether all of a range is filled.
    fn covers(&self, offset: u64, end: u64) -> bool {
        self.filled.range(..=offset).next_back().is_some_and(|(_, (until, _))| end <= *until)
    }

    /// Whether a filled stretch ends where a range begins, or begins where it ends.
    fn touches(&self, offset: u64, end: u64) -> bool {
        let before = self.filled.range(..offset).next_back();
        before.is_some_and(|(_, (until, _))| *until == offset) || self.filled.contains_key(&end)
    }

    /// Adds a stretch, and joins it to those that it touches.
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
