//! Tier of one shard, as a state machine: calls and completions go in, block operations and events come out.
//!
//! [`Tier`] is the shell. It owns the components, dispatches completions by the owner of the operation, and joins steps
//! that involve two of the components:
//!
//! * `Log` appends, reads and removes records; the others get it as an argument.
//! * `Opening` verifies the identity of the device, and formats a blank one; `Notes` records the slots that the shard
//!   owns.
//! * `Recovery` finds the records on the device, while calls are served.
//! * `Reclaim` makes room by freeing the segment that was filled first.
//! * `Scrubber` reads every record periodically.
//!
//! A failed read or write loses its objects and is counted; it never returns wrong bytes.
//!
//! Invariants: one log, appended in order of sequence; a record is live while its segment's generation is live and no
//! record of its digest has a greater sequence. Not here: I/O, time, memory, deadlines; which objects are written to
//! the tier, and when.

mod calls;
mod stats;
mod tenants;

pub use stats::TierStats;
pub use tenants::TierTenants;

use kvplane_proto::ConfigError;

use crate::config::TierConfig;
use crate::device::Owner;
use crate::log::{Barrier, Log, Purpose};
use crate::memory::Memory;
use crate::opening::{Notes, Opening};
use crate::ops::{Fault, OpId};
use crate::reclaim::Reclaim;
use crate::recovery::Recovery;
use crate::scrub::Scrubber;
use crate::types::errors::Reason;
use crate::types::{OpenOptions, Output};

/// Tier of one shard. It belongs to one thread.
#[derive(Debug)]
pub struct Tier {
    log: Log,
    opening: Opening,
    notes: Notes,
    recovery: Recovery,
    reclaim: Reclaim,
    scrubber: Scrubber,
}

impl Tier {
    /// Begins to open a device. [`Tier::poll_output`] returns the operations; [`Event::Opened`](crate::Event::Opened)
    /// or [`Event::Refused`](crate::Event::Refused) follows.
    ///
    /// # Errors
    /// A field of `config` that is out of range.
    pub fn open(config: TierConfig, options: OpenOptions) -> Result<Self, ConfigError> {
        config.validate()?;
        let mut log = Log::new(config, options.tenant_of);
        Ok(Self {
            opening: Opening::begin(options, &mut log.device),
            notes: Notes::begin(&mut log.device),
            recovery: Recovery::new(log.device.config()),
            reclaim: Reclaim::new(log.device.config()),
            scrubber: Scrubber::default(),
            log,
        })
    }

    /// Completes an operation, with the number of bytes that it moved (0 for a flush) or the fault. Unknown operations
    /// are counted.
    pub fn complete(&mut self, now_ns: u64, id: OpId, result: Result<u32, Fault>, memory: &mut dyn Memory) {
        let Some((owner, result)) = self.log.device.complete(id, result) else { return };
        if result == Err(Fault::Gone) {
            self.degrade(Some(Reason::Gone), memory);
        }
        let of_superblock = result.err().map(Reason::of_superblock);
        let Self { log, opening, notes, recovery, reclaim, scrubber } = self;
        match owner {
            Owner::SuperblockRead(copy) => opening.superblock_read(copy, result, notes, log, memory),
            Owner::NoteRead(copy) => {
                notes.read(copy, result);
                opening.one_read(notes, log, memory);
            }
            Owner::Look(place) => opening.looked_at(place, result, log, memory),
            Owner::Blank(_) => {
                self.degrade(of_superblock, memory);
                self.opening.blanked(&mut self.log);
            }
            Owner::SuperblockWrite => {
                self.degrade(of_superblock, memory);
                if self.log.device.is_writable() {
                    self.log.after_flush(Barrier::Superblock);
                } else {
                    self.pass(vec![Barrier::Superblock], Err(Fault::ReadOnly), memory);
                }
            }
            Owner::NoteWrite => {
                self.degrade(of_superblock, memory);
                if self.log.device.is_writable() {
                    self.log.after_flush(Barrier::Note);
                }
            }
            Owner::HeaderRead { segment, place } => recovery.header_read(segment, place, result, log, memory),
            Owner::Reader(reader) => recovery.reader_filled(reader, result, log, memory),
            Owner::Scan => recovery.scan_filled(result, log, memory),
            Owner::Victim => reclaim.victim_filled(result, log),
            Owner::Read(slot) => match log.read_done(slot, result, memory) {
                Some(read) if read.purpose == Purpose::Scrub => scrubber.record_read(&read, log),
                Some(read) => reclaim.record_read(&read, log),
                None => {}
            },
            Owner::Group(number) => self.group_written(now_ns, number, result, memory),
            Owner::Page => {
                let reason = log.page_written(result, memory);
                self.degrade(reason, memory);
            }
            Owner::Prepare(segment) => {
                let reason = log.header_written(segment, result, memory);
                self.degrade(reason, memory);
            }
            Owner::Flush => {
                let covered = log.end_flush(result);
                self.degrade(result.err().map(|_| Reason::FlushFailed), memory);
                self.pass(covered, result, memory);
            }
        }
        if !self.log.device.is_writable() {
            self.reclaim.give_up();
        }
        if !self.log.device.is_readable() {
            self.scrubber.give_up();
        }
    }

    /// Returns the next action for the host: call until it returns `None`.
    pub fn poll_output(&mut self, now_ns: u64, memory: &mut dyn Memory) -> Option<Output> {
        // Periodic work. Each part does a bounded amount.
        self.recovery.work(&mut self.log);
        self.log.limit_tenants(now_ns, memory);
        self.reclaim.work(now_ns, &mut self.log, memory);
        self.log.work(now_ns, self.reclaim.is_reading(), memory);
        self.scrubber.work(now_ns, &mut self.log);
        if let Some(event) = self.log.events.pop() {
            return Some(Output::Event(event));
        }
        self.log.device.next_op().map(Output::Block)
    }

    /// Returns the time at which [`Tier::poll_output`] may have an action without any input before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        // The walk through the index goes on at once.
        let walk = self.log.contents.accounts.walk().filter(|_| self.log.contents.is_running()).map(|_| 0);
        let limits = self.log.limit_pace.due_ns();
        [self.log.due_ns(), self.scrubber.due_ns(&self.log), walk, limits].into_iter().flatten().min()
    }

    /// Stops all writes if there is a reason to, and fails the calls that wait for them.
    fn degrade(&mut self, reason: Option<Reason>, memory: &mut dyn Memory) {
        if !reason.is_some_and(|reason| self.log.degrade(reason)) {
            return;
        }
        // The open group is not submitted any more.
        if let Some(number) = self.log.writer.groups.filling_number() {
            self.group_written(0, number, Err(Fault::ReadOnly), memory);
        }
        let pending = self.log.writer.flushes.take_pending();
        self.pass(pending, Err(Fault::ReadOnly), memory);
        self.log.abandon_seals();
    }

    /// Ends a group that was written or has failed, and continues with the waiters of its records.
    fn group_written(&mut self, now_ns: u64, number: u64, result: Result<(), Fault>, memory: &mut dyn Memory) {
        let Some((mut group, reason)) = self.log.end_group(now_ns, number, result, memory) else { return };
        self.degrade(reason, memory);
        for waiter in group.waiters.drain(..) {
            if let Some(number) = self.log.record_written(waiter, result, group.is_durable) {
                self.reclaim.record_written(number, result, &mut self.log);
            }
        }
        self.log.leave_group(group);
    }

    /// Continues after a flush, or its failure, with the barriers that waited for it.
    fn pass(&mut self, mut barriers: Vec<Barrier>, result: Result<(), Fault>, memory: &mut dyn Memory) {
        let Self { log, opening, notes, recovery, reclaim, .. } = self;
        for barrier in barriers.drain(..) {
            match barrier {
                Barrier::Superblock => {
                    if opening.durable(result, log, memory) {
                        recovery.begin(&mut log.device);
                    }
                }
                Barrier::Note => notes.durable(result, log),
                Barrier::Prepared(segment) => log.header_durable(segment, result),
                Barrier::Records(segment) => log.writer.seals.records_durable(segment, result),
                Barrier::Footer(segment) => log.footer_durable(segment, result),
                Barrier::Victim => reclaim.victim_durable(result),
                Barrier::Recovered => recovery.durable(log),
                Barrier::Waiter(waiter) => log.acknowledge(waiter, result),
            }
        }
        log.writer.flushes.recycle(barriers);
    }
}
