//! Space: the objects of a shard in its pool. Takes memory for them, evicts to make room, and frees it.
//!
//! [`Space`] keeps its components in step: the table of objects, the pool, and the eviction order with the accounts of
//! tenants. Handles, versions and statistics of requests are the store's.
//!
//! Objects are evicted until a request fits, and no further, in the policy's order. If all have one size, the first
//! victim's extent fits. If not, victims free bytes all over the pool, and waiting until enough of them are adjacent
//! could empty it. So after [`SCATTERED`] times the request, the order is given up: the neighbours of the next victim
//! are evicted with it; and if pinned or reserved extents are in between, the first stretch of the pool that can be
//! cleared. A request is refused only if there is none.
//!
//! If watermarks are set, each put beyond the high one also evicts a few more objects, until the low one is reached:
//! bursts then find free memory, at the cost of a pool that holds less.
//!
//! **Far pool.** What is evicted to make room in DRAM moves to the far pool, if there is one, within the same step, and
//! stays visible. If the far pool is full, its own eviction makes room, by a second instance of the policy; only what
//! that drops is gone. A get of an object that was accessed in far memory before moves it back. A move copies the bytes
//! at once ([`super::PoolCopies`]), because a put cannot wait for the room that it makes. Objects that are being read
//! stay where they are: a demotion takes what eviction could, and a promotion happens before the extent of the object
//! is lent, if nobody else reads it.

mod kept;
mod pins;

pub(super) use kept::KeptSpace;
pub use pins::{ObjectPins, PinError};

use kvplane_proto::ids::Version;

use std::sync::Arc;

use super::ObjectView;
use super::far_pool::{FarPool, FarPoolStats, PoolCopies};
use super::objects::ObjectTable;
use super::pool::{Owner, Pool};
use super::watermarks::Watermarks;
use crate::allocator::{Block, GRANULE_BYTES, MemoryKind};
use crate::config::StoreConfig;
use crate::entry::{Entries, Entry, EntryId, Keep, Mark, Replica, Reserve, State, TAIL_BYTES_MOST};
use crate::errors::ReserveError;
use crate::eviction::EvictionPolicy;
use crate::order::{Order, Reach, Scarce, Tenants, relocate};

/// Amount evicted in the policy's order before neighbours are, in multiples of the request.
const SCATTERED: u64 = 2;

/// Most objects that a put evicts because of the watermarks. More than one, so that the low one is reached.
const DRAINED_AT_ONCE: usize = 4;

/// Memory for an object and its tail.
struct Room {
    block: Block,
    /// Bytes of the tail that are in the block.
    tail_bytes: u32,
    /// Otherwise, the class of pages that has a slot for it.
    class: Option<usize>,
}

/// Counters of evictions.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Evictions {
    pub(super) objects: u64,
    /// Exact sizes, summed.
    pub(super) bytes: u64,
}

/// Objects in a pool, and the order in which they are evicted.
#[derive(Debug)]
pub(super) struct Space<P> {
    objects: ObjectTable,
    pool: Pool,
    /// Eviction orders of all tenants.
    order: Order<P>,
    watermarks: Watermarks,
    /// Far pool, once it is in use.
    far: Option<FarPool>,
    evictions: Evictions,
}

impl<P: EvictionPolicy> Space<P> {
    /// Creates an empty space.
    pub(super) fn new(config: &StoreConfig, policy: P) -> Self {
        let pool = Pool::new(config);
        let beside = [MemoryKind::Far, MemoryKind::Device].map(|kind| pool.granules_beside(kind).0);
        let memory_granules = [pool.granules(), beside[0], beside[1]];
        Self {
            objects: ObjectTable::new(config),
            order: Order::new(memory_granules, config.hard_pin_percent, policy),
            pool,
            watermarks: Watermarks::new(config),
            far: None,
            evictions: Evictions::default(),
        }
    }

    /// Returns the table of objects.
    #[inline]
    pub(super) const fn objects(&self) -> &ObjectTable {
        &self.objects
    }

    /// Returns the table of objects, to be changed.
    #[inline]
    pub(super) const fn objects_mut(&mut self) -> &mut ObjectTable {
        &mut self.objects
    }

    /// Returns the memory of the objects.
    #[inline]
    pub(super) const fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns the accounts of tenants.
    #[inline]
    pub(super) const fn tenants(&self) -> &Tenants<P> {
        self.order.tenants()
    }

    /// Returns the accounts of tenants, to be changed.
    #[inline]
    pub(super) const fn tenants_mut(&mut self) -> &mut Tenants<P> {
        self.order.tenants_mut()
    }

    /// Returns the numbers of softly pinned and of retained objects.
    pub(super) fn pin_counts(&self) -> (usize, usize) {
        (self.order.soft_pins(), self.order.retained())
    }

    /// Returns the counters of evictions.
    pub(super) const fn evictions(&self) -> Evictions {
        self.evictions
    }

    /// Returns the granules of objects that are pinned by readers or hard pinned.
    pub(super) const fn pinned_granules(&self) -> u64 {
        self.order.tenants().stuck_granules() - self.written_granules()
    }

    /// Returns the granules of puts in flight, expired ones included.
    const fn written_granules(&self) -> u64 {
        let entries = self.objects.entries();
        entries.granules_in(State::Reserved) + entries.granules_in(State::Quarantined)
    }

    /// Returns the granules that eviction could free.
    const fn evictable_granules(&self) -> u64 {
        // Pages of tails are freed with their objects.
        let held = self.pool.granules() - self.pool.free_granules();
        held - self.order.tenants().stuck_granules()
    }

    /// Returns the view of an entry.
    pub(super) fn view(&self, id: EntryId) -> ObjectView {
        let entry = &self.objects.entries()[id];
        ObjectView {
            extent: self.pool.extent(entry),
            version: entry.version(),
            checksum: entry.checksum(),
            tenant: self.order.tenant_of(self.objects.entries(), id),
            has_tail: entry.is(Mark::Tail),
            tail_at: self.pool.tail_at(entry),
            is_on_device: entry.is_on_device(),
            is_far: entry.memory() == MemoryKind::Far,
            is_head: entry.is(Mark::Head),
            replica: entry.replica(),
            copies: self.objects.entries().copies(id),
            is_retained: self.order.is_retained(id),
            priority: entry.priority(),
        }
    }

    /// Advances the time, for soft pins and retentions. It never goes back.
    pub(super) fn tick(&mut self, now_ns: u64) {
        self.order.tick(now_ns);
        self.order.expire_retentions(self.objects.entries_mut());
        if let Some(far) = &mut self.far {
            far.replenish(now_ns);
        }
    }

    /// Records an access of an object.
    #[inline]
    pub(super) fn access(&mut self, id: EntryId) {
        self.order.access(self.objects.entries_mut(), id);
    }

    /// Adds a pin to an object; returns its view.
    pub(super) fn pin(&mut self, id: EntryId) -> ObjectView {
        self.order.stick(self.objects.entries_mut(), id, |entries| entries.pin(id));
        self.view(id)
    }

    /// Removes a pin of an entry. With the last one, a removed object's bytes are freed.
    pub(super) fn unpin(&mut self, id: EntryId) {
        let entries = self.objects.entries_mut();
        if self.order.stick(entries, id, |entries| entries.unpin(id)) > 0 {
            return;
        }
        if entries[id].state() == State::Doomed {
            self.release(id);
        } else if self.order.unpinned(entries, id) {
            self.evict_one(id);
        }
    }

    /// Takes memory for an object and its tail, within the lease of its tenant and the limits of hard pins, and charges
    /// the tenant. A replica is kept without a hard pin beyond these limits.
    ///
    /// # Errors
    /// See [`crate::Store::reserve`].
    pub(super) fn reserve(&mut self, wanted: &Reserve) -> Result<EntryId, ReserveError> {
        let together = wanted.bytes + u64::from(wanted.tail_bytes);
        let mut keep = wanted.keep;
        if keep.hard_pin && wanted.replica == Replica::Second {
            keep.hard_pin = self.may_pin(self.pool.granules_of(together), keep.account);
        }
        if !wanted.moves {
            self.within_lease(together, &keep)?;
        }
        let Room { block, tail_bytes, class } = self.room_with_tail(wanted, true)?;
        let entries = self.objects.entries_mut();
        let id = entries.reserve(&Reserve { keep, tail_bytes, ..*wanted }, block);
        self.pool.set_owner(block, id);
        if let Some(class) = class {
            self.pool.give_slot(class, &entries[id], id);
        }
        self.order.charge(entries, id, &keep);
        self.drain();
        Ok(id)
    }

    /// Makes a reserved object visible; returns its size. There must be no visible object of its digest.
    pub(super) fn commit(&mut self, id: EntryId, version: Version, checksum: u64) -> u64 {
        self.step(id, |entries, id| entries.commit(id, version, checksum));
        self.objects.show(id);
        self.order.insert(self.objects.entries_mut(), id);
        self.objects.entries()[id].bytes()
    }

    /// Moves a reserved entry to quarantine.
    pub(super) fn quarantine(&mut self, id: EntryId) {
        self.step(id, Entries::expire);
    }

    /// Hides a live entry and frees it, at once or with its last pin. The replicas of one that is `evicted` stay if the
    /// SSD has it.
    pub(super) fn remove(&mut self, id: EntryId, evicted: bool) {
        self.objects.hide(id, evicted);
        self.order.remove(self.objects.entries_mut(), id, false);
        if self.objects.entries()[id].pins() == 0 {
            self.release(id);
        } else {
            self.step(id, Entries::doom);
        }
    }

    /// Frees an unused entry and its bytes; returns the free block of the pool that they are now part of, if any were
    /// there.
    pub(super) fn release(&mut self, id: EntryId) -> Option<Block> {
        let entries = self.objects.entries_mut();
        let block = entries[id].block();
        self.order.discharge(entries, id);
        entries.release(id);
        self.pool.free(block)
    }

    /// Applies a transition of an entry that keeps its bytes.
    fn step(&mut self, id: EntryId, step: impl FnOnce(&mut Entries, EntryId)) {
        self.order.stick(self.objects.entries_mut(), id, |entries| step(entries, id));
    }

    /// Sets the account, the group and the hard pin of a live object: see [`crate::Store::keep_as`].
    pub(super) fn keep_as(&mut self, id: EntryId, keep: &Keep) -> bool {
        let entry = &self.objects.entries()[id];
        let (granules, account) = (entry.granules(), entry.account());
        let is_other = account != usize::from(keep.account);
        if is_other && self.within_lease(granules * GRANULE_BYTES, &Keep { hard_pin: false, ..*keep }).is_err() {
            return false;
        }
        let hard = keep.hard_pin && self.may_pin(granules, keep.account);
        let keep = Keep { hard_pin: hard, soft_pin_ns: 0, ..*keep };
        self.order.keep_as(self.objects.entries_mut(), id, &keep);
        true
    }

    /// Makes room within a tenant's lease, and within the limit of hard pins.
    ///
    /// # Errors
    /// `Quota` or `PinLimit`; nothing is evicted then.
    fn within_lease(&mut self, bytes: u64, keep: &Keep) -> Result<(), ReserveError> {
        let granules = self.pool.granules_of(bytes);
        if keep.hard_pin
            && !self.may_pin(granules, keep.account)
            && let Some((pinned_bytes, limit_bytes, of_tenant)) =
                self.order.tenants_mut().refused_pin(granules, keep.account)
        {
            return Err(ReserveError::PinLimit { pinned_bytes, limit_bytes, of_tenant });
        }
        let is_stuck = |order: &Order<P>| {
            order.tenants().over_lease(keep.account, granules).is_some_and(|(lease, stuck)| stuck + granules > lease)
        };
        while self.order.expire(self.objects.entries_mut()) && is_stuck(&self.order) {}
        while let Some((lease, stuck)) = self.order.tenants().over_lease(keep.account, granules) {
            let may_fit = stuck + granules <= lease;
            let victim = may_fit.then(|| self.order.victim_of(self.objects.entries_mut(), keep.account)).flatten();
            let Some(victim) = victim else {
                self.order.tenants_mut().count_refusal(keep.account);
                let (lease_bytes, held_bytes) = (lease * GRANULE_BYTES, stuck * GRANULE_BYTES);
                return Err(ReserveError::Quota { bytes, lease_bytes, held_bytes });
            };
            drop_with_mates(self, victim);
        }
        Ok(())
    }

    /// Returns true if a tenant may have this many more granules hard pinned. Retentions that have ended do not count,
    /// however many objects wait for their turn: as many of these end as it takes.
    fn may_pin(&mut self, granules: u64, account: u16) -> bool {
        let refuses = |order: &Order<P>| order.tenants().pin_limit(granules, account).is_some();
        while refuses(&self.order) {
            if self.order.expire_retentions(self.objects.entries_mut()) > 0 {
                return !refuses(&self.order);
            }
        }
        true
    }

    /// Allocates memory for an object and its tail; if the tail takes a slot, one is free afterwards. `is_new`: it
    /// needs a vacant entry.
    fn room_with_tail(&mut self, wanted: &Reserve, is_new: bool) -> Result<Room, ReserveError> {
        let Reserve { bytes, tail_bytes, .. } = *wanted;
        if let Some(class) = self.pool.class_of_tail(wanted) {
            let block = self.room(bytes, is_new)?;
            if self.slot_ready(class, is_new) {
                return Ok(Room { block, tail_bytes: 0, class: Some(class) });
            }
            self.pool.free(block);
        }
        Ok(Room { block: self.room(bytes + u64::from(tail_bytes), is_new)?, tail_bytes, class: None })
    }

    /// Makes sure that a slot of a class is free; false if there is no memory for another page.
    fn slot_ready(&mut self, class: usize, is_new: bool) -> bool {
        if self.pool.has_slot(class) {
            return true;
        }
        let Some(page_bytes) = self.pool.new_page_bytes(class) else { return false };
        let Ok(block) = self.room(page_bytes, is_new) else { return false };
        self.pool.add_page(class, block);
        true
    }

    /// Returns a block for `bytes`; and makes sure of a vacant entry, if it is for a new object.
    ///
    /// # Errors
    /// `NoSpace` or `TooManyObjects`: no eviction could provide both.
    fn room(&mut self, bytes: u64, is_new: bool) -> Result<Block, ReserveError> {
        let granules = self.pool.granules_of(bytes);
        // Retentions that have ended hold no memory back, however many objects wait for their turn.
        while self.order.expire(self.objects.entries_mut())
            && self.pool.free_granules() + self.evictable_granules() < granules
        {}
        if self.pool.free_granules() + self.evictable_granules() < granules {
            return Err(self.no_space(granules));
        }
        if is_new && self.objects.entries().is_full() {
            let limit = self.objects.entries().limit();
            let entries = self.objects.entries_mut();
            let victim = self.order.victim(entries, Reach::Soft, Scarce::Room(MemoryKind::Far));
            let victim = victim.or_else(|| self.order.victim(entries, Reach::Soft, Scarce::Entries(limit)));
            let victim = victim.or_else(|| self.order.device_victim(entries));
            drop_with_mates(self, victim.ok_or(ReserveError::TooManyObjects { limit })?);
        }
        if let Some(block) = self.pool.allocate(bytes) {
            return Ok(block);
        }
        for reach in [Reach::Plain, Reach::Soft] {
            let free = self.evict_in_order(granules, reach).or_else(|| self.clear_a_run(granules, reach));
            if let Some(free) = free {
                return Ok(self.pool.carve(free, bytes));
            }
        }
        Err(self.no_space(granules))
    }

    fn no_space(&self, granules: u64) -> ReserveError {
        ReserveError::NoSpace {
            requested_bytes: granules * GRANULE_BYTES,
            free_bytes: self.pool.free_granules() * GRANULE_BYTES,
            pinned_bytes: self.pinned_granules() * GRANULE_BYTES,
            reserved_bytes: self.written_granules() * GRANULE_BYTES,
        }
    }

    /// Evicts a few objects while the pool is used beyond its watermarks.
    fn drain(&mut self) {
        let pool = self.pool.granules();
        for _ in 0..DRAINED_AT_ONCE {
            if !self.watermarks.is_draining(pool - self.pool.free_granules(), pool) {
                return;
            }
            let scarce = Scarce::Room(MemoryKind::Near);
            let victim = self.order.victim(self.objects.entries_mut(), Reach::Plain, scarce);
            let Some(victim) = victim else { return };
            self.evict(victim);
        }
    }

    /// Evicts in the policy's order until a free block of `granules` appears or enough was evicted in vain.
    fn evict_in_order(&mut self, granules: u64, reach: Reach) -> Option<Block> {
        let mut evicted = 0;
        while evicted < SCATTERED * granules {
            let scarce = Scarce::Room(MemoryKind::Near);
            let victim = self.order.victim(self.objects.entries_mut(), reach, scarce)?;
            evicted += self.objects.entries()[victim].granules();
            let free = self.evict(victim);
            if let Some(free) = free.filter(|free| self.pool.granules_in(*free) >= granules) {
                return Some(free);
            }
        }
        None
    }

    /// Evicts neighbours until a free block of `granules` appears; evicts nothing if no run would suffice.
    fn clear_a_run(&mut self, granules: u64, reach: Reach) -> Option<Block> {
        let scarce = Scarce::Room(MemoryKind::Near);
        let victim = self.order.victim(self.objects.entries_mut(), reach, scarce);
        let entries = self.objects.entries();
        let near = victim.map(|victim| entries[victim].block());
        let mut block = self.pool.run(near, granules, |id| self.order.may_go(entries, id, reach))?;
        loop {
            // Groups are not evicted together here: members elsewhere would not help.
            block = match self.pool.owner(block) {
                Some(Owner::Entry(id)) => self.evict_one(id).expect("an owner of a block of the pool frees it"),
                Some(Owner::Page(page)) => {
                    self.pool.close_page(page);
                    while let Some(id) = self.pool.owner_in(page) {
                        self.evict_one(id);
                    }
                    self.pool.end_page(page)
                }
                Some(Owner::Nobody) => unreachable!("a block of a run has an owner that may be evicted"),
                None => block,
            };
            if self.pool.granules_in(block) >= granules {
                return Some(block);
            }
            block = self.pool.after(block).expect("a run is as long as requested");
        }
    }

    /// Evicts an unused object from its memory, and the members of its group that are there with it; returns the free
    /// block of the pool that its bytes are now part of, if any were there.
    fn evict(&mut self, id: EntryId) -> Option<Block> {
        let memory = self.objects.entries()[id].memory();
        for mate in mates(self, id) {
            // Room for those that were demoted before may have taken it.
            let entry = &self.objects.entries()[mate];
            if entry.is_evictable() && entry.memory() == memory {
                self.evict_one(mate);
            }
        }
        self.evict_one(id)
    }

    /// Evicts an unused object from its memory: to the far pool from DRAM, if there is one with room for it.
    fn evict_one(&mut self, id: EntryId) -> Option<Block> {
        demote(self, id).or_else(|| drop_one(self, id))
    }

    /// Returns the next object to leave the device pool.
    pub(super) fn device_victim(&mut self) -> Option<EntryId> {
        self.order.device_victim(self.objects.entries_mut())
    }

    /// Gives the device pool up: nothing is allocated in it any more.
    pub(super) const fn close_device(&mut self) {
        self.pool.close_device();
    }

    /// Takes memory of the other pool for an object that is pinned; its tail stays in the pool, which others are
    /// evicted from to make room. `None` if the device pool has no free block that is large enough, or the pool no
    /// room.
    pub(super) fn reserve_elsewhere(&mut self, of: EntryId) -> Option<EntryId> {
        let entry = &self.objects.entries()[of];
        let (is_promotion, tail_bytes) = (!entry.is_on_device(), self.pool.tail_room(entry));
        let wanted = again(entry, if is_promotion { 0 } else { tail_bytes as u32 });
        if !is_promotion {
            let block = self.room(wanted.bytes + tail_bytes, true).ok()?;
            return Some(self.take(&wanted, block));
        }
        if self.objects.entries().is_full() {
            return None;
        }
        let block = self.pool.allocate_beside(MemoryKind::Device, wanted.bytes, 0)?;
        if !wanted.has_tail {
            return Some(self.take(&wanted, block));
        }
        let Ok(tail) = self.room(tail_bytes, true) else {
            self.pool.free(block);
            return None;
        };
        let id = self.take(&wanted, block);
        self.pool.give_tail(block, tail, tail_bytes, id);
        Some(id)
    }

    /// Reserves an entry for a block, and charges its tenant.
    fn take(&mut self, wanted: &Reserve, block: Block) -> EntryId {
        let entries = self.objects.entries_mut();
        let id = entries.reserve(wanted, block);
        self.pool.set_owner(block, id);
        self.order.charge(entries, id, &wanted.keep);
        id
    }

    /// Makes a reserved entry take the place of a live one of the same object, whose bytes were copied. The bytes of
    /// the former one are freed, at once or with its last pin.
    pub(super) fn supersede(&mut self, old: EntryId, new: EntryId) {
        let entries = self.objects.entries_mut();
        let (version, checksum) = (entries[old].version(), entries[old].checksum());
        self.order.stick(entries, new, |entries| entries.commit(new, version, checksum));
        for mark in [Mark::Tail, Mark::Copy, Mark::Wanted, Mark::Awaited] {
            let is_set = entries[old].is(mark);
            entries.set(new, mark, is_set);
        }
        let copies = entries.copies(old);
        entries.set_wanted(new, copies.wanted);
        entries.set_replica_owners(new, copies.at);
        entries.set(new, Mark::Replace, false);
        self.objects.supersede(old, new);
        self.order.remove(self.objects.entries_mut(), old, false);
        self.step(old, Entries::doom);
        self.order.insert(self.objects.entries_mut(), new);
    }

    /// Asserts that table, pool and eviction order agree. Walks all entries and blocks.
    ///
    /// # Panics
    /// If an assertion fails.
    pub(super) fn check(&self) {
        self.objects.check();
        self.pool.check(self.objects.entries());
        let in_order = self.order.check(self.objects.entries());
        assert_eq!(in_order, self.objects.len() as usize, "the eviction order has the live entries only");
    }
}

/// Evicts an unused object from memory altogether.
fn drop_one<P: EvictionPolicy>(space: &mut Space<P>, id: EntryId) -> Option<Block> {
    let entry = &space.objects.entries()[id];
    assert!(entry.is_evictable(), "evicting {entry:?}");
    let bytes = entry.bytes();
    space.evictions.objects += 1;
    space.evictions.bytes += bytes;
    if entry.memory() == MemoryKind::Far
        && let Some(far) = &mut space.far
    {
        far.count_eviction(bytes);
    }
    space.objects.hide(id, true);
    space.order.remove(space.objects.entries_mut(), id, true);
    space.release(id)
}

/// Evicts an unused object from memory altogether, and its group with it.
fn drop_with_mates<P: EvictionPolicy>(space: &mut Space<P>, id: EntryId) {
    for mate in mates(space, id) {
        drop_one(space, mate);
    }
    drop_one(space, id);
}

/// Returns the members of an object's group that are to be evicted with it.
fn mates<P: EvictionPolicy>(space: &mut Space<P>, id: EntryId) -> Vec<EntryId> {
    let is_grouped = space.objects.entries()[id].is(Mark::Grouped);
    if is_grouped { space.order.mates(space.objects.entries(), id) } else { Vec::new() }
}

/// Uses the far pool from now on: these copies move objects.
///
/// # Panics
/// If the configuration has no far pool.
pub(super) fn open_far<P>(space: &mut Space<P>, copies: Arc<dyn PoolCopies>) {
    assert!(space.pool.granules_beside(MemoryKind::Far).0 > 0, "a far pool is configured");
    space.far = Some(FarPool::new(copies));
}

/// Returns the gauges and counters of the far pool.
pub(super) fn far_stats<P>(space: &Space<P>) -> FarPoolStats {
    let (granules, free) = space.pool.granules_beside(MemoryKind::Far);
    FarPoolStats {
        pool_bytes: granules * GRANULE_BYTES,
        used_bytes: (granules - free) * GRANULE_BYTES,
        objects: space.objects.entries().live().far,
        ..space.far.as_ref().map_or_else(FarPoolStats::default, |far| far.counts)
    }
}

/// Returns true if an object is in the far pool, and was accessed since it came there.
pub(super) fn is_hot_in_far<P: EvictionPolicy>(space: &Space<P>, id: EntryId) -> bool {
    let entry = &space.objects.entries()[id];
    entry.memory() == MemoryKind::Far && space.order.tenants().was_accessed(entry)
}

/// Counts a get of an object of the far pool, which is pinned, and moves it back to DRAM if it `is_hot` and nobody else
/// reads it. Others are evicted from DRAM to make room for it.
pub(super) fn promote<P: EvictionPolicy>(space: &mut Space<P>, id: EntryId, is_hot: bool) {
    let entry = &space.objects.entries()[id];
    let (bytes, is_shared) = (entry.bytes(), entry.pins() > 1);
    let tail_bytes = space.pool.tail_room(entry) as u32;
    let wanted = Reserve { tail_bytes, ..Reserve::plain(entry.digest(), bytes) };
    let far = space.far.as_mut().expect("a far pool in use");
    far.counts.hits += 1;
    if !is_hot || is_shared || !far.may_promote() {
        return;
    }
    let Ok(room) = space.room_with_tail(&wanted, false) else { return };
    space.far.as_mut().expect("a far pool in use").count_promotion(bytes);
    move_to(space, id, &room, true);
}

/// Moves an object that is evicted from DRAM to the far pool, which evicts others for it; returns the free block of
/// DRAM that its bytes were freed into. `None`, and the object stays where it is, if it is in other memory, or the far
/// pool has no room for it.
fn demote<P: EvictionPolicy>(space: &mut Space<P>, id: EntryId) -> Option<Block> {
    let entry = &space.objects.entries()[id];
    if space.far.is_none() || entry.memory() != MemoryKind::Near {
        return None;
    }
    let bytes = entry.bytes();
    let tail_bytes = space.pool.tail_room(entry).min(TAIL_BYTES_MOST.into()) as u32;
    let block = far_room(space, bytes, tail_bytes)?;
    space.far.as_mut().expect("a far pool in use").count_demotion(bytes);
    move_to(space, id, &Room { block, tail_bytes, class: None }, false)
}

/// Returns a block of the far pool for `bytes` and a tail, evicting objects from it in the policy's order.
fn far_room<P: EvictionPolicy>(space: &mut Space<P>, bytes: u64, tail_bytes: u32) -> Option<Block> {
    let granules = space.pool.granules_of(bytes + u64::from(tail_bytes));
    if granules > space.pool.granules_beside(MemoryKind::Far).0 {
        return None;
    }
    let mut evicted = 0;
    loop {
        let block = space.pool.allocate_beside(MemoryKind::Far, bytes, tail_bytes);
        if block.is_some() || evicted >= SCATTERED * granules {
            return block;
        }
        let scarce = Scarce::Room(MemoryKind::Far);
        let victim = space.order.victim(space.objects.entries_mut(), Reach::Soft, scarce)?;
        evicted += space.objects.entries()[victim].granules();
        space.evict(victim);
    }
}

/// Moves a live object to a block of other memory, with its tail; returns the free block of DRAM that it has left.
fn move_to<P: EvictionPolicy>(space: &mut Space<P>, id: EntryId, to: &Room, is_hot: bool) -> Option<Block> {
    let entry = &space.objects.entries()[id];
    let (from, tail_from, room_bytes) =
        (space.pool.extent(entry), space.pool.tail_at(entry), space.pool.tail_room(entry));
    let (left, has_tail) = (entry.block(), entry.is(Mark::Tail));
    relocate(&mut space.order, space.objects.entries_mut(), id, to.block, to.tail_bytes, is_hot);
    space.pool.set_owner(to.block, id);
    let entry = &space.objects.entries()[id];
    if let Some(class) = to.class {
        space.pool.give_slot(class, entry, id);
    }
    let copies = &space.far.as_ref().expect("a far pool in use").copies;
    copies.copy(from.offset, space.pool.extent(entry).offset, from.bytes);
    if has_tail {
        // The shorter of the two rooms: both are long enough for the tail.
        let bytes = room_bytes.min(space.pool.tail_room(entry));
        copies.copy(tail_from, space.pool.tail_at(entry), bytes);
    }
    space.pool.free(left)
}

/// Returns the reservation for another place of an object that nothing but the eviction policy keeps.
fn again(entry: &Entry, tail_bytes: u32) -> Reserve {
    Reserve {
        tail_bytes,
        has_tail: entry.is(Mark::Tail),
        replace: true,
        keep: Keep { account: entry.account() as u16, priority: entry.priority(), ..Keep::default() },
        head: entry.is(Mark::Head),
        replica: entry.replica(),
        moves: true,
        ..Reserve::plain(entry.digest(), entry.bytes())
    }
}
