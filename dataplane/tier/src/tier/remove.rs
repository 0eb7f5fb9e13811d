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
use crate::types::{Ack, Removal, Token};

impl Tier {
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
