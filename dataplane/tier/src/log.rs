//! The log of one device: records are appended, read and removed.
//!
//! * [`Contents`] says which records count; [`Writer`] appends, [`Reads`] reads and checks; [`Events`] go to the host.
//! * A put is copied or lent into a *group* of records at the end of the log; groups are written as a whole, several at
//!   a time, and flushed together when a call wants them durable.
//! * The index knows a record from the moment it is appended. A get of what is not written yet waits for its group.
//!
//! [`Log`] owns these components and joins them: a call needs several, and so does the end of a group. Opening,
//! recovery, reclaim and scrubbing stand above it and get it as an argument; it knows nothing of them.

mod calls;
mod events;
mod flushes;
mod footers;
mod groups;
mod headers;
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
use crate::types::{Ack, Event};

/// Calls taken and refused, and writes that failed, since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallCounts {
    pub(crate) puts: u64,
    pub(crate) put_bytes: u64,
    /// Puts refused for want of room.
    pub(crate) put_refusals: u64,
    /// Puts refused because the payload was not what its writer stated.
    pub(crate) bad_payloads: u64,
    pub(crate) removes: u64,
    /// Operations that the device could not write.
    pub(crate) write_faults: u64,
    /// Segments with write errors.
    pub(crate) bad_segments: u32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Log {
    pub(crate) device: Device,
    pub(crate) contents: Contents,
    pub(crate) writer: Writer,
    pub(crate) reads: Reads,
    pub(crate) events: Events,
    pub(crate) sums: ChunkSums,
    counts: CallCounts,
}

impl Log {
    pub(crate) fn new(config: TierConfig) -> Self {
        let device = Device::new(config);
        Self {
            contents: Contents::new(device.config()),
            writer: Writer::new(&device),
            reads: Reads::new(&device),
            events: Events::new(device.config()),
            sums: ChunkSums::default(),
            counts: CallCounts::default(),
            device,
        }
    }

    pub(crate) const fn counts(&self) -> &CallCounts {
        &self.counts
    }

    /// Goes on with `barrier` after a flush that begins from now on.
    pub(crate) fn after_flush(&mut self, barrier: Barrier) {
        self.writer.flushes.after(barrier);
    }

    /// The device is ours: what it has is known from now on as far as `phase` says.
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

    /// No more writes; false where that was so before. What waits for a write is the caller's.
    pub(crate) fn degrade(&mut self, reason: Reason) -> bool {
        if !self.device.degrade(reason) {
            return false;
        }
        self.events.push(Event::Degraded(reason));
        self.contents.untracked.note_fault();
        true
    }

    /// No footer is written any more.
    pub(crate) fn abandon_seals(&mut self) {
        self.writer.seals.abandon(&mut self.contents.segments);
    }

    /// What the writing side does by itself: groups, headers, footers, flushes. `more_copies`: whether reclaim reads
    /// records that are to be appended with those of the open group.
    pub(crate) fn work(&mut self, now_ns: u64, more_copies: bool, memory: &mut dyn Memory) {
        let Self { device, contents, writer, .. } = self;
        writer.group_work(now_ns, more_copies, device, contents, memory);
        headers::prepare(device, contents, memory);
        writer.seals.work(&mut writer.flushes, &contents.segments, device, memory);
        writer.flushes.work(now_ns, device);
    }

    /// When [`Self::work`] may have something to do without any input before.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        let delay_ns = self.device.config().group_delay_ns;
        let group = self.writer.groups.open_since_ns().map(|since| since.saturating_add(delay_ns));
        [group, self.writer.flushes.due_ns(&self.device)].into_iter().flatten().min()
    }

    /// A group is written, or was not: then the index loses its records. Its waiters are the caller's, who gives it
    /// back to [`Self::leave_group`]; with the reason for which nothing may be written any more, if so.
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

    /// Nobody waits for a group any more that is over.
    pub(crate) fn leave_group(&mut self, group: EndedGroup) {
        self.writer.leave_group(group);
        self.reads.wake(&self.writer.groups, &mut self.device);
    }

    /// A record is written, and durable with it or not: its call is acknowledged now or after a flush. The number of
    /// the copy, if it is one.
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

    /// A call has what it waited for, or has failed.
    pub(crate) fn acknowledge(&mut self, waiter: Waiter, result: Result<(), Fault>) {
        if let Waiter::Remove { token, .. } = waiter
            && let Some(digest) = self.contents.strikes.end(token, result.is_ok())
        {
            // What it was to strike out is in the tier again, unless that was put again, removed or given up meanwhile.
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

    /// Reclaim gives up a record.
    pub(crate) fn evict(&mut self, entry: &Entry) {
        if self.contents.evict(entry, &self.device) {
            let (digest, pinned) = (entry.digest(), entry.is_pinned());
            self.events.push(Event::Evicted { digest, pinned });
        }
    }

    /// A write to a segment failed: it takes no more, and too many such segments, or a device that takes nothing, end
    /// all writing, for the reason that is returned. `group`: the one that was lost, if it was one.
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

    /// The index loses the records of a group that was not written.
    fn lose_records(&mut self, group: &EndedGroup) {
        let Some(entries) = self.writer.entries_of(group.segment) else { return self.contents.untracked.note_all() };
        let lost = entries.iter().filter(|entry| group.sequences.contains(&entry.sequence));
        for entry in lost {
            self.contents.lose(entry.kind, entry.digest, entry.sequence, &self.device);
        }
    }

    /// The header of a segment is written, or was not; why nothing may be written any more, if so.
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

    /// The header of a segment is durable, or will not be.
    pub(crate) fn header_durable(&mut self, segment: u32, result: Result<(), Fault>) {
        let Contents { segments, generations, untracked, .. } = &mut self.contents;
        generations.prepared(result.is_ok());
        if result.is_err() {
            // What the segment held before counts no more, and what its header says now is unknown.
            untracked.note_fault();
            segments.discard(segment);
            return;
        }
        untracked.reclaim_durable(generations.durable_oldest_live());
        untracked.settled(segment);
        segments.prepared(segment);
    }

    /// A page of a footer is written, or was not; why nothing may be written any more, if so.
    pub(crate) fn page_written(&mut self, result: Result<(), Fault>, memory: &mut dyn Memory) -> Option<Reason> {
        let failed = self.writer.page_written(result, &self.device, &mut self.contents)?;
        self.write_failed(failed, None, result.err()?, memory)
    }

    /// The footer of a segment that was scanned is durable: what it does not list does not count.
    pub(crate) fn footer_durable(&mut self, segment: u32, result: Result<(), Fault>) {
        if result.is_ok() {
            self.contents.untracked.settled(segment);
        }
    }

    /// A flush is over; the barriers that it covers, to be given back to [`Flushes`](flushes::Flushes::recycle).
    pub(crate) fn end_flush(&mut self, result: Result<(), Fault>) -> Vec<Barrier> {
        let covered = self.writer.flushes.end(result.is_ok());
        if result.is_ok() {
            self.contents.untracked.removals_durable(self.writer.flushes.durable_sequence());
        }
        covered
    }

    /// Makes sure that the open group takes a record; `use_reserve`: from the last free segment, too.
    pub(crate) fn make_room(
        &mut self,
        now_ns: u64,
        need: Need,
        use_reserve: bool,
        memory: &mut dyn Memory,
    ) -> Result<(), NoRoom> {
        self.writer.make_room(now_ns, need, use_reserve, &mut self.device, &mut self.contents, memory)
    }

    /// Begins a read for which a place is free.
    pub(crate) fn begin_read(&mut self, read: ReadJob) {
        let is_unwritten = self.writer.groups.hasten(read.offset());
        self.reads.begin(read, !is_unwritten, &mut self.device, &mut self.contents.segments);
    }

    /// The record of a read that is over is not wanted any more.
    pub(crate) fn end_read(&mut self, slot: SlotId) {
        self.reads.end(slot, &self.device, &mut self.contents.segments);
    }

    /// A read is over: gets are answered; reads for reclaim or the scrubber are the caller's, and those for reclaim
    /// keep their place until it ends them.
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
            (Purpose::Get(token) | Purpose::Key(token), Err(miss)) => Event::Missed { token, miss },
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

    /// Whether nothing is in flight: no operation, no unwritten record, nothing unsynced that is waited for.
    pub(crate) fn is_idle(&self) -> bool {
        let calls = self.reads.is_empty() && self.events.is_empty();
        self.device.is_idle() && self.writer.is_idle() && !self.contents.generations.is_preparing() && calls
    }

    /// Asserts every invariant. Walks everything.
    pub(crate) fn check(&self) {
        self.contents.check(&self.device);
        self.writer.check();
    }
}
