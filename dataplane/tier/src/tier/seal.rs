//! Sealing: when no more goes to a segment, its records are made durable, then its footer is written, page by page.
//!
//! A footer is not waited for: if it is lost, the segment is scanned.

use super::Tier;
use super::commit::Barrier;
use crate::format::{FilledNote, FooterEntry, FooterPage, Kind};
use crate::memory::{Memory, Span};
use crate::ops::{Action, Fault, Job, Owner, Pieces, Priority};
use crate::segments::{SegmentEvent, SegmentState};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Groups are still being written.
    Groups,
    /// A flush is waited for.
    Flush,
    /// So many pages are written.
    Pages(u32),
    /// There will be no footer; its groups end yet.
    Given,
}

/// A segment being sealed.
#[derive(Debug)]
pub(super) struct Seal {
    pub(super) segment: u32,
    pub(super) entries: Vec<FooterEntry>,
    pub(super) durable_sequence: u64,
    stage: Stage,
    writing: bool,
}

impl Tier {
    /// Whether there is a list of records to be had for the segment after the open one.
    pub(super) fn may_seal(&self) -> bool {
        self.seals.len() + 1 < super::ENTRY_LISTS && !self.spare_entries.is_empty()
    }

    /// Closes the open segment early when it has a good part of an index that is half full: objects shorter than the
    /// index has room for would all lie in a few segments, and reclaim would give up that many of them at once.
    pub(super) fn fill_crowded_segment(&mut self, memory: &mut dyn Memory) {
        let Some(open) = &self.log.open else { return };
        // Those that may be full at a time are to hold the whole index, with as much to spare.
        let segments = self.config.segments.saturating_sub(self.config.free_segments_low).clamp(1, 16);
        let share = self.config.max_records.div_ceil(segments).saturating_mul(2);
        let crowded = self.is_running() && self.index.len() >= self.config.max_records / 2;
        let next = self.segments.ready.is_some() && !self.segments.free.is_empty();
        if crowded && next && self.segments[open.segment].live_records >= share && self.may_seal() {
            self.close_group(memory);
            self.fill_segment();
        }
    }

    /// No more goes to the open segment.
    pub(super) fn fill_segment(&mut self) {
        let Some(open) = self.log.open.take() else { return };
        self.log.filled += 1;
        let generation = self.segments[open.segment].generation;
        let last = open.entries.iter().rev().find(|entry| entry.kind == Kind::Tombstone);
        let last_tombstone = last.map_or(0, |entry| entry.sequence);
        self.generations.filled(FilledNote { generation, last_tombstone, tombstones: open.tombstones });
        if self.segments[open.segment].state == SegmentState::Open {
            self.segments.step(open.segment, SegmentEvent::Fill);
        }
        self.seal(open.segment, open.entries, open.durable_sequence);
    }

    /// Begins to seal a segment with these records.
    pub(super) fn seal(&mut self, segment: u32, entries: Vec<FooterEntry>, durable_sequence: u64) {
        let given = self.segments[segment].state == SegmentState::Retired || !self.writable();
        let stage = if given { Stage::Given } else { Stage::Groups };
        self.seals.push_back(Seal { segment, entries, durable_sequence, stage, writing: false });
        if given {
            self.retire_state(segment);
        }
    }

    fn retire_state(&mut self, segment: u32) {
        if self.segments[segment].state != SegmentState::Dead {
            self.segments.step(segment, SegmentEvent::Fail);
        }
    }

    /// A write to a segment failed: it gets no more records and no footer.
    pub(super) fn retire(&mut self, segment: u32, memory: &mut dyn Memory) {
        if self.log.open.as_ref().is_some_and(|open| open.segment == segment) {
            self.segments.step(segment, SegmentEvent::Fail);
            // What is in the open group goes to the same segment still; it is well if it is written.
            self.close_group(memory);
            self.fill_segment();
        }
        if let Some(seal) = self.seals.iter_mut().find(|seal| seal.segment == segment && seal.stage != Stage::Given) {
            seal.stage = Stage::Given;
            self.segments.step(segment, SegmentEvent::Fail);
        }
    }

    /// No footer is written any more.
    pub(super) fn abandon_seals(&mut self) {
        for at in 0..self.seals.len() {
            let segment = self.seals[at].segment;
            if self.seals[at].stage != Stage::Given {
                self.seals[at].stage = Stage::Given;
                self.retire_state(segment);
            }
        }
    }

    pub(super) fn seal_work(&mut self, memory: &mut dyn Memory) {
        for at in 0..self.seals.len() {
            let segment = self.seals[at].segment;
            if self.seals[at].stage == Stage::Groups && self.segments[segment].groups == 0 {
                self.seals[at].stage = Stage::Flush;
                self.after_flush(Barrier::Records(segment));
            }
        }
        let over = |seal: &Seal| seal.stage == Stage::Given && !seal.writing;
        while let Some(at) = self.seals.iter().position(|seal| over(seal) && self.segments[seal.segment].groups == 0) {
            self.return_list(at);
        }
        if !self.seals.iter().any(|seal| seal.writing) {
            self.write_page(memory);
        }
    }

    fn return_list(&mut self, at: usize) {
        if let Some(mut seal) = self.seals.remove(at) {
            seal.entries.clear();
            self.spare_entries.push(seal.entries);
        }
    }

    /// The records of a segment are durable.
    pub(super) fn records_durable(&mut self, segment: u32, result: Result<(), Fault>) {
        let Some(seal) = self.seals.iter_mut().find(|seal| seal.segment == segment) else { return };
        if seal.stage == Stage::Flush && result.is_ok() {
            seal.stage = Stage::Pages(0);
        }
    }

    fn write_page(&mut self, memory: &mut dyn Memory) {
        let found = self.seals.iter().position(|seal| matches!(seal.stage, Stage::Pages(_)));
        let Some(at) = found else { return };
        let (page_bytes, uuid) = (self.config.footer_page_bytes, self.uuid);
        let per_page = FooterPage::capacity(page_bytes);
        let seal = &mut self.seals[at];
        let Stage::Pages(page) = seal.stage else { return };
        let generation = self.segments[seal.segment].generation;
        let pages = (seal.entries.len() as u32).div_ceil(per_page).max(1);
        let first = (page * per_page) as usize;
        let listed = &seal.entries[first..seal.entries.len().min(first + per_page as usize)];
        let (segment, entries, durable_sequence) = (seal.segment, listed.len() as u32, seal.durable_sequence);
        let header = FooterPage { segment, generation, page, pages, entries, durable_sequence };
        self.scratch.resize(page_bytes as usize, 0);
        header.encode(uuid, listed, &mut self.scratch);
        seal.writing = true;
        let span = Span::staging(self.layout.page, page_bytes);
        memory.write(&self.scratch, span);
        let offset = self.page_at(segment, page);
        let (owner, action, pieces) = (Owner::Page, Action::Write { durable: false }, Pieces::of(&[span]));
        self.jobs.submit(Job { owner, action, offset, pieces, priority: Priority::Commit });
    }

    /// Where a page of a footer is on the device.
    pub(super) const fn page_at(&self, segment: u32, page: u32) -> u64 {
        self.segment_at(segment + 1) - (page as u64 + 1) * self.config.footer_page_bytes as u64
    }

    pub(super) fn page_written(&mut self, result: Result<(), Fault>, memory: &mut dyn Memory) {
        let Some(at) = self.seals.iter().position(|seal| seal.writing) else { return };
        let seal = &mut self.seals[at];
        seal.writing = false;
        let segment = seal.segment;
        if let Err(fault) = result {
            return self.write_failed(segment, None, fault, memory);
        }
        let Stage::Pages(page) = &mut seal.stage else { return };
        *page += 1;
        let (written, per_page) = (*page, FooterPage::capacity(self.config.footer_page_bytes));
        if written == (seal.entries.len() as u32).div_ceil(per_page).max(1) {
            self.segments.step(segment, SegmentEvent::Seal);
            self.stats.sealed += 1;
            self.return_list(at);
            if self.untracked.gets_footer(segment) {
                self.after_flush(Barrier::Footer(segment));
            }
        }
    }

    /// The footer of a segment that was scanned is durable: what it does not list does not count.
    pub(super) fn footer_durable(&mut self, segment: u32, result: Result<(), Fault>) {
        if result.is_ok() {
            self.untracked.settled(segment);
        }
    }
}
