//! A storage node's counters as Prometheus text, shard by shard.

use kvplane_engine::ShardSnapshot;

use crate::error::Error;
use crate::node::Node;
use crate::prometheus::Text;

/// A number of a shard, with its family.
type Number = (&'static str, &'static str, fn(&ShardSnapshot) -> u64);

const COUNTERS: [Number; 17] = [
    ("kvplane_shard_requests_total", "Requests that arrived.", |one| one.service.requests),
    ("kvplane_shard_get_bytes_total", "Objects' bytes sent or lent to peers.", |one| one.service.get_bytes),
    ("kvplane_shard_put_bytes_total", "Objects' bytes taken in.", |one| one.service.put_bytes),
    ("kvplane_shard_hits_total", "Gets that found their object.", |one| store(one).hits),
    ("kvplane_shard_misses_total", "Gets that found nothing.", |one| store(one).misses),
    ("kvplane_shard_puts_total", "Objects that became visible.", |one| store(one).puts),
    ("kvplane_shard_put_refusals_total", "Puts refused for want of space.", |one| store(one).reserve_refusals),
    ("kvplane_shard_put_expirations_total", "Puts whose deadline passed.", |one| store(one).expirations),
    ("kvplane_shard_removes_total", "Objects removed on request.", |one| store(one).removes),
    ("kvplane_shard_evictions_total", "Objects evicted.", |one| store(one).evictions),
    ("kvplane_shard_evicted_bytes_total", "Bytes of evicted objects.", |one| store(one).evicted_bytes),
    ("kvplane_shard_wrong_owner_total", "Requests for keys of other shards.", |one| one.service.wrong_owner),
    ("kvplane_shard_corrupt_total", "Payloads that did not match their checksum.", |one| one.service.corrupt),
    ("kvplane_shard_accepted_total", "Connections accepted.", |one| one.host.accepted),
    ("kvplane_shard_broken_total", "Frames that broke the protocol.", |one| one.host.broken),
    ("kvplane_shard_parks_total", "Times that the shard slept.", |one| one.host.parks),
    ("kvplane_shard_cpu_nanoseconds_total", "CPU time of the shard's thread.", |one| one.cpu_ns),
];

const GAUGES: [Number; 6] = [
    ("kvplane_shard_objects", "Visible objects.", |one| store(one).objects),
    ("kvplane_shard_object_bytes", "Bytes of visible objects.", |one| store(one).payload_bytes),
    ("kvplane_shard_pool_bytes", "Bytes of the pool.", |one| store(one).pool_bytes),
    ("kvplane_shard_used_bytes", "Bytes of the pool that are not free.", |one| store(one).used_bytes),
    ("kvplane_shard_pins", "Pins held.", |one| store(one).pins),
    ("kvplane_shard_connections", "Open connections.", |one| one.connections),
];

/// Zeros for a shard without a store, which has none of this.
fn store(one: &ShardSnapshot) -> kvplane_store::StoreStats {
    one.store.unwrap_or_default()
}

impl Node {
    /// What its shards counted so far, as Prometheus text.
    ///
    /// # Errors
    /// When a shard does not answer.
    pub fn metrics_text(&self) -> Result<String, Error> {
        Ok(render(&self.snapshots()?))
    }
}

fn render(shards: &[ShardSnapshot]) -> String {
    let mut text = Text::default();
    let numbers = |text: &mut Text, value: fn(&ShardSnapshot) -> u64| {
        for (number, shard) in shards.iter().enumerate() {
            text.number(&[("shard", &number.to_string())], value(shard));
        }
    };
    for (name, help, value) in COUNTERS {
        text.counter(name, help);
        numbers(&mut text, value);
    }
    for (name, help, value) in GAUGES {
        text.gauge(name, help);
        numbers(&mut text, value);
    }
    text.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prometheus::tests::parse;

    #[test]
    fn every_shard_has_every_number() {
        let shard = |hits| {
            let store = kvplane_store::StoreStats { hits, ..Default::default() };
            ShardSnapshot { store: Some(store), ..ShardSnapshot::default() }
        };
        let samples = parse(&render(&[shard(3), shard(4)]));
        assert_eq!(samples.len(), 2 * (COUNTERS.len() + GAUGES.len()));
        assert_eq!(samples["kvplane_shard_hits_total{shard=\"1\"}"] as u64, 4);
    }
}
