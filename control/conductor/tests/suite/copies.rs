//! Replication of hot prefixes: each replica pays off, limits hold, and a slow reference model decides the same.

use std::collections::{BTreeMap, VecDeque};

use kvplane_conductor::copies::{Copies, CopyConfig, CopyOrder, PrefixFetch, Sources, waited_s};
use kvplane_proto::rng::Rng;
use proptest::prelude::*;

const SECOND: u64 = 1_000_000_000;
/// Backoff after a failed replication.
const ALONE: u64 = 30 * SECOND;

fn one(key: u64, per_s: f64, bytes: u64) -> PrefixFetch<u64> {
    PrefixFetch { key, per_s, bytes, pieces: 1, places: 1 }
}

fn sources(nodes: u32) -> Sources {
    Sources { nodes, nic_bytes_s: 1_000_000 }
}

/// Returns the mean wait in a queue with random arrivals and a service time of `service_s`.
fn queued_s(per_s: f64, service_s: f64, seed: u64) -> f64 {
    let mut rng = Rng::new(seed, "queue");
    let (mut now, mut free, mut waited, count) = (0.0_f64, 0.0_f64, 0.0, 200_000);
    for _ in 0..count {
        now += -(1.0 - rng.unit()).ln() / per_s;
        waited += (free - now).max(0.0);
        free = free.max(now) + service_s;
    }
    waited / f64::from(count)
}

#[test]
fn predicted_wait_matches_a_simulated_queue() {
    for load in [0.2, 0.5, 0.8] {
        let (service_s, horizon_s) = (0.1, 1e6);
        let fetched = one(1, load / service_s, 100_000);
        let said = waited_s(&fetched, 1, sources(4), 0.0, horizon_s) / fetched.per_s / horizon_s;
        let seen = queued_s(fetched.per_s, service_s, 5);
        assert!((said / seen - 1.0).abs() < 0.1, "load {load}: {said} s, not {seen} s");
    }
}

#[test]
fn prefix_spread_over_all_nodes_is_not_replicated() {
    // The load is half of the bandwidth of one of 2 nodes: one piece on one of them is worth a replica.
    let mut copies = Copies::new(CopyConfig { most_bytes: 1 << 30, ..CopyConfig::default() });
    let hot = one(7, 5.0, 100_000);
    assert_eq!(copies.decide(&[hot], sources(2), 0), vec![CopyOrder::Copy(7)]);
    assert_eq!(copies.decide(&[hot], sources(2), 0), vec![], "a replication is in progress");
    copies.ended(7, true, 0);
    assert_eq!(copies.decide(&[hot], sources(2), 0), vec![], "there are two nodes");
    // A hundred pieces are spread over both nodes already.
    let spread = PrefixFetch { key: 8, pieces: 100, ..hot };
    assert_eq!(Copies::new(CopyConfig::default()).decide(&[spread], sources(2), 0), vec![]);
    // A prefix whose fetches do not wait, and a single node.
    assert_eq!(Copies::new(CopyConfig::default()).decide(&[one(9, 0.01, 100_000)], sources(2), 0), vec![]);
    assert_eq!(Copies::new(CopyConfig::default()).decide(&[hot], sources(1), 0), vec![]);
    let none = CopyConfig { most_bytes: 0, ..CopyConfig::default() };
    assert_eq!(Copies::new(none).decide(&[hot], sources(2), 0), vec![]);
}

#[test]
fn least_valuable_replicas_make_room() {
    let config = CopyConfig { most_bytes: 250_000, ..CopyConfig::default() };
    let mut copies = Copies::new(config);
    let (cool, warm, hot) = (one(1, 3.0, 100_000), one(2, 4.0, 100_000), one(3, 8.0, 100_000));
    assert_eq!(copies.decide(&[cool, warm], sources(8), 0), vec![CopyOrder::Copy(2), CopyOrder::Copy(1)]);
    copies.ended(2, true, 0);
    copies.ended(1, true, 0);
    assert_eq!(copies.bytes(), 200_000);
    assert_eq!(copies.decide(&[cool, warm, hot], sources(8), 0), vec![CopyOrder::Forget(1), CopyOrder::Copy(3)]);
    copies.ended(3, false, 0);
    assert_eq!((copies.counts.made, copies.counts.failed, copies.counts.forgotten), (2, 1, 1));
    // A failed replication is not retried for a while; meanwhile the other prefix is replicated again.
    assert_eq!(copies.decide(&[cool, warm, hot], sources(8), 1), vec![CopyOrder::Copy(1)]);
    copies.ended(1, true, 1);
    assert_eq!(copies.decide(&[warm, hot], sources(8), ALONE + 2), vec![CopyOrder::Forget(1), CopyOrder::Copy(3)]);
    assert_eq!(copies.prefixes(), (1, 1));
}

/// Slow reference model: each step recomputes everything.
struct Twin {
    config: CopyConfig,
    /// Bytes, number of replicas, true if one is being made.
    kept: BTreeMap<u64, (u64, u32, bool)>,
    alone: BTreeMap<u64, u64>,
}

impl Twin {
    fn waits(&self, all: &[PrefixFetch<u64>], one: &PrefixFetch<u64>, places: u32, nodes: u32) -> f64 {
        let others: f64 =
            all.iter().filter(|other| other.key != one.key).map(|other| other.per_s * other.bytes as f64).sum();
        let rate = sources(nodes).nic_bytes_s as f64;
        waited_s(one, places, sources(nodes), others / rate / f64::from(nodes), self.config.horizon_ns as f64 / 1e9)
    }

    fn saves(&self, all: &[PrefixFetch<u64>], one: &PrefixFetch<u64>, nodes: u32) -> f64 {
        let places = 1 + self.kept.get(&one.key).map_or(0, |kept| kept.1);
        self.waits(all, one, places, nodes) - self.waits(all, one, places + 1, nodes)
    }

    fn bytes(&self) -> u64 {
        self.kept.values().map(|(bytes, copies, coming)| bytes * u64::from(copies + u32::from(*coming))).sum()
    }

    /// Returns the prefixes to be removed for this many bytes, the cheapest per byte first, if all of them together
    /// lose less than `worth`.
    fn going(&self, all: &[PrefixFetch<u64>], but: u64, bytes: u64, worth: f64, nodes: u32) -> Option<Vec<u64>> {
        let (mut gone, mut lost) = (Vec::new(), 0.0);
        let mut freed = 0;
        while self.bytes() + bytes > self.config.most_bytes + freed {
            let may_go = |one: &&PrefixFetch<u64>| {
                one.key != but && !gone.contains(&one.key) && self.kept.get(&one.key).is_some_and(|kept| !kept.2)
            };
            let loss = |one: &PrefixFetch<u64>| {
                let places = 1 + self.kept[&one.key].1;
                self.waits(all, one, (places - 1).max(1), nodes) - self.waits(all, one, places, nodes)
            };
            let rank = |one: &&PrefixFetch<u64>| loss(one) / self.kept[&one.key].0 as f64;
            let least = all.iter().filter(may_go).min_by(|a, b| rank(a).total_cmp(&rank(b)).then(a.key.cmp(&b.key)))?;
            lost += loss(least);
            if lost >= worth {
                return None;
            }
            freed += self.kept[&least.key].0 * u64::from(self.kept[&least.key].1);
            gone.push(least.key);
        }
        Some(gone)
    }

    fn decide(&mut self, all: &[PrefixFetch<u64>], nodes: u32, now_ns: u64) -> Vec<CopyOrder<u64>> {
        let mut orders = Vec::new();
        for key in self.kept.clone().into_keys() {
            if !self.kept[&key].2 && all.iter().all(|one| one.key != key) {
                self.kept.remove(&key);
                orders.push(CopyOrder::Forget(key));
            }
        }
        self.alone.retain(|_, until| *until > now_ns);
        let mut turn: Vec<(f64, &PrefixFetch<u64>)> = all
            .iter()
            .filter(|one| {
                let kept = self.kept.get(&one.key).copied().unwrap_or_default();
                !kept.2 && 1 + kept.1 < self.config.most_places.min(nodes) && !self.alone.contains_key(&one.key)
            })
            .map(|one| (self.saves(all, one, nodes), one))
            .filter(|(saves, one)| *saves > 2.0 * one.bytes as f64 / 1e6)
            .collect();
        turn.sort_by(|a, b| (b.0 / b.1.bytes as f64).total_cmp(&(a.0 / a.1.bytes as f64)).then(a.1.key.cmp(&b.1.key)));
        for (_, one) in turn {
            if self.kept.values().filter(|kept| kept.2).count() >= self.config.under_way {
                break;
            }
            let bytes = self.kept.get(&one.key).map_or(one.bytes, |kept| kept.0);
            let worth = self.saves(all, one, nodes) / 2.0;
            let Some(gone) = self.going(all, one.key, bytes, worth, nodes) else { continue };
            for key in gone {
                self.kept.remove(&key);
                orders.push(CopyOrder::Forget(key));
            }
            self.kept.entry(one.key).or_insert((bytes, 0, false)).2 = true;
            orders.push(CopyOrder::Copy(one.key));
        }
        orders
    }

    fn ended(&mut self, key: u64, made: bool, now_ns: u64) {
        let Some(kept) = self.kept.get_mut(&key) else { return };
        kept.2 = false;
        kept.1 += u32::from(made);
        if !made {
            self.alone.insert(key, now_ns + ALONE);
            if kept.1 == 0 {
                self.kept.remove(&key);
            }
        }
    }
}

proptest! {
    #[test]
    fn wait_grows_with_the_rate_and_falls_with_places(
        per_s in 0.001..100.0_f64, bytes in 1_u64..10_000_000, pieces in 1_u64..200, nodes in 1_u32..64,
        other in 0.0..2.0_f64,
    ) {
        let fetched = PrefixFetch { pieces, ..one(1, per_s, bytes) };
        let waited = |fetched: &PrefixFetch<u64>, places| waited_s(fetched, places, sources(nodes), other, 60.0);
        let (once, twice) = (waited(&fetched, 1), waited(&fetched, 2));
        prop_assert!(once.is_finite() && once >= 0.0);
        prop_assert!(twice <= once * (1.0 + 1e-9), "{twice} s with two, {once} s with one");
        let more = PrefixFetch { per_s: per_s * 1.5, ..fetched };
        prop_assert!(waited(&more, 1) >= once * (1.0 - 1e-9));
    }

    #[test]
    fn decisions_match_a_reference_model(seed in any::<u64>(), nodes in 1_u32..10, most_places in 2_u32..4) {
        let config = CopyConfig { most_bytes: 3_000_000, most_places, under_way: 3, horizon_ns: 60 * SECOND };
        let mut rng = Rng::new(seed, "copies");
        let mut copies = Copies::new(config);
        let mut twin = Twin { config, kept: BTreeMap::new(), alone: BTreeMap::new() };
        let mut coming: VecDeque<u64> = VecDeque::new();
        for step in 0..60_u64 {
            let now_ns = step * 4 * SECOND;
            let mut all: Vec<PrefixFetch<u64>> = Vec::new();
            for key in 0..12 {
                if rng.chance(0.7) {
                    all.push(one(key, rng.unit() * 4.0, 1 + rng.below(800_000)));
                }
            }
            let orders = copies.decide(&all, sources(nodes), now_ns);
            prop_assert_eq!(&orders, &twin.decide(&all, nodes, now_ns));
            for order in orders {
                if let CopyOrder::Copy(key) = order {
                    coming.push_back(key);
                }
            }
            prop_assert!(copies.bytes() <= config.most_bytes);
            prop_assert!(coming.len() <= config.under_way && copies.prefixes().1 == coming.len());
            prop_assert!((0..12).all(|key| copies.copies_of(&key) < most_places.min(nodes)));
            while rng.chance(0.5) {
                let Some(key) = coming.pop_front() else { break };
                let made = rng.chance(0.8);
                copies.ended(key, made, now_ns);
                twin.ended(key, made, now_ns);
            }
        }
    }
}
