//! Eviction to make room: until a request fits, and no further.
//!
//! Objects are evicted in the policy's order. If all have one size, the first victim's extent fits. If not, victims
//! free bytes all over the pool, and waiting until enough of them are adjacent could empty it. So after [`SCATTERED`]
//! times the request, the order is given up: the neighbours of the next victim are evicted with it; and if pinned or
//! reserved extents are in between, the first stretch of the pool that can be cleared. A request is refused only if
//! there is none.
//!
//! If watermarks are set, each put beyond the high one also evicts a few more objects, until the low one is reached:
//! bursts then find free memory, at the cost of a pool that holds less.

use super::Store;
use super::tails::{Owner, owner_of};
use crate::allocator::{Block, GRANULE_BYTES, granules_of};
use crate::entry::{EntryId, Keep, Mark, State};
use crate::errors::ReserveError;
use crate::eviction::EvictionPolicy;
use crate::order::{Reach, Scarce};

/// Amount evicted in the policy's order before neighbours are, in multiples of the request.
const SCATTERED: u64 = 2;

/// Most objects that a put evicts because of the watermarks. More than one, so that the low one is reached.
const DRAINED_AT_ONCE: usize = 4;

impl<P: EvictionPolicy> Store<P> {
    /// Returns a block for `bytes`, and makes sure of a vacant entry for it.
    ///
    /// # Errors
    /// `NoSpace` or `TooManyObjects`: no eviction could provide both.
    pub(super) fn room(&mut self, bytes: u64) -> Result<Block, ReserveError> {
        // Every block is a whole number of units, so that every one begins at a multiple of the unit.
        let bytes = bytes.next_multiple_of(self.config.unit_bytes);
        let granules = granules_of(bytes);
        self.order.expire(&mut self.entries);
        if self.allocator.free_granules() + self.evictable_granules() < granules {
            return Err(self.no_space(bytes));
        }
        if self.entries.is_full() {
            let limit = self.config.max_objects;
            let victim = self.order.victim(&mut self.entries, Reach::Soft, Scarce::Entries(limit));
            self.evict(victim.ok_or(ReserveError::TooManyObjects { limit })?);
        }
        if let Some(block) = self.allocator.allocate(bytes) {
            return Ok(block);
        }
        for reach in [Reach::Plain, Reach::Soft] {
            let free = self.evict_in_order(granules, reach).or_else(|| self.clear_a_run(granules, reach));
            if let Some(free) = free {
                return Ok(self.allocator.carve(free, bytes));
            }
        }
        Err(self.no_space(bytes))
    }

    /// Evicts a few objects while the pool is used beyond its watermarks.
    pub(super) fn drain(&mut self) {
        let pool = self.allocator.pool_granules();
        let beyond =
            |store: &Self, percent: u8| (pool - store.allocator.free_granules()) * 100 > pool * u64::from(percent);
        if !self.draining {
            self.draining = beyond(self, self.config.high_watermark_percent);
        }
        for _ in 0..DRAINED_AT_ONCE {
            if !self.draining {
                return;
            }
            if !beyond(self, self.config.low_watermark_percent) {
                self.draining = false;
                return;
            }
            let Some(victim) = self.order.victim(&mut self.entries, Reach::Plain, Scarce::Room) else { return };
            self.evict(victim);
        }
    }

    fn no_space(&self, bytes: u64) -> ReserveError {
        let reserved = self.granules[State::Reserved as usize] + self.granules[State::Quarantined as usize];
        ReserveError::NoSpace {
            requested_bytes: bytes,
            free_bytes: self.allocator.free_bytes(),
            pinned_bytes: self.pinned_granules() * GRANULE_BYTES,
            reserved_bytes: reserved * GRANULE_BYTES,
        }
    }

    /// Evicts in the policy's order until a free block of `granules` appears or enough was evicted in vain.
    fn evict_in_order(&mut self, granules: u64, reach: Reach) -> Option<Block> {
        let mut evicted = 0;
        while evicted < SCATTERED * granules {
            let victim = self.order.victim(&mut self.entries, reach, Scarce::Room)?;
            evicted += self.entries[victim].granules();
            let free = self.evict(victim);
            if self.allocator.granules(free) >= granules {
                return Some(free);
            }
        }
        None
    }

    /// Makes room within a tenant's lease, and within the limit of hard pins.
    ///
    /// # Errors
    /// `Quota` or `PinLimit`; nothing is evicted then.
    pub(super) fn within_lease(&mut self, bytes: u64, keep: &Keep) -> Result<(), ReserveError> {
        let granules = granules_of(bytes.next_multiple_of(self.config.unit_bytes));
        if keep.hard_pin
            && let Some((hard, limit, of_tenant)) = self.pin_limit(granules, keep.account)
        {
            if of_tenant {
                self.order.count_refusal(keep.account);
            }
            let [pinned_bytes, limit_bytes] = [hard, limit].map(|granules| granules * GRANULE_BYTES);
            return Err(ReserveError::PinLimit { pinned_bytes, limit_bytes, of_tenant });
        }
        self.order.expire(&mut self.entries);
        while let Some((lease, stuck)) = self.order.over_lease(keep.account, granules) {
            let may_fit = stuck + granules <= lease;
            let victim = may_fit.then(|| self.order.victim_of(&mut self.entries, keep.account)).flatten();
            let Some(victim) = victim else {
                self.order.count_refusal(keep.account);
                let (lease_bytes, held_bytes) = (lease * GRANULE_BYTES, stuck * GRANULE_BYTES);
                return Err(ReserveError::Quota { bytes, lease_bytes, held_bytes });
            };
            self.evict(victim);
        }
        Ok(())
    }

    /// Returns true if the pool's limit of hard pins allows this many more bytes, of any tenant.
    #[must_use]
    pub fn pins_allow(&self, bytes: u64) -> bool {
        let granules = granules_of(bytes.next_multiple_of(self.config.unit_bytes));
        let (all, limit) = self.pool_pins();
        all + granules <= limit
    }

    /// Returns the granules that are hard pinned, and those that may be.
    fn pool_pins(&self) -> (u64, u64) {
        let limit = self.allocator.pool_granules() * u64::from(self.config.hard_pin_percent) / 100;
        (self.order.hard_granules(), limit)
    }

    /// Returns true if a tenant may have this many more bytes hard pinned.
    pub(super) fn may_pin(&self, bytes: u64, account: u16) -> bool {
        let granules = granules_of(bytes.next_multiple_of(self.config.unit_bytes));
        self.pin_limit(granules, account).is_none()
    }

    /// Returns nothing if this many more granules may be hard pinned; otherwise the granules that are pinned, the
    /// limit, and true if it is the tenant's limit. All hard pinned objects together may take a share of the pool,
    /// those of a tenant with a lease the same share of the lease: otherwise the tenant could fill its lease with them,
    /// and no later put of it would ever find room.
    pub(super) fn pin_limit(&self, granules: u64, account: u16) -> Option<(u64, u64, bool)> {
        let share_of = |granules: u64| granules * u64::from(self.config.hard_pin_percent) / 100;
        let (of_tenant, lease) = self.order.hard_pins_of(account);
        if let Some(lease) = lease
            && of_tenant + granules > share_of(lease)
        {
            return Some((of_tenant, share_of(lease), true));
        }
        let (all, limit) = self.pool_pins();
        (all + granules > limit).then_some((all, limit, false))
    }

    /// Returns the granules of objects that are pinned by readers or hard pinned.
    pub(super) const fn pinned_granules(&self) -> u64 {
        let written = self.granules[State::Reserved as usize] + self.granules[State::Quarantined as usize];
        self.order.stuck_granules() - written
    }

    /// Evicts neighbours until a free block of `granules` appears; evicts nothing if no run would suffice.
    fn clear_a_run(&mut self, granules: u64, reach: Reach) -> Option<Block> {
        let victim = self.order.victim(&mut self.entries, reach, Scarce::Room);
        let may_go = |owner| self.may_go(owner, reach);
        let block_of = |victim: EntryId| self.entries[victim].block();
        let around = victim.and_then(|victim| self.allocator.run_around(block_of(victim), granules, may_go));
        let mut block = around.or_else(|| self.allocator.run_anywhere(granules, may_go))?;
        loop {
            // Groups are not evicted together here: members elsewhere would not help.
            if let Some(owner) = self.allocator.owner(block) {
                block = match owner_of(owner) {
                    Owner::Entry(id) => self.evict_one(id),
                    Owner::Page(page) => self.clear_page(page),
                    Owner::Nobody => unreachable!("a block of a run has an owner that may be evicted"),
                };
            }
            if self.allocator.granules(block) >= granules {
                return Some(block);
            }
            block = self.allocator.after(block).expect("a run is as long as requested");
        }
    }

    /// Evicts an unused object, and its group with it; returns the free block that its bytes are now part of.
    fn evict(&mut self, id: EntryId) -> Block {
        if self.entries[id].is(Mark::Grouped) {
            for mate in self.order.mates(&self.entries, id) {
                self.evict_one(mate);
            }
        }
        self.evict_one(id)
    }

    /// Evicts an unused object.
    pub(super) fn evict_one(&mut self, id: EntryId) -> Block {
        assert!(self.entries[id].is_evictable(), "evicting {:?}", self.entries[id]);
        self.counters.evictions += 1;
        self.counters.evicted_bytes += self.entries[id].bytes();
        self.hide(id);
        self.order.remove(&mut self.entries, id, true);
        self.release(id)
    }
}
