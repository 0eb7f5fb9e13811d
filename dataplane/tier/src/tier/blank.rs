//! Formatting a blank device. It is blank when everything that formatting would write over is zero, and so are both
//! of its ends, where partition tables, file systems, swap space, volumes and RAID members keep their marks.
//!
//! Then every segment's header is made blank, durably, before the first superblock is written. Only zeros are written
//! till then, so a format that was cut short leaves a blank device, or one that is ours.

use super::Tier;
use super::commit::Barrier;
use super::headers::PLACES;
use super::start::Phase;
use crate::errors::{OpenError, Reason};
use crate::memory::{Memory, Span, zero};
use crate::ops::{Action, Fault, Job, Owner, Pieces, Priority};

/// How many bytes of a blank device must be zero at each end: btrfs has its mark after 64 KiB, partitions begin at one
/// MiB.
pub const ENDS_BYTES: u64 = 1 << 20;
/// How much is read at once: less than any device has to cut up, as polled reads of mapped devices fail that are.
const LOOK_BYTES: u64 = 64 << 10;
/// A window is read so often before what was read there is believed not to be zero, or not to be readable: a single
/// read that fails, or is wrong, says nothing.
const TRIES: u8 = 4;

/// A part of the device that must be zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    offset: u64,
    bytes: u32,
    /// Where in the scan area it is read to.
    at: u64,
    /// How often it was read.
    tries: u8,
}

impl Tier {
    /// Looks whether the device is blank; if so, it is formatted.
    pub(super) fn look_whether_blank(&mut self) {
        self.phase = Phase::Ends;
        self.look_at_ends(0);
    }

    /// Reads on at one of the ends, from `offset` on.
    fn look_at_ends(&mut self, offset: u64) {
        let device = self.config.device_bytes();
        let head = ENDS_BYTES.min(device);
        let tail = head.max(device - head);
        let (offset, end) = if offset < head { (offset, head) } else { (offset.max(tail), device) };
        if offset < end {
            let area = u64::from(self.config.scan_bytes) * u64::from(self.config.scan_buffers);
            let bytes = area.min(LOOK_BYTES).min(end - offset) as u32;
            return self.look_at(Window { offset, bytes, at: self.layout.scans, tries: 0 });
        }
        let first = self.header_places().min(self.config.segments);
        self.phase = Phase::Starts { next: first, left: self.config.segments };
        (0..first)
            .for_each(|segment| self.look_at_start(segment, self.layout.scans + u64::from(segment) * self.block()));
    }

    fn look_at_start(&mut self, segment: u32, at: u64) {
        self.look_at(Window { offset: self.segment_at(segment), bytes: self.config.block_bytes, at, tries: 0 });
    }

    fn look_at(&mut self, window: Window) {
        let window = Window { tries: window.tries + 1, ..window };
        let pieces = Pieces::of(&[Span::staging(window.at, window.bytes)]);
        let (owner, action) = (Owner::Look(window), Action::Read);
        self.jobs.submit(Job { owner, action, offset: window.offset, pieces, priority: Priority::Get });
    }

    pub(super) fn looked_at(&mut self, window: Window, result: Result<(), Fault>, memory: &mut dyn Memory) {
        if !matches!(self.phase, Phase::Ends | Phase::Starts { .. }) {
            return;
        }
        let found = match result {
            Ok(()) => first_not_zero(memory, Span::staging(window.at, window.bytes))
                .map(|at| OpenError::NotBlank { offset: window.offset + at }),
            Err(_) => Some(OpenError::Unreadable),
        };
        match (found, &mut self.phase) {
            (Some(_), _) if window.tries < TRIES => self.look_at(window),
            (Some(error), _) => self.refuse(error),
            (None, Phase::Starts { next, left }) => {
                *left -= 1;
                let (upcoming, is_last) = (*next, *left == 0);
                if upcoming < self.config.segments {
                    *next += 1;
                    self.look_at_start(upcoming, window.at);
                } else if is_last {
                    self.format(memory);
                }
            }
            (None, _) => self.look_at_ends(window.offset + u64::from(window.bytes)),
        }
    }

    fn format(&mut self, memory: &mut dyn Memory) {
        zero(memory, self.layout.blank, self.config.block_bytes);
        let first = PLACES.min(self.config.segments);
        self.phase = Phase::Blanking { next: first, left: self.config.segments };
        (0..first).for_each(|segment| self.make_blank(segment));
    }

    fn make_blank(&mut self, segment: u32) {
        let pieces = Pieces::of(&[Span::staging(self.layout.blank, self.config.block_bytes)]);
        let (owner, action) = (Owner::Blank(segment), Action::Write { durable: false });
        let offset = self.segment_at(segment);
        self.jobs.submit(Job { owner, action, offset, pieces, priority: Priority::Commit });
    }

    pub(super) fn blanked(&mut self, result: Result<(), Fault>, memory: &mut dyn Memory) {
        if let Err(fault) = result {
            self.degrade(Reason::of_superblock(fault), memory);
        }
        let Phase::Blanking { next, left } = &mut self.phase else { return };
        *left -= 1;
        let (upcoming, is_last) = (*next, *left == 0);
        if upcoming < self.config.segments {
            *next += 1;
            self.make_blank(upcoming);
        } else if is_last && self.writable() {
            self.phase = Phase::Blanked;
            self.after_flush(Barrier::Superblock);
        } else if is_last {
            self.refuse(OpenError::Unwritable);
        }
    }
}

/// Where the first byte is that is not zero.
fn first_not_zero(memory: &dyn Memory, span: Span) -> Option<u64> {
    let mut bytes = [0; 4096];
    let mut done = 0;
    while done < span.bytes {
        let now = (span.bytes - done).min(bytes.len() as u32);
        memory.read(span.part(done, now), &mut bytes[..now as usize]);
        if let Some(at) = bytes[..now as usize].iter().position(|byte| *byte != 0) {
            return Some(u64::from(done) + at as u64);
        }
        done += now;
    }
    None
}
