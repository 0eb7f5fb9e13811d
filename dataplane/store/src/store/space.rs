//! Making room: eviction until a request fits, and no further.
//!
//! Objects go in the policy's order. Where all are of one size the first victim's place fits. Where they are not,
//! victims free bytes all over the pool, and waiting for enough of them to be neighbours could empty it. So after
//! [`SCATTERED`] times the request the order yields: the neighbours of the next victim go with it; and if pinned or
//! reserved extents hem those in, the first stretch of the pool that can be cleared. A request is refused only when
//! there is none.
//!
//! Where watermarks are set, each put beyond the high one also evicts a few more objects, until the low one is reached:
//! bursts then find room that costs them nothing, for a pool that holds less.

use super::Store;
use super::tails::{Owner, owner_of};
use crate::allocator::{Block, GRANULE_BYTES, granules_of};
use crate::entry::{EntryId, Keep, Mark, State};
use crate::errors::ReserveError;
use crate::eviction::EvictionPolicy;
use crate::order::{Reach, Scarce};

/// How much is evicted in the policy's order before neighbours are, in multiples of the request.
const SCATTERED: u64 = 2;

/// How many objects a put evicts at most on account of the watermarks. More than one, so that the low one is reached.
const DRAINED_AT_ONCE: usize = 4;

impl<P: EvictionPolicy> Store<P> {
    /// A block for `bytes`, and a vacant entry to go with it.
    ///
    /// # Errors
    /// `NoSpace` or `TooManyObjects`: no eviction could give both.
    pub(super) fn room(&mut self, bytes: u64) -> Result<Block, ReserveError> {
        // Every block is a whole number of units, so every one begins at a multiple of the unit.
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

    /// Evicts in the policy's order until a free block of `granules` appears or enough has gone in vain.
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

    /// Makes room below a tenant's lease, and below the share that may be hard pinned.
    ///
    /// # Errors
    /// `Quota` or `PinLimit`: nothing is evicted then.
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

    /// True where the pool's share of hard pins allows for so many bytes more, of whatever tenant.
    #[must_use]
    pub fn pins_allow(&self, bytes: u64) -> bool {
        let granules = granules_of(bytes.next_multiple_of(self.config.unit_bytes));
        let (all, limit) = self.pool_pins();
        all + granules <= limit
    }

    /// Granules that are hard pinned, and those that may be.
    fn pool_pins(&self) -> (u64, u64) {
        let limit = self.allocator.pool_granules() * u64::from(self.config.hard_pin_percent) / 100;
        (self.order.hard_granules(), limit)
    }

    /// Whether a tenant may have so many bytes more hard pinned.
    pub(super) fn may_pin(&self, bytes: u64, account: u16) -> bool {
        let granules = granules_of(bytes.next_multiple_of(self.config.unit_bytes));
        self.pin_limit(granules, account).is_none()
    }

    /// Where so many granules more are not to be hard pinned: what is, what may be, and whether that is the tenant's
    /// limit. All hard pinned objects together may take a share of the pool, those of a tenant with a lease the same
    /// share of that: it could fill its lease with them else, and nothing that it puts would ever have room again.
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

    /// Granules of objects that readers hold or that are hard pinned.
    pub(super) const fn pinned_granules(&self) -> u64 {
        let written = self.granules[State::Reserved as usize] + self.granules[State::Quarantined as usize];
        self.order.stuck_granules() - written
    }

    /// Evicts neighbours until a free block of `granules` appears; evicts nothing when there are none that would do.
    fn clear_a_run(&mut self, granules: u64, reach: Reach) -> Option<Block> {
        let victim = self.order.victim(&mut self.entries, reach, Scarce::Room);
        let may_go = |owner| self.may_go(owner, reach);
        let block_of = |victim: EntryId| self.entries[victim].block();
        let around = victim.and_then(|victim| self.allocator.run_around(block_of(victim), granules, may_go));
        let mut block = around.or_else(|| self.allocator.run_anywhere(granules, may_go))?;
        loop {
            // Groups are taken apart here: what lies elsewhere would be of no use.
            if let Some(owner) = self.allocator.owner(block) {
                block = match owner_of(owner) {
                    Owner::Entry(id) => self.evict_one(id),
                    Owner::Page(page) => self.clear_page(page),
                    Owner::Nobody => unreachable!("a block of a run has a holder that may go"),
                };
            }
            if self.allocator.granules(block) >= granules {
                return Some(block);
            }
            block = self.allocator.after(block).expect("a run is as long as was asked for");
        }
    }

    /// Evicts an object that nobody uses, and its group with it; returns the free block that its bytes are now part of.
    fn evict(&mut self, id: EntryId) -> Block {
        if self.entries[id].is(Mark::Grouped) {
            for mate in self.order.mates(&self.entries, id) {
                self.evict_one(mate);
            }
        }
        self.evict_one(id)
    }

    /// Evicts an object that nobody uses.
    pub(super) fn evict_one(&mut self, id: EntryId) -> Block {
        assert!(self.entries[id].is_evictable(), "evicting {:?}", self.entries[id]);
        self.counters.evictions += 1;
        self.counters.evicted_bytes += self.entries[id].bytes();
        self.hide(id);
        self.order.remove(&mut self.entries, id, true);
        self.release(id)
    }
}
