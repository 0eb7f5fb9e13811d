//! Group commit: flushes, what they cover, and what goes on after them.
//!
//! One flush is in flight at a time. It covers every write that was over when it was given out; what comes later waits
//! for the next. A flush that fails is not repeated: what the device has is unknown then, and it takes no more writes.

use super::groups::{Mark, Waiter};
use crate::device::Device;

/// What goes on after a flush.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Barrier {
    /// Superblocks, or the blank segments under them, are durable.
    Superblock,
    /// A note of owned slots is durable.
    Note,
    /// The header of a segment is durable.
    Prepared(u32),
    /// The records of a segment are durable, so its footer may be written.
    Records(u32),
    /// So is its footer.
    Footer(u32),
    /// What was to stay of the segment that is reclaimed is durable elsewhere.
    Victim,
    /// What recovery has shown stays.
    Recovered,
    /// A call waits for its acknowledgement.
    Waiter(Waiter),
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    /// For the next flush, and for the one in flight.
    pending: Vec<Barrier>,
    covered: Vec<Barrier>,
    in_flight: bool,
    /// When the oldest write was over that no flush covers.
    unsynced_since_ns: Option<u64>,
    written: Mark,
    covered_mark: Mark,
    durable: Mark,
    /// How many there were.
    count: u64,
}

impl Flushes {
    /// Goes on with `barrier` after a flush that begins from now on.
    pub(crate) fn after(&mut self, barrier: Barrier) {
        self.pending.push(barrier);
    }

    /// A write is over.
    pub(crate) fn note_write(&mut self, now_ns: u64) {
        self.unsynced_since_ns.get_or_insert(now_ns);
    }

    /// The log is written up to here.
    pub(super) const fn advance(&mut self, written: Mark) {
        self.written = written;
    }

    /// The last durable sequence, and how many tombstones of the segment of `generation` are durable.
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

    /// When to flush what was written although no barrier waits. A flush in flight is the next occasion: nobody is
    /// called for nothing until it ends.
    pub(crate) fn due_ns(&self, device: &Device) -> Option<u64> {
        let due = self.unsynced_since_ns.map(|since| since.saturating_add(device.config().sync_interval_ns));
        due.filter(|_| device.is_writable() && !self.in_flight)
    }

    /// Begins a flush when a barrier waits for it, or when it is time to.
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

    /// The flush is over; the barriers that it covers.
    pub(crate) fn end(&mut self, is_durable: bool) -> Vec<Barrier> {
        self.in_flight = false;
        if is_durable {
            self.durable = self.covered_mark;
        }
        core::mem::take(&mut self.covered)
    }

    /// The barriers that wait for a flush that will not come.
    pub(crate) fn take_pending(&mut self) -> Vec<Barrier> {
        core::mem::take(&mut self.pending)
    }

    /// Gives back the memory of barriers that were passed.
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
    fn a_flush_covers_what_was_written_before_it_and_the_next_one_the_rest() {
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
