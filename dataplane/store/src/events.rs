//! Events of one shard's objects, in order: a bounded log with sequence numbers, for remote subscribers.
//!
//! No event is kept until there is a subscriber. A reader names the number from which it wants to continue; if the log
//! has dropped that event, the answer states how many are missing, and the reader takes a snapshot. A snapshot is a
//! walk over the objects while they change: the reader notes the log's number before it, and applies the events since
//! then to it.

use std::collections::VecDeque;

use kvplane_proto::Digest;
use kvplane_proto::events::{ObjectChange, ObjectEvent, ObjectMedium};

/// Page of events, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct EventPage {
    /// Number of the first event.
    pub first: u64,
    /// Number of requested events that are missing before it.
    pub lost: u64,
    /// Events, numbered without gaps.
    pub events: Vec<ObjectEvent>,
    /// Number of the next event of the log.
    pub next: u64,
}

/// Event log. Numbers begin at 1 and are never reused.
#[derive(Debug)]
pub struct EventLog {
    ring: VecDeque<ObjectEvent>,
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
    /// Keeps the latest `capacity` events from now on; 0 keeps none. Allocates the memory for them at once. Does
    /// nothing if the capacity is the same.
    pub fn keep(&mut self, capacity: usize) {
        if self.capacity == capacity {
            return;
        }
        self.capacity = capacity;
        if capacity == 0 {
            self.ring = VecDeque::new();
        } else {
            self.ring.truncate(0);
            self.ring.reserve_exact(capacity);
        }
        // A reader of the former log has missed events.
        self.ring.clear();
        self.next += 1;
    }

    /// Returns the number of events that are kept.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns true if events are kept.
    #[must_use]
    pub const fn is_kept(&self) -> bool {
        self.capacity > 0
    }

    /// Returns the number of the next event.
    #[must_use]
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Returns the number of events that were dropped for lack of room, or could not be expressed.
    #[must_use]
    pub const fn lost(&self) -> u64 {
        self.lost
    }

    /// Appends an event.
    #[inline]
    pub fn push(&mut self, change: ObjectChange, medium: ObjectMedium, digest: Digest, bytes: u64) {
        if self.capacity > 0 {
            self.append(ObjectEvent { change, medium, digest, bytes });
        }
    }

    fn append(&mut self, event: ObjectEvent) {
        if self.ring.len() == self.capacity {
            self.ring.pop_front();
            self.lost += 1;
        }
        self.ring.push_back(event);
        self.next += 1;
    }

    /// Marks a change that the log cannot express: every reader needs a snapshot.
    pub fn break_off(&mut self) {
        self.lost += 1 + self.ring.len() as u64;
        self.ring.clear();
        self.next += 1;
    }

    /// Returns at most `most` events from the number `from` on.
    #[must_use]
    pub fn read(&self, from: u64, most: usize) -> EventPage {
        let oldest = self.next - self.ring.len() as u64;
        // A number of another incarnation is treated like one that was dropped.
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
        log.push(ObjectChange::Stored, ObjectMedium::Memory, Digest(digest), 7);
    }

    #[test]
    fn no_event_is_kept_without_a_subscriber() {
        let mut log = EventLog::default();
        push(&mut log, 1);
        assert_eq!((log.next(), log.is_kept(), log.read(1, 9).events.len()), (1, false, 0));
        log.keep(4);
        push(&mut log, 2);
        // A reader with an earlier number cannot know the events in between.
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
