//! Removals: a tombstone at the end of the log.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;

use super::Tier;
use super::groups::{Need, TOMBSTONE_BYTES, Waiter};
use super::start::Phase;
use crate::errors::{OpenError, Reason, RemoveError};
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
            if reason == Reason::Refused(OpenError::Unwritable) {
                // It is blank: nothing can come back from there.
                return Ok(Removal::Absent);
            }
            // It is hidden in this life only: the device has it still.
            self.untracked |= self.index.find(digest).is_some();
            self.forget(digest);
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
        if !matches!(self.phase, Phase::Running) {
            self.remember_removal(digest, version, sequence);
        }
        Ok(Removal::Pending)
    }

    /// Whether the device may have objects that the index does not know and the next start finds: what could not be
    /// read, written or removed, and what was given up because of that.
    #[must_use]
    pub const fn is_untracked(&self) -> bool {
        self.untracked
    }

    /// Whether the next start may find an object: the index knows it, or does not know all that there is.
    #[must_use]
    pub fn may_have(&self, digest: Digest) -> bool {
        let blank = self.unavailable() == Some(Reason::Refused(OpenError::Unwritable));
        let doubtful = self.untracked || !matches!(self.phase, Phase::Running);
        !blank && (doubtful || self.index.find(digest).is_some())
    }

    /// Whether the device may have records, of what the index does not know, that a restart would find: also those
    /// whose removal is not durable yet.
    fn is_doubtful(&self) -> bool {
        self.untracked
            || !matches!(self.phase, Phase::Running)
            || self.reclaim.is_active()
            || self.last_tombstone > self.flushes.durable_sequence()
            || self.durable_oldest_live < self.oldest_live
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
