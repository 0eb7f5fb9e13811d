//! Ownership notes: read at the start, written when ownership changes, each durable before the host is notified.

use crate::device::{Device, Owner};
use crate::format::{OWNERSHIP_IO_BYTES, OWNERSHIP_OFFSETS, Ownership};
use crate::log::Log;
use crate::memory::{Memory, Span};
use crate::ops::{Fault, Pieces, Priority};
use crate::types::Event;

/// Ownership notes of a device.
#[derive(Debug)]
pub(crate) struct Notes {
    /// Newest note at the start.
    found: Option<Ownership>,
    readable: [bool; 2],
    /// Number of the last note, and the copy that is written now or next; the other copy is valid meanwhile.
    number: u64,
    copy: usize,
    pass: Option<Pass>,
}

/// A note is written to one copy and, once that is durable, to the other, so that damage to one location loses nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pass {
    First,
    Second,
}

impl Notes {
    /// Begins to read both copies.
    pub(crate) fn begin(device: &mut Device) -> Self {
        for copy in 0..2u8 {
            let (at, span) = (usize::from(copy), note_span(copy.into(), device));
            device.read(Owner::NoteRead(copy), OWNERSHIP_OFFSETS[at], Pieces::of(&[span]), Priority::Get);
        }
        Self { found: None, readable: [false; 2], number: 0, copy: 0, pass: None }
    }

    /// Returns the newest note at the start; `None` if no note was ever durable.
    pub(crate) const fn found(&self) -> Option<&Ownership> {
        self.found.as_ref()
    }

    /// Handles a copy that was read, or could not be.
    pub(crate) const fn read(&mut self, copy: u8, result: Result<(), Fault>) {
        self.readable[copy as usize] = result.is_ok();
    }

    /// Finds the newest note, once the device's uuid is known.
    pub(super) fn choose(&mut self, device: &Device, memory: &dyn Memory) {
        for copy in 0..2 {
            if !self.readable[copy] {
                continue;
            }
            let mut bytes = vec![0; OWNERSHIP_IO_BYTES as usize];
            memory.read(note_span(copy, device), &mut bytes);
            if let Ok((number, found)) = Ownership::decode(&bytes, device.uuid())
                && number > self.number
            {
                (self.number, self.copy, self.found) = (number, 1 - copy, Some(found));
            }
        }
    }

    /// Begins to write a note; returns false if that is not possible now.
    pub(crate) fn note(&mut self, ownership: &Ownership, log: &mut Log, memory: &mut dyn Memory) -> bool {
        let device = &mut log.device;
        if !log.contents.is_open() || !device.is_writable() || self.pass.is_some() {
            return false;
        }
        self.number += 1;
        self.pass = Some(Pass::First);
        let note = ownership.encode(self.number, device.uuid());
        (0..2).for_each(|copy| memory.write(&note, note_span(copy, device)));
        self.write(device);
        true
    }

    fn write(&self, device: &mut Device) {
        let pieces = Pieces::of(&[note_span(self.copy, device)]);
        device.write(Owner::NoteWrite, OWNERSHIP_OFFSETS[self.copy], pieces);
    }

    /// Handles a copy of the note that is durable, or never will be.
    pub(crate) fn durable(&mut self, result: Result<(), Fault>, log: &mut Log) {
        let pass = self.pass.take();
        if result.is_err() {
            return;
        }
        self.copy = 1 - self.copy;
        if pass == Some(Pass::First) {
            log.events.push(Event::OwnershipNoted);
            self.pass = Some(Pass::Second);
            self.write(&mut log.device);
        }
    }
}

const fn note_span(copy: usize, device: &Device) -> Span {
    let at = device.layout().notes + copy as u64 * OWNERSHIP_IO_BYTES as u64;
    Span::staging(at, OWNERSHIP_IO_BYTES)
}
