//! Slots that came: from whom, what was fetched of them, and what must not be fetched any more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::ids::{Epoch, ReservationId, SLOTS, Slot, Version};
use kvplane_proto::map::{ShardKey, SlotOwners};
use kvplane_proto::message::KeyItem;
use kvplane_proto::message::PageQuery;
use kvplane_proto::{Digest, Status};

use super::super::deferred;
use super::super::tiered::Waiter;
use super::super::types::Place;
use super::super::{Service, Timing};
use super::changes::Changes;

/// Objects that were put or removed here while their former owner may have them.
const MASKS_MOST: usize = 1 << 16;

/// How much is fetched in the background.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FetchLimits {
    /// Bytes a second; 0 for nothing: then objects come only when they are asked for.
    pub bytes_per_s: u64,
    /// Objects at the same time.
    pub objects: usize,
    /// Their bytes. One object may be larger.
    pub bytes: u64,
    /// An object of which more is given in a second gets a copy at the second owner of its slot; 0: none does.
    pub hot_bytes_per_s: u64,
}

impl Default for FetchLimits {
    fn default() -> Self {
        Self { bytes_per_s: 512 << 20, objects: 16, bytes: 32 << 20, hot_bytes_per_s: 256 << 20 }
    }
}

/// A question to a former owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fetch {
    /// To be given back with the answer.
    pub token: u64,
    /// Whom to ask.
    pub source: ShardKey,
    /// For what.
    pub want: Want,
}

/// What is asked of a former owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Want {
    /// Which of these are there, and how long.
    Sizes(Vec<Digest>),
    /// The description of this object, by a list.
    Describe(Digest),
    /// This object, into the pool.
    Object(Digest, Place),
    /// A page of what left with its slot, or of what changed there while it was this owner's. The digest says which
    /// shard is meant.
    List(Digest, PageQuery),
    /// That it drops these.
    Drop(Vec<Digest>),
    /// That it takes this object as the second owner, out of the pool: whose tail is there, and which version it is.
    Copy {
        /// Which.
        digest: Digest,
        /// Where it is.
        place: Place,
        /// Where its tail is, if it has one: see [`super::super::copy_of`].
        tail_at: Option<u64>,
        /// Whether it names the stripes of a larger object.
        is_head: bool,
        /// Which version of it.
        version: Version,
    },
    /// That it drops the copies that it has as the second owner of these. A digest of zeros below the slot means all
    /// of the slot.
    DropCopies(Vec<Digest>),
}

/// How a question ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FetchDone {
    /// Not at all.
    Failed(Status),
    /// What is there of each object.
    Sizes(Vec<(Status, u64)>),
    /// A page of keys.
    Page(Vec<u8>),
    /// The object is in place: its length, and what its bytes sum to.
    Object(u64, u64),
    /// They are dropped.
    Dropped,
    /// The copy is there.
    Copied,
    /// Which of the copies are gone.
    CopiesDropped(Vec<bool>),
}

/// An object that a former owner has.
#[derive(Debug)]
pub(super) struct ListedObject {
    pub(super) item: KeyItem,
    pub(super) tenant: Vec<u8>,
    pub(super) key: Vec<u8>,
}

/// A former owner, of slots that came by one layout.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) key: ShardKey,
    /// How many slots are still its own.
    pub(super) slots: usize,
    /// Where the walk through what it has is.
    pub(super) at: PageQuery,
    pub(super) asking: bool,
    pub(super) walked: bool,
    /// What it told of changes in its slots so far, and where it goes on with that; nothing when it has told all.
    pub(super) changes: Option<(PageQuery, BTreeMap<Slot, Changes>)>,
    /// Something could not be fetched: once more, when the walk is over.
    pub(super) again: bool,
    pub(super) failures: u32,
    pub(super) retry_ns: u64,
    /// Until then nobody waits for it.
    pub(super) muted_ns: u64,
    pub(super) queue: VecDeque<ListedObject>,
    /// What it is to drop.
    pub(super) drops: VecDeque<Digest>,
    pub(super) dropping: bool,
    /// Objects on their way.
    pub(super) open: usize,
    /// Objects that are here, and that it keeps until the SSD here has them; not more than may wait for that.
    pub(super) unwritten: BTreeSet<Digest>,
}

/// An object on its way.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) source: u32,
    pub(super) place: Option<(ReservationId, u64)>,
    pub(super) waiters: Vec<(Waiter, Timing)>,
    /// It is not to be taken over any more.
    pub(super) void: bool,
    /// It was fetched because somebody asked.
    pub(super) demanded: bool,
}

/// A question that was not answered yet.
#[derive(Debug)]
pub(in crate::service) enum Call {
    Sizes { source: u32, items: Vec<(deferred::Slot, Digest)> },
    Describe(Digest),
    Object(Digest),
    List(u32),
    Changes(u32),
    Drop { source: u32, digests: Vec<Digest> },
    Copy(Digest),
    DropCopies { second: ShardKey, digests: Vec<Digest> },
}

/// The importing side.
#[derive(Debug)]
pub(super) struct Imports {
    pub(super) limits: FetchLimits,
    pub(super) sources: BTreeMap<u32, Source>,
    next_source: u32,
    /// The source of each slot; 0 for none.
    by_slot: Vec<u32>,
    /// Grows whenever a slot's source may be another.
    pub(super) generation: u64,
    pub(super) next_token: u64,
    pub(super) calls: BTreeMap<u64, Call>,
    pub(super) objects: BTreeMap<Digest, Object>,
    pub(super) masks: BTreeSet<Digest>,
    /// Questions that somebody waits for.
    pub(super) ready: VecDeque<Fetch>,
    /// Objects on their way in the background, and their bytes.
    pub(super) pulls: usize,
    pub(super) pull_bytes: u64,
    /// What may be fetched now, as of then; below 0 when it was too much.
    pub(super) allowance_bytes: i64,
    pub(super) allowed_ns: u64,
}

impl Imports {
    pub(super) fn new() -> Self {
        Self {
            limits: FetchLimits::default(),
            sources: BTreeMap::new(),
            next_source: 0,
            by_slot: Vec::new(),
            generation: 0,
            next_token: 0,
            calls: BTreeMap::new(),
            objects: BTreeMap::new(),
            masks: BTreeSet::new(),
            ready: VecDeque::new(),
            pulls: 0,
            pull_bytes: 0,
            allowance_bytes: 0,
            allowed_ns: 0,
        }
    }

    pub(super) fn slots(&self) -> usize {
        self.sources.values().map(|source| source.slots).sum()
    }

    /// Who had an object's slot; 0 for nobody who may be asked.
    pub(super) fn source_of(&self, digest: Digest) -> u32 {
        self.by_slot.get(usize::from(digest.slot().0)).copied().unwrap_or(0)
    }

    /// The slots of a source.
    pub(super) fn slots_of(&self, source: u32) -> impl Iterator<Item = Slot> + '_ {
        let slots = self.by_slot.iter().enumerate().filter(move |(_, of)| **of == source);
        slots.map(|(slot, _)| Slot(slot as u16))
    }

    /// Any digest in a slot of a source.
    pub(super) fn digest_of(&self, source: u32) -> Option<Digest> {
        let slot = self.by_slot.iter().position(|of| *of == source)?;
        Some(Digest((slot as u128) << 114))
    }

    pub(super) fn ask(&mut self, source: ShardKey, want: Want, call: Call) -> Fetch {
        self.next_token += 1;
        self.calls.insert(self.next_token, call);
        Fetch { token: self.next_token, source, want }
    }

    /// Forgets sources that have no slots any more, and what belongs to slots that have another source than before.
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

    /// Gives a source up, or is done with it.
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
        self.sources.insert(
            self.next_source,
            Source {
                key,
                slots: 0,
                at: PageQuery { names: true, ..PageQuery::default() },
                asking: false,
                walked: false,
                changes: Some((PageQuery { changes: true, ..PageQuery::default() }, BTreeMap::new())),
                again: false,
                failures: 0,
                retry_ns: 0,
                muted_ns: 0,
                queue: VecDeque::new(),
                drops: VecDeque::new(),
                dropping: false,
                open: 0,
                unwritten: BTreeSet::new(),
            },
        );
        self.next_source
    }
}

impl Service {
    /// How much is fetched in the background from now on.
    pub fn set_fetch_limits(&mut self, limits: FetchLimits) {
        self.moves.imports.limits = limits;
        self.set_heat(limits.hot_bytes_per_s);
    }

    /// Whom the objects of a slot are fetched from, if anybody.
    #[must_use]
    pub fn source_of(&self, slot: Slot) -> Option<ShardKey> {
        let source = self.moves.imports.by_slot.get(usize::from(slot.0))?;
        self.moves.imports.sources.get(source).map(|source| source.key)
    }

    /// A map came: imports go on where slot and former owner stay as they are, and those of slots that it brings begin.
    /// `heard` is the map before.
    pub(in crate::service) fn change_imports(
        &mut self,
        heard: Epoch,
        missed: bool,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        let me = self.ownership.key();
        self.change_witness(heard, missed, owners);
        let imports = &mut self.moves.imports;
        let mut changed = BTreeSet::new();
        for (slot, of) in imports.by_slot.iter_mut().enumerate().filter(|(_, of)| **of != 0) {
            let source = imports.sources.get(of).map(|source| source.key);
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
                if owners.past(Slot(slot)) != Some(from) && self.copies.inherited(Slot(slot)) {
                    // What is left of it is here already.
                    continue;
                }
                let source = *new.entry(from).or_insert_with(|| imports.add_source(from));
                imports.by_slot.resize(SLOTS, 0);
                imports.by_slot[usize::from(slot)] = source;
                changed.insert(slot.into());
            }
        }
        if !changed.is_empty() {
            imports.settle(&changed);
        }
        self.weigh_doubt(owned, owners);
    }

    /// An object was put or removed here: what its former owners have of it counts no more. Whether one that is still
    /// there may have had it.
    pub(in crate::service) fn touched(&mut self, digest: Digest) -> bool {
        self.moves.witness.note(digest, self.ownership.epoch());
        let imports = &mut self.moves.imports;
        if imports.sources.is_empty() {
            return false;
        }
        let source = imports.source_of(digest);
        let Some(entry) = imports.sources.get_mut(&source) else { return false };
        if let Some(object) = imports.objects.get_mut(&digest) {
            object.void = true;
        }
        let new = imports.masks.insert(digest);
        entry.unwritten.remove(&digest);
        if new {
            entry.drops.push_back(digest);
        }
        if imports.masks.len() > MASKS_MOST {
            imports.forget(source);
            self.moves.counters.abandoned += 1;
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

    use super::*;

    /// A source that did not answer for a second is not left alone for five because sixteen objects were on their way.
    #[test]
    fn requests_that_fail_together_put_off_the_next_attempt_once() {
        let mut imports = Imports::new();
        let key = ShardKey { node: NodeId(1), incarnation: Incarnation(1), shard: ShardId(0) };
        let number = imports.add_source(key);
        let source = imports.sources.get_mut(&number).expect("it was just added");
        let mut waits = Vec::new();
        for _ in 0..4 {
            let now_ns = source.retry_ns;
            (0..20).for_each(|later| source.failed(now_ns + later));
            waits.push((source.retry_ns - now_ns) / 100_000_000);
        }
        assert_eq!(waits, [2, 4, 8, 16], "tenths of a second: twice as long each time");
    }
}
