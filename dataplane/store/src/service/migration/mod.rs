//! Migration of slots: their objects follow to the new owner.
//!
//! A shard that loses a slot keeps its objects, frozen, for the new owner alone (*exports*). The shard that gains the
//! slot serves it at once (*imports*): it fetches objects that requests need from the former owner, and in the
//! background it fetches all others, object by object, and has the former owner drop those that were imported. So an
//! object is imported at most once, by its owner, and only the owner answers for it. When everything is imported, it
//! reports that, and the former owner ends the exports.
//!
//! Correctness:
//! * The former owner answers for a lost slot only once it has learned of the loss by a map at least as new as the
//!   peer's. From then on its objects of the slot do not change.
//! * Puts and removals at the new owner take precedence over the former owner's objects: such an object is *masked*
//!   until the former owner has dropped it, and a fetch of it in flight is void.
//! * A fetch belongs to one layout of the cluster. When the slot migrates again, when either side begins another
//!   incarnation, or when the new owner may have missed a layout, every object that was fetched and not imported yet is
//!   void.
//! * An object that cannot be fetched counts as evicted: no request waits for a former owner for long.
//!
//! The former owners of slots are known from the map ([`kvplane_proto::map::SlotOwners`]); requests are sent by the
//! host's client.

mod changes;
mod imports;
mod objects;
mod pace;
mod questions;
mod reports;
mod sources;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};
use kvplane_proto::message::KeyItem;

use self::changes::Witness;
use self::imports::Imports;
pub(super) use self::imports::Waiter;
use self::reports::Reports;
use super::fetches::FetchLimits;
use super::local::LocalStore;
use super::shard::Shard;
use super::shard::context::RequestContext;
use super::tiering::SlotSources;

/// Progress of migration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MoveCounters {
    /// Slots that this shard serves: puts in them are acknowledged.
    pub owned_slots: u64,
    /// Slots that other shards fetch from this one.
    pub exporting_slots: u64,
    /// Slots of which not all objects are here yet.
    pub importing_slots: u64,
    /// Objects imported.
    pub imported: u64,
    /// Bytes imported.
    pub imported_bytes: u64,
    /// Imported objects that a request waited for.
    pub fetched: u64,
    /// Look-ups that the former owner answered with not found.
    pub misses: u64,
    /// Fetches that failed: the former owner did not answer, or there was no memory.
    pub failures: u64,
    /// Fetches that were void because the object was put or removed here, or its slot migrated again.
    pub void: u64,
    /// True if no more objects are to be imported by the maps received, and all objects that lack replicas by them were
    /// walked. Always true if background fetching is off.
    pub settled: bool,
    /// Imports that were abandoned because too much was written while the former owner did not answer.
    pub abandoned: u64,
    /// Exports of slots that ended because the new owner had imported everything.
    pub exports_completed: u64,
}

/// Importing side of migration, and the changes recorded for owners that come back. Exports are part of the shard,
/// which answers for them.
#[derive(Debug, Default)]
pub(super) struct Migration {
    imports: Imports,
    reports: Reports,
    /// Changes in slots whose former owner is absent.
    witness: Witness,
    counters: MoveCounters,
}

impl Migration {
    /// Sets the limits of background fetching.
    pub(super) const fn set_limits(&mut self, limits: FetchLimits) {
        self.imports.pace.limits = limits;
    }

    /// Returns the limits of background fetching.
    pub(super) const fn limits(&self) -> FetchLimits {
        self.imports.pace.limits
    }

    /// Returns the shard that the objects of a slot are fetched from, if any.
    pub(super) fn source_of(&self, slot: Slot) -> Option<ShardKey> {
        self.imports.owner_before(slot)
    }

    /// Returns the former owners that have not answered the report that everything was imported.
    pub(super) fn unreported(&self) -> impl Iterator<Item = ShardKey> + '_ {
        self.reports.sources()
    }

    /// Returns true if all objects of gained slots are here.
    pub(super) fn is_done(&self) -> bool {
        self.imports.sources.is_empty()
    }

    /// Returns the counters of imports; the caller adds owned slots, exports and `settled`.
    pub(super) fn counters(&self) -> MoveCounters {
        MoveCounters { importing_slots: self.imports.slots() as u64, ..self.counters }
    }

    /// Returns true if a former owner may have the object and it can be fetched. False for a peer whose ticket is for
    /// one tenant: its requests wait until the objects were fetched.
    pub(super) fn may_have(&self, shard: &Shard, context: &RequestContext, digest: Digest) -> bool {
        !context.fetches && context.tenant.is_none() && self.is_fetchable(shard, digest)
    }

    /// Returns true if an object that is not here can be fetched from a former owner, for any peer.
    pub(super) fn is_fetchable(&self, shard: &Shard, digest: Digest) -> bool {
        self.imports.is_fetchable(digest, shard.now_ns)
    }

    /// Returns true if an object may yet be imported from a former owner.
    pub(super) fn is_coming(&self, digest: Digest) -> bool {
        self.imports.is_coming(digest)
    }

    /// Returns those of these objects that former owners may have.
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

    /// Acts on a map that follows epoch `heard`: begins to import gained slots, and decides about their slots in doubt
    /// on the SSD. To be called after exports were updated.
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
        self.reports.follow(local.shard.ownership.key(), heard, missed, owned, owners);
        self.with_sources(|sources| local.weigh_doubts(sources, owned, owners));
    }

    /// Passes the slots that are being imported to `look`.
    pub(super) fn with_sources<T>(&self, look: impl FnOnce(&SlotSources<'_>) -> T) -> T {
        let has = |slot: Slot| self.imports.owner_before(slot).is_some();
        look(&SlotSources { generation: self.imports.generation(), has: &has })
    }

    /// Records that an object was put or removed here, which makes the former owners' objects void. Returns true if a
    /// former owner that still exists may have had it.
    pub(super) fn note_change(&mut self, shard: &Shard, digest: Digest) -> bool {
        self.witness.note(digest, shard.ownership.epoch());
        let masked = self.imports.mask(digest);
        self.counters.abandoned += u64::from(masked.is_abandoned);
        masked.is_new
    }

    /// Returns true while a former owner has not reported all changes in gained slots yet.
    pub(super) fn awaits_changes(&self) -> bool {
        self.imports.sources.values().any(sources::Source::awaits_changes)
    }

    /// Forgets all changes: the objects of absent owners are void.
    pub(super) fn forget_absent(&mut self) {
        self.witness.clear();
    }

    /// Returns the number that identifies the walk through the changes, in the incarnation that `walk_tag` identifies;
    /// never 0.
    pub(super) fn changes_tag(&self, walk_tag: u64) -> u64 {
        self.witness.tag(walk_tag)
    }

    /// Returns a page of the changes in exported slots.
    pub(super) fn changes_page(&self, shard: &Shard, from: u64) -> (Vec<KeyItem>, u64) {
        self.witness.page(from, &|slot| shard.exports.has_slot(slot))
    }

    /// Returns the time at which [`Self::poll`] may have a new request.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        [self.imports.poll_timeout(now_ns), self.reports.poll_timeout(now_ns)].into_iter().flatten().min()
    }
}
