//! Moves: records of a segment being reclaimed on their way to the end of the log, in the order in which the footer
//! lists them, and the memory that they take.

use std::collections::VecDeque;

use crate::config::{STAGING_ALIGN_BYTES, TierConfig};
use crate::contents::Entry;
use crate::memory::Span;
use crate::slots::SlotId;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MoveState {
    Reading,
    /// Read and verified; the read is kept for the key.
    Ready(SlotId),
    Appended,
    Over,
}

/// Record on its way to the end of the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub(super) entry: Entry,
    /// Memory in the copy area, counted from its start.
    memory: Span,
    pub(super) checksum: u64,
    pub(super) state: MoveState,
}

impl Move {
    /// Returns the memory of the payload, in the copy area that begins at `area`.
    pub(super) const fn payload(&self, area: u64) -> Span {
        Span::staging(area + self.memory.offset, self.memory.bytes)
    }
}

/// Moves in flight.
#[derive(Debug)]
pub(super) struct Moves {
    queue: VecDeque<Move>,
    /// Number of the first move.
    first: u64,
    most: usize,
    /// Offset of the next move's memory in the copy area, and length of the area.
    head: u64,
    area_bytes: u64,
}

impl Moves {
    pub(super) fn new(config: &TierConfig) -> Self {
        let most = config.max_moves as usize;
        let area_bytes = config.copy_bytes.into();
        Self { queue: VecDeque::with_capacity(most), first: 0, most, head: 0, area_bytes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns the number of the first move: it grows when one ends.
    pub(super) const fn first(&self) -> u64 {
        self.first
    }

    /// Returns the numbers of all moves.
    pub(super) fn numbers(&self) -> core::ops::Range<u64> {
        self.first..self.first + self.queue.len() as u64
    }

    pub(super) fn get(&self, number: u64) -> Option<&Move> {
        self.queue.get(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Move> {
        self.queue.get_mut(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }

    /// Returns true if records are being read.
    pub(super) fn is_reading(&self) -> bool {
        self.queue.iter().any(|moved| moved.state == MoveState::Reading)
    }

    /// Begins a move whose record is to be read; returns its number, or `None` if there is no room until another move
    /// ends.
    pub(super) fn begin(&mut self, entry: Entry) -> Option<u64> {
        if self.queue.len() == self.most {
            return None;
        }
        let bytes = entry.shape().payload_bytes;
        let memory = Span::staging(self.take_memory(bytes)?, bytes);
        let number = self.numbers().end;
        self.queue.push_back(Move { entry, memory, checksum: 0, state: MoveState::Reading });
        Some(number)
    }

    /// Takes memory for a record from the ring: memory is freed in the order in which it was taken.
    fn take_memory(&mut self, bytes: u32) -> Option<u64> {
        let (bytes, area) = (u64::from(bytes).next_multiple_of(STAGING_ALIGN_BYTES), self.area_bytes);
        let at = match self.queue.front() {
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

    /// Removes completed moves, in order.
    pub(super) fn drop_over(&mut self) {
        while self.queue.pop_front_if(|moved| moved.state == MoveState::Over).is_some() {
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::digest::Digest;
    use kvplane_proto::ids::Version;

    use super::*;
    use crate::format::{FooterEntry, Kind, Shape};

    fn entry(payload_bytes: u32) -> Entry {
        let shape = Shape { payload_bytes, key_bytes: 0, extent: true, names_parts: false, copied: false };
        let (kind, digest, version) = (Kind::Object, Digest(1), Version(1));
        let (sequence, unit, away, payload_checksum, pinned, tenant) = (1, 0, 0, 0, false, None);
        Entry::listed(
            &FooterEntry { kind, shape, pinned, digest, version, sequence, unit, away, payload_checksum, tenant },
            65_536,
        )
    }

    #[test]
    fn memory_is_given_out_in_a_ring_and_no_two_records_share_it() {
        let config = TierConfig { max_moves: 4, copy_bytes: 32 << 10, ..TierConfig::for_device(1 << 30, 4096) };
        let mut moves = Moves::new(&config);
        assert_eq!([12_288, 12_288].map(|bytes| moves.begin(entry(bytes))), [Some(0), Some(1)]);
        assert_eq!(moves.begin(entry(12_288)), None, "neither behind nor before them is there room");
        moves.get_mut(0).expect("the first").state = MoveState::Over;
        moves.drop_over();
        assert_eq!((moves.first(), moves.begin(entry(12_288))), (1, Some(2)), "it begins anew");
        let at = [1, 2].map(|number| moves.get(number).map(|moved| moved.payload(4096).offset));
        assert_eq!(at, [Some(4096 + 12_288), Some(4096)]);
        assert_eq!(moves.begin(entry(1)), None, "the area is full up to the first");
    }

    #[test]
    fn records_leave_in_order() {
        let mut moves = Moves::new(&TierConfig::for_device(1 << 30, 4096));
        (0..3).for_each(|number| assert_eq!(moves.begin(entry(100)), Some(number)));
        moves.get_mut(1).expect("the second").state = MoveState::Over;
        moves.drop_over();
        assert!(moves.numbers() == (0..3) && moves.is_reading());
        moves.get_mut(0).expect("the first").state = MoveState::Over;
        moves.drop_over();
        assert!(moves.numbers() == (2..3) && moves.get(1).is_none());
    }
}
