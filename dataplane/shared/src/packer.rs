//! The log of a shard on its way to the store: the pack that is being filled, and the one that is being written.
//!
//! Packs are written one after the other. One that fails is written again under its number, with the same bytes, until
//! the store has it: nothing that was given up can turn up later.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;
use kvplane_tier::SlotSet;

use crate::config::{REMOVALS_MOST, SharedConfig};
use crate::format::{Entry, EntryKind, PackWriter, Stream};
use crate::types::NewObject;

/// Removal that is in a pack, with the token that waits for it.
pub(crate) type PackedRemoval = (Digest, Option<u64>);

/// Pack that is being written.
#[derive(Debug)]
pub(crate) struct SealedPack {
    pub(crate) number: u64,
    pub(crate) bytes: Arc<Vec<u8>>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) removals: Vec<PackedRemoval>,
    pub(crate) written_ms: u64,
    /// Slots that were lost while it was being written: its objects of these do not count.
    lost: SlotSet,
}

impl SealedPack {
    /// Returns true if an entry's slot was not lost since it was packed.
    pub(crate) fn counts(&self, entry: &Entry) -> bool {
        !self.lost.has(entry.digest.slot())
    }
}

/// Packs that are not in the store yet.
#[derive(Debug, Default)]
pub(crate) struct Packer {
    open: PackWriter,
    open_removals: Vec<PackedRemoval>,
    opened_ns: u64,
    pub(crate) sealed: Option<SealedPack>,
    /// Objects in either pack: how often, and the last version.
    objects: BTreeMap<Digest, (u32, Version)>,
    /// Objects with a removal in either pack, and how many.
    removals: BTreeMap<Digest, u32>,
    /// Number of the last pack.
    last: u64,
    /// Memory of the pack that was written last, for the next one.
    spare: Vec<u8>,
}

fn count_down<T>(counts: &mut BTreeMap<Digest, T>, digest: Digest, count: impl Fn(&mut T) -> &mut u32) {
    if let Some(value) = counts.get_mut(&digest) {
        *count(value) -= 1;
        if *count(value) == 0 {
            counts.remove(&digest);
        }
    }
}

impl Packer {
    /// Returns true if a pack has an object.
    pub(crate) fn has(&self, digest: Digest) -> bool {
        self.objects.contains_key(&digest)
    }

    /// Returns the last version of an object that a pack has.
    pub(crate) fn version_of(&self, digest: Digest) -> Option<Version> {
        self.objects.get(&digest).map(|(_, version)| *version)
    }

    /// Returns true while a removal of an object is on its way.
    pub(crate) fn removes(&self, digest: Digest) -> bool {
        self.removals.contains_key(&digest)
    }

    /// Returns true if an object of this length fits the open pack. A full one is written first.
    pub(crate) fn has_room(&self, bytes: u64, config: &SharedConfig) -> bool {
        self.open.bytes() < config.pack_bytes && bytes <= config.object_bytes_most()
    }

    /// Returns true if this many removals fit the open pack.
    pub(crate) fn may_remove(&self, removals: usize) -> bool {
        self.open_removals.len() + removals <= REMOVALS_MOST
    }

    /// Appends an object. Returns false if its bytes are not what their writer stated.
    pub(crate) fn push(&mut self, object: &NewObject<'_>, fill: impl FnOnce(&mut [u8]), now_ns: u64) -> bool {
        if self.open.entries().is_empty() {
            self.opened_ns = now_ns;
        }
        let pushed = self.open.push(object, fill);
        if pushed {
            let (count, version) = self.objects.entry(object.digest).or_default();
            (*count, *version) = (*count + 1, object.version);
        }
        pushed
    }

    /// Appends a removal, for which `token` waits.
    pub(crate) fn remove(&mut self, digest: Digest, token: Option<u64>) {
        self.open.remove(digest);
        self.open_removals.push((digest, token));
        *self.removals.entry(digest).or_default() += 1;
    }

    /// Appends the removal of an object that is not whole, if it fits.
    pub(crate) fn give_up(&mut self, digest: Digest) {
        if self.may_remove(1) {
            self.remove(digest, None);
        }
    }

    /// Returns true if the open pack is to be written now; at its time, or for `all`, even if it is not full.
    pub(crate) fn is_due(&self, config: &SharedConfig, now_ns: u64, all: bool) -> bool {
        let is_old = now_ns >= self.opened_ns.saturating_add(config.flush_ns);
        let has_objects = !self.open.entries().is_empty();
        self.sealed.is_none()
            && (!self.open_removals.is_empty()
                || self.open.bytes() >= config.pack_bytes
                || has_objects && (is_old || all))
    }

    /// Returns the time at which the open pack is to be written.
    pub(crate) fn due_ns(&self, config: &SharedConfig) -> Option<u64> {
        let waits = self.sealed.is_none() && !self.open.entries().is_empty();
        waits.then(|| self.opened_ns.saturating_add(config.flush_ns))
    }

    /// Returns true if nothing is on its way.
    pub(crate) fn is_idle(&self) -> bool {
        self.sealed.is_none() && self.open.entries().is_empty()
    }

    /// Returns the number of the pack after which nothing is on its way that is now.
    pub(crate) fn last_number(&self) -> u64 {
        self.last + u64::from(!self.open.entries().is_empty())
    }

    /// Seals the open pack, to be written under the next number.
    pub(crate) fn seal(&mut self, stream: Stream, written_ms: u64) {
        self.last += 1;
        let next = PackWriter::within(core::mem::take(&mut self.spare));
        let open = core::mem::replace(&mut self.open, next);
        let (bytes, entries) = open.seal(stream, self.last, written_ms);
        self.sealed = Some(SealedPack {
            number: self.last,
            bytes: Arc::new(bytes),
            entries,
            removals: core::mem::take(&mut self.open_removals),
            written_ms,
            lost: SlotSet::none(),
        });
    }

    /// Takes the pack that the store has now.
    pub(crate) fn take_written(&mut self) -> Option<SealedPack> {
        let sealed = self.sealed.take()?;
        for entry in &sealed.entries {
            match entry.kind {
                EntryKind::Object => count_down(&mut self.objects, entry.digest, |(count, _)| count),
                EntryKind::Removal => count_down(&mut self.removals, entry.digest, |count| count),
                EntryKind::Void => {}
            }
        }
        Some(sealed)
    }

    /// Takes the bytes of a pack back, whose memory the next one fills, unless its writer still has them.
    pub(crate) fn recycle(&mut self, bytes: Arc<Vec<u8>>) {
        self.spare = Arc::try_unwrap(bytes).unwrap_or_default();
    }

    /// Takes the tokens that wait for removals: these are answered, and are written all the same.
    pub(crate) fn take_waiting(&mut self) -> Vec<u64> {
        let sealed = self.sealed.iter_mut().flat_map(|sealed| sealed.removals.iter_mut());
        self.open_removals.iter_mut().chain(sealed).filter_map(|(_, token)| token.take()).collect()
    }

    /// Makes the objects of lost slots void.
    pub(crate) fn lose(&mut self, lost: &SlotSet) {
        let is_lost = |digest: Digest| lost.has(digest.slot());
        for entry in self.open.entries().iter().filter(|entry| entry.kind == EntryKind::Object) {
            if is_lost(entry.digest) {
                count_down(&mut self.objects, entry.digest, |(count, _)| count);
            }
        }
        self.open.make_void(is_lost);
        if let Some(sealed) = &mut self.sealed {
            sealed.lost = sealed.lost.with(lost, |before, now| before | now);
        }
    }
}
