//! When a prefix is worth another copy: when those who fetch it wait for its sources' NICs longer than a copy costs.
//!
//! What is fetched `per_s` times a second and takes `s` seconds of a NIC keeps each of its `n` sources busy for a part
//! `load = other + per_s * s / n` of the time. Who fetches waits `s * load / (2 * (1 - load))` for it, as in a queue
//! with random arrivals and equal services (Pollaczek and Khinchin); where more comes than goes, half of what has piled
//! up at the end of the horizon. A copy is a source more. It is worth it when it saves all who fetch within the horizon
//! more time than making it takes of two NICs.
//!
//! Copies have a budget of bytes. Where it is used up, those go from it that save the least for their bytes, if that is
//! less than half of what takes their place; nobody fetches those that are not told of any more. What leaves the budget
//! is left to eviction.

use std::collections::BTreeMap;

/// How long one that could not be copied is left alone.
const LEAVE_ALONE_NS: u64 = 30_000_000_000;
/// Copies that are remembered at most.
const KEPT: usize = 4_096;

/// What copies may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyConfig {
    /// Bytes of all copies; 0: none are made.
    pub most_bytes: u64,
    /// Places where a prefix is, the first included.
    pub most_places: u32,
    /// Copies that are being made.
    pub under_way: usize,
    /// Within which a copy must pay.
    pub horizon_ns: u64,
}

impl Default for CopyConfig {
    /// Two places, as the shared store has; 16 GiB; a minute, in which counts halve.
    fn default() -> Self {
        Self { most_bytes: 16 << 30, most_places: 2, under_way: 2, horizon_ns: 60_000_000_000 }
    }
}

/// A prefix that is fetched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefixFetch<K> {
    /// Its name.
    pub key: K,
    /// How often a second.
    pub per_s: f64,
    /// Its bytes.
    pub bytes: u64,
    /// Pieces of it that lie anywhere, each by itself: its blocks in a store that spreads them, 1 where it is in one
    /// place.
    pub pieces: u64,
    /// Places where each piece is already, without the copies made here.
    pub places: u32,
}

/// Where prefixes are fetched from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sources {
    /// Nodes, each with a NIC.
    pub nodes: u32,
    /// Bytes a second of each.
    pub nic_bytes_s: u64,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOrder<K> {
    /// A copy is made; [`Copies::ended`] says what became of it.
    Copy(K),
    /// A copy does not count any more.
    Forget(K),
}

#[derive(Clone, Copy)]
struct CopyState {
    bytes: u64,
    copies: u32,
    coming: bool,
}

/// The copies that were made.
pub struct Copies<K> {
    config: CopyConfig,
    kept: BTreeMap<K, CopyState>,
    left_alone: BTreeMap<K, u64>,
    /// What was counted.
    pub counts: CopyCounts,
}

/// What was counted of copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyCounts {
    /// Copies that were made.
    pub made: u64,
    /// Those that could not be.
    pub failed: u64,
    /// Those that do not count any more.
    pub forgotten: u64,
}

/// How busy each source is with a prefix in so many places, and how long the part of a fetch takes that is one
/// source's.
fn spread<K>(fetched: &PrefixFetch<K>, places: u32, sources: Sources) -> (f64, f64) {
    let nodes = f64::from(sources.nodes.max(1));
    let pieces = fetched.pieces.max(1) as f64;
    let held = (f64::from(places) / nodes).min(1.0);
    // Nodes that have a piece, on average.
    let busy_nodes = (nodes * (1.0 - (1.0 - held).powf(pieces))).max(1.0);
    let seconds = fetched.bytes as f64 / sources.nic_bytes_s.max(1) as f64;
    (fetched.per_s * seconds / busy_nodes, seconds / busy_nodes.min(pieces))
}

/// Seconds that all who fetch a prefix within the horizon wait for its sources, when it is in so many places and its
/// sources are busy with others for the part `other` of the time.
#[must_use]
pub fn waited_s<K>(fetched: &PrefixFetch<K>, places: u32, sources: Sources, other: f64, horizon_s: f64) -> f64 {
    let (own, service_s) = spread(fetched, places, sources);
    let (load, half_s) = (own + other.max(0.0), horizon_s / 2.0);
    let each_s = if load < 1.0 { (service_s * load / (2.0 * (1.0 - load))).min(half_s) } else { load * half_s };
    each_s * fetched.per_s * horizon_s
}

/// What each source is busy with beside a prefix, on average.
fn other_load<K>(all: &[PrefixFetch<K>], own: &PrefixFetch<K>, sources: Sources) -> f64 {
    let load = |one: &PrefixFetch<K>| one.per_s * one.bytes as f64 / sources.nic_bytes_s.max(1) as f64;
    (all.iter().map(load).sum::<f64>() - load(own)).max(0.0) / f64::from(sources.nodes.max(1))
}

impl<K: Ord + Copy> Copies<K> {
    /// None yet.
    #[must_use]
    pub fn new(config: CopyConfig) -> Self {
        Self { config, kept: BTreeMap::new(), left_alone: BTreeMap::new(), counts: CopyCounts::default() }
    }

    /// What copies may take.
    #[must_use]
    pub const fn config(&self) -> &CopyConfig {
        &self.config
    }

    /// Bytes of copies that are there or coming.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.kept.values().map(CopyState::total).sum()
    }

    /// Prefixes with copies, and copies that are coming.
    #[must_use]
    pub fn prefixes(&self) -> (usize, usize) {
        let coming = self.kept.values().filter(|kept| kept.coming).count();
        (self.kept.values().filter(|kept| kept.copies > 0).count(), coming)
    }

    /// Whether a prefix has a copy.
    #[must_use]
    pub fn is_copied(&self, key: &K) -> bool {
        self.kept.get(key).is_some_and(|kept| kept.copies > 0)
    }

    /// How many copies of a prefix there are.
    #[must_use]
    pub fn copies_of(&self, key: &K) -> u32 {
        self.kept.get(key).map_or(0, |kept| kept.copies)
    }

    /// Seconds that one copy more saves those who fetch a prefix; with `less`, those that they lose with one less.
    fn saves_s(&self, all: &[PrefixFetch<K>], one: &PrefixFetch<K>, sources: Sources, less: bool) -> f64 {
        let other = other_load(all, one, sources);
        let places = one.places.max(1) + self.copies_of(&one.key);
        let (few, many) = if less { (places.saturating_sub(1).max(1), places) } else { (places, places + 1) };
        let horizon_s = self.config.horizon_ns as f64 / 1e9;
        let waited = |places| waited_s(one, places, sources, other, horizon_s);
        waited(few) - waited(many)
    }

    /// What is to be done now, for all prefixes that are fetched.
    pub fn decide(&mut self, all: &[PrefixFetch<K>], sources: Sources, now_ns: u64) -> Vec<CopyOrder<K>> {
        let mut orders = self.forget_cold(all);
        self.left_alone.retain(|_, until_ns| *until_ns > now_ns);
        let mut worth: Vec<(f64, usize)> = Vec::new();
        for (at, one) in all.iter().enumerate() {
            let kept = self.kept.get(&one.key);
            let places = one.places.max(1) + self.copies_of(&one.key);
            let full = places >= self.config.most_places.min(sources.nodes);
            if full || kept.is_some_and(|kept| kept.coming) || self.left_alone.contains_key(&one.key) {
                continue;
            }
            let costs_s = 2.0 * one.bytes as f64 / sources.nic_bytes_s.max(1) as f64;
            let saves_s = self.saves_s(all, one, sources, false);
            if saves_s > costs_s {
                worth.push((saves_s / one.bytes.max(1) as f64, at));
            }
        }
        worth.sort_by(|one, other| other.0.total_cmp(&one.0).then(all[one.1].key.cmp(&all[other.1].key)));
        for (_, at) in worth {
            let one = &all[at];
            if self.prefixes().1 >= self.config.under_way {
                break;
            }
            let new = !self.kept.contains_key(&one.key);
            if new && self.kept.len() >= KEPT || !self.make_room(all, one, sources, &mut orders) {
                continue;
            }
            let kept = self.kept.entry(one.key).or_insert(CopyState { bytes: one.bytes, copies: 0, coming: false });
            kept.coming = true;
            orders.push(CopyOrder::Copy(one.key));
        }
        orders
    }

    /// Copies of what nobody fetches any more do not count.
    fn forget_cold(&mut self, all: &[PrefixFetch<K>]) -> Vec<CopyOrder<K>> {
        let is_told = |key: &K| all.iter().any(|one| one.key == *key);
        let cold: Vec<K> =
            self.kept.iter().filter(|(key, kept)| !kept.coming && !is_told(key)).map(|(key, _)| *key).collect();
        cold.into_iter().map(|key| self.forget(key)).collect()
    }

    fn forget(&mut self, key: K) -> CopyOrder<K> {
        if let Some(kept) = self.kept.remove(&key) {
            self.counts.forgotten += u64::from(kept.copies);
        }
        CopyOrder::Forget(key)
    }

    /// Whether the budget has room for a copy, after those have gone that lose least; then these are in `orders`.
    fn make_room(
        &mut self,
        all: &[PrefixFetch<K>],
        wanted: &PrefixFetch<K>,
        sources: Sources,
        orders: &mut Vec<CopyOrder<K>>,
    ) -> bool {
        let bytes = self.kept.get(&wanted.key).map_or(wanted.bytes, |kept| kept.bytes);
        let mut over = self.bytes().saturating_add(bytes).saturating_sub(self.config.most_bytes);
        let mut losses: Vec<(f64, f64, u64, K)> = Vec::new();
        for one in all.iter().filter(|one| one.key != wanted.key) {
            let Some(kept) = self.kept.get(&one.key).filter(|kept| !kept.coming) else { continue };
            let loss_s = self.saves_s(all, one, sources, true);
            losses.push((loss_s / kept.bytes.max(1) as f64, loss_s, kept.total(), one.key));
        }
        losses.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.3.cmp(&other.3)));
        let mut left_s = self.saves_s(all, wanted, sources, false) / 2.0;
        let mut going = Vec::new();
        for (_, loss_s, bytes, key) in losses {
            left_s -= loss_s;
            if over == 0 || left_s <= 0.0 {
                break;
            }
            over = over.saturating_sub(bytes);
            going.push(key);
        }
        if over > 0 {
            return false;
        }
        orders.extend(going.into_iter().map(|key| self.forget(key)));
        true
    }

    /// A copy was made, or could not be: then its prefix is left alone for a while.
    pub fn ended(&mut self, key: K, made: bool, now_ns: u64) {
        let Some(kept) = self.kept.get_mut(&key).filter(|kept| kept.coming) else { return };
        kept.coming = false;
        if made {
            kept.copies += 1;
            self.counts.made += 1;
            return;
        }
        self.counts.failed += 1;
        if kept.copies == 0 {
            self.kept.remove(&key);
        }
        if self.left_alone.len() < KEPT {
            self.left_alone.insert(key, now_ns.saturating_add(LEAVE_ALONE_NS));
        }
    }
}

impl CopyState {
    fn total(&self) -> u64 {
        self.bytes.saturating_mul(u64::from(self.copies) + u64::from(self.coming))
    }
}
