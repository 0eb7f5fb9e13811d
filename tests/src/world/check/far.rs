//! Checks of far memory: an object that moves is used by nobody, crosses the border between DRAM and far memory, and
//! has its bytes and its name; far memory holds no more than it has room for, and nothing is evicted while there is
//! room.

use kvplane_store::far_pool_stats;
use kvplane_store::service::{Memory, MemoryExtent};

use super::{Rule, broken};
use crate::world::World;
use crate::world::far::PoolCopy;

impl World {
    /// Checks the moves between DRAM and far memory that a shard has made since the last call.
    pub(crate) fn check_moves(&mut self, incarnation: usize) {
        let at = &mut self.incarnations[incarnation];
        let Some(far) = &at.far else { return };
        let copies = far.take_copies();
        for copy in &copies {
            at.flips.iter_mut().for_each(|flip| flip.follow(copy));
        }
        let (near_bytes, host_bytes) = (self.scenario.pool_bytes, self.scenario.host_bytes());
        for copy in copies {
            self.detail(copy.to, || format!("incarnation {incarnation} moves {copy:?}"));
            let PoolCopy { from, to, bytes } = copy;
            let is_in = |offset: u64, is_far: bool| {
                let (first, end) = if is_far { (near_bytes, host_bytes) } else { (0, near_bytes) };
                offset >= first && offset + bytes <= end
            };
            let is_demotion = to >= near_bytes;
            if !is_in(from, !is_demotion) || !is_in(to, is_demotion) {
                let what = format!("incarnation {incarnation}: {copy:?} with {near_bytes} of {host_bytes} bytes near");
                self.violate(broken(Rule::Memory, what));
            }
            let unused = self.incarnations[incarnation].ledger.may_move(from, to, bytes);
            self.require(unused);
            self.check_moved(incarnation, to);
        }
    }

    /// Checks the object that has moved to an offset, if it has not moved on since.
    fn check_moved(&mut self, incarnation: usize, to: u64) {
        let at = &self.incarnations[incarnation];
        let moved = (0..self.scenario.keys).find_map(|key| {
            let view = at.service.store().peek(self.shadow.digest(key))?;
            (view.extent.offset == to).then_some((key, view))
        });
        let Some((key, view)) = moved else { return };
        let version = view.version.0;
        // What is being committed is not known yet.
        if self.shadow.commit_of(version).is_some() {
            let extent = MemoryExtent { memory: Memory::Pool, offset: to, bytes: view.extent.bytes };
            let kept = self.shadow.check_read(key, version, &at.undamaged(version, extent));
            self.require(kept);
        }
        self.check_name(incarnation, self.shadow.digest(key));
    }

    /// Checks, at rest, the objects in far memory, and how much is there.
    pub(crate) fn check_far(&mut self, incarnation: usize) {
        let at = &self.incarnations[incarnation];
        if at.far.is_none() {
            return;
        }
        let (stats, evictions) = (far_pool_stats(at.service.store()), at.service.store().stats().evictions);
        let near_bytes = self.scenario.pool_bytes;
        let views = (0..self.scenario.keys).filter_map(|key| {
            let view = at.service.store().peek(self.shadow.digest(key))?;
            view.is_far.then_some((key, view))
        });
        let there: Vec<_> = views.collect();
        let held_bytes: u64 = there.iter().map(|(_, view)| view.extent.bytes).sum();
        let is_misplaced = there.iter().any(|(_, view)| view.extent.offset < near_bytes);
        if held_bytes > stats.used_bytes || stats.used_bytes > stats.pool_bytes || is_misplaced {
            let what = format!("incarnation {incarnation}: {held_bytes} bytes of {} objects in {stats:?}", there.len());
            self.violate(broken(Rule::Memory, what));
        }
        for (key, view) in there {
            let at = &self.incarnations[incarnation];
            let (version, offset, bytes) = (view.version.0, view.extent.offset, view.extent.bytes);
            let extent = MemoryExtent { memory: Memory::Pool, offset, bytes };
            let kept = self.shadow.check_read(key, version, &at.undamaged(version, extent));
            self.require(kept);
        }
        if evictions > 0 && self.scenario.far.is_some_and(|far| far.holds_all) {
            let what = format!("incarnation {incarnation}: {evictions} objects evicted, with room in {stats:?}");
            self.violate(broken(Rule::Lost, what));
        }
    }

    /// Counts what a shard's far pool did.
    pub(crate) fn count_far(&mut self, incarnation: usize) {
        let stats = far_pool_stats(self.incarnations[incarnation].service.store());
        let counts = &mut self.statistics.far;
        counts.demotions += stats.demotions;
        counts.promotions += stats.promotions;
        counts.hits += stats.hits;
        counts.evictions += stats.evictions;
    }
}
