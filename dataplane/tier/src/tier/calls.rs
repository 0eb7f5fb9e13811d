//! What the host calls: objects are put, removed, read and listed; reclaim and scrubbing are set.

use kvplane_proto::digest::Digest;

use super::{Tier, TierStats};
use crate::config::TierConfig;
use crate::contents::Entry;
use crate::format::Ownership;
use crate::log::RemoveCall;
use crate::memory::Memory;
use crate::ops::Priority;
use crate::scrub::ScrubReport;
use crate::types::errors::{GetError, PutError, Reason, RemoveError};
use crate::types::{Ack, Get, Harm, Put, PutReceipt, RecordView, Removal, Token};

/// Objects: puts, removals, gets.
impl Tier {
    /// Takes an object. [`crate::Event::Stored`] or [`crate::Event::StoreFailed`] follows, and
    /// [`crate::Event::Released`] where the payload is lent. From now on gets give this object, and what was promised
    /// of an earlier one of the digest is void.
    ///
    /// # Errors
    /// See [`PutError`]; nothing happened.
    pub fn put(&mut self, now_ns: u64, put: &Put<'_>, memory: &mut dyn Memory) -> Result<PutReceipt, PutError> {
        self.log.put(now_ns, put, memory)
    }

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
        let call = RemoveCall { digest, ack, token, is_reclaiming: self.reclaim.is_active() };
        self.log.strike(now_ns, &call, memory)
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
        let call = RemoveCall { digest, ack, token, is_reclaiming: self.reclaim.is_active() };
        self.log.remove(now_ns, &call, memory)
    }

    /// Begins to read an object. [`crate::Event::Got`] or [`crate::Event::Missed`] follows; until then the destination
    /// is the tier's.
    ///
    /// # Errors
    /// See [`GetError`]; nothing happened.
    pub fn get(&mut self, get: &Get) -> Result<(), GetError> {
        self.log.get(get)
    }

    /// Begins to read the key that is kept with an object. [`crate::Event::Key`] or [`crate::Event::Missed`] follows;
    /// with the former, [`Self::take_key`] has it. Counts as no hit.
    ///
    /// # Errors
    /// See [`GetError`]; nothing happened.
    pub fn get_key(&mut self, digest: Digest, priority: Priority, token: Token) -> Result<(), GetError> {
        self.log.get_key(digest, priority, token)
    }

    /// The key of [`crate::Event::Key`]; once.
    pub fn take_key(&mut self, token: Token) -> Option<Vec<u8>> {
        self.log.reads.take_key(token)
    }

    /// Says whether reclaim is to keep an object; false when there is none. Lasts until the next start, or with the
    /// record that reclaim writes.
    pub fn set_pinned(&mut self, digest: Digest, pinned: bool) -> bool {
        let entry = self.log.contents.index.find_mut(digest).filter(|entry| !entry.is_removed());
        entry.map(|entry| entry.set_pinned(pinned)).is_some()
    }
}

/// What is known without reading.
impl Tier {
    /// The limits.
    #[must_use]
    pub const fn config(&self) -> &TierConfig {
        self.log.device.config()
    }

    /// Why no writes are taken, if so.
    #[must_use]
    pub const fn degraded(&self) -> Option<Reason> {
        self.log.device.degraded()
    }

    /// Whether every record on the device has been looked at.
    #[must_use]
    pub const fn is_recovered(&self) -> bool {
        self.log.contents.is_running()
    }

    /// Whether records are still being found.
    #[must_use]
    pub const fn is_recovering(&self) -> bool {
        self.log.contents.is_open() && !self.log.contents.is_running() && !self.log.device.is_gone()
    }

    /// How often the device was opened, this time too; 1 for one that was formatted at this opening.
    #[must_use]
    pub const fn incarnation(&self) -> u64 {
        self.log.contents.sequences.incarnation()
    }

    /// What is known of an object. Not an access; nothing for what recovery has not reached.
    #[must_use]
    pub fn locate(&self, digest: Digest) -> Option<RecordView> {
        self.log.contents.shown(digest, &self.log.device).map(Entry::view)
    }

    /// Objects from a place of the index on, at most `most`, with the place to go on from; `None` for it at the end.
    /// An object that is there all the while is seen, unless others come and go meanwhile; some may be seen twice.
    #[must_use]
    pub fn walk(&self, from: usize, most: usize) -> (Vec<RecordView>, Option<usize>) {
        let (device, contents) = (&self.log.device, &self.log.contents);
        let shown = contents.index.walk(from).filter(|(_, entry)| contents.is_shown(entry, device));
        let mut end = None;
        let mut views = Vec::new();
        for (next, entry) in shown.take(most) {
            views.push(entry.view());
            end = Some(next);
        }
        let end = if views.len() == most { end } else { None };
        (views, end)
    }

    /// Objects whose place in the order of [`Self::point_of`] is from `from` up to `to`, in no order. Looks at about as
    /// many places of the index as that is of all.
    pub fn between(&self, from: u64, to: u64) -> impl Iterator<Item = RecordView> {
        let (device, contents) = (&self.log.device, &self.log.contents);
        contents.index.between(from, to).filter(|entry| contents.is_shown(entry, device)).map(Entry::view)
    }

    /// How many places the index has.
    #[must_use]
    pub const fn places(&self) -> usize {
        self.log.contents.index.places()
    }

    /// The order in which [`Self::between`] walks: 32 bits of a mix of the digest, salted by the configured seed.
    #[must_use]
    pub const fn point_of(&self, digest: Digest) -> u32 {
        self.log.contents.index.point(digest)
    }

    /// Whether the device may have objects that the index does not know and the next start finds: what could not be
    /// read, written or removed, and what was given up because of that.
    #[must_use]
    pub const fn is_untracked(&self) -> bool {
        self.log.contents.untracked.is_any()
    }

    /// Whether that will be known better soon: what recovery scanned is being sealed.
    #[must_use]
    pub fn is_settling(&self) -> bool {
        self.log.device.is_writable() && self.log.contents.untracked.is_settling()
    }

    /// True where an object that the index does not know may come to light: in what recovery has not looked at, at the
    /// next start, or as a tombstone in flight fails.
    #[must_use]
    pub fn may_find(&self, digest: Digest) -> bool {
        self.log.contents.may_find(digest, &self.log.device)
    }

    /// Whether the next start may find an object: the index knows it, or what the index lost may be of its digest.
    #[must_use]
    pub fn may_have(&self, digest: Digest) -> bool {
        self.log.contents.may_have(digest, &self.log.device)
    }

    /// Records that were not whole, since the start.
    #[must_use]
    pub const fn harm(&self) -> Harm {
        self.log.contents.harm()
    }

    /// Counts since the start, and how much there is now. Walks the segments.
    #[must_use]
    pub fn stats(&self) -> TierStats {
        TierStats::of(&self.log, &self.reclaim)
    }

    /// Bytes written to the device in groups of records, since the start.
    #[must_use]
    pub const fn written_bytes(&self) -> u64 {
        self.log.writer.counts().bytes
    }

    /// Whether nothing is in flight: no operation, no unwritten record, nothing unsynced that is waited for.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.log.is_idle() && !self.reclaim.is_active()
    }

    /// Asserts every invariant, for tests and simulation. Walks everything.
    ///
    /// # Panics
    /// When one does not hold.
    pub fn check(&self) {
        self.log.check();
    }
}

/// Slots, reclaim and scrubbing.
impl Tier {
    /// What the device said at the start about its shard's slots; nothing, if no note was ever durable.
    #[must_use]
    pub const fn ownership(&self) -> Option<&Ownership> {
        self.notes.found()
    }

    /// Writes down which slots are owned from now on. [`crate::Event::OwnershipNoted`] follows, unless the device takes
    /// no more writes by then. False when that cannot be begun now: one note at a time, and not before the device is
    /// open.
    pub fn note_ownership(&mut self, ownership: &Ownership, memory: &mut dyn Memory) -> bool {
        self.notes.note(ownership, &mut self.log, memory)
    }

    /// Reclaims until so many segments are free, or all that is left is what reclaim would keep. 0 ends that. More than
    /// half of the segments cannot be wanted: what is kept needs room. Nothing is wanted of a tier that takes no
    /// writes: it makes no room.
    pub fn reclaim_until(&mut self, free_segments: u32) {
        let wanted = if self.log.device.is_writable() { free_segments } else { 0 };
        self.reclaim.want_free(wanted, self.log.device.config());
    }

    /// Segments that a caller wants to be free; 0 when there are as many, or nobody wants any.
    #[must_use]
    pub const fn wanted_free_segments(&self) -> u32 {
        self.reclaim.wanted_free()
    }

    /// How fast records are checked in the background, in bytes a second; 0 for not at all.
    pub fn set_scrub(&mut self, bytes_per_s: u64) {
        self.scrubber.set_background(bytes_per_s);
    }

    /// Checks every record once, at this rate; a pass that was paused goes on. 0 pauses it. Nothing is begun where
    /// nothing can be read: the device is gone or was refused.
    pub fn scrub_once(&mut self, now_ns: u64, bytes_per_s: u64) {
        self.scrubber.order(now_ns, bytes_per_s, &self.log);
    }

    /// What the scrubber does and has found.
    #[must_use]
    pub fn scrub_report(&self) -> ScrubReport {
        self.scrubber.report()
    }
}
