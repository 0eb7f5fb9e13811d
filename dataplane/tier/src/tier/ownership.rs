//! Notes of which slots are owned: read at the start, written when that changes, each durable before it is told.

use super::Tier;
use super::commit::Barrier;
use crate::errors::Reason;
use crate::format::{OWNERSHIP_IO_BYTES, OWNERSHIP_OFFSETS, Ownership};
use crate::memory::{Memory, Span};
use crate::ops::{Action, Fault, Job, Owner, Pieces, Priority};
use crate::types::Event;

/// Notes.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// What the device said at the start.
    found: Option<Ownership>,
    readable: [bool; 2],
    /// The last number, and the copy that is written now or next: the other one counts meanwhile.
    number: u64,
    copy: usize,
    under_way: Option<Pass>,
}

/// A note is written to one copy and, once that is durable, to the other: what damages one place then costs nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pass {
    First,
    Second,
}

impl Tier {
    /// What the device said at the start about its shard's slots; nothing, if no note was ever durable.
    #[must_use]
    pub const fn ownership(&self) -> Option<&Ownership> {
        self.notes.found.as_ref()
    }

    /// Writes down which slots are owned from now on. [`Event::OwnershipNoted`] follows, unless the device takes no
    /// more writes by then. False when that cannot be begun now: one note at a time, and not before the device is open.
    pub fn note_ownership(&mut self, ownership: &Ownership, memory: &mut dyn Memory) -> bool {
        if !self.is_open() || !self.writable() || self.notes.under_way.is_some() {
            return false;
        }
        self.notes.number += 1;
        self.notes.under_way = Some(Pass::First);
        let note = ownership.encode(self.notes.number, self.uuid);
        (0..2).for_each(|copy| memory.write(&note, self.note_span(copy)));
        self.write_note();
        true
    }

    fn write_note(&mut self) {
        let copy = self.notes.copy;
        let pieces = Pieces::of(&[self.note_span(copy)]);
        let (owner, action) = (Owner::NoteWrite, Action::Write { durable: false });
        self.jobs.submit(Job { owner, action, offset: OWNERSHIP_OFFSETS[copy], pieces, priority: Priority::Commit });
    }

    const fn note_span(&self, copy: usize) -> Span {
        Span::staging(self.layout.notes + copy as u64 * OWNERSHIP_IO_BYTES as u64, OWNERSHIP_IO_BYTES)
    }

    pub(super) fn read_notes(&mut self) {
        for copy in 0..2u8 {
            let pieces = Pieces::of(&[self.note_span(usize::from(copy))]);
            let (owner, action) = (Owner::NoteRead(copy), Action::Read);
            let offset = OWNERSHIP_OFFSETS[usize::from(copy)];
            self.jobs.submit(Job { owner, action, offset, pieces, priority: Priority::Get });
        }
    }

    pub(super) fn note_read(&mut self, copy: u8, result: Result<(), Fault>) {
        self.notes.readable[usize::from(copy)] = result.is_ok();
    }

    /// Finds the newest note, once it is known whose device this is.
    pub(super) fn choose_note(&mut self, memory: &dyn Memory) {
        for copy in 0..2 {
            if !self.notes.readable[copy] {
                continue;
            }
            let mut bytes = vec![0; OWNERSHIP_IO_BYTES as usize];
            memory.read(self.note_span(copy), &mut bytes);
            if let Ok((number, found)) = Ownership::decode(&bytes, self.uuid)
                && number > self.notes.number
            {
                (self.notes.number, self.notes.copy, self.notes.found) = (number, 1 - copy, Some(found));
            }
        }
    }

    pub(super) fn note_written(&mut self, result: Result<(), Fault>, memory: &mut dyn Memory) {
        if let Err(fault) = result {
            self.degrade(Reason::of_superblock(fault), memory);
        }
        if self.writable() {
            self.after_flush(Barrier::Note);
        }
    }

    pub(super) fn note_durable(&mut self, result: Result<(), Fault>) {
        let pass = self.notes.under_way.take();
        if result.is_err() {
            return;
        }
        self.notes.copy = 1 - self.notes.copy;
        if pass == Some(Pass::First) {
            self.events.push_back(Event::OwnershipNoted);
            self.notes.under_way = Some(Pass::Second);
            self.write_note();
        }
    }
}
