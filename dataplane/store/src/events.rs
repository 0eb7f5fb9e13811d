//! What became of the objects of one shard, in order: a bounded log with sequence numbers, for who follows from afar.
//!
//! Nothing is kept until somebody follows. A reader names the number that it wants to go on from; where the log has
//! dropped that, the answer says how many are missing, and the reader takes a snapshot. A snapshot is a walk over the
//! objects while they change: the reader notes the log's number before it, and lays what happened since over it.

use std::collections::VecDeque;

use kvplane_proto::Digest;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// An object is there.
    Stored,
    /// An object is there no more.
    Removed,
    /// No object is there.
    Cleared,
}

/// Where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Medium {
    /// In the shard's pool.
    Memory,
    /// On its SSD.
    Ssd,
}

/// Something that happened to an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreEvent {
    /// What.
    pub change: Change,
    /// Where.
    pub medium: Medium,
    /// Which object; 0 where all are meant.
    pub digest: Digest,
    /// Its size, where it is there.
    pub bytes: u64,
}

/// Events in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct EventPage {
    /// The number of the first.
    pub first: u64,
    /// How many that were asked for are missing before it.
    pub lost: u64,
    /// The events, with numbers without gaps.
    pub events: Vec<StoreEvent>,
    /// The number of the next that there will be, or is.
    pub next: u64,
}

/// The log. Numbers begin at 1 and never come twice.
#[derive(Debug)]
pub struct EventLog {
    ring: VecDeque<StoreEvent>,
    capacity: usize,
    next: u64,
    lost: u64,
}

impl Default for EventLog {
    fn default() -> Self {
        Self { ring: VecDeque::new(), capacity: 0, next: 1, lost: 0 }
    }
}

impl EventLog {
    /// Keeps the latest so many from now on; 0 keeps nothing. Takes the memory for them at once.
    pub fn keep(&mut self, capacity: usize) {
        self.capacity = capacity;
        if capacity == 0 {
            self.ring = VecDeque::new();
        } else {
            self.ring.truncate(0);
            self.ring.reserve_exact(capacity);
        }
        // Who knows the log from before missed something.
        self.ring.clear();
        self.next += 1;
    }

    /// How many are kept.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether anything is kept.
    #[must_use]
    pub const fn is_kept(&self) -> bool {
        self.capacity > 0
    }

    /// The number of the next event.
    #[must_use]
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Events that were dropped for want of room, or could not be said.
    #[must_use]
    pub const fn lost(&self) -> u64 {
        self.lost
    }

    /// Something happened.
    #[inline]
    pub fn push(&mut self, change: Change, medium: Medium, digest: Digest, bytes: u64) {
        if self.capacity > 0 {
            self.append(StoreEvent { change, medium, digest, bytes });
        }
    }

    fn append(&mut self, event: StoreEvent) {
        if self.ring.len() == self.capacity {
            self.ring.pop_front();
            self.lost += 1;
        }
        self.ring.push_back(event);
        self.next += 1;
    }

    /// Something happened that the log cannot say: every reader needs a snapshot.
    pub fn break_off(&mut self) {
        self.lost += 1 + self.ring.len() as u64;
        self.ring.clear();
        self.next += 1;
    }

    /// At most `most` events from the number `from` on.
    #[must_use]
    pub fn read(&self, from: u64, most: usize) -> EventPage {
        let oldest = self.next - self.ring.len() as u64;
        // A number from another incarnation is no better than one that was dropped.
        let first = if from > self.next { oldest } else { from.max(oldest) };
        let lost = if from > self.next { 1 } else { first - from };
        let skip = (first - oldest) as usize;
        let events = self.ring.iter().skip(skip).take(most).copied().collect();
        EventPage { first, lost, events, next: self.next }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn push(log: &mut EventLog, digest: u128) {
        log.push(Change::Stored, Medium::Memory, Digest(digest), 7);
    }

    #[test]
    fn nothing_is_kept_until_somebody_follows() {
        let mut log = EventLog::default();
        push(&mut log, 1);
        assert_eq!((log.next(), log.is_kept(), log.read(1, 9).events.len()), (1, false, 0));
        log.keep(4);
        push(&mut log, 2);
        // Who had numbers of before cannot know what happened in between.
        assert_eq!((log.read(1, 9).lost, log.read(2, 9).lost), (1, 0));
        log.keep(0);
        assert_eq!((log.read(3, 9).lost, log.read(4, 9).events.len()), (1, 0));
    }

    proptest! {
        #[test]
        fn a_reader_gets_every_event_in_order_or_learns_how_many_it_missed(
            capacity in 1usize..20,
            steps in prop::collection::vec((0u8..12, 0usize..6), 1..200),
        ) {
            let mut log = EventLog::default();
            log.keep(capacity);
            let (mut from, mut pushed, mut read, mut lost) = (log.next(), 0u128, Vec::new(), 0u64);
            for (pushes, most) in steps {
                for _ in 0..pushes {
                    push(&mut log, pushed);
                    pushed += 1;
                }
                let page = log.read(from, most);
                prop_assert!(page.events.len() <= most);
                lost += page.lost;
                let begin = u128::from(lost) + read.len() as u128;
                read.extend(page.events.iter().map(|event| event.digest.0));
                for (at, event) in page.events.iter().enumerate() {
                    prop_assert_eq!(event.digest.0, begin + at as u128);
                }
                from = page.first + page.events.len() as u64;
            }
            let rest = log.read(from, usize::MAX);
            let seen = u128::from(lost) + u128::from(rest.lost) + read.len() as u128 + rest.events.len() as u128;
            prop_assert_eq!(seen, pushed);
            prop_assert_eq!(rest.next, rest.first + rest.events.len() as u64);
            prop_assert!(log.ring.len() <= capacity && log.ring.capacity() < 2 * capacity + 8);
        }
    }
}
