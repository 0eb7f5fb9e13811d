//! Slots that migrate: what was in them goes along.
//!
//! A shard that loses a slot to another keeps its objects, frozen, for the new owner alone (*exports*). The shard that
//! gets the slot serves it at once (*imports*): what it does not have it asks the former owner for, and in the
//! background it fetches everything that is left, object by object, and has the former owner drop what has moved. So an
//! object is taken over at most once, by its owner, and only the owner answers for it.
//!
//! What makes it right:
//! * The former owner tells of a slot only once it has heard that it lost it, by a map at least as new as the peer's.
//!   From then on nobody changes what it has of it.
//! * What was put or removed at the new owner counts, whatever the former one has: such an object is *masked* until the
//!   former owner has dropped it, and a fetch of it in flight comes to nothing.
//! * A fetch belongs to one layout of the cluster. When the slot moves on, when either side begins another incarnation,
//!   or when the new owner may have missed a layout, everything that was fetched and not taken over yet is void.
//! * Whatever cannot be fetched counts as evicted: nothing waits for a former owner for long.
//!
//! Not here: who owned what before ([`kvplane_proto::map::SlotOwners`]), and how to ask: the host's client does that.

mod changes;
mod imports;
mod objects;
mod pace;
mod questions;
mod sources;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};
use kvplane_proto::message::KeyItem;

use self::changes::Witness;
use self::imports::Imports;
pub(super) use self::imports::Waiter;
use super::fetches::FetchLimits;
use super::local::LocalStore;
use super::shard::Shard;
use super::shard::context::RequestContext;
use super::tiering::SlotSources;

/// What moved so far, and what is on its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MoveCounters {
    /// Slots that others fetch from here.
    pub exporting_slots: u64,
    /// Slots of which not all is here yet.
    pub importing_slots: u64,
    /// Objects that were taken over.
    pub imported: u64,
    /// Their bytes.
    pub imported_bytes: u64,
    /// Of them, those that somebody waited for.
    pub fetched: u64,
    /// Questions that the former owner answered with no.
    pub misses: u64,
    /// Fetches that came to nothing: the former owner did not answer, or there was no room.
    pub failures: u64,
    /// Fetches that were void, as the object was put or removed here, or its slot moved on.
    pub void: u64,
    /// Whether nothing is to come any more by the maps that were heard of, and what lacks copies by them was gone
    /// through. Where nothing is fetched by itself, that is always so.
    pub settled: bool,
    /// Imports that were given up, as too much was written while the former owner did not answer.
    pub abandoned: u64,
}

/// The importing side of migration, and what is known of changes for owners that come back. What is exported is the
/// shard's to know, who answers for it.
#[derive(Debug, Default)]
pub(super) struct Migration {
    imports: Imports,
    /// What changed in slots whose owner before is away.
    witness: Witness,
    counters: MoveCounters,
}

impl Migration {
    /// How much is fetched in the background from now on.
    pub(super) const fn set_limits(&mut self, limits: FetchLimits) {
        self.imports.pace.limits = limits;
    }

    /// How much is moved in the background.
    pub(super) const fn limits(&self) -> FetchLimits {
        self.imports.pace.limits
    }

    /// The shard that the objects of a slot are fetched from, if any.
    pub(super) fn source_of(&self, slot: Slot) -> Option<ShardKey> {
        self.imports.owner_before(slot)
    }

    /// True where all is here of the slots that came.
    pub(super) fn is_done(&self) -> bool {
        self.imports.sources.is_empty()
    }

    /// What was imported so far; exports, and whether all has settled, are for others to add.
    pub(super) fn counters(&self) -> MoveCounters {
        MoveCounters { importing_slots: self.imports.slots() as u64, ..self.counters }
    }

    /// True where a former owner may have the object, and can be asked. For a peer whose ticket is for one tenant,
    /// objects are fetched before anything is said of them.
    pub(super) fn may_have(&self, shard: &Shard, context: &RequestContext, digest: Digest) -> bool {
        !context.fetches && context.tenant.is_none() && self.is_fetchable(shard, digest)
    }

    /// True where what is not here can be fetched from a former owner, for whatever peer.
    pub(super) fn is_fetchable(&self, shard: &Shard, digest: Digest) -> bool {
        self.imports.is_fetchable(digest, shard.now_ns)
    }

    /// True where an object may yet come from a former owner.
    pub(super) fn is_coming(&self, digest: Digest) -> bool {
        self.imports.is_coming(digest)
    }

    /// Those of these objects that may be with former owners.
    pub(super) fn elsewhere(
        &self,
        shard: &Shard,
        context: &RequestContext,
        missing: impl Iterator<Item = (usize, Digest)>,
    ) -> Vec<(usize, Digest)> {
        if self.imports.sources.is_empty() {
            return Vec::new();
        }
        missing.filter(|(_, digest)| self.may_have(shard, context, *digest)).collect()
    }

    /// A map came, of which `heard` was the one before: what it brings is fetched, and what the SSD has of it is
    /// compared. To be called when it is known what is exported.
    pub(super) fn follow(
        &mut self,
        local: &mut LocalStore,
        heard: Epoch,
        missed: bool,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        self.witness.follow(&local.shard, heard, missed, owners);
        self.imports.follow(&local.shard, heard, missed, owned, owners);
        self.with_sources(|sources| local.weigh_doubts(sources, owned, owners));
    }

    /// Shows whom slots are fetched from.
    pub(super) fn with_sources<T>(&self, look: impl FnOnce(&SlotSources<'_>) -> T) -> T {
        let has = |slot: Slot| self.imports.owner_before(slot).is_some();
        look(&SlotSources { generation: self.imports.generation(), has: &has })
    }

    /// An object was put or removed here: what its former owners have of it counts no more. True where one that is
    /// still there may have had it.
    pub(super) fn note_change(&mut self, shard: &Shard, digest: Digest) -> bool {
        self.witness.note(digest, shard.ownership.epoch());
        let masked = self.imports.mask(digest);
        self.counters.abandoned += u64::from(masked.is_abandoned);
        masked.is_new
    }

    /// True while a former owner has not told yet what changed in slots that came.
    pub(super) fn awaits_changes(&self) -> bool {
        self.imports.sources.values().any(sources::Source::awaits_changes)
    }

    /// What absent owners have counts no more.
    pub(super) fn forget_absent(&mut self) {
        self.witness.clear();
    }

    /// Names the walk through what changed, in the incarnation that `walk_tag` names; never 0.
    pub(super) fn changes_tag(&self, walk_tag: u64) -> u64 {
        self.witness.tag(walk_tag)
    }

    /// A page of what changed in the slots that left.
    pub(super) fn changes_page(&self, shard: &Shard, from: u64) -> (Vec<KeyItem>, u64) {
        self.witness.page(from, &|slot| shard.exports.has_slot(slot))
    }

    /// When [`Self::poll`] may have something that it has not now.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        self.imports.poll_timeout(now_ns)
    }
}
