//! Copies: records of a segment that is reclaimed on their way to the end of the log.
//!
//! A record is read into the area for copies, checked, and appended like any other. A turn of reclaim takes less of the
//! log than it gives back, whatever the records are: what does not fit goes.

use std::collections::VecDeque;

use super::Tier;
use super::append::Record;
use super::groups::{NoRoom, Waiter};
use super::read::{Purpose, ReadJob};
use crate::config::STAGING_ALIGN_BYTES;
use crate::index::Entry;
use crate::memory::{Memory, Span};
use crate::ops::{Fault, Priority};
use crate::slots::SlotId;
use crate::types::{Event, Miss};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum MoveState {
    Reading,
    /// Read and verified; the read is kept for the key.
    Ready(SlotId),
    Appended,
    Over,
}

/// A record on its way to the end of the log.
#[derive(Clone, Copy, Debug)]
struct Move {
    entry: Entry,
    memory: Span,
    checksum: u64,
    state: MoveState,
}

/// All of them, in the order in which they were listed.
#[derive(Debug)]
pub(super) struct Moves {
    list: VecDeque<Move>,
    /// The number of the first.
    first: u64,
    most: usize,
    /// Where the next one's memory begins, in the area for copies.
    head: u64,
}

impl Moves {
    pub(super) fn new(most: u32) -> Self {
        let most = most as usize;
        Self { list: VecDeque::with_capacity(most), first: 0, most, head: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The number of the first: greater when one is over.
    pub(super) const fn first(&self) -> u64 {
        self.first
    }

    /// Memory for a record, in turn: what was taken first is given back first.
    fn take(&mut self, bytes: u32, area: u64) -> Option<u64> {
        let bytes = u64::from(bytes).next_multiple_of(STAGING_ALIGN_BYTES);
        let at = match self.list.front() {
            None => 0,
            Some(first) => {
                let tail = first.memory.offset;
                let fits = if self.head > tail { self.head + bytes <= area } else { self.head + bytes <= tail };
                if self.head == tail {
                    return None;
                }
                match (fits, self.head > tail && bytes <= tail) {
                    (true, _) => self.head,
                    (false, true) => 0,
                    (false, false) => return None,
                }
            }
        };
        self.head = at + bytes;
        Some(at)
    }
}

impl Tier {
    /// Begins to copy a record; false when there is no room for it until another one is over.
    pub(super) fn begin_move(&mut self, entry: Entry) -> bool {
        let moves = &mut self.reclaim.moves;
        if moves.list.len() == moves.most {
            return false;
        }
        let bytes = entry.shape().payload_bytes;
        let Some(at) = moves.take(bytes, self.config.copy_bytes.into()) else { return false };
        let number = moves.first + moves.list.len() as u64;
        // Kept relative to the area, so that the queue of moves knows where it begins.
        let span = Span::staging(at, bytes);
        moves.list.push_back(Move { entry, memory: span, checksum: 0, state: MoveState::Reading });
        let destination = Span::staging(self.layout.copies + at, bytes);
        self.begin_read(ReadJob::new(entry, destination, Priority::Background, Purpose::Move(number)));
        true
    }

    fn move_at(&mut self, number: u64) -> Option<&mut Move> {
        let at = number.checked_sub(self.reclaim.moves.first)?;
        self.reclaim.moves.list.get_mut(at as usize)
    }

    /// A record that is to stay has been read, or not.
    pub(super) fn move_read(&mut self, number: u64, slot: SlotId, verified: Result<u64, Miss>) {
        let state = if verified.is_ok() { MoveState::Ready(slot) } else { MoveState::Over };
        if verified.is_err() {
            self.end_read(slot);
        }
        let moved = self.move_at(number).map(|moved| {
            (moved.state, moved.checksum) = (state, verified.unwrap_or(0));
            moved.entry.digest()
        });
        if let (Some(digest), Err(miss)) = (moved, verified)
            && self.index.find(digest).is_none()
        {
            self.events.push_back(Event::Quarantined { digest, miss });
        }
        self.drop_moves();
    }

    /// Whether records are being read that are to be appended with those of the open group.
    pub(super) fn more_moves_come(&self) -> bool {
        self.reclaim.moves.list.iter().any(|moved| moved.state == MoveState::Reading)
    }

    /// Appends what was read, in order, as far as there is room.
    pub(super) fn append_moves(&mut self, now_ns: u64, memory: &mut dyn Memory) {
        for at in 0..self.reclaim.moves.list.len() {
            let number = self.reclaim.moves.first + at as u64;
            let MoveState::Ready(slot) = self.reclaim.moves.list[at].state else { continue };
            let before = self.log_taken();
            let state = self.place_move(now_ns, number, slot, memory);
            self.charge_victim(self.log_taken() - before);
            let Some(state) = state else { return };
            self.end_read(slot);
            if let Some(moved) = self.move_at(number) {
                moved.state = state;
            }
        }
        self.drop_moves();
    }

    /// Appends a record, or gives it up; `None` when it has to wait for room.
    fn place_move(&mut self, now_ns: u64, number: u64, slot: SlotId, memory: &mut dyn Memory) -> Option<MoveState> {
        let Move { entry, memory: span, checksum, .. } = *self.move_at(number)?;
        if !self.is_current(entry.digest(), entry.sequence()) {
            return Some(MoveState::Over);
        }
        let need = self.need(entry.shape(), false);
        let pinned = self.index.find(entry.digest()).is_some_and(Entry::is_pinned);
        let room = if self.victim_allows(self.log_cost(need), pinned) {
            self.make_room(now_ns, need, true, memory)
        } else {
            Err(NoRoom::Full)
        };
        match room {
            Err(NoRoom::Busy) => None,
            Err(NoRoom::Full) => {
                self.evict(&entry);
                Some(MoveState::Over)
            }
            Ok(()) => {
                let span = Span::staging(self.layout.copies + span.offset, span.bytes);
                let key = self.read_key(slot, &entry, memory);
                self.sum_chunks(span, memory);
                let (digest, version, shape) = (entry.digest(), entry.version(), entry.shape());
                // It was hot or pinned a moment ago: pinned still counts as it is now, hits begin anew.
                let record = Record { digest, version, key: &key, payload: span, shape, checksum, pinned };
                self.append(&record, Waiter::Move(number), memory);
                self.stats.reinserted += 1;
                self.stats.reinserted_bytes += u64::from(span.bytes);
                Some(MoveState::Appended)
            }
        }
    }

    /// The group of a record that is written again is over; what it lost, the index lost with it.
    pub(super) fn move_written(&mut self, number: u64, result: Result<(), Fault>) {
        let moved = self.move_at(number).map(|moved| {
            moved.state = MoveState::Over;
            (moved.entry.digest(), moved.entry.is_pinned())
        });
        if let (Some((digest, pinned)), Err(_)) = (moved, result)
            && self.index.find(digest).is_none()
        {
            self.events.push_back(Event::Evicted { digest, pinned });
        }
        self.drop_moves();
    }

    fn drop_moves(&mut self) {
        while self.reclaim.moves.list.front().is_some_and(|moved| moved.state == MoveState::Over) {
            self.reclaim.moves.list.pop_front();
            self.reclaim.moves.first += 1;
        }
    }
}
