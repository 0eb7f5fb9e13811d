//! Puts, removals and gets of the log.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::narrowing::length_u16;

use super::Log;
use super::groups::Waiter;
use super::reads::{Purpose, ReadJob};
use super::room::{Need, NoRoom, is_lent};
use super::writer::Record;
use crate::contents::{Entry, Phase, ReplacedRecord};
use crate::format::Shape;
use crate::memory::{Memory, Span};
use crate::ops::Priority;
use crate::types::errors::{GetError, PutError, Reason, RemoveError};
use crate::types::{Ack, Get, Put, PutReceipt, Removal, Token};

/// Removal or replacement of an object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoveCall {
    pub(crate) digest: Digest,
    pub(crate) ack: Ack,
    pub(crate) token: Token,
    /// True while reclaim processes a segment: a restart may find the segment's records.
    pub(crate) is_reclaiming: bool,
}

impl Log {
    /// Appends an object; see [`crate::Tier::put`].
    pub(crate) fn put(&mut self, now_ns: u64, put: &Put<'_>, memory: &mut dyn Memory) -> Result<PutReceipt, PutError> {
        let shape = self.check_put(put)?;
        let account = self.contents.accounts.of(put.tenant);
        let record = Some((put.digest, self.device.record_bytes(shape)));
        self.keep_within_limit(now_ns, account, record, memory).inspect_err(|error| {
            if matches!(error, PutError::Quota { .. }) {
                self.contents.accounts.count_refusal(account);
            }
        })?;
        let known = self.contents.index.find(put.digest).copied();
        if known.is_none() && self.contents.index.is_full() {
            self.counts.put_refusals += 1;
            return Err(PutError::Full);
        }
        if known.is_none() {
            self.writer.fill_crowded_segment(&mut self.device, &mut self.contents, memory);
        }
        // The replaced record is removed by a tombstone first: if the new record is ever damaged, the old one does not
        // come back. A record of the same version may come back, and must: the object is not lost with its new record.
        let replaced = known.filter(|entry| !entry.is_removed() && entry.version() != put.version);
        let need = Need::of(shape, replaced.is_some(), &self.device);
        self.make_room(now_ns, need, false, memory).map_err(|no_room| {
            self.counts.put_refusals += 1;
            if no_room == NoRoom::Full { PutError::Full } else { PutError::Busy }
        })?;
        // Checksums are computed only now: a call that finds no room is retried, and they take longer than all other
        // steps.
        let computed = self.sums.compute(put.payload, self.device.config().chunk_bytes, memory);
        if let Some(stated) = put.checksum.filter(|stated| *stated != computed) {
            self.counts.bad_payloads += 1;
            return Err(PutError::Checksum { stated, computed });
        }
        let Self { device, contents, writer, .. } = self;
        if let Some(entry) = replaced {
            writer.append_tombstone(put.digest, entry.version(), None, device, contents, memory);
        }
        let Put { digest, version, key, tenant, payload, pinned, hits, .. } = *put;
        let sums = self.sums.as_slice();
        let record = Record { digest, version, key, tenant, payload, shape, checksum: computed, sums, pinned, hits };
        let lent = is_lent(shape, device);
        let waiter = Waiter::Put { token: put.token, ack: put.ack, lent };
        let sequence = writer.append(&record, waiter, device, contents, memory);
        contents.replacements.put(digest, replaced.is_some());
        self.events.owe();
        self.counts.puts += 1;
        self.counts.put_bytes += u64::from(payload.bytes);
        Ok(PutReceipt { sequence, lent })
    }

    fn check_put(&self, put: &Put<'_>) -> Result<Shape, PutError> {
        if let Some(reason) = self.device.degraded() {
            return Err(PutError::Unavailable(reason));
        }
        let config = self.device.config();
        let (bytes, align) = (put.payload.bytes, config.memory_align_bytes);
        if bytes == 0 {
            return Err(PutError::Empty);
        }
        if bytes > config.max_object_bytes {
            return Err(PutError::TooLarge { bytes, limit_bytes: config.max_object_bytes });
        }
        if put.key.len() > usize::from(config.max_key_bytes) {
            return Err(PutError::KeyTooLong { bytes: put.key.len(), limit_bytes: config.max_key_bytes });
        }
        let extent = config.has_blocks_of_its_own(bytes);
        let (key_bytes, names_parts, copied) = (length_u16(put.key.len()), put.names_parts, put.copied);
        let shape = Shape { payload_bytes: bytes, key_bytes, extent, names_parts, copied };
        if is_lent(shape, &self.device) && !put.payload.offset.is_multiple_of(u64::from(align)) {
            return Err(PutError::Unaligned { offset: put.payload.offset, align_bytes: align });
        }
        if !self.contents.is_open() || !self.events.may_owe() {
            return Err(PutError::Busy);
        }
        Ok(shape)
    }

    /// Removes an object that a newer version is to replace; see [`crate::Tier::remove_replaced`].
    pub(crate) fn remove_replaced(
        &mut self,
        now_ns: u64,
        call: &RemoveCall,
        memory: &mut dyn Memory,
    ) -> Result<Removal, RemoveError> {
        let RemoveCall { digest, token, .. } = *call;
        if let Some(reason) = self.device.degraded().filter(|_| self.contents.may_have(digest, &self.device)) {
            return Err(RemoveError::Unavailable(reason));
        }
        let known = self.contents.index.find(digest).filter(|entry| !entry.is_removed()).copied();
        let removal = self.append_removal(now_ns, call, memory)?;
        let may_return = known.is_some() || self.contents.replacements.may_return(digest);
        if removal == Removal::Pending && may_return && self.contents.is_running() {
            let generation = |entry: &Entry| self.contents.generation_of(entry, &self.device);
            let tenant = |entry: &Entry| self.contents.accounts.number(entry.account());
            let replaced = known.map(|entry| {
                let (generation, tenant) = (generation(&entry), tenant(&entry));
                ReplacedRecord { entry, generation, tenant }
            });
            self.contents.replacements.begin(token, digest, replaced);
        }
        Ok(removal)
    }

    /// Removes an object; see [`crate::Tier::remove`].
    pub(crate) fn remove(
        &mut self,
        now_ns: u64,
        call: &RemoveCall,
        memory: &mut dyn Memory,
    ) -> Result<Removal, RemoveError> {
        let removal = self.append_removal(now_ns, call, memory);
        if !matches!(removal, Err(RemoveError::Busy)) {
            // No replacement in flight restores the object.
            self.contents.replacements.forget(call.digest);
        }
        removal
    }

    /// Appends a tombstone if one is needed: the object is hidden at once.
    fn append_removal(
        &mut self,
        now_ns: u64,
        call: &RemoveCall,
        memory: &mut dyn Memory,
    ) -> Result<Removal, RemoveError> {
        let RemoveCall { digest, ack, token, is_reclaiming } = *call;
        if let Some(reason) = self.device.degraded() {
            return self.hide(digest, reason);
        }
        if !self.contents.is_open() || !self.events.may_owe() {
            return Err(RemoveError::Busy);
        }
        let known = self.contents.index.find(digest).copied();
        let durable_sequence = self.writer.flushes.durable_sequence();
        let may_be_there = self.contents.is_doubtful(is_reclaiming, durable_sequence);
        if known.is_none() && !may_be_there && !self.contents.replacements.may_return(digest) {
            return Ok(Removal::Absent);
        }
        self.make_room(now_ns, Need::TOMBSTONE, true, memory).map_err(|_| RemoveError::Busy)?;
        let version = known.map_or(Version(0), |entry| entry.version());
        let waiter = Some(Waiter::Remove { token, ack });
        let Self { device, contents, writer, .. } = self;
        let sequence = writer.append_tombstone(digest, version, waiter, device, contents, memory);
        contents.forget(digest, device);
        self.events.owe();
        self.counts.removes += 1;
        if !contents.is_running() {
            contents.remember_removal(digest, version, sequence, device);
        }
        Ok(Removal::Pending)
    }

    /// Hides an object on a device that takes no writes, in this incarnation only. The device still has the object, and
    /// recovery may not have found it yet.
    fn hide(&mut self, digest: Digest, reason: Reason) -> Result<Removal, RemoveError> {
        let Self { device, contents, .. } = self;
        if !contents.may_have(digest, device) {
            return Ok(Removal::Absent);
        }
        contents.untracked.note(digest);
        contents.forget(digest, device);
        if contents.phase() == Phase::Recovering {
            contents.remember_removal(digest, Version(0), contents.sequences.floor(), device);
        }
        Err(RemoveError::Unavailable(reason))
    }

    /// Begins to read an object; see [`crate::Tier::get`].
    pub(crate) fn get(&mut self, get: &Get) -> Result<(), GetError> {
        if self.device.is_gone() {
            return Err(GetError::Unavailable(Reason::Gone));
        }
        let Some(entry) = self.contents.shown(get.digest, &self.device).copied() else {
            self.reads.count_miss();
            return Err(GetError::NotFound);
        };
        let (shape, at) = (entry.shape(), get.destination);
        if at.bytes != shape.payload_bytes {
            return Err(GetError::WrongLength { bytes: at.bytes, object_bytes: shape.payload_bytes });
        }
        let align_bytes = self.device.config().memory_align_bytes;
        if shape.extent && !at.offset.is_multiple_of(u64::from(align_bytes)) {
            return Err(GetError::Unaligned { offset: at.offset, align_bytes });
        }
        if !self.reads.may_get() || self.events.is_clogged() {
            return Err(GetError::Busy);
        }
        if get.priority == Priority::Get
            && let Some(entry) = self.contents.index.find_mut(get.digest)
        {
            entry.hit();
        }
        self.begin_read(ReadJob::new(entry, at, get.priority, Purpose::Get(get.token)));
        Ok(())
    }

    /// Begins to read the key of an object; see [`crate::Tier::get_key`].
    pub(crate) fn get_key(&mut self, digest: Digest, priority: Priority, token: Token) -> Result<(), GetError> {
        if self.device.is_gone() {
            return Err(GetError::Unavailable(Reason::Gone));
        }
        let Some(entry) = self.contents.shown(digest, &self.device).copied() else { return Err(GetError::NotFound) };
        if !self.reads.may_get() || self.events.is_clogged() {
            return Err(GetError::Busy);
        }
        self.begin_read(ReadJob::new(entry, Span::default(), priority, Purpose::Key(token)));
        Ok(())
    }
}
