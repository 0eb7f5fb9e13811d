//! Reference models of a cache: hits that LRU and segmented LRU of a given size must have on a trace.
//!
//! The models judge the store, so they share no code with it: recency is a `BTreeMap` from a rising stamp to the block,
//! nothing cleverer. They replay the steps of one client of `kvplane replay`, for each request in arrival order:
//!
//! 1. check which of its blocks exist (no access);
//! 2. get the longest prefix that does (each get is an access);
//! 3. put the rest in order: a block that exists is accessed and stays as it is, a missing one is inserted, evicting
//!    until it fits.
//!
//! Segmented LRU: a block enters at the most recent end of *probation*; an access there moves it to the most recent end
//! of *protected*, which holds at most a fifth of the capacity and pushes its least recent blocks back to the most
//! recent end of probation. Victims are the least recent of probation, then of protected. A block that alone exceeds
//! the protected fifth only moves to the most recent end of probation.
//!
//! The models have one pool, one client and no pins: a sharded store or several clients differ a little, and the
//! reports show the difference.

use std::collections::{BTreeMap, HashMap};

use crate::trace::{HitCounts, Request};

/// Divisor of the capacity that gives the most bytes of the protected segment.
const PROTECTED_DIVISOR: u64 = 5;

/// Eviction policy of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The least recently used block is evicted first.
    Lru,
    /// Segmented LRU with probation and a protected fifth.
    SegmentedLru,
}

/// Results of a model run.
#[derive(Clone, Debug)]
pub struct ModelRun {
    /// Blocks and tokens requested and found.
    pub counts: HitCounts,
    /// Number of evicted blocks.
    pub evictions: u64,
    /// Number of puts refused because one block is larger than the pool.
    pub refused: u64,
    /// Counts after each request.
    progress: Vec<HitCounts>,
}

impl ModelRun {
    /// Returns the counts after the first `requests` requests, to compare with a replay in progress; all of them if the
    /// trace is shorter.
    #[must_use]
    pub fn after(&self, requests: u64) -> HitCounts {
        match requests.min(self.progress.len() as u64) {
            0 => HitCounts::default(),
            done => self.progress[done as usize - 1],
        }
    }
}

/// Replays `requests` against a pool of `capacity_bytes`, each block charged `charge_bytes` (the block's size rounded
/// up as the store does).
///
/// # Panics
/// Panics if `charge_bytes` is 0.
#[must_use]
pub fn simulate(policy: Policy, requests: &[Request], charge_bytes: u64, capacity_bytes: u64) -> ModelRun {
    assert!(charge_bytes > 0, "a block must be charged at least one byte");
    let mut cache = Cache::new(policy, charge_bytes, capacity_bytes);
    let mut run = ModelRun { counts: HitCounts::default(), evictions: 0, refused: 0, progress: Vec::new() };
    for request in requests {
        let found = request.blocks.iter().take_while(|block| cache.holds(**block)).count();
        let (prefix, rest) = request.blocks.split_at(found);
        for &block in prefix {
            cache.access(block);
        }
        for &block in rest {
            cache.put(block);
        }
        run.counts.add(request, found);
        run.progress.push(run.counts);
    }
    run.evictions = cache.evictions;
    run.refused = cache.refused;
    run
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Segment {
    Probation,
    Protected,
}

/// Blocks of one segment, least recent first.
#[derive(Default)]
struct Recency {
    blocks: BTreeMap<u64, u64>,
}

struct Cache {
    policy: Policy,
    charge_bytes: u64,
    capacity_bytes: u64,
    protected_bytes: u64,
    clock: u64,
    /// Segment and stamp of every block in the cache.
    places: HashMap<u64, (Segment, u64)>,
    probation: Recency,
    protected: Recency,
    evictions: u64,
    refused: u64,
}

impl Cache {
    fn new(policy: Policy, charge_bytes: u64, capacity_bytes: u64) -> Self {
        Self {
            policy,
            charge_bytes,
            capacity_bytes,
            protected_bytes: capacity_bytes / PROTECTED_DIVISOR,
            clock: 0,
            places: HashMap::new(),
            probation: Recency::default(),
            protected: Recency::default(),
            evictions: 0,
            refused: 0,
        }
    }

    fn holds(&self, block: u64) -> bool {
        self.places.contains_key(&block)
    }

    fn segment(&mut self, segment: Segment) -> &mut Recency {
        match segment {
            Segment::Probation => &mut self.probation,
            Segment::Protected => &mut self.protected,
        }
    }

    /// Makes `block` the most recent of `segment`, and removes it from its former segment.
    fn place(&mut self, block: u64, segment: Segment) {
        self.clock += 1;
        let stamp = self.clock;
        if let Some((old, old_stamp)) = self.places.insert(block, (segment, stamp)) {
            self.segment(old).blocks.remove(&old_stamp);
        }
        self.segment(segment).blocks.insert(stamp, block);
    }

    fn bytes(&self, recency: &Recency) -> u64 {
        recency.blocks.len() as u64 * self.charge_bytes
    }

    /// Accesses a block, by a get or by a put of an existing block.
    fn access(&mut self, block: u64) {
        if self.policy == Policy::Lru || self.charge_bytes > self.protected_bytes {
            self.place(block, Segment::Probation);
            return;
        }
        self.place(block, Segment::Protected);
        while self.bytes(&self.protected) > self.protected_bytes {
            let (_, &least_recent) = self.protected.blocks.first_key_value().expect("it holds too much");
            self.place(least_recent, Segment::Probation);
        }
    }

    fn put(&mut self, block: u64) {
        if self.holds(block) {
            self.access(block);
            return;
        }
        if self.charge_bytes > self.capacity_bytes {
            self.refused += 1;
            return;
        }
        while self.places.len() as u64 * self.charge_bytes + self.charge_bytes > self.capacity_bytes {
            self.evict();
        }
        self.place(block, Segment::Probation);
    }

    fn evict(&mut self) {
        let victim = self.probation.blocks.pop_first().or_else(|| self.protected.blocks.pop_first());
        let (_, block) = victim.expect("a full pool holds a block");
        self.places.remove(&block);
        self.evictions += 1;
    }
}

#[cfg(test)]
mod tests;
