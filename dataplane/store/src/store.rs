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
//! Invariant ([`Store::check`]): every granule of the pool is free or belongs to exactly one entry or page of tails.
//! Deadlines are the host's, which calls [`Store::expire`]; the store knows nothing of tickets and tiers, and does not
//! touch the bytes themselves.

mod check;
mod copies;
mod put;
mod space;
mod stats;
mod tails;

pub use copies::{Fate, Side};
pub use stats::{EventStats, PinStats, ReplicaStats, SIZE_CLASSES, StoreStats};

use kvplane_proto::ConfigError;
use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{PinId, Version};

use crate::allocator::{Allocator, Block, GRANULE_BYTES};
use crate::config::StoreConfig;
use crate::entry::{Entries, Entry, EntryId, Mark, Replica, STATES, State};
use crate::errors::{GetError, StalePin};
use crate::events::{Change, EventLog, Medium};
use crate::eviction::{ChosenPolicy, EvictionPolicy};
use crate::generational::GenerationalTable;
use crate::index::{Index, TOGETHER};
use crate::order::{Order, TenantLease, TenantUse};
use crate::tail_pages::TailPages;
use stats::Counters;

/// Range of the pool: exactly the object's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Offset from the start of the pool.
    pub offset: u64,
    /// Size of the object.
    pub bytes: u64,
}

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
    /// True if it is a stripe head.
    pub is_head: bool,
    /// Role of the object in replication.
    pub replica: Replica,
    /// True if the replica owner may have a replica of it.
    pub copied: bool,
}

/// State of one shard, with an eviction policy of type `P`. Single-threaded.
#[derive(Debug)]
pub struct Store<P = ChosenPolicy> {
    config: StoreConfig,
    allocator: Allocator,
    entries: Entries,
    index: Index,
    /// Eviction orders of all tenants.
    order: Order<P>,
    /// Entry that each pin holds.
    pins: GenerationalTable,
    /// Entry of each reservation, quarantined ones included.
    reservations: GenerationalTable,
    /// Granules of the entries in each state.
    granules: [u64; STATES],
    /// Tails that are not stored behind their objects.
    tails: TailPages,
    /// True if usage exceeded the high watermark and has not reached the low one since.
    draining: bool,
    next_version: u64,
    counters: Counters,
    /// Events of the objects, if there are subscribers.
    pub(crate) events: EventLog,
    /// Objects that are gone while the replica owner may have replicas of them.
    orphans: Vec<Digest>,
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
}

impl<P: EvictionPolicy> Store<P> {
    /// Like [`Store::new`], with an eviction policy of the caller.
    ///
    /// # Errors
    /// A field of `config` that is out of range.
    pub fn with_policy(config: StoreConfig, first_version: Version, policy: P) -> Result<Self, ConfigError> {
        config.validate()?;
        let tails = TailPages::new(config.unit_bytes, GRANULE_BYTES, config.max_objects);
        Ok(Self {
            allocator: Allocator::new(config.pool_bytes, config.max_objects + tails.max_pages()),
            tails,
            entries: Entries::new(config.max_objects).in_units(config.unit_bytes),
            index: Index::new(config.max_objects, config.hash_seed),
            order: Order::new(config.pool_bytes / GRANULE_BYTES, policy),
            pins: GenerationalTable::new(config.max_pins),
            reservations: GenerationalTable::new(config.max_reservations),
            granules: [0; STATES],
            draining: false,
            next_version: first_version.0,
            counters: Counters::default(),
            events: EventLog::default(),
            orphans: Vec::new(),
            config,
        })
    }

    /// Returns the limits.
    #[must_use]
    pub const fn config(&self) -> &StoreConfig {
        &self.config
    }

    /// Returns true if there is an object of this digest. Does not count as an access.
    #[must_use]
    pub fn exists(&self, digest: Digest) -> bool {
        self.index.find(&self.entries, digest).is_some()
    }

    /// Returns the memory of the tables that look-ups read at random: that of digests, all of it touched, and that of
    /// entries, touched as it fills. For advice to the kernel about that memory.
    #[must_use]
    pub fn tables(&self) -> [core::ops::Range<*const u8>; 2] {
        [self.index.memory(), self.entries.memory()]
    }

    /// Like [`Self::exists`], for many digests: faster than one by one if the tables exceed the caches.
    pub fn exist(&self, digests: impl IntoIterator<Item = Digest>, mut each: impl FnMut(Digest, bool)) {
        self.look_up(digests, |digest, found| each(digest, found.is_some()));
    }

    /// Like [`Self::exist`], and passes for existing objects whether they are stripe heads.
    pub fn exist_as_heads(&self, digests: impl IntoIterator<Item = Digest>, mut each: impl FnMut(bool, bool)) {
        self.look_up(digests, |_, found| each(found.is_some(), found.is_some_and(|entry| entry.is(Mark::Head))));
    }

    fn look_up(&self, digests: impl IntoIterator<Item = Digest>, mut each: impl FnMut(Digest, Option<&Entry>)) {
        let mut digests = digests.into_iter();
        let mut together = [Digest(0); TOGETHER];
        loop {
            let mut count = 0;
            for (place, digest) in together.iter_mut().zip(&mut digests) {
                *place = digest;
                count += 1;
            }
            let mut found = [None; TOGETHER];
            self.index.find_together(&self.entries, &together[..count], &mut found[..count]);
            for (digest, found) in together[..count].iter().zip(found) {
                each(*digest, found.map(|id| &self.entries[id]));
            }
            if count < TOGETHER {
                return;
            }
        }
    }

    /// Returns the object's size. Does not count as an access.
    #[must_use]
    pub fn size(&self, digest: Digest) -> Option<u64> {
        Some(self.entries[self.index.find(&self.entries, digest)?].bytes())
    }

    /// Returns the view of an object. Does not count as an access.
    #[must_use]
    pub fn peek(&self, digest: Digest) -> Option<ObjectView> {
        self.index.find(&self.entries, digest).map(|id| self.view(id))
    }

    /// Returns the objects whose point (32 bits of a mix of the digest, salted by the configured seed) is in
    /// `from..to`; `to` may be one beyond the last point. Each comes with its point, in no order. Looks at about the
    /// corresponding fraction of the index. Does not count as an access.
    pub fn between(&self, from: u64, to: u64) -> impl Iterator<Item = (u32, Digest, ObjectView)> {
        let found = self.index.between(from, to);
        found.map(|(point, id)| (point, self.entries[id].digest(), self.view(id)))
    }

    /// Returns the number of index slots that [`Self::between`] has in all.
    #[must_use]
    pub const fn places(&self) -> usize {
        self.index.slots()
    }

    /// Pins an object, so that its bytes stay until [`Store::unpin`]. Counts as an access.
    ///
    /// # Errors
    /// [`GetError::NotFound`]; [`GetError::TooManyPins`], in which case nothing is counted as an access.
    pub fn get(&mut self, digest: Digest) -> Result<(PinId, ObjectView), GetError> {
        let Some(id) = self.index.find(&self.entries, digest) else {
            self.counters.misses += 1;
            return Err(GetError::NotFound);
        };
        if self.pins.is_full() {
            self.counters.pin_refusals += 1;
            return Err(GetError::TooManyPins { limit: self.config.max_pins });
        }
        self.counters.hits += 1;
        self.order.access(&mut self.entries, id);
        Ok(self.pin_entry(id))
    }

    /// Pins an object without counting an access: for background work. `None` if there is no object or no free pin.
    pub fn hold(&mut self, digest: Digest) -> Option<(PinId, ObjectView)> {
        let id = self.index.find(&self.entries, digest)?;
        (!self.pins.is_full()).then(|| self.pin_entry(id))
    }

    /// Returns the object that a pin holds.
    #[must_use]
    pub fn held(&self, pin: PinId) -> Option<ObjectView> {
        let id = EntryId(self.pins.get(pin.index, pin.generation)?);
        Some(self.view(id))
    }

    /// Returns true if a pinned object is still visible: not removed since.
    #[must_use]
    pub fn is_live(&self, pin: PinId) -> bool {
        let entry = self.pins.get(pin.index, pin.generation);
        entry.is_some_and(|entry| self.entries[EntryId(entry)].state() == State::Live)
    }

    /// Advances the time, for soft pins. It never goes back.
    pub fn tick(&mut self, now_ns: u64) {
        self.order.tick(now_ns);
    }

    /// Sets the tenants beside the default one: see [`TenantLease`].
    pub fn set_tenants(&mut self, leases: &[TenantLease]) {
        self.order.set_tenants(leases);
    }

    /// Returns the account of the tenant with this number, if it is configured.
    #[must_use]
    pub fn account_of(&self, tenant: u32) -> Option<u16> {
        self.order.account_of(tenant)
    }

    /// Returns the account to charge for a tenant that is not configured: one of its own without a lease, or the
    /// default tenant's if there are too many of those.
    pub fn account_of_stranger(&mut self, tenant: u32) -> u16 {
        self.order.stranger(tenant)
    }

    /// Returns true if there are, or were, tenants besides the default one.
    #[must_use]
    pub const fn has_tenants(&self) -> bool {
        self.order.has_tenants()
    }

    /// Returns the usage of each tenant.
    #[must_use]
    pub fn tenants(&self) -> Vec<TenantUse> {
        self.order.uses()
    }

    /// Returns the number of free pins.
    #[must_use]
    pub const fn free_pins(&self) -> u32 {
        self.config.max_pins - self.pins.len()
    }

    /// Marks the tail of a pinned object as present; its memory was reserved from the start.
    pub fn set_tail(&mut self, pin: PinId) {
        if let Some(entry) = self.pins.get(pin.index, pin.generation) {
            self.entries.set(EntryId(entry), Mark::Tail, true);
        }
    }

    /// Pins an entry; there must be a free pin.
    fn pin_entry(&mut self, id: EntryId) -> (PinId, ObjectView) {
        self.order.stick(&mut self.entries, id, |entries| entries.pin(id));
        let (index, generation) = self.pins.insert(id.0);
        (PinId { index, generation }, self.view(id))
    }

    fn view(&self, id: EntryId) -> ObjectView {
        let entry = &self.entries[id];
        ObjectView {
            extent: self.extent(id),
            version: entry.version(),
            checksum: entry.checksum(),
            tenant: self.order.tenant_of(&self.entries, id),
            has_tail: entry.is(Mark::Tail),
            tail_at: self.tail_place(id),
            is_head: entry.is(Mark::Head),
            replica: entry.replica(),
            copied: entry.is(Mark::Copied),
        }
    }

    /// Returns the digest of the object that a pin holds; `None` if the pin is not held.
    #[must_use]
    pub fn pinned(&self, pin: PinId) -> Option<Digest> {
        let entry = self.pins.get(pin.index, pin.generation)?;
        Some(self.entries[EntryId(entry)].digest())
    }

    /// Releases a pin. With the last one, a removed object's bytes are freed.
    ///
    /// # Errors
    /// The pin is not held; only a counter changes.
    pub fn unpin(&mut self, pin: PinId) -> Result<(), StalePin> {
        let Some(entry) = self.pins.remove(pin.index, pin.generation) else {
            self.counters.stale_ids += 1;
            return Err(StalePin);
        };
        let id = EntryId(entry);
        if self.order.stick(&mut self.entries, id, |entries| entries.unpin(id)) > 0 {
            return Ok(());
        }
        if self.entries[id].state() == State::Doomed {
            self.release(id);
        } else if self.order.unpinned(&mut self.entries, id) {
            self.evict_one(id);
        }
        Ok(())
    }

    /// Makes an object invisible at once; its bytes are freed with its last pin. False if there was none. A put in
    /// flight is not affected: it completes after the removal.
    pub fn remove(&mut self, digest: Digest) -> bool {
        let Some(id) = self.index.find(&self.entries, digest) else { return false };
        self.counters.removes += 1;
        self.remove_entry(id);
        true
    }

    /// Like [`Store::remove`], for an object that exists elsewhere too and need not be kept here.
    pub fn drop_copy(&mut self, digest: Digest) {
        if let Some(id) = self.index.find(&self.entries, digest) {
            self.remove_entry(id);
        }
    }

    /// Returns the visible objects with their sizes among `most` entries from `from` on, and the next position.
    #[must_use]
    pub fn walk(&self, from: u32, most: u32) -> (Vec<(Digest, u64)>, Option<u32>) {
        let touched = self.entries.touched();
        let end = from.saturating_add(most.max(1)).min(touched);
        let entries = (from..end).map(|at| &self.entries[EntryId(at)]);
        let live = entries.filter(|entry| entry.state() == State::Live);
        (live.map(|entry| (entry.digest(), entry.bytes())).collect(), (end < touched).then_some(end))
    }

    /// Returns the event log.
    #[must_use]
    pub const fn events(&self) -> &EventLog {
        &self.events
    }

    /// Keeps the latest `capacity` events from now on; 0 keeps none. Does nothing if the capacity is the same.
    pub fn keep_events(&mut self, capacity: usize) {
        if self.events.capacity() != capacity {
            self.events.keep(capacity);
        }
    }

    /// Returns the version that the next commit assigns.
    #[must_use]
    pub const fn next_version(&self) -> Version {
        Version(self.next_version)
    }

    /// Removes every object; returns their number. Walks the arena.
    pub fn remove_all(&mut self) -> u64 {
        // One event stands for all.
        let events = core::mem::take(&mut self.events);
        let removed = self.retain(|_| false);
        self.events = events;
        self.events.push(Change::Cleared, Medium::Memory, Digest(0), 0);
        removed
    }

    /// Removes every object for whose digest `keep` returns false; returns their number. Walks the arena.
    pub fn retain(&mut self, keep: impl Fn(Digest) -> bool) -> u64 {
        let mut removed = 0;
        for id in (0..self.entries.touched()).map(EntryId) {
            if self.entries[id].state() == State::Live && !keep(self.entries[id].digest()) {
                self.remove_entry(id);
                removed += 1;
            }
        }
        self.counters.removes += removed;
        removed
    }

    /// Returns the extent of an entry.
    fn extent(&self, id: EntryId) -> Extent {
        let entry = &self.entries[id];
        Extent { offset: self.allocator.offset_bytes(entry.block()), bytes: entry.bytes() }
    }

    /// Removes a live entry from the index. The caller removes it from the eviction order.
    fn hide(&mut self, id: EntryId) {
        let taken = self.index.remove(self.entries[id].digest(), id);
        assert!(taken, "{id:?} is live but not in the index");
        self.counters.payload_bytes -= self.entries[id].bytes();
        self.counters.copies -= u64::from(self.entries[id].is(Mark::Copy));
        if self.entries[id].is(Mark::Copied) {
            self.counters.copied -= 1;
            self.orphans.push(self.entries[id].digest());
        }
        self.events.push(Change::Removed, Medium::Memory, self.entries[id].digest(), 0);
    }

    /// Hides a live entry and frees it, at once or with its last pin.
    fn remove_entry(&mut self, id: EntryId) {
        self.hide(id);
        self.order.remove(&mut self.entries, id, false);
        if self.entries[id].pins() == 0 {
            self.release(id);
        } else {
            self.change_state(id, Entries::doom);
        }
    }

    /// Frees an unused entry and its bytes; returns the free block that they are now part of.
    fn release(&mut self, id: EntryId) -> Block {
        let block = self.entries[id].block();
        self.granules[self.entries[id].state() as usize] -= self.entries[id].granules();
        self.order.discharge(&self.entries, id);
        self.entries.release(id);
        // First, so that the block that is returned is the one that all of it is part of.
        self.free_tail(block);
        self.allocator.free(block)
    }

    /// Applies a transition of the entry that keeps its bytes, and moves them to the other state's account.
    fn change_state(&mut self, id: EntryId, step: impl FnOnce(&mut Entries, EntryId)) {
        let granules = self.entries[id].granules();
        self.granules[self.entries[id].state() as usize] -= granules;
        self.order.stick(&mut self.entries, id, |entries| step(entries, id));
        self.granules[self.entries[id].state() as usize] += granules;
    }

    /// Returns the granules that eviction could free.
    const fn evictable_granules(&self) -> u64 {
        // Pages of tails are freed with their objects.
        let held = self.allocator.pool_granules() - self.allocator.free_granules();
        held - self.order.stuck_granules()
    }
}
