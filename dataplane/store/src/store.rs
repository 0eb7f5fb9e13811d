//! Objects of one shard: get with pins, put as reserve and commit, remove.
//!
//! * Objects are immutable. A version is assigned at commit, greater than any assigned before.
//! * A pin keeps an object's bytes in place; a removed object's bytes are freed with its last pin.
//! * A put reserves an extent, its writer fills it, and it becomes visible at commit. Several puts of one digest may be
//!   in flight; the first commit wins, unless a later one may replace: then the later one is the object, and readers of
//!   the former one finish undisturbed. The extent of a failed put stays in quarantine until the host knows that its
//!   writer has stopped ([`Store::abort`]).
//! * Room is made inside `reserve`, by evicting unused objects.
//!
//! [`Store`] owns the handles (pins and reservations), the versions and the counters of requests. Below it, `space`
//! takes, evicts and frees memory; it keeps three components in step: the table that finds objects by digest
//! ([`ObjectTable`]), the pool that knows their extents ([`Pool`]), and the eviction order across tenants
//! (`crate::order`, with the accounts in [`Tenants`]).
//!
//! Invariant ([`Store::check`]): every granule of the pool is free or belongs to exactly one entry or page of tails.
//! Deadlines are the host's, which calls [`Store::expire`]; the store knows nothing of tickets and tiers, and does not
//! touch the bytes themselves.

mod detached;
mod far_pool;
mod kept;
mod moves;
mod objects;
mod pool;
mod put;
mod space;
mod stats;
mod unchecked;
mod watermarks;

pub use detached::DetachedReplicas;
pub use far_pool::{FarPoolStats, PoolCopies};
pub use kept::{KeptObjects, TakeBackError, former_objects};
pub use moves::{NoMove, PoolMove, PoolMoves, TailMove};
pub use objects::ObjectTable;
pub use pool::Pool;
pub use space::{ObjectPins, PinError};
pub use stats::{DevicePoolStats, EventStats, HandleStats, PinStats, ReplicaStats, SIZE_CLASSES, StoreStats};

use std::sync::Arc;

use kvplane_proto::ConfigError;
use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{PinId, ReservationId, Version};
use kvplane_proto::map::ReplicaSet;
use kvplane_proto::message::ObjectPriority;

pub use crate::allocator::Extent;
use crate::allocator::{GRANULE_BYTES, MemoryKind};
use crate::config::StoreConfig;
use crate::entry::{Copies, Entry, EntryId, Keep, LiveUse, Mark, Replica, State};
use crate::errors::{GetError, StalePin};
use crate::eviction::{ChosenPolicy, EvictionPolicy};
use crate::generational::GenerationalTable;
use crate::order::Tenants;
use kvplane_proto::events::{ObjectChange, ObjectMedium};
use space::{Evictions, Space};
use stats::Counters;
use unchecked::UncheckedObjects;
pub use unchecked::{KeptCounters, PoolSums};

/// Facts about an object that a reader needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectView {
    /// Extent of its bytes, valid until the pin is released.
    pub extent: Extent,
    /// Version that its commit assigned.
    pub version: Version,
    /// Checksum that its writer stated.
    pub checksum: u64,
    /// Number of the tenant that it is charged to.
    pub tenant: u32,
    /// True if its tail is present.
    pub has_tail: bool,
    /// Offset of the tail, present or not.
    pub tail_at: u64,
    /// True if its extent is in the device pool; the tail is in the pool either way.
    pub is_on_device: bool,
    /// True if its extent is in the far pool, where it is read like in the rest of the pool.
    pub is_far: bool,
    /// True if it is a stripe head.
    pub is_head: bool,
    /// Role of the object in replication.
    pub replica: Replica,
    /// Its replicas.
    pub copies: Copies,
    /// True if a retention keeps it.
    pub is_retained: bool,
    /// Its priority, which may differ from that in its tail.
    pub priority: ObjectPriority,
}

/// Consequence of new owners for an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OwnershipChange {
    /// It stays as it is.
    Unchanged,
    /// A replica: it becomes an object of this shard.
    Promoted,
    /// It is dropped.
    Dropped,
    /// An object of this shard: these replica owners may have a replica of it.
    Replicated(ReplicaSet),
}

/// Role of an object in replication.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplicaRole {
    /// Replica of another owner's object.
    Replica,
    /// Object of this shard of which these replica owners may have a replica.
    Replicated(ReplicaSet),
    /// Object of this shard without a replica.
    Sole,
}

/// State of one shard, with an eviction policy of type `P`. Single-threaded.
#[derive(Debug)]
pub struct Store<P = ChosenPolicy> {
    config: StoreConfig,
    /// Objects in their memory.
    space: Space<P>,
    /// Objects of a former process.
    unchecked: UncheckedObjects,
    /// Entry that each pin holds.
    pins: GenerationalTable<PinId>,
    /// Entry of each reservation, quarantined ones included.
    reservations: GenerationalTable<ReservationId>,
    next_version: u64,
    counters: Counters,
}

impl Store {
    /// Creates an empty store. The first commit gets `first_version`, which is to be greater than any that an earlier
    /// incarnation of this shard assigned.
    ///
    /// # Errors
    /// A field of `config` that is out of range.
    pub fn new(config: StoreConfig, first_version: Version) -> Result<Self, ConfigError> {
        config.validate()?;
        let policy = config.policy();
        Self::with_policy(config, first_version, policy)
    }

    /// Creates a store without a pool: it holds no object and refuses every put. For shards that have segments only.
    #[must_use]
    pub fn empty() -> Self {
        let config = StoreConfig::without_pool();
        let policy = config.policy();
        Self::build(config, Version(1), policy)
    }
}

/// Uses the far pool of a store's configuration from now on: `copies` moves objects inside the pool.
///
/// # Panics
/// If the configuration has no far pool.
pub fn open_far_pool<P>(store: &mut Store<P>, copies: Arc<dyn PoolCopies>) {
    space::open_far(&mut store.space, copies);
}

/// Returns the gauges and counters of a store's far pool. Its objects count among the visible ones of the store; its
/// space does not count in the store's gauges.
#[must_use]
pub fn far_pool_stats<P>(store: &Store<P>) -> FarPoolStats {
    space::far_stats(&store.space)
}

impl<'a, P> From<&'a mut Store<P>> for ObjectPins<'a, P> {
    fn from(store: &'a mut Store<P>) -> Self {
        Self { space: &mut store.space }
    }
}

impl<P: EvictionPolicy> Store<P> {
    /// Like [`Store::new`], with an eviction policy of the caller.
    ///
    /// # Errors
    /// A field of `config` that is out of range.
    pub fn with_policy(config: StoreConfig, first_version: Version, policy: P) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self::build(config, first_version, policy))
    }

    fn build(config: StoreConfig, first_version: Version, policy: P) -> Self {
        Self {
            space: Space::new(&config, policy),
            unchecked: UncheckedObjects::default(),
            pins: GenerationalTable::new(config.max_pins),
            reservations: GenerationalTable::new(config.max_reservations),
            next_version: first_version.0,
            counters: Counters::default(),
            config,
        }
    }

    /// Returns the limits.
    #[must_use]
    pub const fn config(&self) -> &StoreConfig {
        &self.config
    }

    /// Returns the table of objects, for look-ups by digest and walks. These do not count as accesses.
    #[must_use]
    #[inline]
    pub const fn objects(&self) -> &ObjectTable {
        self.space.objects()
    }

    /// Returns the table of objects, for changes of their replication.
    #[inline]
    pub const fn objects_mut(&mut self) -> &mut ObjectTable {
        self.space.objects_mut()
    }

    /// Returns the pool: the extents of objects and of their tails.
    #[must_use]
    #[inline]
    pub const fn pool(&self) -> &Pool {
        self.space.pool()
    }

    /// Returns the accounts of tenants.
    #[must_use]
    #[inline]
    pub const fn tenants(&self) -> &Tenants<P> {
        self.space.tenants()
    }

    /// Returns the accounts of tenants, to be changed.
    #[inline]
    pub const fn tenants_mut(&mut self) -> &mut Tenants<P> {
        self.space.tenants_mut()
    }

    /// Returns the version that the next commit assigns.
    #[must_use]
    pub const fn next_version(&self) -> Version {
        Version(self.next_version)
    }

    /// Advances the time, for soft pins and retentions. It never goes back.
    pub fn tick(&mut self, now_ns: u64) {
        self.space.tick(now_ns);
    }

    /// Returns true if there is an object of this digest. Does not count as an access.
    #[must_use]
    pub fn exists(&self, digest: Digest) -> bool {
        self.objects().find(digest).is_some()
    }

    /// Returns the view of an object. Does not count as an access.
    #[must_use]
    pub fn peek(&self, digest: Digest) -> Option<ObjectView> {
        self.objects().find(digest).map(|id| self.space.view(id))
    }

    /// Returns the objects whose point (32 bits of a mix of the digest, salted by the configured seed) is in
    /// `from..to`; `to` may be one beyond the last point. Each comes with its point, in no order. Looks at about the
    /// corresponding fraction of the index. Does not count as an access.
    pub fn between(&self, from: u64, to: u64) -> impl Iterator<Item = (u32, Digest, ObjectView)> {
        let found = self.objects().between(from, to);
        found.map(|(point, id)| (point, self.objects().entries()[id].digest(), self.space.view(id)))
    }

    /// Pins an object, so that its bytes stay until [`Store::unpin`]. Counts as an access. One in the far pool may move
    /// back to DRAM.
    ///
    /// # Errors
    /// [`GetError::NotFound`]; [`GetError::TooManyPins`], in which case nothing is counted as an access.
    pub fn get(&mut self, digest: Digest) -> Result<(PinId, ObjectView), GetError> {
        let Some(id) = self.unchecked.find_to_lend(&mut self.space, digest) else {
            self.counters.misses += 1;
            return Err(GetError::NotFound);
        };
        if self.pins.is_full() {
            self.counters.pin_refusals += 1;
            return Err(GetError::TooManyPins { limit: self.config.max_pins });
        }
        self.counters.hits += 1;
        let is_far = self.objects().entries()[id].memory() == MemoryKind::Far;
        let is_hot = is_far && space::is_hot_in_far(&self.space, id);
        self.space.access(id);
        let (pin, view) = (self.pins.insert(id), self.space.pin(id));
        if !is_far {
            return Ok((pin, view));
        }
        space::promote(&mut self.space, id, is_hot);
        Ok((pin, self.space.view(id)))
    }

    /// Pins an object without counting an access: for background work. `None` if there is no object or no free pin.
    pub fn hold(&mut self, digest: Digest) -> Option<(PinId, ObjectView)> {
        let id = self.unchecked.find_to_lend(&mut self.space, digest)?;
        (!self.pins.is_full()).then(|| (self.pins.insert(id), self.space.pin(id)))
    }

    /// Returns the number of free pins.
    #[must_use]
    pub const fn free_pins(&self) -> u32 {
        self.pins.free()
    }

    /// Returns the view of the object that a pin holds.
    #[must_use]
    pub fn held(&self, pin: PinId) -> Option<ObjectView> {
        Some(self.space.view(self.pins.get(pin)?))
    }

    /// Returns the metadata of the object that a pin holds, which may have been removed since; `None` if the pin is not
    /// held.
    #[must_use]
    pub fn pinned(&self, pin: PinId) -> Option<&Entry> {
        Some(&self.objects().entries()[self.pins.get(pin)?])
    }

    /// Marks the tail of a pinned object as present; its memory was reserved from the start.
    pub fn set_tail(&mut self, pin: PinId) {
        if let Some(id) = self.pins.get(pin) {
            self.space.objects_mut().entries_mut().set(id, Mark::Tail, true);
        }
    }

    /// Sets the account, the group, the hard pin and the priority of a pinned object, for which they are known only
    /// now; the hard pin only within the limits. Soft pins have expired by then. False if its account has no room for
    /// it, even after evicting the account's other objects as for a put: then nothing is set.
    pub fn keep_as(&mut self, pin: PinId, keep: &Keep) -> bool {
        let Some(id) = self.pins.get(pin) else { return true };
        !self.objects().entries()[id].is_live() || self.space.keep_as(id, keep)
    }

    /// Releases a pin. With the last one, a removed object's bytes are freed.
    ///
    /// # Errors
    /// The pin is not held; only a counter changes.
    pub fn unpin(&mut self, pin: PinId) -> Result<(), StalePin> {
        let Some(id) = self.pins.remove(pin) else {
            self.counters.stale_ids += 1;
            return Err(StalePin);
        };
        self.space.unpin(id);
        Ok(())
    }

    /// Makes an object invisible at once; its bytes are freed with its last pin. False if there was none. A put in
    /// flight is not affected: it completes after the removal.
    pub fn remove(&mut self, digest: Digest) -> bool {
        let Some(id) = self.objects().find(digest) else { return false };
        self.counters.removes += 1;
        self.space.remove(id, false);
        true
    }

    /// Like [`Store::remove`], for an object that exists elsewhere too and need not be kept here.
    pub fn drop_copy(&mut self, digest: Digest) {
        if let Some(id) = self.objects().find(digest) {
            self.space.remove(id, true);
        }
    }

    /// Removes every object; returns their number. Walks the arena.
    pub fn remove_all(&mut self) -> u64 {
        // One event stands for all.
        let events = core::mem::take(self.objects_mut().events_mut());
        let removed = self.retain(|_| false);
        *self.objects_mut().events_mut() = events;
        self.objects_mut().events_mut().push(ObjectChange::Cleared, ObjectMedium::Memory, Digest(0), 0);
        removed
    }

    /// Removes every object for whose digest `keep` returns false; returns their number. Walks the arena.
    pub fn retain(&mut self, keep: impl Fn(Digest) -> bool) -> u64 {
        let mut removed = 0;
        for id in (0..self.objects().entries().touched()).map(EntryId) {
            let entry = &self.objects().entries()[id];
            if entry.is_live() && !keep(entry.digest()) {
                self.space.remove(id, false);
                removed += 1;
            }
        }
        self.counters.removes += removed;
        removed
    }

    /// Applies a change of owners: `change` returns the consequence for each object, by its role in replication.
    /// Returns the number of objects dropped. Walks the arena.
    pub fn reassign(&mut self, mut change: impl FnMut(Digest, ReplicaRole) -> OwnershipChange) -> u64 {
        let mut gone = 0;
        for id in (0..self.objects().entries().touched()).map(EntryId) {
            let Some((digest, role)) = self.objects().role(id) else { continue };
            match change(digest, role) {
                OwnershipChange::Unchanged => {}
                OwnershipChange::Replicated(at) => self.objects_mut().set_replica_owners(id, at),
                OwnershipChange::Promoted => self.objects_mut().own(id),
                OwnershipChange::Dropped => {
                    self.space.remove(id, false);
                    gone += 1;
                }
            }
        }
        gone
    }

    /// Returns the gauges and counters. Walks one bin of the allocator.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        let (objects, pool, counters) = (self.objects(), self.pool(), &self.counters);
        let bytes_in = |state: State| objects.entries().granules_in(state) * GRANULE_BYTES;
        let LiveUse { payload_bytes, replicas, copied, .. } = *objects.entries().live();
        let Evictions { objects: evictions, bytes: evicted_bytes } = self.space.evictions();
        let events = self.objects().events();
        let (soft, retained) = self.space.pin_counts();
        let (device_granules, free_device_granules) = pool.granules_beside(MemoryKind::Device);
        StoreStats {
            objects: objects.len().into(),
            payload_bytes,
            replicas: ReplicaStats { here: replicas, elsewhere: copied },
            pool_bytes: pool.granules() * GRANULE_BYTES,
            used_bytes: (pool.granules() - pool.free_granules()) * GRANULE_BYTES,
            free_bytes: pool.free_granules() * GRANULE_BYTES,
            largest_free_bytes: pool.largest_free_bytes(),
            pinned_bytes: self.space.pinned_granules() * GRANULE_BYTES,
            kept: PinStats {
                hard_bytes: self.tenants().hard_granules() * GRANULE_BYTES,
                soft: soft as u64,
                retained: retained as u64,
            },
            doomed_bytes: bytes_in(State::Doomed),
            reserved_bytes: bytes_in(State::Reserved),
            quarantined_bytes: bytes_in(State::Quarantined),
            tail_page_bytes: pool.page_bytes(),
            device: DevicePoolStats {
                pool_bytes: device_granules * GRANULE_BYTES,
                used_bytes: (device_granules - free_device_granules) * GRANULE_BYTES,
                objects: objects.entries().live().on_device,
                promotions: counters.promotions,
                demotions: counters.demotions,
                lost: counters.lost_with_device,
            },
            pins: self.pins.len().into(),
            reservations: self.reservations.len().into(),
            hits: counters.hits,
            misses: counters.misses,
            puts: counters.puts,
            exists_conflicts: counters.exists_conflicts,
            replacements: counters.replacements,
            reserve_refusals: counters.reserve_refusals,
            expirations: counters.expirations,
            aborts: counters.aborts,
            removes: counters.removes,
            evictions,
            evicted_bytes,
            handles: HandleStats { pin_refusals: counters.pin_refusals, stale_ids: counters.stale_ids },
            sizes: counters.sizes,
            events: EventStats { next: events.next(), lost: events.lost(), are_kept: events.is_kept() },
        }
    }

    /// Asserts every invariant. Walks all entries and blocks: for tests and simulation.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn check(&self) {
        self.space.check();
        let entries = self.objects().entries();
        let pins: u32 = entries.iter().map(|(_, entry)| entry.pins()).sum();
        assert_eq!(pins, self.pins.len() + self.unchecked.lent, "pins are counted");
        for entry in self.pins.values().map(|id| &entries[id]) {
            assert!(entry.pins() > 0, "a pin leads to {entry:?}");
            assert!(matches!(entry.state(), State::Live | State::Doomed), "{entry:?} is pinned");
        }
        let is_put = |entry: &Entry| matches!(entry.state(), State::Reserved | State::Quarantined);
        for entry in self.reservations.values().map(|id| &entries[id]) {
            assert!(is_put(entry), "a reservation leads to {entry:?}");
        }
        let puts = entries.iter().filter(|(_, entry)| is_put(entry)).count();
        assert_eq!(puts, (self.reservations.len() + self.unchecked.withheld) as usize, "reservations are counted");
    }
}
