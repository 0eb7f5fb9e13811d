//! Removals: a tombstone at the end of the log.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;

use super::Tier;
use super::groups::{Need, TOMBSTONE_BYTES, Waiter};
use super::start::Phase;
use super::strikes::Struck;
use crate::errors::RemoveError;
use crate::format::Kind;
use crate::index::Entry;
use crate::memory::Memory;
use crate::segments::SegmentState;
use crate::types::{Ack, Removal, Token};

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
        let removal = self.append_removal(now_ns, digest, Waiter::Remove { token, ack }, memory)?;
        let may_return = known.is_some() || self.strikes.may_return(digest);
        if removal == Removal::Pending && may_return && self.is_running() {
            let generation = |entry: Entry| self.segments[self.segment_of(entry.offset())].generation;
            let struck = known.map(|entry| Struck { entry, generation: generation(entry) });
            self.strikes.begin(token, digest, struck);
        }
        Ok(removal)
    }

    /// A removal has ended. One that failed leaves in the tier what it was to strike out, unless that was put again,
    /// removed or given up meanwhile.
    pub(super) fn strike_ended(&mut self, token: Token, good: bool) {
        if let Some(digest) = self.strikes.end(token, good) {
            self.give_back(digest);
        }
    }

    /// The index has again what was struck out in favour of versions none of which came to be.
    pub(super) fn give_back(&mut self, digest: Digest) {
        if self.index.find(digest).is_some() {
            return;
        }
        let Some(Struck { entry, generation }) = self.strikes.give_back(digest) else { return };
        let segment = &self.segments[self.segment_of(entry.offset())];
        // Reclaim may have passed the record over already, as nothing named it.
        let is_there = segment.generation == generation
            && segment.state.has_records()
            && segment.state != SegmentState::Reclaiming;
        if is_there {
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
        let removal = self.append_removal(now_ns, digest, Waiter::Remove { token, ack }, memory);
        if !matches!(removal, Err(RemoveError::Busy)) {
            // No replacement under way gives it back.
            self.strikes.forget(digest);
        }
        removal
    }

    /// A tombstone for an object, where one is needed: the object is hidden at once.
    fn append_removal(
        &mut self,
        now_ns: u64,
        digest: Digest,
        waiter: Waiter,
        memory: &mut dyn Memory,
    ) -> Result<Removal, RemoveError> {
        if let Some(reason) = self.unavailable() {
            if !self.may_have(digest) {
                return Ok(Removal::Absent);
            }
            // It is hidden in this incarnation only: the device has it still, and recovery may not have come to it yet.
            self.untracked.note(digest);
            self.forget(digest);
            if self.phase == Phase::Recovering {
                self.remember_removal(digest, Version(0), self.incarnation << super::SEQUENCE_BITS);
            }
            return Err(RemoveError::Unavailable(reason));
        }
        if !self.is_open() || self.waiters == self.config.max_waiters || self.is_clogged() {
            return Err(RemoveError::Busy);
        }
        let known = self.index.find(digest).copied();
        if known.is_none() && !self.is_doubtful() && !self.strikes.may_return(digest) {
            return Ok(Removal::Absent);
        }
        let bytes = TOMBSTONE_BYTES;
        let need = Need { device_bytes: bytes, buffer_bytes: bytes, entries: 1, tombstones: 1 };
        self.make_room(now_ns, need, true, memory).map_err(|_| RemoveError::Busy)?;
        let version = known.map_or(Version(0), |entry| entry.version());
        let sequence = self.append_tombstone(digest, version, Some(waiter), memory);
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
            let floor = self.incarnation << super::SEQUENCE_BITS;
            self.raise_floor(floor.min(sequence));
        }
    }
}
