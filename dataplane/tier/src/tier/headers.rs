//! Headers of segments: one is made ready ahead of the open segment; at the start all are read.

use super::Tier;
use super::commit::Barrier;
use super::generations::Heritage;
use super::start::Phase;
use crate::format::{SEGMENT_HEADER_BYTES, SEGMENT_HEADER_OFFSETS, SegmentHeader};
use crate::memory::{Memory, Span, zero};
use crate::ops::{Action, Fault, Job, Owner, Pieces, Priority};
use crate::segments::{SegmentEvent, SegmentState};

/// Headers that are read, or made blank, at a time.
pub(super) const PLACES: u32 = 16;

impl Tier {
    /// Prepares the segment that fell free first, when none is ready or being prepared.
    pub(super) fn prepare_work(&mut self, memory: &mut dyn Memory) {
        let busy = self.segments.ready.is_some() || self.generations.is_preparing();
        if busy || !self.is_open() || !self.writable() {
            return;
        }
        let Some(segment) = self.segments.free.pop_front() else { return };
        self.segments.step(segment, SegmentEvent::Prepare);
        let generation = self.take_sequence();
        let Heritage { oldest_live, previous, filled } = self.generations.prepare(segment);
        let at = &mut self.segments[segment];
        (at.generation, at.previous, at.bad, at.visible) = (generation, previous, false, true);
        let header = SegmentHeader { segment, generation, oldest_live, previous, filled };
        let bytes = header.encode(self.uuid);
        let block = self.config.block_bytes;
        zero(memory, self.layout.header, block);
        for at in SEGMENT_HEADER_OFFSETS {
            memory.write(&bytes, Span::staging(self.layout.header + at as u64, SEGMENT_HEADER_BYTES as u32));
        }
        let pieces = Pieces::of(&[Span::staging(self.layout.header, block)]);
        let (owner, action) = (Owner::Prepare(segment), Action::Write { durable: false });
        let offset = self.segment_at(segment);
        self.jobs.submit(Job { owner, action, offset, pieces, priority: Priority::Commit });
    }

    pub(super) fn header_written(&mut self, segment: u32, result: Result<(), Fault>, memory: &mut dyn Memory) {
        match result {
            Ok(()) if self.writable() => self.after_flush(Barrier::Prepared(segment)),
            Ok(()) => self.header_durable(segment, Err(Fault::ReadOnly)),
            Err(fault) => {
                self.write_failed(segment, None, fault, memory);
                self.header_durable(segment, Err(fault));
            }
        }
    }

    pub(super) fn header_durable(&mut self, segment: u32, result: Result<(), Fault>) {
        self.generations.prepared(result.is_ok());
        if result.is_err() {
            // What the segment held before counts no more, and what its header says now is unknown.
            self.untracked.note_fault();
            self.segments.step(segment, SegmentEvent::Fail);
            self.segments.step(segment, SegmentEvent::Discard);
            return;
        }
        self.untracked.reclaim_durable(self.generations.durable_oldest_live());
        self.untracked.settled(segment);
        self.segments.step(segment, SegmentEvent::Prepared);
        self.segments.ready = Some(segment);
    }

    /// How many headers are read at a time.
    pub(super) fn header_places(&self) -> u32 {
        let area = u64::from(self.config.scan_bytes) * u64::from(self.config.scan_buffers);
        u64::from(PLACES).min(area / self.block()) as u32
    }

    /// Reads the header of `segment` into a block of the scan area.
    pub(super) fn read_header(&mut self, segment: u32, place: u32) {
        let block = self.config.block_bytes;
        let at = self.layout.scans + u64::from(place) * u64::from(block);
        let pieces = Pieces::of(&[Span::staging(at, block)]);
        let (owner, action) = (Owner::HeaderRead { segment, place }, Action::Read);
        let offset = self.segment_at(segment);
        self.jobs.submit(Job { owner, action, offset, pieces, priority: Priority::Get });
    }

    pub(super) fn header_read(&mut self, segment: u32, place: u32, result: Result<(), Fault>, memory: &mut dyn Memory) {
        let block = u64::from(self.config.block_bytes);
        let at = self.layout.scans + u64::from(place) * block;
        let copies = SEGMENT_HEADER_OFFSETS.map(|offset| {
            let mut bytes = [0; SEGMENT_HEADER_BYTES];
            memory.read(Span::staging(at + offset as u64, SEGMENT_HEADER_BYTES as u32), &mut bytes);
            bytes
        });
        let decoded = copies.iter().find_map(|bytes| SegmentHeader::decode(bytes, self.uuid).ok());
        let header = decoded.filter(|header| result.is_ok() && header.segment == segment);
        let is_blank = result.is_ok() && copies.iter().flatten().all(|byte| *byte == 0);
        if let Some(header) = header {
            let at = &mut self.segments[segment];
            (at.generation, at.previous) = (header.generation, header.previous);
            self.generations.raise(header.oldest_live);
            self.recovery.filled.extend(header.filled.map(|filled| (filled.generation, filled)));
        }
        self.recovery.header(segment, header.is_none() && !is_blank);
        let Phase::Headers { next, left, .. } = &mut self.phase else { return };
        *left -= 1;
        let (upcoming, is_last) = (*next, *left == 0);
        if upcoming < self.config.segments {
            *next += 1;
            self.read_header(upcoming, place);
        } else if is_last {
            self.headers_known();
        }
    }

    /// Segments without a generation that counts are free; the others are recovered, the newest first.
    fn headers_known(&mut self) {
        let newest = self.segments.iter().map(|(_, segment)| segment.generation).max().unwrap_or(0);
        self.incarnation = self.incarnation.max((newest >> super::SEQUENCE_BITS) + 1);
        self.next_sequence = (self.incarnation << super::SEQUENCE_BITS) + 1;
        self.generations.headers_read();
        self.recovery.report.missing_segments = self.missing_segments();
        let mut dead: Vec<(u64, u32)> = Vec::new();
        let mut live: Vec<(u64, u32)> = Vec::new();
        for (number, segment) in self.segments.iter() {
            let generation = segment.generation;
            if self.recovery.is_damaged(number) {
                continue;
            }
            let is_dead = generation == 0 || generation < self.generations.oldest_live();
            if is_dead { dead.push((generation, number)) } else { live.push((generation, number)) }
        }
        dead.sort_unstable();
        live.sort_unstable_by(|a, b| b.cmp(a));
        for (_, segment) in dead {
            debug_assert_eq!(self.segments[segment].state, SegmentState::Unknown);
            self.segments.step(segment, SegmentEvent::FoundFree);
            self.segments.free.push_back(segment);
        }
        self.recovery.begin(live.into_iter().map(|(_, segment)| segment));
        self.opened(Phase::Recovering);
    }

    /// How many segments are gone that were opened in the incarnation before this one: a header is made when the
    /// segment before it is open, whose own is durable by then and stays as it is until that one is reclaimed. Of
    /// earlier incarnations nobody knows, as a start uses segments anew in which nothing was; nor where a header is
    /// damaged.
    fn missing_segments(&self) -> u32 {
        let all = || self.segments.iter();
        if all().any(|(number, _)| self.recovery.is_damaged(number)) {
            return 0;
        }
        let lately = |generation: u64| (generation >> super::SEQUENCE_BITS) + 1 == self.incarnation;
        let named = all().filter(|(_, segment)| lately(segment.generation) && segment.previous != 0);
        let named =
            named.map(|(_, segment)| segment.previous).filter(|previous| *previous >= self.generations.oldest_live());
        named.filter(|previous| !all().any(|(_, other)| other.generation == *previous)).count() as u32
    }
}
