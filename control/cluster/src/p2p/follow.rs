//! What a rank does that fetches by a [`Schedule`]: which shard next from which parent, and when it is done waiting.
//!
//! A parent is followed as long as it is there and gets on. What it fails to give, and everything that it was to give
//! after that, is asked for from whoever else has it: the swarm's own scheduling has those shards from then on.

use std::collections::{BTreeMap, BTreeSet};

use super::member::Typical;
use super::schedule::{HALVES, Schedule, half_of};
use super::shards::ShardSet;

/// Shards that are fetched from one parent at a time, at most: several where they take so little that to ask for one
/// takes as long. Else one: two at a time would arrive at the same time, and each later than one by itself.
const WINDOW: u64 = 8;
/// What is fetched from one parent at a time takes about so long.
const AHEAD_NS: u64 = 10_000_000;

/// One half of the object.
#[derive(Debug)]
struct Half {
    /// What its parent has, as far as is known.
    there: ShardSet,
    /// What is missing, and its parent is not known to have it.
    absent: BTreeSet<u32>,
    /// What is missing and to be had.
    ready: BTreeSet<u32>,
    /// What is being fetched, and since when.
    active: BTreeMap<u32, u64>,
    took: Typical,
    /// How long it is waited for without anything coming.
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

/// One rank's way through its schedule. Time comes as an argument, in nanoseconds.
#[derive(Debug)]
pub struct Follow {
    halves: [Half; HALVES],
    started_ns: u64,
    /// When the first half was there.
    first_ns: Option<u64>,
}

impl Follow {
    /// A rank that lacks these shards. It waits for a parent for `patience_ns`, and as long again for each rank that is
    /// before that one: whoever is nearest to what does not get on gives it up first, and the others have news then.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn new(schedule: Schedule, rank: u32, lacks: &ShardSet, patience_ns: u64, now_ns: u64) -> Self {
        let half = |half| Half {
            there: ShardSet::empty(lacks.shards()),
            absent: lacks.iter().filter(|&shard| half_of(shard) == half).collect(),
            ready: BTreeSet::new(),
            active: BTreeMap::new(),
            took: Typical::default(),
            patience_ns: patience_ns.saturating_mul(u64::from(schedule.depth(half, rank))),
            heard_ns: now_ns,
            left: false,
        };
        Self { halves: [half(0), half(1)], started_ns: now_ns, first_ns: None }
    }

    /// What a half's parent has: all that is known of it, as 64 shards at a time.
    pub fn learn(&mut self, half: usize, words: &[u64]) {
        let half = &mut self.halves[half];
        for shard in half.there.insert_words(words) {
            if !half.left && half.absent.remove(&shard) {
                half.ready.insert(shard);
            }
        }
    }

    /// The next shard to be fetched from a half's parent; it counts as being fetched from then on.
    pub fn next(&mut self, half: usize, now_ns: u64) -> Option<u32> {
        let half = &mut self.halves[half];
        if half.left || half.active.len() >= half.window() {
            return None;
        }
        let shard = half.ready.pop_first()?;
        half.active.insert(shard, now_ns);
        Some(shard)
    }

    /// Whether a half's parent is to be asked what else it has: there is less to fetch than could be.
    #[must_use]
    pub fn is_hungry(&self, half: usize) -> bool {
        let half = &self.halves[half];
        !half.left && !half.absent.is_empty() && half.active.len() + half.ready.len() < half.window()
    }

    /// Whether a half's parent is followed: something is to come from it still.
    #[must_use]
    pub fn follows(&self, half: usize) -> bool {
        !self.halves[half].left && !self.halves[half].is_done()
    }

    /// A shard is there, wherever it came from.
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

    /// A shard was not to be had from its parent: that one is left. False where it was not being fetched from it.
    pub fn failed(&mut self, shard: u32) -> bool {
        let half = &mut self.halves[half_of(shard)];
        let ours = half.active.contains_key(&shard);
        if ours {
            half.leave();
        }
        ours
    }

    /// A half's parent cannot be asked: it is left.
    pub fn leave(&mut self, half: usize) {
        self.halves[half].leave();
    }

    /// When a half's parent will have been waited for long enough, if it is followed.
    #[must_use]
    pub fn due_ns(&self, half: usize) -> Option<u64> {
        if !self.follows(half) {
            return None;
        }
        let half = &self.halves[half];
        // One half is there, and the other takes half as long again: that parent is slow, or those before it are.
        let slow = |first_ns: u64| {
            let took_ns = first_ns.saturating_sub(self.started_ns);
            first_ns.saturating_add((took_ns / 2).max(half.patience_ns / 8))
        };
        let silent = half.heard_ns.saturating_add(half.patience_ns);
        Some(self.first_ns.map_or(silent, |first_ns| silent.min(slow(first_ns))))
    }

    /// Leaves those who have been waited for long enough.
    pub fn tick(&mut self, now_ns: u64) {
        for half in 0..HALVES {
            if self.due_ns(half).is_some_and(|due_ns| due_ns <= now_ns) {
                self.halves[half].leave();
            }
        }
    }

    /// Shards that are to be had from elsewhere: those that are missing of halves whose parent was left.
    pub fn elsewhere(&self) -> impl Iterator<Item = u32> + '_ {
        self.halves.iter().filter(|half| half.left).flat_map(|half| half.absent.iter().copied())
    }
}
