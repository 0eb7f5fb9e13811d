//! Group commit: flushes, what they cover, and who is told.
//!
//! One flush is under way at a time. It covers every write that was over when it was given out; what comes later waits
//! for the next. A flush that fails is not repeated: what the device has is unknown then, and it takes no more writes.

use super::Tier;
use super::groups::Waiter;
use crate::errors::Reason;
use crate::memory::Memory;
use crate::ops::{Action, Fault, Job, Owner, Pieces, Priority};
use crate::types::{Ack, Event};

/// What goes on after a flush.
#[derive(Clone, Copy, Debug)]
pub(super) enum Barrier {
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
    /// Somebody waits.
    Waiter(Waiter),
}

/// How far the log is written.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    sequence: u64,
    generation: u64,
    tombstones: u32,
}

/// Flushes.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    /// For the next flush, and for the one under way.
    pending: Vec<Barrier>,
    covered: Vec<Barrier>,
    pub(super) under_way: bool,
    /// When the oldest write was over that no flush covers.
    pub(super) unsynced_since_ns: Option<u64>,
    written: Mark,
    covered_mark: Mark,
    durable: Mark,
}

impl Flushes {
    pub(super) fn written(&mut self, sequence: u64, generation: u64, tombstones: u32) {
        self.written = Mark { sequence, generation, tombstones };
    }

    /// The last durable sequence, and how many tombstones of the segment of `generation` are durable.
    pub(super) const fn durable(&self, generation: u64) -> (u64, u32) {
        let same = self.durable.generation == generation;
        (self.durable.sequence, if same { self.durable.tombstones } else { 0 })
    }

    pub(super) const fn durable_sequence(&self) -> u64 {
        self.durable.sequence
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.pending.is_empty() && !self.under_way
    }
}

impl Tier {
    /// Goes on with `barrier` after a flush that begins from now on.
    pub(super) fn after_flush(&mut self, barrier: Barrier) {
        self.flushes.pending.push(barrier);
    }

    pub(super) fn flush_work(&mut self, now_ns: u64) {
        let since = self.flushes.unsynced_since_ns;
        let due = since.is_some_and(|since| now_ns >= since.saturating_add(self.config.sync_interval_ns));
        if self.flushes.under_way || !self.writable() || (self.flushes.pending.is_empty() && !due) {
            return;
        }
        self.flushes.under_way = true;
        self.flushes.unsynced_since_ns = None;
        self.flushes.covered_mark = self.flushes.written;
        core::mem::swap(&mut self.flushes.pending, &mut self.flushes.covered);
        self.stats.flushes += 1;
        let (action, pieces) = (Action::Flush, Pieces::default());
        self.jobs.submit(Job { owner: Owner::Flush, action, offset: 0, pieces, priority: Priority::Commit });
    }

    pub(super) fn flushed(&mut self, result: Result<(), Fault>, memory: &mut dyn Memory) {
        self.flushes.under_way = false;
        if result.is_ok() {
            self.flushes.durable = self.flushes.covered_mark;
            self.untracked.removals_durable(self.flushes.durable_sequence());
        } else {
            self.degrade(Reason::FlushFailed, memory);
        }
        let mut covered = core::mem::take(&mut self.flushes.covered);
        for barrier in covered.drain(..) {
            self.pass(barrier, result, memory);
        }
        self.flushes.covered = covered;
    }

    /// What waits for a flush that will not come.
    pub(super) fn fail_pending(&mut self, memory: &mut dyn Memory) {
        for barrier in core::mem::take(&mut self.flushes.pending) {
            self.pass(barrier, Err(Fault::ReadOnly), memory);
        }
    }

    fn pass(&mut self, barrier: Barrier, result: Result<(), Fault>, memory: &mut dyn Memory) {
        match barrier {
            Barrier::Superblock => self.superblock_durable(result, memory),
            Barrier::Note => self.note_durable(result),
            Barrier::Prepared(segment) => self.header_durable(segment, result),
            Barrier::Records(segment) => self.records_durable(segment, result),
            Barrier::Footer(segment) => self.footer_durable(segment, result),
            Barrier::Victim => self.victim_durable(result),
            Barrier::Recovered => self.recovery_durable(),
            Barrier::Waiter(waiter) => self.tell(waiter, result),
        }
    }

    /// A record is written, and durable with it or not.
    pub(super) fn record_written(&mut self, waiter: Waiter, result: Result<(), Fault>, durable: bool) {
        match waiter {
            Waiter::Put { token, lent: true, .. } => self.events.push_back(Event::Released { token }),
            Waiter::Move(number) => return self.move_written(number, result),
            Waiter::Put { .. } | Waiter::Remove { .. } => {}
        }
        let (Waiter::Put { ack, .. } | Waiter::Remove { ack, .. }) = waiter else { return };
        let result = result.and(if self.writable() || ack == Ack::Buffered { Ok(()) } else { Err(Fault::ReadOnly) });
        if result.is_err() || ack == Ack::Buffered || durable {
            self.tell(waiter, result);
        } else {
            self.after_flush(Barrier::Waiter(waiter));
        }
    }

    fn tell(&mut self, waiter: Waiter, result: Result<(), Fault>) {
        if let Waiter::Remove { token, .. } = waiter {
            self.strike_ended(token, result.is_ok());
        }
        self.events.push_back(match (waiter, result) {
            (Waiter::Put { token, ack, .. }, Ok(())) => Event::Stored { token, ack },
            (Waiter::Put { token, .. }, Err(fault)) => Event::StoreFailed { token, fault },
            (Waiter::Remove { token, .. }, Ok(())) => Event::Removed { token },
            (Waiter::Remove { token, .. }, Err(fault)) => Event::RemoveFailed { token, fault },
            (Waiter::Move(_), _) => return,
        });
    }

    /// A write to a segment failed: it takes no more, and too many such segments, or a device that takes nothing, end
    /// all writing. `group` is the place of the group that was lost, if it was one.
    pub(super) fn write_failed(&mut self, segment: u32, group: Option<usize>, fault: Fault, memory: &mut dyn Memory) {
        self.untracked.note_fault();
        self.untracked.no_footer(segment);
        self.stats.write_faults += 1;
        if let Some(group) = group {
            self.drop_records(group);
        }
        if !self.segments[segment].bad {
            self.segments[segment].bad = true;
            self.stats.bad_segments += 1;
        }
        self.retire(segment, memory);
        match fault {
            Fault::Io if self.stats.bad_segments > self.config.max_bad_segments => {
                self.degrade(Reason::WriteErrors { segments: self.stats.bad_segments }, memory);
            }
            Fault::Io => {}
            Fault::NoSpace => self.degrade(Reason::NoSpace, memory),
            Fault::ReadOnly => self.degrade(Reason::DeviceReadOnly, memory),
            Fault::Gone => self.degrade(Reason::Gone, memory),
        }
    }
}
