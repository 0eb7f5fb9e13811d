//! Arithmetic of a ring of records, in order: where a record goes, and which records are free again.
//!
//! Positions are 64-bit byte counts that only grow. A record is contiguous and a multiple of [`LINE_BYTES`] long, so
//! that its payload can be used where it lies; where the rest of the ring is too short for one, the producer skips that
//! rest, and the record goes to the start.

use crate::error::ChannelError;

/// Granularity of records, in bytes: a cache line.
pub(crate) const LINE_BYTES: usize = 64;
/// Bytes of a record before its payload: a line for its length, and the frame's head.
pub(crate) const RECORD_HEAD_BYTES: usize = 2 * LINE_BYTES;
/// Length that says that the rest of the ring is skipped.
pub(crate) const SKIP: u64 = u64::MAX;

/// Returns the bytes of a record with a payload of this length.
pub(crate) const fn record_bytes(payload_bytes: usize) -> usize {
    RECORD_HEAD_BYTES + payload_bytes.next_multiple_of(LINE_BYTES)
}

/// Returns the least capacity of a ring for payloads of this length: two of the longest records have room, wherever
/// the first one lies.
pub(crate) const fn least_capacity(payload_bytes: usize) -> usize {
    (2 * record_bytes(payload_bytes)).next_power_of_two()
}

/// Place of a new record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Offset of the record in the ring.
    pub(crate) at: usize,
    /// Offset of the rest that is skipped before it, if any.
    pub(crate) skipped: Option<usize>,
    /// Position behind the record.
    pub(crate) end: u64,
}

/// Producer's side of a ring.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    capacity: usize,
    tail: u64,
    head: u64,
}

impl Room {
    /// Creates the producer's side of an empty ring. Panics unless the capacity is a power of two of whole lines.
    pub(crate) fn new(capacity: usize) -> Self {
        assert!(capacity.is_power_of_two() && capacity >= LINE_BYTES, "a ring of {capacity} bytes");
        Self { capacity, tail: 0, head: 0 }
    }

    /// Returns the place of a record of this length, a multiple of [`LINE_BYTES`] of at most half the capacity; `None`
    /// while there is no room.
    pub(crate) fn place(&self, bytes: usize) -> Option<Place> {
        debug_assert!(bytes.is_multiple_of(LINE_BYTES) && bytes <= self.capacity / 2);
        let at = self.tail as usize & (self.capacity - 1);
        let rest = self.capacity - at;
        let (at, skipped, skip_bytes) = if rest < bytes { (0, Some(at), rest) } else { (at, None, 0) };
        let end = self.tail + (skip_bytes + bytes) as u64;
        (end - self.head <= self.capacity as u64).then_some(Place { at, skipped, end })
    }

    /// Returns the consumer's position that was last taken.
    pub(crate) const fn head(&self) -> u64 {
        self.head
    }

    /// Appends the record of this place.
    pub(crate) fn fill(&mut self, place: &Place) {
        self.tail = place.end;
    }

    /// Takes the consumer's position. Returns false, and changes nothing, if no consumer could be there.
    pub(crate) fn free_to(&mut self, head: u64) -> bool {
        let sound = (self.head..=self.tail).contains(&head) && head.is_multiple_of(LINE_BYTES as u64);
        if sound {
            self.head = head;
        }
        sound
    }
}

/// Content of the ring at the consumer's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// A skipped rest; the next record is at this position.
    Skipped { end: u64 },
    /// A record.
    Frame {
        /// Offset of the record in the ring.
        at: usize,
        /// Length of its payload.
        payload_bytes: usize,
        /// Position behind the record.
        end: u64,
    },
}

/// Consumer's side of a ring. The producer is another process: what it writes is checked.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    capacity: usize,
    payload_limit: usize,
    head: u64,
}

impl Progress {
    /// Creates the consumer's side of an empty ring.
    pub(crate) const fn new(capacity: usize, payload_limit: usize) -> Self {
        Self { capacity, payload_limit, head: 0 }
    }

    /// Returns the position up to which records were taken.
    pub(crate) const fn head(&self) -> u64 {
        self.head
    }

    /// Returns the offset of the next record.
    pub(crate) const fn at(&self) -> usize {
        self.head as usize & (self.capacity - 1)
    }

    /// Interprets the length at [`Self::at`], where the producer's position is `tail`, which is not ours.
    ///
    /// # Errors
    /// When a position or a length is none that a producer writes.
    pub(crate) fn record(&self, tail: u64, length: u64) -> Result<Record, ChannelError> {
        let corrupt = |found| Err(ChannelError::Corrupt { position: self.head, found });
        let available = tail.wrapping_sub(self.head);
        if available == 0 || available > self.capacity as u64 || !available.is_multiple_of(LINE_BYTES as u64) {
            return corrupt(tail);
        }
        let rest = self.capacity - self.at();
        let (taken, skipped) = match usize::try_from(length) {
            _ if length == SKIP => (rest, true),
            Ok(bytes) if bytes <= self.payload_limit && record_bytes(bytes) <= rest => (record_bytes(bytes), false),
            _ => return corrupt(length),
        };
        if taken as u64 > available {
            return corrupt(length);
        }
        let end = self.head + taken as u64;
        Ok(match skipped {
            true => Record::Skipped { end },
            false => Record::Frame { at: self.at(), payload_bytes: length as usize, end },
        })
    }

    /// Continues behind a record.
    pub(crate) const fn take_to(&mut self, end: u64) {
        self.head = end;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn two_of_the_longest_records_have_room_wherever_the_first_one_lies() {
        for payload_bytes in [0, 1, 64, 4096, 100_000, 256 << 10] {
            let (capacity, bytes) = (least_capacity(payload_bytes), record_bytes(payload_bytes));
            for lines in 0..(capacity / LINE_BYTES).min(5000) {
                let mut room = Room::new(capacity);
                room.tail = (lines * LINE_BYTES) as u64;
                room.head = room.tail;
                let first = room.place(bytes).expect("the ring is empty");
                room.fill(&first);
                assert!(room.free_to(first.end));
                assert!(room.place(bytes).is_some());
            }
        }
    }

    #[test]
    fn positions_that_no_producer_writes_are_refused() {
        let progress = Progress::new(1024, 256);
        let record = |tail, length| progress.record(tail, length).is_ok();
        assert!(record(128, 0) && record(192, 64) && record(192, 1) && record(1024, 256) && record(1024, SKIP));
        assert!(!record(0, 0) && !record(1088, 0) && !record(130, 0), "positions");
        assert!(!record(1024, 257) && !record(1024, u64::MAX - 1) && !record(128, 1) && !record(64, SKIP), "lengths");
        let mut room = Room::new(1024);
        let place = room.place(128).expect("empty");
        room.fill(&place);
        assert!(!room.free_to(192) && !room.free_to(64 + 1) && room.free_to(128) && !room.free_to(64));
    }

    proptest! {
        /// Records of any lengths, put and taken in any interleaving: each arrives where it was put, in order, none
        /// overlaps one that is not free, and a ring that everything was taken from has room.
        #[test]
        fn records_arrive_in_order_and_never_overlap(
            steps in proptest::collection::vec((any::<bool>(), 0usize..=1000), 1..400),
        ) {
            const LIMIT: usize = 1000;
            let capacity = least_capacity(LIMIT);
            let (mut room, mut progress) = (Room::new(capacity), Progress::new(capacity, LIMIT));
            let mut lengths = vec![None; capacity / LINE_BYTES];
            let mut sent: VecDeque<(usize, usize)> = VecDeque::new();
            let mut tail = 0;
            for (puts, bytes) in steps {
                if puts {
                    let Some(place) = room.place(record_bytes(bytes)) else {
                        prop_assert!(!sent.is_empty(), "an empty ring has room");
                        continue;
                    };
                    let range = place.at..place.at + record_bytes(bytes);
                    prop_assert!(range.end <= capacity);
                    for &(at, bytes) in &sent {
                        prop_assert!(at + record_bytes(bytes) <= range.start || range.end <= at, "overlap");
                    }
                    if let Some(at) = place.skipped {
                        lengths[at / LINE_BYTES] = Some(SKIP);
                    }
                    lengths[place.at / LINE_BYTES] = Some(bytes as u64);
                    room.fill(&place);
                    tail = place.end;
                    sent.push_back((place.at, bytes));
                } else if let Some((at, bytes)) = sent.pop_front() {
                    loop {
                        let length = lengths[progress.at() / LINE_BYTES].expect("written");
                        match progress.record(tail, length).expect("sound") {
                            Record::Skipped { end } => progress.take_to(end),
                            Record::Frame { at: found, payload_bytes, end } => {
                                prop_assert_eq!((found, payload_bytes), (at, bytes));
                                progress.take_to(end);
                                break;
                            }
                        }
                    }
                    prop_assert!(room.free_to(progress.head()));
                }
            }
        }
    }
}
