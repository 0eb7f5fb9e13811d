//! Sealing of segments: once a segment takes no more records, its records are made durable, then its footer is written,
//! page by page.
//!
//! No call waits for a footer: if it is lost, the segment is scanned. This module also owns the lists of records: the
//! open segment, each segment being sealed, and a scanned segment have one each.

use kvplane_proto::narrowing::length_u32;
use std::collections::VecDeque;

use super::flushes::{Barrier, Flushes};
use crate::config::Layout;
use crate::contents::{SegmentEvent, SegmentState, Segments};
use crate::device::{Device, Owner};
use crate::format::{FooterEntry, FooterPage};
use crate::memory::{Memory, Span};
use crate::ops::{Fault, Pieces};

/// Number of lists of a segment's records: one for the open segment, others for those being sealed or scanned.
const LISTS: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Groups are still being written.
    Groups,
    /// Waits for a flush of the records.
    Flush,
    /// This number of pages is written.
    Pages(u32),
    /// There will be no footer; groups may still be in flight.
    Given,
}

/// Segment being sealed.
#[derive(Debug)]
struct Seal {
    segment: u32,
    entries: Vec<FooterEntry>,
    durable_sequence: u64,
    stage: Stage,
    writing: bool,
}

/// Segments being sealed, and spare lists of records.
#[derive(Debug)]
pub(crate) struct Seals {
    queue: VecDeque<Seal>,
    spare_lists: Vec<Vec<FooterEntry>>,
    page: Vec<u8>,
    /// Segments sealed since the start.
    sealed: u64,
}

impl Seals {
    pub(super) fn new(device: &Device) -> Self {
        let config = device.config();
        let entries = Layout::entries_most(config) as usize;
        Self {
            queue: VecDeque::with_capacity(LISTS),
            spare_lists: (0..LISTS).map(|_| Vec::with_capacity(entries)).collect(),
            page: vec![0; config.footer_page_bytes as usize],
            sealed: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) const fn sealed(&self) -> u64 {
        self.sealed
    }

    /// Returns true if a list of records remains for the segment after the open one.
    pub(super) fn may_seal(&self) -> bool {
        self.queue.len() + 1 < LISTS && !self.spare_lists.is_empty()
    }

    /// Returns the number of unused lists.
    pub(super) const fn spare_lists(&self) -> usize {
        self.spare_lists.len()
    }

    pub(crate) fn take_list(&mut self) -> Option<Vec<FooterEntry>> {
        self.spare_lists.pop()
    }

    pub(crate) fn return_list(&mut self, mut entries: Vec<FooterEntry>) {
        entries.clear();
        self.spare_lists.push(entries);
    }

    /// Returns the records of a segment that is being sealed.
    pub(super) fn entries_of(&self, segment: u32) -> Option<&Vec<FooterEntry>> {
        self.queue.iter().find(|seal| seal.segment == segment).map(|seal| &seal.entries)
    }

    /// Begins to seal a segment with these records.
    pub(crate) fn seal(
        &mut self,
        segment: u32,
        entries: Vec<FooterEntry>,
        durable_sequence: u64,
        is_writable: bool,
        segments: &mut Segments,
    ) {
        let given = segments[segment].state == SegmentState::Retired || !is_writable;
        let stage = if given { Stage::Given } else { Stage::Groups };
        self.queue.push_back(Seal { segment, entries, durable_sequence, stage, writing: false });
        if given {
            retire_state(segment, segments);
        }
    }

    /// Gives up the footer of a segment after a failed write.
    pub(super) fn retire(&mut self, segment: u32, segments: &mut Segments) {
        if let Some(seal) = self.queue.iter_mut().find(|seal| seal.segment == segment && seal.stage != Stage::Given) {
            seal.stage = Stage::Given;
            segments.step(segment, SegmentEvent::Fail);
        }
    }

    /// Abandons all footers.
    pub(crate) fn abandon(&mut self, segments: &mut Segments) {
        for seal in &mut self.queue {
            if seal.stage != Stage::Given {
                seal.stage = Stage::Given;
                retire_state(seal.segment, segments);
            }
        }
    }

    /// Advances every segment whose groups are complete, and writes a page of one.
    pub(crate) fn work(
        &mut self,
        flushes: &mut Flushes,
        segments: &Segments,
        device: &mut Device,
        memory: &mut dyn Memory,
    ) {
        for seal in &mut self.queue {
            if seal.stage == Stage::Groups && segments[seal.segment].groups == 0 {
                seal.stage = Stage::Flush;
                flushes.after(Barrier::Records(seal.segment));
            }
        }
        let over = |seal: &Seal| seal.stage == Stage::Given && !seal.writing && segments[seal.segment].groups == 0;
        while let Some(at) = self.queue.iter().position(over) {
            self.drop_seal(at);
        }
        if !self.queue.iter().any(|seal| seal.writing) {
            self.write_page(segments, device, memory);
        }
    }

    fn drop_seal(&mut self, at: usize) {
        if let Some(seal) = self.queue.remove(at) {
            self.return_list(seal.entries);
        }
    }

    /// Handles the flush of a segment's records, or its failure.
    pub(crate) fn records_durable(&mut self, segment: u32, result: Result<(), Fault>) {
        let Some(seal) = self.queue.iter_mut().find(|seal| seal.segment == segment) else { return };
        if seal.stage == Stage::Flush && result.is_ok() {
            seal.stage = Stage::Pages(0);
        }
    }

    fn write_page(&mut self, segments: &Segments, device: &mut Device, memory: &mut dyn Memory) {
        let found = self.queue.iter_mut().find_map(|seal| match seal.stage {
            Stage::Pages(page) => Some((seal, page)),
            _ => None,
        });
        let Some((seal, page)) = found else { return };
        let page_bytes = device.config().footer_page_bytes;
        let per_page = FooterPage::capacity(page_bytes);
        let generation = segments[seal.segment].generation;
        let pages = length_u32(seal.entries.len()).div_ceil(per_page).max(1);
        let first = (page * per_page) as usize;
        let listed = &seal.entries[first..seal.entries.len().min(first + per_page as usize)];
        let (segment, entries, durable_sequence) = (seal.segment, length_u32(listed.len()), seal.durable_sequence);
        let names_tenants = true;
        let header = FooterPage { segment, generation, page, pages, entries, durable_sequence, names_tenants };
        header.encode(device.uuid(), listed, &mut self.page);
        seal.writing = true;
        let span = Span::staging(device.layout().page, page_bytes);
        memory.write(&self.page, span);
        device.write(Owner::Page, device.page_at(segment, page), Pieces::of(&[span]));
    }

    /// Handles a page that was written or has failed; returns its segment, and true if the segment is sealed with it.
    pub(super) fn page_written(&mut self, result: Result<(), Fault>, page_bytes: u32) -> Option<(u32, bool)> {
        let at = self.queue.iter().position(|seal| seal.writing)?;
        let seal = &mut self.queue[at];
        seal.writing = false;
        let segment = seal.segment;
        if result.is_err() {
            return Some((segment, false));
        }
        let Stage::Pages(page) = &mut seal.stage else { return Some((segment, false)) };
        *page += 1;
        let is_last = *page == length_u32(seal.entries.len()).div_ceil(FooterPage::capacity(page_bytes)).max(1);
        if is_last {
            self.sealed += 1;
            self.drop_seal(at);
        }
        Some((segment, is_last))
    }

    /// Asserts that no list is lost or duplicated.
    pub(super) fn check(&self, open: usize) {
        let lists = self.spare_lists.len() + self.queue.len() + open;
        assert!(lists <= LISTS, "{lists} lists of records");
    }
}

fn retire_state(segment: u32, segments: &mut Segments) {
    if segments[segment].state != SegmentState::Dead {
        segments.step(segment, SegmentEvent::Fail);
    }
}
