//! Receiving side of a [`Schedule`]: the next shard to fetch from each parent, and the time at which a parent is left.
//!
//! A parent is followed while it is a member and makes progress. Shards that it fails to deliver, and all shards that
//! it was to deliver after them, are requested from other members: from then on they belong to the swarm's own
//! scheduling.

use std::collections::{BTreeMap, BTreeSet};

use super::member::MovingAverage;
use super::schedule::{HALVES, Schedule, half_of};
use super::shards::ShardSet;

/// Maximum number of concurrent fetches from one parent. There are several only if fetches are so short that the round
/// trip dominates. Otherwise there is one: two concurrent fetches would complete at the same time, each later than one
/// alone.
const WINDOW: u64 = 8;
/// Target duration of the concurrent fetches from one parent.
const AHEAD_NS: u64 = 10_000_000;

/// Half of the object's shards.
#[derive(Debug)]
struct Half {
    /// Shards that its parent is known to have.
    there: ShardSet,
    /// Missing shards that its parent is not known to have.
    absent: BTreeSet<u32>,
    /// Missing shards that can be fetched.
    ready: BTreeSet<u32>,
    /// Fetches in flight: shard and start time.
    active: BTreeMap<u32, u64>,
    took: MovingAverage,
    /// Time without an arrival after which the parent is left.
    patience_ns: u64,
    heard_ns: u64,
    left: bool,
}

impl Half {
    fn is_done(&self) -> bool {
        self.absent.is_empty() && self.ready.is_empty() && self.active.is_empty()
    }

    fn leave(&mut self) {
        self.left = true;
        self.absent.append(&mut self.ready);
        self.absent.extend(std::mem::take(&mut self.active).into_keys());
    }

    fn window(&self) -> usize {
        self.took.ns().map_or(1, |took_ns| AHEAD_NS / took_ns).clamp(1, WINDOW) as usize
    }
}

/// Progress of one rank through its schedule. Time is an argument, in nanoseconds.
#[derive(Debug)]
pub struct Follow {
    halves: [Half; HALVES],
    started_ns: u64,
    /// Time at which the first half was complete.
    first_ns: Option<u64>,
}

impl Follow {
    /// Creates the state of a rank that lacks these shards. The rank leaves a parent after `patience_ns` without an
    /// arrival, times the rank's depth in the tree: the rank nearest to a stalled member leaves it first, and the ranks
    /// below get shards again before they would time out.
    /// # Panics
    /// When the rank is not in the schedule.
    #[must_use]
    pub fn new(schedule: Schedule, rank: u32, lacks: &ShardSet, patience_ns: u64, now_ns: u64) -> Self {
        let half = |half| Half {
            there: ShardSet::empty(lacks.shards()),
            absent: lacks.iter().filter(|&shard| half_of(shard) == half).collect(),
            ready: BTreeSet::new(),
            active: BTreeMap::new(),
            took: MovingAverage::default(),
            patience_ns: patience_ns.saturating_mul(u64::from(schedule.depth(half, rank))),
            heard_ns: now_ns,
            left: false,
        };
        Self { halves: [half(0), half(1)], started_ns: now_ns, first_ns: None }
    }

    /// Notes the shards of a half's parent, all that are known, as words of 64 shards.
    pub fn learn(&mut self, half: usize, words: &[u64]) {
        let half = &mut self.halves[half];
        for shard in half.there.insert_words(words) {
            if !half.left && half.absent.remove(&shard) {
                half.ready.insert(shard);
            }
        }
    }

    /// Returns the next shard to fetch from a half's parent, and counts it as in flight.
    pub fn next(&mut self, half: usize, now_ns: u64) -> Option<u32> {
        let half = &mut self.halves[half];
        if half.left || half.active.len() >= half.window() {
            return None;
        }
        let shard = half.ready.pop_first()?;
        half.active.insert(shard, now_ns);
        Some(shard)
    }

    /// Returns true if a half's parent should be polled for new shards: fewer are ready or in flight than the window
    /// allows.
    #[must_use]
    pub fn has_room(&self, half: usize) -> bool {
        let half = &self.halves[half];
        !half.left && !half.absent.is_empty() && half.active.len() + half.ready.len() < half.window()
    }

    /// Returns true while a half's parent is followed: shards are still to come from it.
    #[must_use]
    pub fn follows(&self, half: usize) -> bool {
        !self.halves[half].left && !self.halves[half].is_done()
    }

    /// Notes the arrival of a shard, from any source.
    pub fn arrived(&mut self, shard: u32, now_ns: u64) {
        let half = &mut self.halves[half_of(shard)];
        if let Some(since_ns) = half.active.remove(&shard) {
            half.took.learn(now_ns.saturating_sub(since_ns) / half.window() as u64);
        }
        half.absent.remove(&shard);
        half.ready.remove(&shard);
        half.heard_ns = now_ns;
        if half.is_done() {
            self.first_ns.get_or_insert(now_ns);
        }
    }

    /// Notes that the fetch of a shard from its parent failed, and leaves the parent. Returns false if the shard was
    /// not being fetched from it.
    pub fn failed(&mut self, shard: u32) -> bool {
        let half = &mut self.halves[half_of(shard)];
        let ours = half.active.contains_key(&shard);
        if ours {
            half.leave();
        }
        ours
    }

    /// Leaves a half's parent, which cannot be reached.
    pub fn leave(&mut self, half: usize) {
        self.halves[half].leave();
    }

    /// Returns the time at which a half's parent is left unless shards arrive; `None` if it is not followed.
    #[must_use]
    pub fn due_ns(&self, half: usize) -> Option<u64> {
        if !self.follows(half) {
            return None;
        }
        let half = &self.halves[half];
        // One half is complete, and the other takes half as long again: its parent, or an ancestor, is slow.
        let slow = |first_ns: u64| {
            let took_ns = first_ns.saturating_sub(self.started_ns);
            first_ns.saturating_add((took_ns / 2).max(half.patience_ns / 8))
        };
        let silent = half.heard_ns.saturating_add(half.patience_ns);
        Some(self.first_ns.map_or(silent, |first_ns| silent.min(slow(first_ns))))
    }

    /// Leaves the parents whose time is up.
    pub fn tick(&mut self, now_ns: u64) {
        for half in 0..HALVES {
            if self.due_ns(half).is_some_and(|due_ns| due_ns <= now_ns) {
                self.halves[half].leave();
            }
        }
    }

    /// Returns the shards to be fetched from other members: the missing ones of halves whose parent was left.
    pub fn elsewhere(&self) -> impl Iterator<Item = u32> + '_ {
        self.halves.iter().filter(|half| half.left).flat_map(|half| half.absent.iter().copied())
    }
}
