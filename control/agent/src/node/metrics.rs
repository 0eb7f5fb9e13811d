//! A storage node's counters as Prometheus text, shard by shard.

use kvplane_engine::prometheus::Text;
use kvplane_engine::{NvmeCounters, OperationTimes, ShardSnapshot, TenantOperation, TierSnapshot, Whose};

use crate::error::Error;
use crate::node::Node;

/// A number of a shard, with its family.
type Number = (&'static str, &'static str, fn(&ShardSnapshot) -> u64);

const COUNTERS: [Number; 30] = [
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
    ("kvplane_shard_slow_total", "Requests that were slow: see /debug/shards.", |one| one.times.slow_count),
    ("kvplane_shard_accepted_total", "Connections accepted.", |one| one.host.accepted),
    ("kvplane_shard_crowded_out_total", "Connections closed for others before they said who they are.", |one| {
        one.host.crowded_out
    }),
    ("kvplane_shard_strangers_total", "Connections refused for want of a good ticket.", |one| one.service.strangers),
    ("kvplane_shard_tickets_ended_total", "Connections closed as their tickets ended.", |one| {
        one.service.tickets_ended
    }),
    ("kvplane_shard_unauthorized_total", "Requests that a ticket does not allow.", |one| one.service.unauthorized),
    ("kvplane_shard_broken_total", "Frames that broke the protocol.", |one| one.host.broken),
    ("kvplane_shard_copies_made_total", "Copies that second owners took.", |one| one.copies.made),
    ("kvplane_shard_copied_bytes_total", "Bytes of them.", |one| one.copies.made_bytes),
    ("kvplane_shard_copies_hot_total", "Objects that got a copy as they are asked for so much.", |one| one.copies.hot),
    ("kvplane_shard_copies_failed_total", "Copies that second owners did not take.", |one| one.copies.failed),
    ("kvplane_shard_copies_dropped_total", "Copies that second owners said to be gone.", |one| one.copies.dropped),
    ("kvplane_shard_copies_refused_total", "Answers refused as a copy was not gone in time.", |one| one.copies.refused),
    ("kvplane_shard_copies_served_total", "Gets answered with a copy.", |one| one.copies.served),
    ("kvplane_shard_copies_inherited_total", "Copies of owners that left.", |one| one.copies.inherited),
    ("kvplane_shard_parks_total", "Times that the shard slept.", |one| one.host.parks),
    ("kvplane_shard_cpu_nanoseconds_total", "CPU time of the shard's thread.", |one| one.cpu_ns),
];

const GAUGES: [Number; 12] = [
    ("kvplane_shard_objects", "Visible objects.", |one| store(one).objects),
    ("kvplane_shard_object_bytes", "Bytes of visible objects.", |one| store(one).payload_bytes),
    ("kvplane_shard_pool_bytes", "Bytes of the pool.", |one| store(one).pool_bytes),
    ("kvplane_shard_used_bytes", "Bytes of the pool that are not free.", |one| store(one).used_bytes),
    ("kvplane_shard_pins", "Pins held.", |one| store(one).pins),
    ("kvplane_shard_hard_pinned_bytes", "Bytes of objects that are never evicted.", |one| store(one).kept.hard_bytes),
    ("kvplane_shard_soft_pins", "Objects that are kept before others for a while.", |one| store(one).kept.soft),
    ("kvplane_shard_copies", "Copies of what other shards own.", |one| store(one).replicas.here),
    ("kvplane_shard_objects_copied", "Objects of which the second owner may have a copy.", |one| {
        store(one).replicas.elsewhere
    }),
    ("kvplane_shard_copies_owed", "Copies that second owners are to drop.", |one| one.copies.owed),
    ("kvplane_shard_second_slots", "Slots whose second owner it is.", |one| one.copies.second_slots),
    ("kvplane_shard_connections", "Open connections.", |one| one.connections),
];

/// Of shards with an SSD only.
const TIER_COUNTERS: [Number; 41] = [
    ("kvplane_tier_hits_total", "Gets answered from the SSD.", |one| tier(one).counters.hits),
    ("kvplane_tier_hit_bytes_total", "Bytes of objects read from the SSD.", |one| tier(one).stats.hit_bytes),
    ("kvplane_tier_misses_total", "Gets that found a damaged or removed object.", |one| tier(one).counters.misses),
    ("kvplane_tier_reads_queued_total", "Gets that waited for their read to be begun.", |one| {
        tier(one).counters.reads_queued
    }),
    ("kvplane_tier_reads_shared_total", "Gets that joined a read.", |one| tier(one).counters.reads_shared),
    ("kvplane_tier_promotions_total", "Objects kept in memory after a read.", |one| tier(one).counters.promotions),
    ("kvplane_tier_prefetches_total", "Objects read ahead.", |one| tier(one).counters.prefetches),
    ("kvplane_tier_prefetches_used_total", "Objects read ahead and then asked for.", |one| {
        tier(one).counters.prefetches_used
    }),
    ("kvplane_tier_prefetches_expired_total", "Objects read ahead that nobody asked for in time.", |one| {
        tier(one).counters.prefetches_expired
    }),
    ("kvplane_tier_prefetch_refusals_total", "Objects not read ahead for want of room.", |one| {
        tier(one).counters.prefetch_refusals
    }),
    ("kvplane_tier_writes_over_budget_total", "Objects not written as the day's bytes were used.", |one| {
        tier(one).counters.writes_over_budget
    }),
    ("kvplane_tier_quarantined_total", "Records that the scrubber found not to be whole.", |one| {
        tier(one).counters.quarantined
    }),
    ("kvplane_tier_rewritten_total", "Of those, written again from memory.", |one| tier(one).counters.rewritten),
    ("kvplane_tier_scrub_passes_total", "Times that every record was checked.", |one| tier(one).scrub.passes),
    ("kvplane_tier_log_bytes_total", "Bytes of records written, by reclaim too.", |one| tier(one).stats.written_bytes),
    ("kvplane_tier_writes_total", "Objects given to the SSD.", |one| tier(one).counters.writes),
    ("kvplane_tier_write_bytes_total", "Bytes of them.", |one| tier(one).counters.write_bytes),
    ("kvplane_tier_writes_skipped_total", "Objects not written for want of room.", |one| {
        tier(one).counters.writes_skipped
    }),
    ("kvplane_tier_writes_failed_total", "Objects that could not be written.", |one| tier(one).counters.writes_failed),
    ("kvplane_tier_writes_retried_total", "Writes that failed and are tried again.", |one| {
        tier(one).counters.writes_retried
    }),
    ("kvplane_tier_removals_total", "Removals written.", |one| tier(one).counters.removals),
    ("kvplane_tier_removals_unwritten_total", "Removals that a restart may undo.", |one| {
        tier(one).counters.removals_unwritten
    }),
    ("kvplane_tier_slots_compared_total", "Slots that came back, with what others changed told.", |one| {
        tier(one).counters.slots_compared
    }),
    ("kvplane_tier_slots_voided_total", "Slots that came back of which nobody knew what had changed.", |one| {
        tier(one).counters.slots_voided
    }),
    ("kvplane_tier_struck_total", "Objects struck out as others had put or removed them.", |one| {
        tier(one).counters.struck
    }),
    ("kvplane_tier_reclaimed_total", "Objects that reclaim dropped.", |one| tier(one).counters.reclaimed),
    ("kvplane_tier_reinserted_total", "Records that reclaim wrote again.", |one| tier(one).stats.reinserted),
    ("kvplane_tier_damaged_total", "Records found damaged.", |one| tier(one).stats.harm.damaged),
    ("kvplane_tier_stale_total", "Records found to be old: a write was lost.", |one| tier(one).stats.harm.stale),
    ("kvplane_tier_misdirected_total", "Records found in the wrong place.", |one| tier(one).stats.harm.misdirected),
    ("kvplane_tier_read_faults_total", "Reads that the device could not do.", |one| tier(one).stats.harm.unread),
    ("kvplane_tier_write_faults_total", "Writes that the device could not do.", |one| tier(one).stats.write_faults),
    ("kvplane_tier_device_reads_total", "Reads of the device.", |one| device(one).reads),
    ("kvplane_tier_device_writes_total", "Writes of the device.", |one| device(one).writes),
    ("kvplane_tier_device_read_bytes_total", "Bytes read from the device.", |one| device(one).read_bytes),
    ("kvplane_tier_device_written_bytes_total", "Bytes written to it.", |one| device(one).written_bytes),
    ("kvplane_tier_device_commands_total", "Of both, NVMe commands by passthrough.", |one| device(one).commands),
    ("kvplane_tier_device_commands_failed_total", "NVMe commands that failed and were tried the plain way.", |one| {
        device(one).commands_failed
    }),
    ("kvplane_tier_device_polled_total", "Reads and writes whose ends were polled for.", |one| device(one).polled),
    ("kvplane_tier_flushes_total", "Flushes.", |one| device(one).flush_latency.count),
    ("kvplane_tier_flush_nanoseconds_total", "Time in flushes.", |one| device(one).flush_latency.sum_ns),
];

const TIER_GAUGES: [Number; 24] = [
    ("kvplane_tier_objects", "Objects on the SSD.", |one| tier(one).stats.objects.into()),
    ("kvplane_tier_live_bytes", "Bytes of live records on the SSD.", |one| tier(one).stats.live_bytes),
    ("kvplane_tier_free_segments", "Segments without records.", |one| tier(one).stats.free_segments.into()),
    ("kvplane_tier_bad_segments", "Segments with write errors.", |one| tier(one).stats.bad_segments.into()),
    ("kvplane_tier_segments", "Segments.", |one| tier(one).stats.segments.into()),
    ("kvplane_tier_dead_bytes", "Bytes of used segments that no live record takes.", |one| tier(one).stats.dead_bytes),
    ("kvplane_tier_admission", "What is written: 0 all, 1 selected, 2 only what was promised.", |one| {
        tier(one).admission as u64
    }),
    ("kvplane_tier_day_bytes", "Bytes written in the last day.", |one| tier(one).day_bytes),
    ("kvplane_tier_budget_bytes", "Bytes that may be written a day; 0 without a limit.", |one| tier(one).bytes_per_day),
    ("kvplane_tier_scrub_records", "Records checked in the scrubber's pass.", |one| tier(one).scrub.pass.records),
    ("kvplane_tier_scrub_bytes", "Bytes of them.", |one| tier(one).scrub.pass.bytes),
    ("kvplane_tier_backlog_objects", "Objects that wait to be written.", |one| tier(one).backlog),
    ("kvplane_tier_backlog_bytes", "Bytes of them.", |one| tier(one).backlog_bytes),
    ("kvplane_tier_reading", "Reads under way.", |one| tier(one).reading),
    ("kvplane_tier_recovered", "Whether every record was looked at.", |one| tier(one).is_recovered.into()),
    ("kvplane_tier_degraded", "Whether nothing is written any more.", |one| tier(one).degraded.is_some().into()),
    ("kvplane_tier_voided", "Whether what was on the SSD at the start was void.", |one| {
        tier(one).voided.is_some().into()
    }),
    ("kvplane_tier_get_p99_nanoseconds", "Reads for gets: 99 % were not above.", |one| {
        device(one).get_latency.percentile_ns(99)
    }),
    ("kvplane_tier_flush_p99_nanoseconds", "Flushes: 99 % were not above.", |one| {
        device(one).flush_latency.percentile_ns(99)
    }),
    ("kvplane_tier_flush_most_nanoseconds", "The longest flush.", |one| device(one).flush_latency.most_ns),
    ("kvplane_tier_in_flight_gets", "Operations for gets at the device.", |one| device(one).priorities[0].in_flight),
    ("kvplane_tier_in_flight_commits", "Writes at the device.", |one| device(one).priorities[1].in_flight),
    ("kvplane_tier_in_flight_background", "Reclaim's and recovery's operations.", |one| {
        device(one).priorities[3].in_flight
    }),
    ("kvplane_tier_queued", "Operations that wait for the device.", |one| {
        device(one).priorities.iter().map(|priority| priority.queued).sum()
    }),
];

fn tier(one: &ShardSnapshot) -> TierSnapshot {
    one.tier.unwrap_or_default()
}

fn device(one: &ShardSnapshot) -> NvmeCounters {
    one.device.unwrap_or_default()
}

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
        Self::metrics_text_of([self])
    }

    /// The same for several nodes of a process as one text: shards are numbered on from node to node.
    ///
    /// # Errors
    /// When a shard does not answer.
    pub fn metrics_text_of<'a>(nodes: impl IntoIterator<Item = &'a Self>) -> Result<String, Error> {
        let mut shards = Vec::new();
        for node in nodes {
            shards.extend(node.snapshots()?);
        }
        Ok(render(&shards))
    }
}

fn render(shards: &[ShardSnapshot]) -> String {
    let mut text = Text::default();
    let numbers = |text: &mut Text, value: fn(&ShardSnapshot) -> u64| {
        for (number, shard) in shards.iter().enumerate() {
            text.number(&[("shard", &number.to_string())], value(shard));
        }
    };
    let tiered = shards.iter().any(|shard| shard.tier.is_some());
    let (counters, gauges): (&[Number], &[Number]) = if tiered { (&TIER_COUNTERS, &TIER_GAUGES) } else { (&[], &[]) };
    for (name, help, value) in COUNTERS.iter().chain(counters) {
        text.counter(name, help);
        numbers(&mut text, *value);
    }
    for (name, help, value) in GAUGES.iter().chain(gauges) {
        text.gauge(name, help);
        numbers(&mut text, *value);
    }
    operations(&mut text, shards);
    tenants(&mut text, shards);
    devices(&mut text, shards);
    text.finish()
}

/// How long requests took, by operation and tier.
fn operations(text: &mut Text, shards: &[ShardSnapshot]) {
    let mut all: Vec<(String, &OperationTimes)> = Vec::new();
    for (number, shard) in shards.iter().enumerate() {
        all.extend(shard.times.operations.iter().map(|one| (number.to_string(), one)));
    }
    if all.is_empty() {
        return;
    }
    let labels = |one: &OperationTimes| {
        let tier = if one.ssd { "ssd" } else { "memory" };
        (format!("{:?}", one.operation).to_lowercase(), tier)
    };
    text.histogram(
        "kvplane_shard_operation_seconds",
        "Time from a request's arrival to its answer's departure, by whether it waited for the SSD.",
    );
    for (shard, one) in &all {
        let (operation, tier) = labels(one);
        text.times(&[("shard", shard), ("operation", &operation), ("tier", tier)], &one.times);
    }
    text.counter("kvplane_shard_operation_failures_total", "Requests that were not answered with Ok.");
    for (shard, one) in &all {
        let (operation, tier) = labels(one);
        text.number(&[("shard", shard), ("operation", &operation), ("tier", tier)], one.failed);
    }
}

/// How long gets and puts took by tenant, where there are others than the default one.
fn tenants(text: &mut Text, shards: &[ShardSnapshot]) {
    if shards.iter().all(|shard| shard.times.tenants.is_empty()) {
        return;
    }
    text.histogram(
        "kvplane_shard_tenant_operation_seconds",
        "Time from a request's arrival to its answer's departure, by the tenant whose object it was about.",
    );
    for (number, shard) in shards.iter().enumerate() {
        for one in &shard.times.tenants {
            let tenant = match (&one.name, one.whose) {
                (Some(name), _) => name.clone(),
                (None, Whose::Tenant(0)) => "default".to_owned(),
                (None, Whose::Tenant(number)) => format!("#{number}"),
                (None, Whose::Unknown) => "#unknown".to_owned(),
                (None, Whose::Others) => "#others".to_owned(),
            };
            let operation = match one.operation {
                TenantOperation::Get => "get",
                TenantOperation::Put => "put",
            };
            let (shard, tier) = (number.to_string(), if one.ssd { "ssd" } else { "memory" });
            let labels = [("shard", &*shard), ("tenant", &*tenant), ("operation", operation), ("tier", tier)];
            text.times(&labels, &one.times);
        }
    }
}

/// What RDMA devices moved for peers, by whether they are where the pool is.
fn devices(text: &mut Text, shards: &[ShardSnapshot]) {
    if shards.iter().all(|shard| shard.rdma.is_empty()) {
        return;
    }
    text.counter(
        "kvplane_shard_payloads_by_node_total",
        "Payloads moved over RDMA, by whether pool and device are on one NUMA node.",
    );
    for (number, shard) in shards.iter().enumerate() {
        for device in &shard.rdma {
            let counts = [("same", device.served.same), ("other", device.served.other)];
            for (node, count) in counts.into_iter().chain([("unknown", device.served.unknown)]) {
                let shard = number.to_string();
                text.number(&[("shard", &shard), ("device", &device.name), ("node", node)], count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvplane_engine::prometheus::parse;

    #[test]
    fn every_shard_has_every_number() {
        let shard = |hits| {
            let store = kvplane_store::StoreStats { hits, ..Default::default() };
            ShardSnapshot { store: Some(store), ..ShardSnapshot::default() }
        };
        let samples = parse(&render(&[shard(3), shard(4)])).unwrap();
        assert_eq!(samples.len(), 2 * (COUNTERS.len() + GAUGES.len()));
        assert_eq!(samples["kvplane_shard_hits_total{shard=\"1\"}"] as u64, 4);
        let tiered = ShardSnapshot { tier: Some(TierSnapshot { backlog: 5, ..Default::default() }), ..shard(6) };
        let samples = parse(&render(&[tiered])).unwrap();
        let all = COUNTERS.len() + GAUGES.len() + TIER_COUNTERS.len() + TIER_GAUGES.len();
        assert_eq!((samples.len(), samples["kvplane_tier_backlog_objects{shard=\"0\"}"] as u64), (all, 5));
    }
}
