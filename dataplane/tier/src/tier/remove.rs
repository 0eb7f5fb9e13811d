//! Removals: a tombstone at the end of the log.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;

use super::Tier;
use super::groups::{Need, TOMBSTONE_BYTES, Waiter};
use super::start::Phase;
use crate::errors::RemoveError;
use crate::format::Kind;
use crate::index::Entry;
use crate::memory::Memory;
use crate::segments::SegmentState;
use crate::types::{Ack, Removal, Token};

/// The entry of an object until the tombstone is written by which another version replaces it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Struck {
    entry: Entry,
    /// Of the segment that has its record.
    generation: u64,
}

impl Tier {
    /// Removes an object in favour of a version that is to replace it: as [`Self::remove`], but where the tombstone
    /// cannot be written the object is in the tier again, as its replacement does not happen either.
    ///
    /// # Errors
    /// See [`RemoveError`]; after [`RemoveError::Unavailable`] the object is as it was.
    pub fn strike(
        &mut self,
        now_ns: u64,
        digest: Digest,
        ack: Ack,
        token: Token,
        memory: &mut dyn Memory,
    ) -> Result<Removal, RemoveError> {
        if let Some(reason) = self.unavailable().filter(|_| self.may_have(digest)) {
            return Err(RemoveError::Unavailable(reason));
        }
        let known = self.index.find(digest).filter(|entry| !entry.is_removed()).copied();
        let removal = self.remove(now_ns, digest, ack, token, memory)?;
        if let (Removal::Pending, Some(entry)) = (removal, known.filter(|_| self.is_running())) {
            let generation = self.segments[self.segment_of(entry.offset())].generation;
            self.struck.insert(token, Struck { entry, generation });
        }
        Ok(removal)
    }

    /// A removal has ended. One that failed leaves in the tier what it was to strike out, unless that was put again
    /// or given up meanwhile.
    pub(super) fn strike_ended(&mut self, token: Token, good: bool) {
        let Some(Struck { entry, generation }) = self.struck.remove(&token) else { return };
        let segment = &self.segments[self.segment_of(entry.offset())];
        // Reclaim may have passed the record over already, as nothing named it.
        let is_there = segment.generation == generation
            && segment.state.has_records()
            && segment.state != SegmentState::Reclaiming;
        if !good && is_there && self.index.find(entry.digest()).is_none() {
            self.place(entry);
        }
    }

    /// Removes an object: it is hidden at once, and never comes back once [`crate::Event::Removed`] has said so.
    ///
    /// # Errors
    /// See [`RemoveError`].
    pub fn remove(
        &mut self,
        now_ns: u64,
        digest: Digest,
        ack: Ack,
        token: Token,
        memory: &mut dyn Memory,
    ) -> Result<Removal, RemoveError> {
        if let Some(reason) = self.unavailable() {
            if !self.may_have(digest) {
                return Ok(Removal::Absent);
            }
            // It is hidden in this life only: the device has it still, and recovery may not have come to it yet.
            self.untracked.note(digest);
            self.forget(digest);
            if self.phase == Phase::Recovering {
                self.remember_removal(digest, Version(0), self.life << super::SEQUENCE_BITS);
            }
            return Err(RemoveError::Unavailable(reason));
        }
        if !self.is_open() || self.waiters == self.config.max_waiters || self.is_clogged() {
            return Err(RemoveError::Busy);
        }
        let known = self.index.find(digest).copied();
        if known.is_none() && !self.is_doubtful() {
            return Ok(Removal::Absent);
        }
        let bytes = TOMBSTONE_BYTES;
        let need = Need { device_bytes: bytes, buffer_bytes: bytes, entries: 1, tombstones: 1 };
        self.make_room(now_ns, need, true, memory).map_err(|_| RemoveError::Busy)?;
        let version = known.map_or(Version(0), |entry| entry.version());
        let sequence = self.append_tombstone(digest, version, Some(Waiter::Remove { token, ack }), memory);
        self.forget(digest);
        self.waiters += 1;
        self.stats.removes += 1;
        if !self.is_running() {
            self.remember_removal(digest, version, sequence);
        }
        Ok(Removal::Pending)
    }

    /// Until recovery has seen everything, the index holds removals too. If it has no room, everything older than this
    /// one is given up.
    pub(super) fn remember_removal(&mut self, digest: Digest, version: Version, sequence: u64) {
        if !self.place(Entry::new(Kind::Tombstone, digest, version, sequence)) {
            let floor = self.life << super::SEQUENCE_BITS;
            self.raise_floor(floor.min(sequence));
        }
    }
}
