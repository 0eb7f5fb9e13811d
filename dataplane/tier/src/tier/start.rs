//! Opening: whose device is it? Superblocks are read, checked, and written anew with this incarnation's number.
//!
//! A device without superblocks is formatted when that was asked for and it is blank (`blank.rs`). Each of the two
//! copies of the superblock is durable before the other is touched.

use super::Tier;
use super::commit::Barrier;
use crate::errors::{OpenError, Reason};
use crate::format::{
    FORMAT_VERSION, SUPERBLOCK_BYTES, SUPERBLOCK_IO_BYTES, SUPERBLOCK_OFFSETS, Superblock, SuperblockFound,
};
use crate::memory::{Memory, Span, zero};
use crate::ops::{Action, Fault, Job, Owner, Pieces, Priority};
use crate::segments::SegmentEvent;
use crate::types::Event;

/// How far the start has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Both copies of the superblock, and of the note of owned slots, are being read.
    Superblocks { left: u8 },
    /// Without superblocks: whether all is zero at both ends of the device,
    Ends,
    /// and where segments begin.
    Starts { next: u32, left: u32 },
    /// Segments are made blank.
    Blanking { next: u32, left: u32 },
    /// What was made blank is being made durable.
    Blanked,
    /// A copy of the superblock is written; `copies` more follow.
    Claiming { copy: usize, copies: u8, formatted: bool },
    /// The headers of the segments are being read.
    Headers { next: u32, left: u32 },
    /// Calls are taken; records are being found.
    Recovering,
    /// All records are known.
    Running,
    /// The device is not ours.
    Refused,
}

impl Tier {
    pub(super) fn read_superblocks(&mut self) {
        for copy in 0..2u8 {
            let pieces = Pieces::of(&[self.superblock_span(usize::from(copy))]);
            let (owner, action) = (Owner::SuperblockRead(copy), Action::Read);
            let offset = SUPERBLOCK_OFFSETS[usize::from(copy)];
            self.jobs.submit(Job { owner, action, offset, pieces, priority: Priority::Get });
        }
    }

    const fn superblock_span(&self, copy: usize) -> Span {
        let at = self.layout.superblocks + copy as u64 * SUPERBLOCK_IO_BYTES as u64;
        Span::staging(at, SUPERBLOCK_IO_BYTES)
    }

    pub(super) fn superblock_read(&mut self, copy: u8, result: Result<(), Fault>, memory: &mut dyn Memory) {
        self.superblocks[usize::from(copy)] = result.ok().map(|()| {
            let mut bytes = [0; SUPERBLOCK_BYTES];
            memory.read(self.superblock_span(usize::from(copy)).part(0, SUPERBLOCK_BYTES as u32), &mut bytes);
            Superblock::decode(&bytes)
        });
        self.one_read(memory);
    }

    /// One of the superblocks or notes is read; with the last it is known whose device it is.
    pub(super) fn one_read(&mut self, memory: &mut dyn Memory) {
        let Phase::Superblocks { left } = &mut self.phase else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        match self.choose() {
            Ok(()) => {
                self.choose_note(memory);
                self.start_claim_or_format(memory);
            }
            Err(error) => self.refuse(error),
        }
    }

    pub(super) fn refuse(&mut self, error: OpenError) {
        self.phase = Phase::Refused;
        self.degraded = Some(Reason::Refused(error));
        self.give_up_reclaim();
        self.give_up_scrub();
        self.events.push_back(Event::Refused(error));
    }

    /// Finds the superblock that counts and checks that it is ours. Leaves `uuid` and `incarnation` set.
    fn choose(&mut self) -> Result<(), OpenError> {
        let found = self.superblocks;
        let ours = found.iter().filter_map(|found| match found {
            Some(SuperblockFound::Ours(superblock)) => Some(*superblock),
            _ => None,
        });
        let other = found.iter().find_map(|found| match found {
            Some(SuperblockFound::OtherVersion(version)) => Some(*version),
            _ => None,
        });
        // A whole superblock of another version was written by another program, which may have changed anything.
        if let Some(found) = other {
            return Err(OpenError::OtherVersion { found, known: FORMAT_VERSION });
        }
        if let Some(superblock) = ours.max_by_key(|superblock| superblock.generation) {
            self.check_owner(&superblock)?;
            self.check_layout(&superblock)?;
            if superblock.generation + 2 >= 1 << (64 - super::SEQUENCE_BITS) {
                return Err(OpenError::TooManyIncarnations { incarnations: superblock.generation });
            }
            (self.uuid, self.incarnation) = (superblock.uuid, superblock.generation + 1);
            return Ok(());
        }
        if found.contains(&Some(SuperblockFound::Damaged)) {
            return Err(OpenError::Damaged);
        }
        if found.contains(&Some(SuperblockFound::Foreign)) {
            return Err(OpenError::Foreign);
        }
        if found != [Some(SuperblockFound::Blank); 2] {
            return Err(OpenError::Unreadable);
        }
        self.uuid = self.options.format_blank.ok_or(OpenError::Blank)?;
        self.incarnation = 1;
        Ok(())
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

    fn check_layout(&self, superblock: &Superblock) -> Result<(), OpenError> {
        let config = &self.config;
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

    fn start_claim_or_format(&mut self, memory: &mut dyn Memory) {
        let generation = |found: &Option<SuperblockFound>| match found {
            Some(SuperblockFound::Ours(superblock)) => superblock.generation,
            _ => 0,
        };
        if self.superblocks == [Some(SuperblockFound::Blank); 2] {
            self.look_whether_blank();
            return;
        }
        // The copy that counts stays as it is until the other one is durable.
        let copy = usize::from(generation(&self.superblocks[0]) > generation(&self.superblocks[1]));
        self.phase = Phase::Claiming { copy, copies: 1, formatted: false };
        self.write_superblock(copy, memory);
    }

    fn write_superblock(&mut self, copy: usize, memory: &mut dyn Memory) {
        let (config, identity) = (&self.config, self.options.identity);
        let superblock = Superblock {
            generation: self.incarnation,
            uuid: self.uuid,
            cluster: identity.cluster,
            node: identity.node,
            shard: identity.shard,
            block_bytes: config.block_bytes,
            footer_page_bytes: config.footer_page_bytes,
            segment_bytes: config.segment_bytes,
            segments: config.segments,
            chunk_bytes: config.chunk_bytes,
        };
        let span = self.superblock_span(copy);
        zero(memory, span.offset, span.bytes);
        memory.write(&superblock.encode(), span.part(0, SUPERBLOCK_BYTES as u32));
        let (owner, action, pieces) = (Owner::SuperblockWrite, Action::Write { durable: false }, Pieces::of(&[span]));
        let offset = SUPERBLOCK_OFFSETS[copy];
        self.jobs.submit(Job { owner, action, offset, pieces, priority: Priority::Commit });
    }

    pub(super) fn superblock_written(&mut self, result: Result<(), Fault>, memory: &mut dyn Memory) {
        match result {
            Ok(()) if self.writable() => self.after_flush(Barrier::Superblock),
            Ok(()) => self.superblock_durable(Err(Fault::ReadOnly), memory),
            Err(fault) => {
                self.degrade(Reason::of_superblock(fault), memory);
                self.superblock_durable(result, memory);
            }
        }
    }

    /// What was written of superblocks or blank segments is durable, or the device takes no writes: then what is on it
    /// can still be read.
    pub(super) fn superblock_durable(&mut self, result: Result<(), Fault>, memory: &mut dyn Memory) {
        match self.phase {
            Phase::Blanked if result.is_ok() => {
                self.phase = Phase::Claiming { copy: 0, copies: 1, formatted: true };
                self.write_superblock(0, memory);
            }
            Phase::Claiming { copy, copies: 1, formatted } if result.is_ok() => {
                self.phase = Phase::Claiming { copy: 1 - copy, copies: 0, formatted };
                self.write_superblock(1 - copy, memory);
            }
            Phase::Claiming { formatted: false, .. } => self.read_headers(),
            Phase::Claiming { .. } if result.is_ok() => self.formatted(),
            Phase::Blanked | Phase::Claiming { .. } => self.refuse(OpenError::Unwritable),
            _ => {}
        }
    }

    fn formatted(&mut self) {
        for segment in 0..self.config.segments {
            self.segments.step(segment, SegmentEvent::FoundFree);
            self.segments.free.push_back(segment);
        }
        self.next_sequence = (self.incarnation << super::SEQUENCE_BITS) + 1;
        self.opened(Phase::Running);
    }

    pub(super) fn opened(&mut self, phase: Phase) {
        self.phase = phase;
        self.events.push_back(Event::Opened { uuid: self.uuid, incarnation: self.incarnation });
    }

    fn read_headers(&mut self) {
        let first = self.header_places().min(self.config.segments);
        self.phase = Phase::Headers { next: first, left: self.config.segments };
        (0..first).for_each(|segment| self.read_header(segment, segment));
    }
}
