//! Opening of a device: superblocks are read, verified against the expected identity, and rewritten with the number of
//! this incarnation.
//!
//! A device without superblocks is formatted if the options allow it and the device is blank (`blank.rs`). Then the
//! headers of all segments are zeroed, durably, before the first superblock is written. Only zeros are written till
//! then, so an interrupted format leaves a device that is blank, or has a valid superblock. Each of the two copies of
//! the superblock is durable before the other is touched.

mod blank;
mod notes;

pub use blank::ENDS_BYTES;
pub(crate) use notes::Notes;

use crate::config::TierConfig;
use crate::contents::{INCARNATIONS_MOST, Phase};
use crate::device::{Device, HEADER_PLACES, Owner};
use crate::format::{
    FORMAT_VERSION, SUPERBLOCK_BYTES, SUPERBLOCK_IO_BYTES, SUPERBLOCK_OFFSETS, Superblock, SuperblockFound,
};
use crate::log::{Barrier, Log};
use crate::memory::{Memory, Span, zero};
use crate::ops::{Fault, Pieces, Priority};
use crate::types::OpenOptions;
use crate::types::errors::OpenError;
use blank::BlankCheck;
use kvplane_proto::narrowing::length_u32;

/// Progress of opening.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Both copies of the superblock, and of the ownership note, are being read.
    Superblocks { left: u8 },
    /// There are no superblocks: the device is checked to be blank.
    Checking,
    /// Segment headers are being zeroed.
    Blanking { next: u32, left: u32 },
    /// The zeroed headers are being made durable.
    Blanked,
    /// A copy of the superblock is being written; `copies` more follow.
    Claiming { copy: usize, copies: u8, formatted: bool },
    /// The device is open, or was refused.
    Over,
}

/// Opening of a device.
#[derive(Debug)]
pub(crate) struct Opening {
    options: OpenOptions,
    /// Contents of both superblock locations; `None` if unreadable.
    superblocks: [Option<SuperblockFound>; 2],
    step: Step,
    blank: BlankCheck,
}

impl Opening {
    /// Begins to read the superblocks; [`Notes`] reads the notes meanwhile.
    pub(crate) fn begin(options: OpenOptions, device: &mut Device) -> Self {
        for copy in 0..2u8 {
            let (at, span) = (usize::from(copy), superblock_span(copy.into(), device));
            device.read(Owner::SuperblockRead(copy), SUPERBLOCK_OFFSETS[at], Pieces::of(&[span]), Priority::Get);
        }
        let step = Step::Superblocks { left: 4 };
        Self { options, superblocks: [None; 2], step, blank: BlankCheck::default() }
    }

    /// Handles a copy of the superblock that was read.
    pub(crate) fn superblock_read(
        &mut self,
        copy: u8,
        result: Result<(), Fault>,
        notes: &mut Notes,
        log: &mut Log,
        memory: &mut dyn Memory,
    ) {
        self.superblocks[usize::from(copy)] = result.ok().map(|()| {
            let mut bytes = [0; SUPERBLOCK_BYTES];
            let span = superblock_span(copy.into(), &log.device);
            memory.read(span.part(0, length_u32(SUPERBLOCK_BYTES)), &mut bytes);
            Superblock::decode(&bytes)
        });
        self.one_read(notes, log, memory);
    }

    /// Counts a superblock or note that was read; after the last, the device is accepted or refused.
    pub(crate) fn one_read(&mut self, notes: &mut Notes, log: &mut Log, memory: &mut dyn Memory) {
        let Step::Superblocks { left } = &mut self.step else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        match self.choose(log.device.config()) {
            Ok((uuid, incarnation)) => {
                log.device.identify(uuid);
                log.contents.sequences.claim(incarnation);
                notes.choose(&log.device, memory);
                self.claim_or_format(log, memory);
            }
            Err(error) => self.refuse(error, log),
        }
    }

    fn refuse(&mut self, error: OpenError, log: &mut Log) {
        self.step = Step::Over;
        log.refuse(error);
    }

    /// Finds the newest superblock and verifies the identity; returns the device's uuid, and the number of this
    /// incarnation.
    fn choose(&self, config: &TierConfig) -> Result<(u128, u64), OpenError> {
        let found = self.superblocks;
        let ours = found.iter().filter_map(|found| match found {
            Some(SuperblockFound::Kvplane(superblock)) => Some(*superblock),
            _ => None,
        });
        let other = found.iter().find_map(|found| match found {
            Some(SuperblockFound::OtherVersion(version)) => Some(*version),
            _ => None,
        });
        // A valid superblock of another version was written by another program, which may have changed anything.
        if let Some(found) = other {
            return Err(OpenError::OtherVersion { found, known: FORMAT_VERSION });
        }
        if let Some(superblock) = ours.max_by_key(|superblock| superblock.generation) {
            self.check_owner(&superblock)?;
            check_layout(&superblock, config)?;
            if superblock.generation + 2 >= INCARNATIONS_MOST {
                return Err(OpenError::TooManyIncarnations { incarnations: superblock.generation });
            }
            return Ok((superblock.uuid, superblock.generation + 1));
        }
        if found.contains(&Some(SuperblockFound::Damaged)) {
            return Err(OpenError::Damaged);
        }
        if found.contains(&Some(SuperblockFound::Foreign)) {
            return Err(OpenError::Foreign);
        }
        if !self.is_without_superblocks() {
            return Err(OpenError::Unreadable);
        }
        Ok((self.options.format_blank.ok_or(OpenError::Blank)?, 1))
    }

    fn is_without_superblocks(&self) -> bool {
        self.superblocks == [Some(SuperblockFound::Blank); 2]
    }

    fn check_owner(&self, superblock: &Superblock) -> Result<(), OpenError> {
        let identity = self.options.identity;
        for (field, found, expected) in [
            ("cluster", superblock.cluster, identity.cluster),
            ("node", superblock.node.0.into(), identity.node.0.into()),
            ("shard", superblock.shard.0.into(), identity.shard.0.into()),
            ("device", superblock.uuid, self.options.expected_uuid.unwrap_or(superblock.uuid)),
        ] {
            if found != expected {
                return Err(OpenError::OtherOwner { field, found, expected });
            }
        }
        Ok(())
    }

    fn claim_or_format(&mut self, log: &mut Log, memory: &mut dyn Memory) {
        if self.is_without_superblocks() {
            self.step = Step::Checking;
            self.blank.begin(&mut log.device);
            return;
        }
        let generation = |copy: usize| match self.superblocks[copy] {
            Some(SuperblockFound::Kvplane(superblock)) => superblock.generation,
            _ => 0,
        };
        // The newest copy stays untouched until the other one is durable.
        let copy = usize::from(generation(0) > generation(1));
        self.claim(copy, 1, false, log, memory);
    }

    /// Writes a copy of the superblock; `copies` more follow.
    fn claim(&mut self, copy: usize, copies: u8, formatted: bool, log: &mut Log, memory: &mut dyn Memory) {
        self.step = Step::Claiming { copy, copies, formatted };
        let (config, identity) = (log.device.config(), self.options.identity);
        let superblock = Superblock {
            generation: log.contents.sequences.incarnation(),
            uuid: log.device.uuid(),
            cluster: identity.cluster,
            node: identity.node,
            shard: identity.shard,
            block_bytes: config.block_bytes,
            footer_page_bytes: config.footer_page_bytes,
            segment_bytes: config.segment_bytes,
            segments: config.segments,
            chunk_bytes: config.chunk_bytes,
        };
        let span = superblock_span(copy, &log.device);
        zero(memory, span.offset, span.bytes);
        memory.write(&superblock.encode(), span.part(0, length_u32(SUPERBLOCK_BYTES)));
        log.device.write(Owner::SuperblockWrite, SUPERBLOCK_OFFSETS[copy], Pieces::of(&[span]));
    }

    /// Handles superblocks or zeroed headers that are durable, or a device that takes no writes, which can still be
    /// read. Returns true if recovery begins now.
    pub(crate) fn durable(&mut self, result: Result<(), Fault>, log: &mut Log, memory: &mut dyn Memory) -> bool {
        match self.step {
            Step::Blanked if result.is_ok() => self.claim(0, 1, true, log, memory),
            Step::Claiming { copy, copies: 1, formatted } if result.is_ok() => {
                self.claim(1 - copy, 0, formatted, log, memory);
            }
            Step::Claiming { formatted: false, .. } => {
                self.step = Step::Over;
                return true;
            }
            Step::Claiming { .. } if result.is_ok() => self.formatted(log),
            Step::Blanked | Step::Claiming { .. } => self.refuse(OpenError::Unwritable, log),
            _ => {}
        }
        false
    }

    fn formatted(&mut self, log: &mut Log) {
        self.step = Step::Over;
        let contents = &mut log.contents;
        for segment in 0..log.device.config().segments {
            contents.segments.found_free(segment);
        }
        contents.sequences.begin();
        log.enter(Phase::Running);
    }

    /// Handles a part of a device without superblocks that was read.
    pub(crate) fn looked_at(&mut self, place: u32, result: Result<(), Fault>, log: &mut Log, memory: &mut dyn Memory) {
        if self.step != Step::Checking {
            return;
        }
        match self.blank.looked_at(place, result, &mut log.device, memory) {
            None => {}
            Some(Ok(())) => self.format(&mut log.device, memory),
            Some(Err(error)) => self.refuse(error, log),
        }
    }

    fn format(&mut self, device: &mut Device, memory: &mut dyn Memory) {
        zero(memory, device.layout().blank, device.config().block_bytes);
        let segments = device.config().segments;
        let first = HEADER_PLACES.min(segments);
        self.step = Step::Blanking { next: first, left: segments };
        (0..first).for_each(|segment| make_blank(segment, device));
    }

    /// Handles a zeroed segment header, or the failure of its write, after which the device takes no writes.
    pub(crate) fn blanked(&mut self, log: &mut Log) {
        let Step::Blanking { next, left } = &mut self.step else { return };
        *left -= 1;
        let (upcoming, is_last) = (*next, *left == 0);
        if upcoming < log.device.config().segments {
            *next += 1;
            make_blank(upcoming, &mut log.device);
        } else if is_last && log.device.is_writable() {
            self.step = Step::Blanked;
            log.after_flush(Barrier::Superblock);
        } else if is_last {
            self.refuse(OpenError::Unwritable, log);
        }
    }
}

const fn superblock_span(copy: usize, device: &Device) -> Span {
    let at = device.layout().superblocks + copy as u64 * SUPERBLOCK_IO_BYTES as u64;
    Span::staging(at, SUPERBLOCK_IO_BYTES)
}

fn check_layout(superblock: &Superblock, config: &TierConfig) -> Result<(), OpenError> {
    for (field, found, expected) in [
        ("block_bytes", superblock.block_bytes.into(), config.block_bytes.into()),
        ("segment_bytes", superblock.segment_bytes, config.segment_bytes),
        ("segments", superblock.segments.into(), config.segments.into()),
        ("footer_page_bytes", superblock.footer_page_bytes.into(), config.footer_page_bytes.into()),
        ("chunk_bytes", superblock.chunk_bytes.into(), config.chunk_bytes.into()),
    ] {
        if found != expected {
            return Err(OpenError::OtherLayout { field, found, expected });
        }
    }
    Ok(())
}

fn make_blank(segment: u32, device: &mut Device) {
    let pieces = Pieces::of(&[Span::staging(device.layout().blank, device.config().block_bytes)]);
    device.write(Owner::Blank(segment), device.segment_at(segment), pieces);
}
