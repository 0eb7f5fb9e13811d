//! Rates of shards: the change of counters between two reports, over the time between these.

use std::time::Duration;

use kvplane::rpc::message::{OperationFigures, ShardFigures, ShardNode};

/// Rates of one shard. Counts are per second.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rates {
    pub(super) node: u64,
    pub(super) shard: u16,
    pub(super) objects: u64,
    pub(super) used_bytes: u64,
    pub(super) pool_bytes: u64,
    pub(super) gets: f64,
    /// Part of the gets that memory or SSD answered; 0 if there were no gets.
    pub(super) hit_ratio: f64,
    pub(super) ssd_hits: f64,
    pub(super) puts: f64,
    pub(super) evictions: f64,
    pub(super) get_bytes: f64,
    pub(super) put_bytes: f64,
    pub(super) get_p50_ns: u64,
    pub(super) get_p99_ns: u64,
    pub(super) slow: f64,
    /// CPU time per second: cores in use.
    pub(super) cpu: f64,
}

/// Returns the rates between two polls that are `elapsed` apart. Where a node has not reported in between, the rates
/// shown before stay.
pub(super) fn rates(before: &[ShardNode], now: &[ShardNode], elapsed: Duration, shown: &[Rates]) -> Vec<Rates> {
    let mut all = Vec::new();
    for node in now {
        let old = before.iter().find(|old| old.node == node.node && old.incarnation == node.incarnation);
        // Reports are as old as the nodes' last heartbeats, not as the polls.
        let between = old.map_or(elapsed, |old| {
            Duration::from_nanos((elapsed.as_nanos() as u64).saturating_add(old.age_ns).saturating_sub(node.age_ns))
        });
        for shard in &node.shards {
            let old = old.and_then(|old| old.shards.iter().find(|old| old.shard == shard.shard));
            let known = shown.iter().find(|one| one.node == node.node && one.shard == shard.shard);
            all.push(match (old, known) {
                (Some(old), Some(known)) if old == shard => known.clone(),
                (old, _) => rate(node.node, old.unwrap_or(shard), shard, between),
            });
        }
    }
    all
}

fn rate(node: u64, old: &ShardFigures, new: &ShardFigures, between: Duration) -> Rates {
    let seconds = between.as_secs_f64().max(1e-3);
    let per_s = |old: u64, new: u64| new.saturating_sub(old) as f64 / seconds;
    let ssd = |of: &ShardFigures| of.ssd.map_or(0, |ssd| ssd.hits);
    let (hits, misses) = (per_s(old.gets.hits, new.gets.hits), per_s(old.gets.misses, new.gets.misses));
    let ssd_hits = per_s(ssd(old), ssd(new));
    let gets = hits + misses;
    let times = gets_between(old, new);
    Rates {
        node,
        shard: new.shard,
        objects: new.objects,
        used_bytes: new.pool.used_bytes,
        pool_bytes: new.pool.bytes,
        gets,
        hit_ratio: if gets > 0.0 { ((hits + ssd_hits) / gets).min(1.0) } else { 0.0 },
        ssd_hits,
        puts: per_s(old.puts.objects, new.puts.objects),
        evictions: per_s(old.evictions.objects, new.evictions.objects),
        get_bytes: per_s(old.gets.bytes, new.gets.bytes),
        put_bytes: per_s(old.puts.bytes, new.puts.bytes),
        get_p50_ns: times.quantile_ns(0.5),
        get_p99_ns: times.quantile_ns(0.99),
        slow: per_s(old.slow.count, new.slow.count),
        cpu: per_s(old.thread.cpu_ns, new.thread.cpu_ns) / 1e9,
    }
}

/// Returns the latencies of gets between two reports: over the network and over shared memory, from memory and from the
/// SSD.
fn gets_between(old: &ShardFigures, new: &ShardFigures) -> OperationFigures {
    let mut buckets: std::collections::BTreeMap<u64, u64> = std::collections::BTreeMap::new();
    let of = |figures: &ShardFigures| {
        let gets = figures.operations.iter().filter(|one| matches!(one.operation.as_str(), "get" | "lookup"));
        gets.flat_map(|one| one.buckets.clone()).collect::<Vec<_>>()
    };
    for (bound_ns, count) in of(new) {
        *buckets.entry(bound_ns).or_default() += count;
    }
    for (bound_ns, count) in of(old) {
        let entry = buckets.entry(bound_ns).or_default();
        *entry = entry.saturating_sub(count);
    }
    let count = buckets.values().sum();
    OperationFigures { count, buckets: buckets.into_iter().collect(), ..OperationFigures::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvplane::rpc::message::GetFigures;

    fn node(age_ns: u64, hits: u64, buckets: &[(u64, u64)]) -> ShardNode {
        let get =
            OperationFigures { operation: "get".to_owned(), buckets: buckets.to_vec(), ..OperationFigures::default() };
        let gets = GetFigures { hits, misses: hits / 3, ..GetFigures::default() };
        let shard = ShardFigures { gets, operations: vec![get], ..ShardFigures::default() };
        ShardNode { node: 7, incarnation: 1, age_ns, shards: vec![shard] }
    }

    #[test]
    fn speeds_are_over_the_time_between_the_reports() {
        // Polls are two seconds apart, the reports that they see one second.
        let before = node(0, 300, &[(1000, 50), (8000, 50)]);
        let now = node(1_000_000_000, 600, &[(1000, 149), (8000, 51)]);
        let shown = rates(&[before], core::slice::from_ref(&now), Duration::from_secs(2), &[]);
        assert_eq!((shown[0].gets, shown[0].hit_ratio), (400.0, 0.75));
        assert_eq!((shown[0].get_p50_ns, shown[0].get_p99_ns), (1000, 1000));
        // Without a report in between, the rates shown before stay.
        let again = rates(core::slice::from_ref(&now), core::slice::from_ref(&now), Duration::from_secs(2), &shown);
        assert_eq!(again, shown);
    }

    #[test]
    fn rates_of_a_new_incarnation_begin_at_zero() {
        let mut other = node(0, 5, &[]);
        other.incarnation = 2;
        let shown = rates(&[node(0, 300, &[])], &[other], Duration::from_secs(1), &[]);
        assert_eq!((shown.len(), shown[0].gets), (1, 0.0));
    }
}
