//! Group commit: flushes, the writes that they cover, and the barriers that wait for them.
//!
//! One flush is in flight at a time. It covers every write that was complete when it was submitted; later writes wait
//! for the next flush. A failed flush is not repeated: the device's contents are unknown then, and it takes no more
//! writes.

use super::groups::{Mark, Waiter};
use crate::device::Device;

/// Action that waits for a flush.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Barrier {
    /// Superblocks, or the blank segments below them, become durable.
    Superblock,
    /// An ownership note becomes durable.
    Note,
    /// The header of a segment becomes durable.
    Prepared(u32),
    /// The records of a segment become durable, so its footer may be written.
    Records(u32),
    /// The footer of a segment becomes durable.
    Footer(u32),
    /// Records that stay of the segment being reclaimed become durable in other segments.
    Victim,
    /// The result of recovery becomes durable.
    Recovered,
    /// A call is acknowledged.
    Waiter(Waiter),
}

/// Flushes of a device.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    /// Barriers for the next flush, and those of the flush in flight.
    pending: Vec<Barrier>,
    covered: Vec<Barrier>,
    in_flight: bool,
    /// Completion time of the oldest write that no flush covers.
    unsynced_since_ns: Option<u64>,
    written: Mark,
    covered_mark: Mark,
    durable: Mark,
    /// Number of flushes since the start.
    count: u64,
}

impl Flushes {
    /// Passes `barrier` after a flush that begins from now on.
    pub(crate) fn after(&mut self, barrier: Barrier) {
        self.pending.push(barrier);
    }

    /// Notes a completed write.
    pub(crate) fn note_write(&mut self, now_ns: u64) {
        self.unsynced_since_ns.get_or_insert(now_ns);
    }

    /// Sets the mark up to which the log is written.
    pub(super) const fn advance(&mut self, written: Mark) {
        self.written = written;
    }

    /// Returns the last durable sequence, and the number of durable tombstones of the segment of `generation`.
    pub(crate) const fn durable(&self, generation: u64) -> (u64, u32) {
        let same = self.durable.generation == generation;
        (self.durable.sequence, if same { self.durable.tombstones } else { 0 })
    }

    pub(crate) const fn durable_sequence(&self) -> u64 {
        self.durable.sequence
    }

    pub(crate) const fn is_idle(&self) -> bool {
        self.pending.is_empty() && !self.in_flight
    }

    pub(crate) const fn count(&self) -> u64 {
        self.count
    }

    /// Returns the time to flush completed writes for which no barrier waits. While a flush is in flight there is none:
    /// its completion is the next occasion, and an earlier call would have nothing to do.
    pub(crate) fn due_ns(&self, device: &Device) -> Option<u64> {
        let due = self.unsynced_since_ns.map(|since| since.saturating_add(device.config().sync_interval_ns));
        due.filter(|_| device.is_writable() && !self.in_flight)
    }

    /// Begins a flush if a barrier waits for it, or if it is due.
    pub(crate) fn work(&mut self, now_ns: u64, device: &mut Device) {
        let due = self.due_ns(device).is_some_and(|due_ns| now_ns >= due_ns);
        if self.in_flight || !device.is_writable() || (self.pending.is_empty() && !due) {
            return;
        }
        self.in_flight = true;
        self.unsynced_since_ns = None;
        self.covered_mark = self.written;
        core::mem::swap(&mut self.pending, &mut self.covered);
        self.count += 1;
        device.flush();
    }

    /// Ends the flush; returns the barriers that it covers.
    pub(crate) fn end(&mut self, is_durable: bool) -> Vec<Barrier> {
        self.in_flight = false;
        if is_durable {
            self.durable = self.covered_mark;
        }
        core::mem::take(&mut self.covered)
    }

    /// Takes the barriers that wait for a flush that will not be submitted.
    pub(crate) fn take_pending(&mut self) -> Vec<Barrier> {
        core::mem::take(&mut self.pending)
    }

    /// Gives back the memory of passed barriers.
    pub(crate) fn recycle(&mut self, mut barriers: Vec<Barrier>) {
        barriers.clear();
        if self.covered.is_empty() && self.covered.capacity() < barriers.capacity() {
            self.covered = barriers;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TierConfig;
    use crate::types::errors::Reason;

    #[test]
    fn a_flush_covers_only_the_writes_completed_before_it() {
        let config = TierConfig { sync_interval_ns: 100, ..TierConfig::for_device(1 << 30, 4096) };
        let (mut device, mut flushes) = (Device::new(config), Flushes::default());
        flushes.work(0, &mut device);
        assert!(flushes.is_idle() && device.is_idle(), "nothing was written");
        flushes.note_write(5);
        flushes.advance(Mark { sequence: 7, generation: 3, tombstones: 2 });
        assert_eq!(flushes.due_ns(&device), Some(105));
        flushes.work(104, &mut device);
        assert!(device.is_idle(), "there is time");
        flushes.after(Barrier::Note);
        flushes.work(6, &mut device);
        assert!(!flushes.is_idle() && flushes.due_ns(&device).is_none());
        flushes.after(Barrier::Victim);
        flushes.advance(Mark { sequence: 9, generation: 4, tombstones: 1 });
        assert!(matches!(flushes.end(true)[..], [Barrier::Note]));
        assert_eq!((flushes.durable(3), flushes.durable(4)), ((7, 2), (7, 0)));
        flushes.work(6, &mut device);
        assert!(matches!(flushes.end(false)[..], [Barrier::Victim]));
        assert_eq!(flushes.durable_sequence(), 7, "it failed");
        device.degrade(Reason::FlushFailed);
        flushes.after(Barrier::Recovered);
        flushes.work(1000, &mut device);
        assert!(matches!(flushes.take_pending()[..], [Barrier::Recovered]) && flushes.is_idle());
        assert_eq!(flushes.count(), 2);
    }
}
