//! Imports: the sources of gained slots, the objects being fetched, and those that must not be imported any more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, ReservationId, SLOTS, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};

use super::pace::Pace;
use super::sources::Source;
use crate::service::fetches::{Fetch, Want};
use crate::service::shard::Shard;
use crate::service::shard::deferrals::DeferredItem;
use crate::service::shard::stream_read::Reader;
use crate::service::shard::timing::Timing;

/// Most objects that were put or removed here while their former owner may have them.
const MASKS_MOST: usize = 1 << 16;

/// Waiter for an object from a former owner.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) enum Waiter {
    /// Get of the object.
    Reader(Reader),
    /// Claims that wait until its tenant is known.
    Tenant,
}

/// Object being fetched.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) source: u32,
    pub(super) extent: Option<(ReservationId, u64)>,
    pub(super) waiters: Vec<(Waiter, Timing)>,
    /// True if it must not be imported any more.
    pub(super) void: bool,
    /// True if it is fetched because a request needs it.
    pub(super) demanded: bool,
}

/// Request to a former owner that was not answered yet.
#[derive(Debug)]
pub(super) enum Call {
    Sizes { source: u32, items: Vec<(DeferredItem, Digest)> },
    Describe(Digest),
    Object(Digest),
    List(u32),
    Changes(u32),
    Drop { source: u32, digests: Vec<Digest> },
    EndExports { source: ShardKey, epoch: Epoch },
}

/// Consequences of a change of an object here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct MaskOutcome {
    /// A former owner that still exists may have had the object.
    pub(super) is_new: bool,
    /// The import of its slot was abandoned, because too much was changed while its former owner did not answer.
    pub(super) is_abandoned: bool,
}

/// Importing side of migration.
#[derive(Debug, Default)]
pub(super) struct Imports {
    pub(super) sources: BTreeMap<u32, Source>,
    next_source: u32,
    /// Source of each slot; 0 for none.
    by_slot: Vec<u32>,
    /// Grows whenever a slot's source may have changed.
    generation: u64,
    pub(super) calls: BTreeMap<u64, Call>,
    pub(super) objects: BTreeMap<Digest, Object>,
    masks: BTreeSet<Digest>,
    /// Requests that clients wait for.
    pub(super) ready: VecDeque<Fetch>,
    pub(super) pace: Pace,
}

impl Imports {
    pub(super) fn slots(&self) -> usize {
        self.sources.values().map(|source| source.slots).sum()
    }

    pub(super) const fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the source of an object; 0 if it is not imported.
    pub(super) fn source_of(&self, digest: Digest) -> u32 {
        self.by_slot.get(usize::from(digest.slot().0)).copied().unwrap_or(0)
    }

    /// Returns the shard that the objects of a slot are fetched from.
    pub(super) fn owner_before(&self, slot: Slot) -> Option<ShardKey> {
        let source = self.by_slot.get(usize::from(slot.0))?;
        self.sources.get(source).map(|source| source.key)
    }

    /// Returns the slots of a source.
    pub(super) fn slots_of(&self, source: u32) -> impl Iterator<Item = Slot> + '_ {
        let slots = self.by_slot.iter().enumerate().filter(move |(_, of)| **of == source);
        slots.map(|(slot, _)| Slot(slot as u16))
    }

    /// Returns any digest in a slot of a source.
    pub(super) fn digest_of(&self, source: u32) -> Option<Digest> {
        let slot = self.by_slot.iter().position(|of| *of == source)?;
        Some(Slot(slot as u16).first_digest())
    }

    /// Unmasks objects that the former owner has dropped, which cannot be imported any more.
    pub(super) fn unmask(&mut self, digests: &[Digest]) {
        for digest in digests {
            self.masks.remove(digest);
        }
    }

    /// Returns true if an object may be imported from this source.
    pub(super) fn is_current(&self, source: u32, digest: Digest) -> bool {
        self.source_of(digest) == source && !self.masks.contains(&digest)
    }

    /// Returns true if an object that is not here can be fetched from a former owner.
    pub(super) fn is_fetchable(&self, digest: Digest, now_ns: u64) -> bool {
        if self.sources.is_empty() {
            return false;
        }
        let source = self.sources.get(&self.source_of(digest));
        source.is_some_and(|source| !source.is_muted(now_ns)) && !self.masks.contains(&digest)
    }

    /// Returns true if an object may yet be imported from a former owner.
    pub(super) fn is_coming(&self, digest: Digest) -> bool {
        self.sources.contains_key(&self.source_of(digest)) && !self.masks.contains(&digest)
    }

    /// Makes a request to another shard.
    pub(super) fn ask(&mut self, shard: &mut Shard, source: ShardKey, want: Want, call: Call) -> Fetch {
        let token = shard.new_fetch_token();
        self.calls.insert(token, call);
        Fetch { token, source, want }
    }

    /// Enqueues an object for a source to drop.
    pub(super) fn drop_there(&mut self, source: u32, digest: Digest) {
        if let Some(source) = self.sources.get_mut(&source) {
            source.drop_object(digest);
        }
    }

    /// Notes an object that cannot be imported: its source keeps it, and the import of its slot is never complete.
    pub(super) fn leave_there(&mut self, source: u32, digest: Digest) {
        if let Some(source) = self.sources.get_mut(&source) {
            source.incomplete.insert(digest.slot());
        }
    }

    /// Keeps requests from waiting for a source that did not answer.
    pub(super) fn mute(&mut self, source: u32, now_ns: u64) {
        if let Some(source) = self.sources.get_mut(&source) {
            source.mute(now_ns);
        }
    }

    /// Returns the time of the next request that waits for a backoff or for the pace.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        let waits = |source: &Source| {
            let retry = (source.retry_ns() > now_ns).then_some(source.retry_ns());
            let paced = if source.queue.is_empty() { None } else { self.pace.next_ns() };
            [retry, paced].into_iter().flatten().filter(|at_ns| *at_ns > now_ns).min()
        };
        self.sources.values().filter_map(waits).min()
    }

    /// Returns the next drop request to a source.
    pub(super) fn next_drop(&mut self, shard: &mut Shard, source: u32) -> Option<Fetch> {
        let by_slot = &self.by_slot;
        let is_its = |digest: Digest| by_slot.get(usize::from(digest.slot().0)) == Some(&source);
        let entry = self.sources.get_mut(&source)?;
        let digests = entry.next_drops(shard.now_ns, is_its)?;
        let key = entry.key;
        Some(self.ask(shard, key, Want::Drop(digests.clone()), Call::Drop { source, digests }))
    }

    /// Returns the request for the next page of a source's objects.
    pub(super) fn next_page(&mut self, shard: &mut Shard, source: u32) -> Option<Fetch> {
        let entry = self.sources.get_mut(&source).filter(|_| self.pace.limits.bytes_per_s > 0)?;
        let (key, at) = (entry.key, entry.next_page(shard.now_ns)?);
        let digest = self.digest_of(source)?;
        Some(self.ask(shard, key, Want::List(digest, at), Call::List(source)))
    }

    /// Returns the request for the next page of the changes in a source's slots.
    pub(super) fn next_changes(&mut self, shard: &mut Shard, source: u32) -> Option<Fetch> {
        let entry = self.sources.get_mut(&source)?;
        let (key, at) = (entry.key, entry.next_changes(shard.now_ns)?);
        let digest = self.digest_of(source)?;
        Some(self.ask(shard, key, Want::List(digest, at), Call::Changes(source)))
    }

    /// Masks an object that was put or removed here: the former owner's object is void.
    pub(super) fn mask(&mut self, digest: Digest) -> MaskOutcome {
        if self.sources.is_empty() {
            return MaskOutcome::default();
        }
        let source = self.source_of(digest);
        let Some(entry) = self.sources.get_mut(&source) else { return MaskOutcome::default() };
        if let Some(object) = self.objects.get_mut(&digest) {
            object.void = true;
        }
        let is_new = self.masks.insert(digest);
        entry.unwritten.remove(&digest);
        if is_new {
            entry.drop_object(digest);
        }
        let is_abandoned = self.masks.len() > MASKS_MOST;
        if is_abandoned {
            self.forget(source);
        }
        MaskOutcome { is_new, is_abandoned }
    }

    /// Follows a map after epoch `heard`: imports continue for slots whose owner and former owner stay the same, and
    /// begin for gained slots.
    pub(super) fn follow(
        &mut self,
        shard: &Shard,
        heard: Epoch,
        missed: bool,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        let me = shard.ownership.key();
        let mut changed = BTreeSet::new();
        for (slot, of) in self.by_slot.iter_mut().enumerate().filter(|(_, of)| **of != 0) {
            let source = self.sources.get(of).map(|source| source.key);
            let there = source.is_some_and(|key| owners.is_some_and(|owners| owners.address(key).is_some()));
            if missed || !there || !owned(slot as u16) {
                *of = 0;
                changed.insert(slot);
            }
        }
        if let Some(owners) = owners.filter(|owners| owners.has_changed(heard)) {
            let mut new: BTreeMap<ShardKey, u32> = BTreeMap::new();
            let changed_now = |slot: &u16| owned(*slot) && owners.slot_has_changed(Slot(*slot), heard);
            for slot in (0..SLOTS as u16).filter(changed_now) {
                let Some(from) = owners.former(Slot(slot)).filter(|from| *from != me) else { continue };
                let is_replica_owner = owners.past(Slot(slot)) != Some(from);
                let was_only_one = owners.replica_owners(Slot(slot)).len() < 2;
                if is_replica_owner && was_only_one && shard.replicas.has_inherited(Slot(slot)) {
                    // The remaining objects of the slot are here already, as replicas. With several replica owners,
                    // another may have some that this one had not got.
                    continue;
                }
                let source = *new.entry(from).or_insert_with(|| self.add_source(from));
                self.by_slot.resize(SLOTS, 0);
                self.by_slot[usize::from(slot)] = source;
                changed.insert(slot.into());
            }
        }
        if !changed.is_empty() {
            self.settle(&changed);
        }
    }

    /// Forgets sources that have no slots any more, and all state of slots whose source has changed.
    fn settle(&mut self, changed: &BTreeSet<usize>) {
        self.generation += 1;
        self.sources.values_mut().for_each(|source| source.slots = 0);
        for source in self.by_slot.iter().filter(|source| **source != 0) {
            if let Some(source) = self.sources.get_mut(source) {
                source.slots += 1;
            }
        }
        self.sources.retain(|_, source| source.slots > 0);
        let by_slot = &self.by_slot;
        let of = |digest: &Digest| by_slot.get(usize::from(digest.slot().0)).copied().unwrap_or(0);
        self.masks.retain(|digest| of(digest) != 0 && !changed.contains(&usize::from(digest.slot().0)));
        for (digest, object) in &mut self.objects {
            object.void |= of(digest) != object.source;
        }
        for (number, source) in &mut self.sources {
            source.unwritten.retain(|digest| of(digest) == *number);
        }
    }

    /// Ends the import from a source, whether it is complete or abandoned.
    pub(super) fn forget(&mut self, source: u32) {
        let mut changed = BTreeSet::new();
        for (slot, of) in self.by_slot.iter_mut().enumerate().filter(|(_, of)| **of == source) {
            *of = 0;
            changed.insert(slot);
        }
        self.settle(&changed);
    }

    fn add_source(&mut self, key: ShardKey) -> u32 {
        self.next_source += 1;
        self.sources.insert(self.next_source, Source::new(key));
        self.next_source
    }
}
