//! Replication of hot prefixes: a prefix is worth another replica when its fetches wait longer for the NICs of its
//! sources than a replica costs.
//!
//! A prefix that is fetched `per_s` times a second and occupies a NIC for `s` seconds keeps each of its `n` sources
//! busy for a fraction `load = other + per_s * s / n` of the time. A fetch waits `s * load / (2 * (1 - load))` for the
//! NIC, as in a queue with random arrivals and equal service times (M/D/1, Pollaczek-Khinchine formula); if the load
//! exceeds 1, half of the backlog at the end of the horizon. A replica is another source. It pays off when it saves all
//! fetches within the horizon more time than making it occupies two NICs.
//!
//! Replicas have a budget of bytes. When it is exhausted, the replicas that save the least per byte leave it, if they
//! save less than half of what their replacement does; so do replicas of prefixes that are no longer fetched. Replicas
//! that leave the budget are not removed but left to eviction.

use std::collections::BTreeMap;

/// Backoff after a failed replication, in nanoseconds.
const LEAVE_ALONE_NS: u64 = 30_000_000_000;
/// Maximum number of replicated prefixes.
const KEPT: usize = 4_096;

/// Limits of replicas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyConfig {
    /// Maximum bytes of all replicas; 0 disables replication.
    pub most_bytes: u64,
    /// Maximum number of places of a prefix, including the first.
    pub most_places: u32,
    /// Maximum number of replicas being made.
    pub under_way: usize,
    /// Horizon within which a replica must pay off, in nanoseconds.
    pub horizon_ns: u64,
}

impl Default for CopyConfig {
    /// Returns the defaults: two places, as the shared store has; 16 GiB; a minute, the half-life of counts.
    fn default() -> Self {
        Self { most_bytes: 16 << 30, most_places: 2, under_way: 2, horizon_ns: 60_000_000_000 }
    }
}

/// Rate and size of a prefix that is fetched.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct PrefixFetch<K> {
    pub key: K,
    /// Fetches per second.
    pub per_s: f64,
    /// Size in bytes.
    pub bytes: u64,
    /// Number of independently placed pieces: its blocks in a store that spreads them, 1 if it is in one place.
    pub pieces: u64,
    /// Number of places of each piece, without replicas made by this module.
    pub places: u32,
}

/// Nodes that prefixes are fetched from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sources {
    /// Number of nodes, each with a NIC.
    pub nodes: u32,
    /// Bandwidth of each NIC, in bytes per second.
    pub nic_bytes_s: u64,
}

/// Action to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOrder<K> {
    /// Make a replica; [`Copies::ended`] reports the result.
    Copy(K),
    /// Remove a replica from the budget.
    Forget(K),
}

#[derive(Clone, Copy)]
struct CopyState {
    bytes: u64,
    copies: u32,
    coming: bool,
}

/// Replicas that were made or are being made.
pub struct Copies<K> {
    config: CopyConfig,
    kept: BTreeMap<K, CopyState>,
    left_alone: BTreeMap<K, u64>,
    /// Counters since the start.
    pub counts: CopyCounts,
}

/// Counters of replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyCounts {
    /// Replicas that were made.
    pub made: u64,
    /// Replicas that could not be made.
    pub failed: u64,
    /// Replicas that left the budget.
    pub forgotten: u64,
}

/// Returns the load that a prefix in this many places puts on each source, and the duration of the part of a fetch that
/// one source serves.
fn spread<K>(fetched: &PrefixFetch<K>, places: u32, sources: Sources) -> (f64, f64) {
    let nodes = f64::from(sources.nodes.max(1));
    let pieces = fetched.pieces.max(1) as f64;
    let held = (f64::from(places) / nodes).min(1.0);
    // Expected number of nodes that have a piece.
    let busy_nodes = (nodes * (1.0 - (1.0 - held).powf(pieces))).max(1.0);
    let seconds = fetched.bytes as f64 / sources.nic_bytes_s.max(1) as f64;
    (fetched.per_s * seconds / busy_nodes, seconds / busy_nodes.min(pieces))
}

/// Returns the total wait of all fetches of a prefix within the horizon, in seconds, when the prefix is in this many
/// places and other prefixes keep its sources busy for the fraction `other` of the time.
#[must_use]
pub fn waited_s<K>(fetched: &PrefixFetch<K>, places: u32, sources: Sources, other: f64, horizon_s: f64) -> f64 {
    let (own, service_s) = spread(fetched, places, sources);
    let (load, half_s) = (own + other.max(0.0), horizon_s / 2.0);
    let each_s = if load < 1.0 { (service_s * load / (2.0 * (1.0 - load))).min(half_s) } else { load * half_s };
    each_s * fetched.per_s * horizon_s
}

/// Returns the load of each source from other prefixes, on average.
fn other_load<K>(all: &[PrefixFetch<K>], own: &PrefixFetch<K>, sources: Sources) -> f64 {
    let load = |one: &PrefixFetch<K>| one.per_s * one.bytes as f64 / sources.nic_bytes_s.max(1) as f64;
    (all.iter().map(load).sum::<f64>() - load(own)).max(0.0) / f64::from(sources.nodes.max(1))
}

impl<K: Ord + Copy> Copies<K> {
    /// Creates the state without replicas.
    #[must_use]
    pub fn new(config: CopyConfig) -> Self {
        Self { config, kept: BTreeMap::new(), left_alone: BTreeMap::new(), counts: CopyCounts::default() }
    }

    /// Returns the limits of replicas.
    #[must_use]
    pub const fn config(&self) -> &CopyConfig {
        &self.config
    }

    /// Returns the bytes of replicas that exist or are being made.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.kept.values().map(CopyState::total).sum()
    }

    /// Returns the number of prefixes with replicas, and of replicas being made.
    #[must_use]
    pub fn prefixes(&self) -> (usize, usize) {
        let coming = self.kept.values().filter(|kept| kept.coming).count();
        (self.kept.values().filter(|kept| kept.copies > 0).count(), coming)
    }

    /// Returns true if a prefix has a replica.
    #[must_use]
    pub fn is_copied(&self, key: &K) -> bool {
        self.kept.get(key).is_some_and(|kept| kept.copies > 0)
    }

    /// Returns the number of replicas of a prefix.
    #[must_use]
    pub fn copies_of(&self, key: &K) -> u32 {
        self.kept.get(key).map_or(0, |kept| kept.copies)
    }

    /// Returns the seconds of fetching that one more replica of a prefix saves; with `less`, those that one fewer
    /// costs.
    fn saves_s(&self, all: &[PrefixFetch<K>], one: &PrefixFetch<K>, sources: Sources, less: bool) -> f64 {
        let other = other_load(all, one, sources);
        let places = one.places.max(1) + self.copies_of(&one.key);
        let (few, many) = if less { (places.saturating_sub(1).max(1), places) } else { (places, places + 1) };
        let horizon_s = self.config.horizon_ns as f64 / 1e9;
        let waited = |places| waited_s(one, places, sources, other, horizon_s);
        waited(few) - waited(many)
    }

    /// Returns the actions to be taken now, given all prefixes that are fetched.
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

    /// Removes the replicas of prefixes that are no longer fetched from the budget.
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

    /// Makes room for a replica in the budget by removing those that lose the least, which are appended to `orders`.
    /// Returns false if that is not worthwhile.
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

    /// Notes that a replica was made, or could not be: then its prefix is not retried for a while.
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
