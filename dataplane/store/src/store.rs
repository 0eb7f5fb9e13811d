//! One shard's objects: get with pins, put as reserve and commit, remove.
//!
//! * Objects are immutable. A version is given at commit, greater than any given before.
//! * A pin keeps an object's bytes where they are; a removed object's bytes go with its last pin.
//! * A put reserves an extent, its writer fills it, and it becomes visible at commit. Several puts of one digest may
//!   be in flight; the first commit wins, unless a later one was made to replace: then that is the object, and who
//!   reads the former one reads on. An extent whose put failed stays in quarantine until the host knows that its
//!   writer has stopped ([`Store::abort`]).
//! * Room is made inside `reserve`, by evicting what nobody uses.
//!
//! Invariant ([`Store::check`]): every granule of the pool is free or belongs to exactly one entry or page of tails.
//! Not here: deadlines (the host calls [`Store::expire`]), leases, tiers, the bytes themselves.

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

/// A range of the pool: exactly the object's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// From the start of the pool.
    pub offset: u64,
    /// The object's size.
    pub bytes: u64,
}

/// What a reader needs of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectView {
    /// Where its bytes are, until the pin is released.
    pub extent: Extent,
    /// Which put made it.
    pub version: Version,
    /// The checksum that its writer gave.
    pub checksum: u64,
    /// The number of the tenant that it is charged to.
    pub tenant: u32,
    /// Whether it has its tail.
    pub has_tail: bool,
    /// Where that is, or is to be.
    pub tail_at: u64,
    /// Whether it only names the stripes of a larger object.
    pub is_head: bool,
    /// What it is of those that two owners have.
    pub replica: Replica,
    /// Whether the replica owner may have a copy of it.
    pub copied: bool,
}

/// The state of one shard, with an eviction policy of type `P`. One thread's.
#[derive(Debug)]
pub struct Store<P = ChosenPolicy> {
    config: StoreConfig,
    allocator: Allocator,
    entries: Entries,
    index: Index,
    /// Which object goes next.
    order: Order<P>,
    /// The entry that each pin holds.
    pins: GenerationalTable,
    /// The entry of each reservation, quarantined ones included.
    reservations: GenerationalTable,
    /// Granules of the entries in each state.
    granules: [u64; STATES],
    /// Tails that do not lie behind their objects.
    tails: TailPages,
    /// Whether use went over the high watermark and has not come down to the low one.
    draining: bool,
    next_version: u64,
    counters: Counters,
    /// What became of the objects, where somebody follows.
    pub(crate) events: EventLog,
    /// Objects that are not to be found any more while the replica owner may have copies of them.
    orphans: Vec<Digest>,
}

impl Store {
    /// An empty store. The first commit gets `first_version`: greater than any that an earlier incarnation of this
    /// shard gave.
    ///
    /// # Errors
    /// A field of `config` that cannot be.
    pub fn new(config: StoreConfig, first_version: Version) -> Result<Self, ConfigError> {
        config.validate()?;
        let policy = ChosenPolicy::new(&config);
        Self::with_policy(config, first_version, policy)
    }
}

impl<P: EvictionPolicy> Store<P> {
    /// As [`Store::new`], with an eviction policy of the caller's.
    ///
    /// # Errors
    /// A field of `config` that cannot be.
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

    /// The limits.
    #[must_use]
    pub const fn config(&self) -> &StoreConfig {
        &self.config
    }

    /// Whether there is an object of this digest. Not an access.
    #[must_use]
    pub fn exists(&self, digest: Digest) -> bool {
        self.index.find(&self.entries, digest).is_some()
    }

    /// Where the tables lie that look-ups read here and there: that of digests, all of it touched, and that of entries,
    /// touched as it fills. For advice to the system about that memory.
    #[must_use]
    pub fn tables(&self) -> [core::ops::Range<*const u8>; 2] {
        [self.index.memory(), self.entries.memory()]
    }

    /// As [`Self::exists`], of many: faster than one by one where the objects are more than the caches hold.
    pub fn exist(&self, digests: impl IntoIterator<Item = Digest>, mut each: impl FnMut(Digest, bool)) {
        self.look_up(digests, |digest, found| each(digest, found.is_some()));
    }

    /// As [`Self::exist`], and of those that are there, whether they name stripes.
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

    /// The object's size. Not an access.
    #[must_use]
    pub fn size(&self, digest: Digest) -> Option<u64> {
        Some(self.entries[self.index.find(&self.entries, digest)?].bytes())
    }

    /// Where an object is and which version of it. Not an access.
    #[must_use]
    pub fn peek(&self, digest: Digest) -> Option<ObjectView> {
        self.index.find(&self.entries, digest).map(|id| self.view(id))
    }

    /// The objects whose point (32 bits of a mix of the digest, salted by the configured seed) is from `from` up to
    /// `to`, which may be one beyond the last: each with its point, in no order. Looks at about as many places as
    /// that is
    /// of all. Not an access.
    pub fn between(&self, from: u64, to: u64) -> impl Iterator<Item = (u32, Digest, ObjectView)> {
        let found = self.index.between(from, to);
        found.map(|(point, id)| (point, self.entries[id].digest(), self.view(id)))
    }

    /// How many places [`Self::between`] has in all.
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

    /// Pins an object without that counting as an access: for who moves it elsewhere. Nothing where there is no object
    /// or no free pin.
    pub fn hold(&mut self, digest: Digest) -> Option<(PinId, ObjectView)> {
        let id = self.index.find(&self.entries, digest)?;
        (!self.pins.is_full()).then(|| self.pin_entry(id))
    }

    /// What a pin holds.
    #[must_use]
    pub fn held(&self, pin: PinId) -> Option<ObjectView> {
        let id = EntryId(self.pins.get(pin.index, pin.generation)?);
        Some(self.view(id))
    }

    /// Whether a pinned object is still to be found: not removed since.
    #[must_use]
    pub fn is_live(&self, pin: PinId) -> bool {
        let entry = self.pins.get(pin.index, pin.generation);
        entry.is_some_and(|entry| self.entries[EntryId(entry)].state() == State::Live)
    }

    /// What time it is, for soft pins. It never goes back.
    pub fn tick(&mut self, now_ns: u64) {
        self.order.tick(now_ns);
    }

    /// These tenants there are from now on, beside the default one: see [`TenantLease`].
    pub fn set_tenants(&mut self, leases: &[TenantLease]) {
        self.order.set_tenants(leases);
    }

    /// The account of the tenant with this number, if there is such a tenant.
    #[must_use]
    pub fn account_of(&self, tenant: u32) -> Option<u16> {
        self.order.account_of(tenant)
    }

    /// The account to charge where a tenant is not one that was told of: one of its own without a lease, or the
    /// default tenant's where there are too many of those.
    pub fn account_of_stranger(&mut self, tenant: u32) -> u16 {
        self.order.stranger(tenant)
    }

    /// Whether there are, or were, others than the default tenant.
    #[must_use]
    pub const fn has_tenants(&self) -> bool {
        self.order.has_tenants()
    }

    /// What each tenant has.
    #[must_use]
    pub fn tenants(&self) -> Vec<TenantUse> {
        self.order.uses()
    }

    /// How many more pins there may be.
    #[must_use]
    pub const fn free_pins(&self) -> u32 {
        self.config.max_pins - self.pins.len()
    }

    /// Notes that the tail of a pinned object is in its place now; there was room for it from the start.
    pub fn set_tail(&mut self, pin: PinId) {
        if let Some(entry) = self.pins.get(pin.index, pin.generation) {
            self.entries.set(EntryId(entry), Mark::Tail, true);
        }
    }

    /// Pins an entry; there is a free pin.
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

    /// The object that a pin holds; none for a pin that is not held.
    #[must_use]
    pub fn pinned(&self, pin: PinId) -> Option<Digest> {
        let entry = self.pins.get(pin.index, pin.generation)?;
        Some(self.entries[EntryId(entry)].digest())
    }

    /// Releases a pin. With the last one, a removed object's bytes are free.
    ///
    /// # Errors
    /// The pin is not held; nothing happens but a count.
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

    /// Makes an object invisible at once; its bytes are free when its last pin goes. False when there was none. A put
    /// in flight is not touched: it completes after the removal.
    pub fn remove(&mut self, digest: Digest) -> bool {
        let Some(id) = self.index.find(&self.entries, digest) else { return false };
        self.counters.removes += 1;
        self.remove_entry(id);
        true
    }

    /// As [`Store::remove`], of an object that is elsewhere too and need not be here.
    pub fn drop_copy(&mut self, digest: Digest) {
        if let Some(id) = self.index.find(&self.entries, digest) {
            self.remove_entry(id);
        }
    }

    /// Some of the visible objects and their sizes: looks at so many entries from `from` on. Then where to go on.
    #[must_use]
    pub fn walk(&self, from: u32, most: u32) -> (Vec<(Digest, u64)>, Option<u32>) {
        let touched = self.entries.touched();
        let end = from.saturating_add(most.max(1)).min(touched);
        let entries = (from..end).map(|at| &self.entries[EntryId(at)]);
        let live = entries.filter(|entry| entry.state() == State::Live);
        (live.map(|entry| (entry.digest(), entry.bytes())).collect(), (end < touched).then_some(end))
    }

    /// What became of the objects, as far as it is kept.
    #[must_use]
    pub const fn events(&self) -> &EventLog {
        &self.events
    }

    /// Keeps the latest so many events from now on; 0 keeps none. Nothing happens where as many are kept already.
    pub fn keep_events(&mut self, capacity: usize) {
        if self.events.capacity() != capacity {
            self.events.keep(capacity);
        }
    }

    /// The version that the next commit gives.
    #[must_use]
    pub const fn next_version(&self) -> Version {
        Version(self.next_version)
    }

    /// Removes every object; returns how many there were. Walks the arena.
    pub fn remove_all(&mut self) -> u64 {
        // One event says it for all.
        let events = core::mem::take(&mut self.events);
        let removed = self.retain(|_| false);
        self.events = events;
        self.events.push(Change::Cleared, Medium::Memory, Digest(0), 0);
        removed
    }

    /// Removes every object whose digest `keep` refuses; returns how many. Walks the arena.
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

    /// Where an entry's bytes are.
    fn extent(&self, id: EntryId) -> Extent {
        let entry = &self.entries[id];
        Extent { offset: self.allocator.offset_bytes(entry.block()), bytes: entry.bytes() }
    }

    /// Takes a live entry out of the index. The caller takes it out of the eviction order.
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

    /// Hides a live entry and frees it, at once or when its last pin goes.
    fn remove_entry(&mut self, id: EntryId) {
        self.hide(id);
        self.order.remove(&mut self.entries, id, false);
        if self.entries[id].pins() == 0 {
            self.release(id);
        } else {
            self.change_state(id, Entries::doom);
        }
    }

    /// Frees an entry that nobody uses and its bytes; returns the free block that they are now part of.
    fn release(&mut self, id: EntryId) -> Block {
        let block = self.entries[id].block();
        self.granules[self.entries[id].state() as usize] -= self.entries[id].granules();
        self.order.discharge(&self.entries, id);
        self.entries.release(id);
        // First, so that the block that is returned is the one that all of it is part of.
        self.free_tail(block);
        self.allocator.free(block)
    }

    /// Applies a step of the entry's incarnation that keeps its bytes, and moves them to the other state's account.
    fn change_state(&mut self, id: EntryId, step: impl FnOnce(&mut Entries, EntryId)) {
        let granules = self.entries[id].granules();
        self.granules[self.entries[id].state() as usize] -= granules;
        self.order.stick(&mut self.entries, id, |entries| step(entries, id));
        self.granules[self.entries[id].state() as usize] += granules;
    }

    /// Granules that eviction could free.
    const fn evictable_granules(&self) -> u64 {
        // Pages of tails go with their objects.
        let held = self.allocator.pool_granules() - self.allocator.free_granules();
        held - self.order.stuck_granules()
    }
}
