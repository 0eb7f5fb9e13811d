//! Calls of the host: objects are put, removed, read and listed; reclaim and scrubbing are configured.

use kvplane_proto::digest::Digest;

use super::{Tier, TierStats, TierTenants};
use crate::config::TierConfig;
use crate::format::Ownership;
use crate::log::RemoveCall;
use crate::memory::Memory;
use crate::ops::Priority;
use crate::scrub::ScrubReport;
use crate::types::errors::{GetError, PutError, Reason, RemoveError};
use crate::types::{Ack, DamageCounters, Get, Put, PutReceipt, RecordView, Removal, Token};

/// Objects: puts, removals, gets.
impl Tier {
    /// Puts an object. [`crate::Event::Stored`] or [`crate::Event::StoreFailed`] follows, and
    /// [`crate::Event::Released`] if the payload is lent. From now on gets return this object; acknowledgements of an
    /// earlier object of the digest no longer hold.
    ///
    /// # Errors
    /// See [`PutError`]; nothing has changed.
    pub fn put(&mut self, now_ns: u64, put: &Put<'_>, memory: &mut dyn Memory) -> Result<PutReceipt, PutError> {
        self.log.put(now_ns, put, memory)
    }

    /// Removes an object that a newer version is to replace: as [`Self::remove`], but if the tombstone cannot be
    /// written the object is in the tier again, as its replacement fails too.
    ///
    /// # Errors
    /// See [`RemoveError`]; after [`RemoveError::Unavailable`] the object is unchanged.
    pub fn remove_replaced(
        &mut self,
        now_ns: u64,
        digest: Digest,
        ack: Ack,
        token: Token,
        memory: &mut dyn Memory,
    ) -> Result<Removal, RemoveError> {
        let call = RemoveCall { digest, ack, token, is_reclaiming: self.reclaim.is_active() };
        self.log.remove_replaced(now_ns, &call, memory)
    }

    /// Removes an object: it is hidden at once, and never comes back after [`crate::Event::Removed`].
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
        let call = RemoveCall { digest, ack, token, is_reclaiming: self.reclaim.is_active() };
        self.log.remove(now_ns, &call, memory)
    }

    /// Begins to read an object. [`crate::Event::Got`] or [`crate::Event::Missed`] follows; until then the destination
    /// belongs to the tier.
    ///
    /// # Errors
    /// See [`GetError`]; nothing has changed.
    pub fn get(&mut self, get: &Get) -> Result<(), GetError> {
        self.log.get(get)
    }

    /// Begins to read the key that is stored with an object. [`crate::Event::Key`] or [`crate::Event::Missed`] follows;
    /// after the former, [`Self::take_key`] returns the key. Does not count as a hit.
    ///
    /// # Errors
    /// See [`GetError`]; nothing has changed.
    pub fn get_key(&mut self, digest: Digest, priority: Priority, token: Token) -> Result<(), GetError> {
        self.log.get_key(digest, priority, token)
    }

    /// Takes the key that [`crate::Event::Key`] announced.
    pub fn take_key(&mut self, token: Token) -> Option<Vec<u8>> {
        self.log.reads.take_key(token)
    }

    /// Pins an object against reclaim, or unpins it; returns false if there is no such object. The pin lasts until the
    /// next start, or goes into the record that reclaim rewrites.
    pub fn set_pinned(&mut self, digest: Digest, pinned: bool) -> bool {
        self.log.contents.set_pinned(digest, pinned)
    }
}

/// Queries that need no read.
impl Tier {
    /// Returns the sizes and limits.
    #[must_use]
    pub const fn config(&self) -> &TierConfig {
        self.log.device.config()
    }

    /// Returns the reason why no writes are taken, if there is one.
    #[must_use]
    pub const fn degraded(&self) -> Option<Reason> {
        self.log.device.degraded()
    }

    /// Returns true if recovery is complete: every record on the device is known.
    #[must_use]
    pub const fn is_recovered(&self) -> bool {
        self.log.contents.is_running()
    }

    /// Returns true while recovery searches for records.
    #[must_use]
    pub const fn is_recovering(&self) -> bool {
        self.log.contents.is_open() && !self.log.contents.is_running() && !self.log.device.is_gone()
    }

    /// Returns the number of times that the device was opened, this one included; 1 for a device that was formatted at
    /// this opening.
    #[must_use]
    pub const fn incarnation(&self) -> u64 {
        self.log.contents.sequences.incarnation()
    }

    /// Returns the properties of an object. Not an access; returns `None` for objects that recovery has not reached.
    #[must_use]
    pub fn locate(&self, digest: Digest) -> Option<RecordView> {
        let contents = &self.log.contents;
        contents.shown(digest, &self.log.device).map(|entry| contents.view(entry))
    }

    /// Returns at most `most` objects from a bucket of the index on, and the bucket to continue from, which is `None`
    /// at the end. Every object that exists throughout the walk is returned, unless objects are added or removed
    /// meanwhile; some may be returned twice.
    #[must_use]
    pub fn walk(&self, from: usize, most: usize) -> (Vec<RecordView>, Option<usize>) {
        let (device, contents) = (&self.log.device, &self.log.contents);
        let shown = contents.index.walk(from).filter(|(_, entry)| contents.is_shown(entry, device));
        let mut end = None;
        let mut views = Vec::new();
        for (next, entry) in shown.take(most) {
            views.push(contents.view(entry));
            end = Some(next);
        }
        let end = if views.len() == most { end } else { None };
        (views, end)
    }

    /// Returns the objects whose point ([`Self::point_of`]) is in `from..to`, in no order. Visits about the same share
    /// of the index's buckets.
    pub fn between(&self, from: u64, to: u64) -> impl Iterator<Item = RecordView> {
        let (device, contents) = (&self.log.device, &self.log.contents);
        let shown = contents.index.between(from, to).filter(|entry| contents.is_shown(entry, device));
        shown.map(|entry| contents.view(entry))
    }

    /// Returns the number of buckets of the index.
    #[must_use]
    pub const fn places(&self) -> usize {
        self.log.contents.index.places()
    }

    /// Returns the point of a digest, by which [`Self::between`] selects: 32 bits of a hash of the digest with the
    /// configured seed.
    #[must_use]
    pub const fn point_of(&self, digest: Digest) -> u32 {
        self.log.contents.index.point(digest)
    }

    /// Returns true if the device may have objects that the index does not know and the next start finds: records that
    /// could not be read, written or removed, and objects given up because of that.
    #[must_use]
    pub const fn is_untracked(&self) -> bool {
        self.log.contents.untracked.is_any()
    }

    /// Returns true if that will be known better soon, as segments that recovery scanned are being sealed.
    #[must_use]
    pub fn is_settling(&self) -> bool {
        self.log.device.is_writable() && self.log.contents.untracked.is_settling()
    }

    /// Returns true if an object that the index does not know may still appear: in segments that recovery has not read,
    /// at the next start, or because a tombstone in flight fails.
    #[must_use]
    pub fn may_find(&self, digest: Digest) -> bool {
        self.log.contents.may_find(digest, &self.log.device)
    }

    /// Returns true if the next start may find an object: the index knows it, or one of the records that the index lost
    /// may be of its digest.
    #[must_use]
    pub fn may_have(&self, digest: Digest) -> bool {
        self.log.contents.may_have(digest, &self.log.device)
    }

    /// Returns the counters of records that were not whole, since the start.
    #[must_use]
    pub const fn damage(&self) -> DamageCounters {
        self.log.contents.damage()
    }

    /// Returns counters since the start, and current quantities. Walks the segments.
    #[must_use]
    pub fn stats(&self) -> TierStats {
        TierStats::of(&self.log, &self.reclaim)
    }

    /// Returns the bytes written to the device in groups of records, since the start.
    #[must_use]
    pub const fn written_bytes(&self) -> u64 {
        self.log.writer.counts().bytes
    }

    /// Returns true if nothing is in flight: no operation, no unwritten record, no flush that a call waits for.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.log.is_idle() && !self.reclaim.is_active()
    }

    /// Asserts every invariant, for tests and simulation. Walks the whole index.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn check(&self) {
        self.log.check();
    }
}

/// Tenants, slots, reclaim and scrubbing.
impl Tier {
    /// Returns the tenants: their limits, and their use of the device.
    pub const fn tenants(&mut self) -> TierTenants<'_> {
        TierTenants::new(&mut self.log)
    }

    /// Returns the ownership note that the device had at the start; `None` if no note was ever durable.
    #[must_use]
    pub const fn ownership(&self) -> Option<&Ownership> {
        self.notes.found()
    }

    /// Begins to write an ownership note. [`crate::Event::OwnershipNoted`] follows, unless the device takes no more
    /// writes by then. Returns false if that is not possible now: one note at a time, and not before the device is
    /// open.
    pub fn note_ownership(&mut self, ownership: &Ownership, memory: &mut dyn Memory) -> bool {
        self.notes.note(ownership, &mut self.log, memory)
    }

    /// Reclaims until `free_segments` are free, or until all that is left is pinned or hot. 0 cancels the request. At
    /// most half of the segments can be requested, as objects that are kept need room. A tier that takes no writes
    /// ignores the request: it cannot make room.
    pub fn reclaim_until(&mut self, free_segments: u32) {
        let wanted = if self.log.device.is_writable() { free_segments } else { 0 };
        self.reclaim.want_free(wanted, self.log.device.config());
    }

    /// Sets the rate of background scrubbing, in bytes per second; 0 disables it.
    pub fn set_scrub(&mut self, bytes_per_s: u64) {
        self.scrubber.set_background(bytes_per_s);
    }

    /// Scrubs every record once, at this rate; a paused pass is resumed. 0 pauses the pass. Ignored if the device
    /// cannot be read: it is gone or was refused.
    pub fn scrub_once(&mut self, now_ns: u64, bytes_per_s: u64) {
        self.scrubber.order(now_ns, bytes_per_s, &self.log);
    }

    /// Returns the state and findings of the scrubber.
    #[must_use]
    pub fn scrub_report(&self) -> ScrubReport {
        self.scrubber.report()
    }
}
