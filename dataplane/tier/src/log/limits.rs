//! Limits of tenants: records of a tenant that is above its limit are evicted, oldest first.
//!
//! An eviction writes a tombstone, as a removal does: the record is not found by the next start, and an older version
//! of the object never takes the place of a newer one. Evictions run ahead by a 64th of the limit, so that tombstones
//! share blocks. Those for a limit that was lowered, or for a tenant that was removed, are paced: many records would
//! otherwise take the device from everybody else at once.

use kvplane_proto::digest::Digest;

use super::Log;
use super::room::{Need, segment_room};
use crate::contents::{Contents, NextEvicted};
use crate::device::Device;
use crate::memory::Memory;
use crate::types::errors::PutError;
use crate::types::{Event, TenantLimit};

/// Most records that one call evicts.
const EVICTED_AT_ONCE: usize = 64;
/// Part of the device that reclaim can keep for tenants with limits, in percent: the rest is what it works with.
const KEPT_PERCENT: u64 = 70;

impl Log {
    /// Sets the limits of tenants; those that are not listed have none.
    pub(crate) fn set_limits(&mut self, limits: &[TenantLimit]) {
        let capacity_bytes = self.capacity_bytes() / 100 * KEPT_PERCENT;
        self.contents.accounts.set_limits(limits, capacity_bytes);
        self.limits_to_check = self.contents.accounts.limited().len();
    }

    /// Returns the bytes of the device that records can take.
    pub(crate) const fn capacity_bytes(&self) -> u64 {
        segment_room(&self.device) * self.device.config().segments as u64
    }

    /// Evicts records of tenants whose limits were lowered, a few at a time, and builds the queues that this needs.
    pub(crate) fn limit_tenants(&mut self, now_ns: u64, memory: &mut dyn Memory) {
        self.limit_pace.rest();
        // A second time if the first has found that a queue is to be built anew.
        for _ in 0..2 {
            self.contents.walk_accounts(&self.device);
            let may_evict = self.contents.is_running() && self.device.is_writable();
            while let Some(at) = self.limits_to_check.checked_sub(1).filter(|_| may_evict) {
                let account = self.contents.accounts.limited()[at];
                if self.keep_within_limit(now_ns, account, None, memory) == Err(PutError::Busy) {
                    break;
                }
                self.limits_to_check = at;
            }
            if self.contents.accounts.walk().is_none() {
                return;
            }
        }
    }

    /// Makes room within the limit of an account, for a record of a digest and this many bytes if there is one: evicts
    /// its oldest records that are not pinned. A record that is replaced makes room, too.
    ///
    /// # Errors
    /// [`PutError::Quota`] if that would not suffice, and [`PutError::Busy`] while it has not sufficed yet.
    pub(crate) fn keep_within_limit(
        &mut self,
        now_ns: u64,
        account: u16,
        record: Option<(Digest, u64)>,
        memory: &mut dyn Memory,
    ) -> Result<(), PutError> {
        let bytes = record.map_or(0, |(_, bytes)| bytes);
        for evicted in 0..EVICTED_AT_ONCE {
            let over = self.over_limit(account, record);
            if over.is_none() && evicted == 0 {
                return Ok(());
            }
            // Beyond what has to go, evictions run a little ahead.
            let unless_over = |error| if over.is_some() { Err(error) } else { Ok(()) };
            let refused = PutError::Quota { record_bytes: bytes, limit_bytes: over.unwrap_or(0) };
            if over.is_some_and(|limit_bytes| bytes > limit_bytes) {
                return Err(refused);
            }
            // During recovery the queue is not known; the limit holds from its end on.
            if !self.contents.is_running() {
                return Ok(());
            }
            let entry = match self.contents.next_evicted(account, &self.device) {
                NextEvicted::Entry(entry) => entry,
                NextEvicted::Unknown => return unless_over(PutError::Busy),
                NextEvicted::None => return unless_over(refused),
            };
            let (digest, record_bytes) = (entry.digest(), self.device.record_bytes(entry.shape()));
            let more = growth(account, record, &self.contents, &self.device);
            if over.is_none() && !self.contents.accounts.may_run_ahead(account, more, record_bytes) {
                return Ok(());
            }
            if record.is_none() && !self.limit_pace.take(now_ns) {
                return unless_over(PutError::Busy);
            }
            if self.events.is_clogged() || self.make_room(now_ns, Need::TOMBSTONE, true, memory).is_err() {
                return unless_over(PutError::Busy);
            }
            let Self { device, contents, writer, .. } = self;
            writer.append_tombstone(digest, entry.version(), None, device, contents, memory);
            contents.replacements.forget(digest);
            contents.forget(digest, device);
            contents.accounts.take_oldest(account);
            contents.accounts.count_eviction(account, record_bytes);
            self.events.push(Event::Evicted { digest, pinned: false });
        }
        match self.over_limit(account, record) {
            Some(_) => Err(PutError::Busy),
            None => Ok(()),
        }
    }

    /// Returns the limit of an account, if its records exceed it with this one.
    fn over_limit(&self, account: u16, record: Option<(Digest, u64)>) -> Option<u64> {
        self.contents.accounts.over_limit(account, growth(account, record, &self.contents, &self.device))
    }
}

/// Returns the bytes by which a record makes an account grow: one that is replaced goes.
fn growth(account: u16, record: Option<(Digest, u64)>, contents: &Contents, device: &Device) -> u64 {
    record.map_or(0, |(digest, bytes)| {
        let replaced = contents.index.find(digest).filter(|entry| !entry.is_removed());
        let replaced = replaced.filter(|entry| entry.account() == account);
        bytes.saturating_sub(replaced.map_or(0, |entry| device.record_bytes(entry.shape())))
    })
}
