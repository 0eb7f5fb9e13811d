//! Log of one device: appends, reads and removes records.
//!
//! * [`Contents`] determines which records are live; [`Writer`] appends, [`Reads`] reads and verifies; [`Events`] go to
//!   the host.
//! * A put's payload is copied into a *group* of records at the end of the log, or lent to it; groups are written as a
//!   whole, several at a time, and flushed together when a call needs them durable.
//! * A record is in the index from the moment it is appended. A get of a record that is not written yet waits for its
//!   group.
//!
//! [`Log`] owns these components and joins them: a call needs several, and so does the completion of a group. Opening,
//! recovery, reclaim and scrubbing are layered above it and get it as an argument; it does not know them.

mod calls;
mod events;
mod flushes;
mod footers;
mod groups;
mod headers;
mod limits;
mod pace;
mod reads;
mod room;
mod seals;
mod sums;
mod writer;

pub(crate) use calls::RemoveCall;
pub(crate) use events::Events;
pub(crate) use flushes::Barrier;
pub(crate) use footers::{FooterWindow, NextPage};
pub(crate) use groups::{EndedGroup, Waiter};
pub(crate) use pace::EvictionPace;
pub(crate) use reads::{EndedRead, Purpose, ReadJob, Reads};
pub(crate) use room::{Need, NoRoom, segment_room};
pub(crate) use sums::ChunkSums;
pub(crate) use writer::{Record, Writer};

use crate::config::TierConfig;
use crate::contents::{Contents, Entry, Phase};
use crate::device::Device;
use crate::memory::Memory;
use crate::ops::Fault;
use crate::slots::SlotId;
use crate::types::errors::{OpenError, Reason};
use crate::types::{Ack, Event, TenantOf};

/// Counters of accepted and refused calls, and of failed writes, since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallCounts {
    pub(crate) puts: u64,
    pub(crate) put_bytes: u64,
    /// Puts refused because there was no room.
    pub(crate) put_refusals: u64,
    /// Puts refused because the payload did not match its writer's checksum.
    pub(crate) bad_payloads: u64,
    pub(crate) removes: u64,
    /// Operations that the device failed to write.
    pub(crate) write_faults: u64,
    /// Segments with write errors.
    pub(crate) bad_segments: u32,
}

/// Components of the log of one device.
#[derive(Debug)]
pub(crate) struct Log {
    pub(crate) device: Device,
    pub(crate) contents: Contents,
    pub(crate) writer: Writer,
    pub(crate) reads: Reads,
    pub(crate) events: Events,
    pub(crate) sums: ChunkSums,
    counts: CallCounts,
    pub(crate) tenant_of: TenantOf,
    /// Accounts whose limits are still to be checked, as they have changed.
    limits_to_check: usize,
    pub(crate) limit_pace: EvictionPace,
}

impl Log {
    pub(crate) fn new(config: TierConfig, tenant_of: TenantOf) -> Self {
        let device = Device::new(config);
        Self {
            contents: Contents::new(device.config()),
            writer: Writer::new(&device),
            reads: Reads::new(&device),
            events: Events::new(device.config()),
            sums: ChunkSums::default(),
            counts: CallCounts::default(),
            tenant_of,
            limits_to_check: 0,
            limit_pace: EvictionPace::default(),
            device,
        }
    }

    pub(crate) const fn counts(&self) -> &CallCounts {
        &self.counts
    }

    /// Passes `barrier` after a flush that begins from now on.
    pub(crate) fn after_flush(&mut self, barrier: Barrier) {
        self.writer.flushes.after(barrier);
    }

    /// Enters the first phase after the device was accepted.
    pub(crate) fn enter(&mut self, phase: Phase) {
        self.contents.enter(phase);
        let (uuid, incarnation) = (self.device.uuid(), self.contents.sequences.incarnation());
        self.events.push(Event::Opened { uuid, incarnation });
    }

    pub(crate) fn refuse(&mut self, error: OpenError) {
        self.contents.enter(Phase::Refused);
        self.device.refuse(error);
        self.events.push(Event::Refused(error));
    }

    /// Stops all writes; returns false if they were stopped before. The caller ends the waits for writes.
    pub(crate) fn degrade(&mut self, reason: Reason) -> bool {
        if !self.device.degrade(reason) {
            return false;
        }
        self.events.push(Event::Degraded(reason));
        self.contents.untracked.note_fault();
        true
    }

    /// Abandons all footers in progress and to come.
    pub(crate) fn abandon_seals(&mut self) {
        self.writer.seals.abandon(&mut self.contents.segments);
    }

    /// Performs the periodic work of the writing side: groups, headers, footers, flushes. `more_copies`: reclaim is
    /// reading records that are to be appended to the open group.
    pub(crate) fn work(&mut self, now_ns: u64, more_copies: bool, memory: &mut dyn Memory) {
        let Self { device, contents, writer, .. } = self;
        writer.group_work(now_ns, more_copies, device, contents, memory);
        headers::prepare(device, contents, memory);
        writer.seals.work(&mut writer.flushes, &contents.segments, device, memory);
        writer.flushes.work(now_ns, device);
    }

    /// Returns the time at which [`Self::work`] may have work without any input before.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        let delay_ns = self.device.config().group_delay_ns;
        let group = self.writer.groups.open_since_ns().map(|since| since.saturating_add(delay_ns));
        [group, self.writer.flushes.due_ns(&self.device)].into_iter().flatten().min()
    }

    /// Ends a group that was written or has failed; after a failure, its records are removed from the index. The caller
    /// serves the group's waiters and gives it back to [`Self::leave_group`]. The reason is set if no more writes are
    /// possible.
    pub(crate) fn end_group(
        &mut self,
        now_ns: u64,
        number: u64,
        result: Result<(), Fault>,
        memory: &mut dyn Memory,
    ) -> Option<(EndedGroup, Option<Reason>)> {
        let group = self.writer.groups.end(number)?;
        self.contents.segments.end_group(group.segment);
        let reason = match result {
            Ok(()) => {
                self.writer.flushes.note_write(now_ns);
                None
            }
            Err(fault) => self.write_failed(group.segment, Some(&group), fault, memory),
        };
        Some((group, reason))
    }

    /// Releases a completed group whose waiters were served.
    pub(crate) fn leave_group(&mut self, group: EndedGroup) {
        self.writer.leave_group(group);
        self.reads.wake(&self.writer.groups, &mut self.device);
    }

    /// Handles a record that was written, and is durable or not: its call is acknowledged now or after a flush. Returns
    /// the number of the move if the record is a copy by reclaim.
    pub(crate) fn record_written(
        &mut self,
        waiter: Waiter,
        result: Result<(), Fault>,
        is_durable: bool,
    ) -> Option<u64> {
        let ack = match waiter {
            Waiter::Put { token, lent, ack } => {
                if lent {
                    self.events.push(Event::Released { token });
                }
                ack
            }
            Waiter::Remove { ack, .. } => ack,
            Waiter::Move(number) => return Some(number),
        };
        let may_end = self.device.is_writable() || ack == Ack::Buffered;
        let result = result.and(if may_end { Ok(()) } else { Err(Fault::ReadOnly) });
        if result.is_err() || ack == Ack::Buffered || is_durable {
            self.acknowledge(waiter, result);
        } else {
            self.after_flush(Barrier::Waiter(waiter));
        }
        None
    }

    /// Acknowledges a call, or reports its failure.
    pub(crate) fn acknowledge(&mut self, waiter: Waiter, result: Result<(), Fault>) {
        if let Waiter::Remove { token, .. } = waiter
            && let Some(digest) = self.contents.replacements.end(token, result.is_ok())
        {
            // The object that the tombstone was to remove is live again, unless it was put again, removed or given up
            // meanwhile.
            self.contents.give_back(digest, &self.device);
        }
        self.events.push(match (waiter, result) {
            (Waiter::Put { token, ack, .. }, Ok(())) => Event::Stored { token, ack },
            (Waiter::Put { token, .. }, Err(fault)) => Event::StoreFailed { token, fault },
            (Waiter::Remove { token, .. }, Ok(())) => Event::Removed { token },
            (Waiter::Remove { token, .. }, Err(fault)) => Event::RemoveFailed { token, fault },
            (Waiter::Move(_), _) => return,
        });
    }

    /// Evicts a record for reclaim, and reports it.
    pub(crate) fn evict(&mut self, entry: &Entry) {
        if self.contents.evict(entry, &self.device) {
            let (digest, pinned) = (entry.digest(), entry.is_pinned());
            self.events.push(Event::Evicted { digest, pinned });
        }
    }

    /// Handles a failed write to a segment, which takes no more records. Returns the reason for stopping all writes if
    /// too many segments have failed, or if the device takes no writes. `group`: the group whose write failed, if it
    /// was a group.
    fn write_failed(
        &mut self,
        segment: u32,
        group: Option<&EndedGroup>,
        fault: Fault,
        memory: &mut dyn Memory,
    ) -> Option<Reason> {
        self.contents.untracked.note_fault();
        self.contents.untracked.no_footer(segment);
        self.counts.write_faults += 1;
        if let Some(group) = group {
            self.lose_records(group);
        }
        self.counts.bad_segments += u32::from(self.contents.segments.mark_bad(segment));
        self.writer.retire(segment, &mut self.device, &mut self.contents, memory);
        let segments = self.counts.bad_segments;
        match fault {
            Fault::Io => (segments > self.device.config().max_bad_segments).then_some(Reason::WriteErrors { segments }),
            Fault::NoSpace => Some(Reason::NoSpace),
            Fault::ReadOnly => Some(Reason::DeviceReadOnly),
            Fault::Gone => Some(Reason::Gone),
        }
    }

    /// Removes the records of a group that was not written from the index.
    fn lose_records(&mut self, group: &EndedGroup) {
        let Some(entries) = self.writer.entries_of(group.segment) else { return self.contents.untracked.note_all() };
        let lost = entries.iter().filter(|entry| group.sequences.contains(&entry.sequence));
        for entry in lost {
            self.contents.lose(entry.kind, entry.digest, entry.sequence, &self.device);
        }
    }

    /// Handles a segment header that was written or has failed; returns the reason for stopping all writes, if there is
    /// one.
    pub(crate) fn header_written(
        &mut self,
        segment: u32,
        result: Result<(), Fault>,
        memory: &mut dyn Memory,
    ) -> Option<Reason> {
        match result {
            Ok(()) if self.device.is_writable() => {
                self.after_flush(Barrier::Prepared(segment));
                None
            }
            Ok(()) => {
                self.header_durable(segment, Err(Fault::ReadOnly));
                None
            }
            Err(fault) => {
                let reason = self.write_failed(segment, None, fault, memory);
                self.header_durable(segment, Err(fault));
                reason
            }
        }
    }

    /// Handles a segment header that is durable, or never will be.
    pub(crate) fn header_durable(&mut self, segment: u32, result: Result<(), Fault>) {
        let Contents { segments, generations, untracked, .. } = &mut self.contents;
        generations.prepared(result.is_ok());
        if result.is_err() {
            // The former records of the segment are no longer live, and what its header states now is unknown.
            untracked.note_fault();
            segments.discard(segment);
            return;
        }
        untracked.reclaim_durable(generations.durable_oldest_live());
        untracked.settled(segment);
        segments.prepared(segment);
    }

    /// Handles a page of a footer that was written or has failed; returns the reason for stopping all writes, if there
    /// is one.
    pub(crate) fn page_written(&mut self, result: Result<(), Fault>, memory: &mut dyn Memory) -> Option<Reason> {
        let failed = self.writer.page_written(result, &self.device, &mut self.contents)?;
        self.write_failed(failed, None, result.err()?, memory)
    }

    /// Handles the durable footer of a scanned segment: records that it does not list are not live.
    pub(crate) fn footer_durable(&mut self, segment: u32, result: Result<(), Fault>) {
        if result.is_ok() {
            self.contents.untracked.settled(segment);
        }
    }

    /// Ends a flush; returns the barriers that it covers, to be given back to [`Flushes`](flushes::Flushes::recycle).
    pub(crate) fn end_flush(&mut self, result: Result<(), Fault>) -> Vec<Barrier> {
        let covered = self.writer.flushes.end(result.is_ok());
        if result.is_ok() {
            self.contents.untracked.removals_durable(self.writer.flushes.durable_sequence());
        }
        covered
    }

    /// Makes room for a record in the open group. `use_reserve`: the last free segment may be used.
    pub(crate) fn make_room(
        &mut self,
        now_ns: u64,
        need: Need,
        use_reserve: bool,
        memory: &mut dyn Memory,
    ) -> Result<(), NoRoom> {
        self.writer.make_room(now_ns, need, use_reserve, &mut self.device, &mut self.contents, memory)
    }

    /// Begins a read, for which a slot is free.
    pub(crate) fn begin_read(&mut self, read: ReadJob) {
        let is_unwritten = self.writer.groups.hasten(read.offset());
        self.reads.begin(read, !is_unwritten, &mut self.device, &mut self.contents.segments);
    }

    /// Ends a read whose record is no longer needed, and frees its slot.
    pub(crate) fn end_read(&mut self, slot: SlotId) {
        self.reads.end(slot, &self.device, &mut self.contents.segments);
    }

    /// Handles a completed read: gets are answered; reads for reclaim or the scrubber are returned to the caller, and
    /// those for reclaim keep their slot until it ends them.
    pub(crate) fn read_done(
        &mut self,
        slot: SlotId,
        result: Result<(), Fault>,
        memory: &mut dyn Memory,
    ) -> Option<EndedRead> {
        let read = self.reads.verify(slot, result, &mut self.device, memory)?;
        if let Err(miss) = read.verified {
            self.contents.quarantine(&read.entry, miss, &self.device);
        }
        let version = read.entry.version();
        let event = match (read.purpose, read.verified) {
            (Purpose::Get(token), Ok(checksum)) => {
                self.reads.count_hit(&read.entry);
                Event::Got { token, version, checksum }
            }
            (Purpose::Key(token), Ok(_)) => {
                self.reads.keep_key(token, &read, &self.device, memory);
                Event::Key { token, version }
            }
            (Purpose::Get(token) | Purpose::Key(token), Err(miss)) => {
                Event::Missed { token, record: self.contents.view(&read.entry), miss }
            }
            (Purpose::Move(_), _) => return Some(read),
            (Purpose::Scrub, _) => {
                self.end_read(slot);
                return Some(read);
            }
        };
        self.end_read(slot);
        self.events.push(event);
        None
    }

    /// Returns true if nothing is in flight: no operation, no unwritten record, no flush that a call waits for.
    pub(crate) fn is_idle(&self) -> bool {
        let calls = self.reads.is_empty() && self.events.is_empty();
        self.device.is_idle() && self.writer.is_idle() && !self.contents.generations.is_preparing() && calls
    }

    /// Asserts every invariant. Walks the whole index.
    pub(crate) fn check(&self) {
        self.contents.check(&self.device);
        self.writer.check();
    }
}
