//! Timers of a client.
//!
//! There are four kinds. A batch has a *deadline*. A lane has an *alarm*, by which it must have been welcomed or may
//! reconnect. A slice that waits for a newer map, or for its shard to receive the client's map, is *parked*. A get that
//! may be hedged to the replica owner is *watched*. Timers expire in the order of their times; the client acts on them.

use core::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use kvplane_proto::ids::BatchId;

use crate::tables::slice_id;
use crate::types::SliceId;

/// The timers of a client.
#[derive(Default)]
pub(crate) struct Timers {
    /// Entries of completed batches are dropped when they reach the top, or when they outnumber the open ones.
    deadlines: BinaryHeap<Reverse<(u64, BatchId)>>,
    /// At most one entry for each lane.
    alarms: BTreeSet<(u64, u32)>,
    parked: BTreeSet<(u64, SliceId)>,
    watched: BTreeSet<(u64, SliceId)>,
}

impl Timers {
    /// Returns the time at which the first timer expires.
    #[inline]
    pub(crate) fn next_ns(&self) -> Option<u64> {
        let deadline = self.deadlines.peek().map(|entry| entry.0.0);
        let first = |set: &BTreeSet<(u64, SliceId)>| set.first().map(|entry| entry.0);
        let alarm = self.alarms.first().map(|entry| entry.0);
        [deadline, alarm, first(&self.parked), first(&self.watched)].into_iter().flatten().min()
    }

    /// Adds the deadline of a batch. `open` is the number of batches in flight: entries of completed batches are
    /// dropped when they outnumber these, so that memory is bounded by them, at an amortised constant cost.
    pub(crate) fn add_deadline(&mut self, at_ns: u64, batch: BatchId, open: usize, is_open: impl Fn(BatchId) -> bool) {
        if self.deadlines.len() >= 64 + 2 * open {
            self.deadlines.retain(|entry| is_open(entry.0.1));
        }
        self.deadlines.push(Reverse((at_ns, batch)));
    }

    /// Removes and returns a batch whose deadline has passed, or that is complete.
    pub(crate) fn due_deadline(&mut self, now_ns: u64, is_complete: impl Fn(BatchId) -> bool) -> Option<BatchId> {
        let &Reverse((at_ns, batch)) = self.deadlines.peek()?;
        if at_ns > now_ns && !is_complete(batch) {
            return None;
        }
        self.deadlines.pop();
        Some(batch)
    }

    /// Moves the alarm of a lane; `None` means no alarm.
    pub(crate) fn move_alarm(&mut self, lane: u32, from_ns: Option<u64>, to_ns: Option<u64>) {
        if let Some(at_ns) = from_ns {
            self.alarms.remove(&(at_ns, lane));
        }
        if let Some(at_ns) = to_ns {
            self.alarms.insert((at_ns, lane));
        }
    }

    /// Returns a lane whose alarm has expired. The alarm stays until it is moved.
    pub(crate) fn due_alarm(&self, now_ns: u64) -> Option<u32> {
        self.alarms.first().filter(|(at_ns, _)| *at_ns <= now_ns).map(|(_, lane)| *lane)
    }

    /// Returns all alarms, by their times.
    pub(crate) fn alarms(&self) -> Vec<(u64, u32)> {
        self.alarms.iter().copied().collect()
    }

    pub(crate) fn park(&mut self, slice: SliceId, until_ns: u64) {
        self.parked.insert((until_ns, slice));
    }

    /// Removes and returns the parked slices whose time has come.
    pub(crate) fn due_parked(&mut self, now_ns: u64) -> impl Iterator<Item = SliceId> + use<> {
        let later = match now_ns.checked_add(1) {
            Some(after) => self.parked.split_off(&(after, slice_id(0, 0))),
            None => BTreeSet::new(),
        };
        core::mem::replace(&mut self.parked, later).into_iter().map(|(_, slice)| slice)
    }

    /// Removes and returns the parked slices that `pick` selects.
    pub(crate) fn take_parked(&mut self, pick: impl Fn(SliceId) -> bool) -> Vec<SliceId> {
        self.parked.extract_if(.., |(_, slice)| pick(*slice)).map(|(_, slice)| slice).collect()
    }

    pub(crate) fn watch(&mut self, slice: SliceId, until_ns: u64) {
        self.watched.insert((until_ns, slice));
    }

    pub(crate) fn unwatch(&mut self, slice: SliceId, until_ns: u64) {
        self.watched.remove(&(until_ns, slice));
    }

    /// Removes and returns a watched slice whose time has come.
    pub(crate) fn due_watched(&mut self, now_ns: u64) -> Option<SliceId> {
        self.watched.first().filter(|(at_ns, _)| *at_ns <= now_ns)?;
        self.watched.pop_first().map(|(_, slice)| slice)
    }
}

#[cfg(test)]
impl Timers {
    /// Returns the numbers of deadlines, alarms, parked and watched slices.
    pub(crate) fn counts(&self) -> [usize; 4] {
        [self.deadlines.len(), self.alarms.len(), self.parked.len(), self.watched.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slices(slices: impl IntoIterator<Item = SliceId>) -> Vec<u32> {
        slices.into_iter().map(|slice| slice.index).collect()
    }

    #[test]
    fn timers_expire_in_the_order_of_their_times() {
        let mut timers = Timers::default();
        assert_eq!(timers.next_ns(), None);
        let batch = BatchId { index: 1, generation: 1 };
        timers.add_deadline(90, batch, 1, |_| true);
        timers.move_alarm(7, None, Some(50));
        timers.park(slice_id(2, 1), 60);
        timers.watch(slice_id(3, 1), 40);
        assert_eq!(timers.next_ns(), Some(40));
        assert_eq!((timers.due_watched(39), timers.due_watched(40)), (None, Some(slice_id(3, 1))));
        assert_eq!((timers.due_alarm(49), timers.due_alarm(50)), (None, Some(7)));
        timers.move_alarm(7, Some(50), None);
        assert_eq!(timers.next_ns(), Some(60));
        assert_eq!((slices(timers.due_parked(59)), slices(timers.due_parked(60))), (vec![], vec![2]));
        assert_eq!((timers.due_deadline(89, |_| false), timers.due_deadline(89, |_| true)), (None, Some(batch)));
        assert_eq!(timers.counts(), [0; 4]);
    }

    #[test]
    fn parked_slices_are_removed_selectively() {
        let mut timers = Timers::default();
        for index in 0..10 {
            timers.park(slice_id(index, 1), u64::from(index) % 3);
        }
        let mut even = slices(timers.take_parked(|slice| slice.index % 2 == 0));
        even.sort_unstable();
        assert_eq!(even, [0, 2, 4, 6, 8]);
        assert_eq!(slices(timers.due_parked(u64::MAX)).len(), 5);
    }
}
