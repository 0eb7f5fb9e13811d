//! Counters of a storage node as Prometheus text, by shard.

use std::sync::LazyLock;

use kvplane_engine::prometheus::Text;
use kvplane_engine::{
    KeptReport, NvmeCounters, OperationTimes, ShardSnapshot, SharedStats, TenantOperation, TierSnapshot, TimedTenant,
};
use kvplane_store::DevicePoolStats;

use crate::error::Error;
use crate::node::Node;

/// Metric of a shard: name, help text, and the function that reads its value.
type Number = (&'static str, &'static str, fn(&ShardSnapshot) -> u64);

const COUNTERS: [Number; 40] = [
    ("kvplane_shard_requests_total", "Requests that arrived.", |one| one.service.requests),
    ("kvplane_shard_get_bytes_total", "Bytes of objects sent or lent to peers.", |one| one.service.get_bytes),
    ("kvplane_shard_put_bytes_total", "Bytes of objects received.", |one| one.service.put_bytes),
    ("kvplane_shard_hits_total", "Gets that found their object.", |one| store(one).hits),
    ("kvplane_shard_misses_total", "Gets that found nothing.", |one| store(one).misses),
    ("kvplane_shard_puts_total", "Objects committed.", |one| store(one).puts),
    ("kvplane_shard_put_refusals_total", "Puts refused for lack of space.", |one| store(one).reserve_refusals),
    ("kvplane_shard_put_expirations_total", "Puts whose deadline expired.", |one| store(one).expirations),
    ("kvplane_shard_removes_total", "Objects removed on request.", |one| store(one).removes),
    ("kvplane_shard_evictions_total", "Objects evicted.", |one| store(one).evictions),
    ("kvplane_shard_evicted_bytes_total", "Bytes of evicted objects.", |one| store(one).evicted_bytes),
    ("kvplane_shard_wrong_owner_total", "Requests for keys of other shards.", |one| one.service.wrong_owner),
    ("kvplane_shard_corrupt_total", "Payloads that did not match their checksum.", |one| one.service.corrupt),
    ("kvplane_shard_slow_total", "Requests that were slow: see /debug/shards.", |one| one.times.slow_count),
    ("kvplane_shard_accepted_total", "Connections accepted.", |one| one.host.accepted),
    ("kvplane_shard_unauthenticated_closed_total", "Unauthenticated connections closed for others.", |one| {
        one.host.replaced_unauthenticated
    }),
    ("kvplane_shard_unauthenticated_total", "Connections rejected for lack of a valid ticket.", |one| {
        one.service.unauthenticated
    }),
    ("kvplane_shard_tickets_expired_total", "Connections closed because their ticket ended.", |one| {
        one.service.tickets_ended
    }),
    ("kvplane_shard_unauthorized_total", "Requests that the ticket does not permit.", |one| one.service.unauthorized),
    ("kvplane_shard_protocol_errors_total", "Frames that broke the protocol.", |one| one.host.broken),
    ("kvplane_shard_replicas_made_total", "Replicas written to replica owners.", |one| one.copies.made),
    ("kvplane_shard_replicated_bytes_total", "Bytes that replica owners took.", |one| one.copies.made_bytes),
    ("kvplane_shard_replicas_hot_total", "Replicas begun automatically, for hot objects.", |one| one.copies.hot),
    ("kvplane_shard_replicas_failed_total", "Replicas that could not be written.", |one| one.copies.failed),
    ("kvplane_shard_replicas_dropped_total", "Replicas that replica owners reported as gone.", |one| {
        one.copies.dropped
    }),
    ("kvplane_shard_replica_drop_timeouts_total", "Refused: a replica was not removed in time.", |one| {
        one.copies.refused
    }),
    ("kvplane_shard_replicas_served_total", "Gets answered from a replica.", |one| one.copies.served),
    ("kvplane_shard_replicas_inherited_total", "Replicas taken over from owners that left.", |one| {
        one.copies.inherited
    }),
    ("kvplane_shard_imported_total", "Objects migrated to this shard.", |one| one.moves.imported),
    ("kvplane_shard_imported_bytes_total", "Bytes of objects migrated to this shard.", |one| one.moves.imported_bytes),
    ("kvplane_shard_exports_completed_total", "Exported slots of which new owners imported everything.", |one| {
        one.moves.exports_completed
    }),
    (
        "kvplane_shard_imports_failed_total",
        "Imports that failed: a former owner did not answer, or no memory.",
        |one| one.moves.failures,
    ),
    ("kvplane_shard_memory_checked_total", "Objects in memory compared with their checksum.", |one| {
        one.repairs.checked
    }),
    ("kvplane_shard_memory_checked_bytes_total", "Bytes of objects compared with their checksum.", |one| {
        one.repairs.checked_bytes
    }),
    ("kvplane_shard_memory_scrub_passes_total", "Completed scrub passes through memory.", |one| one.repairs.passes),
    ("kvplane_shard_damaged_total", "Objects and replicas in memory whose bytes were damaged.", |one| {
        one.repairs.damaged
    }),
    ("kvplane_shard_repaired_total", "Damaged objects and replicas that are good again.", |one| one.repairs.repaired),
    ("kvplane_shard_damage_lost_total", "Damaged objects and replicas removed: no good bytes were found.", |one| {
        one.repairs.lost
    }),
    ("kvplane_shard_parks_total", "Times that the shard parked.", |one| one.host.parks),
    ("kvplane_shard_cpu_nanoseconds_total", "CPU time of the shard's thread.", |one| one.cpu_ns),
];

const GAUGES: [Number; 16] = [
    ("kvplane_shard_objects", "Visible objects.", |one| store(one).objects),
    ("kvplane_shard_object_bytes", "Bytes of visible objects.", |one| store(one).payload_bytes),
    ("kvplane_shard_pool_bytes", "Bytes of the pool.", |one| store(one).pool_bytes),
    ("kvplane_shard_used_bytes", "Bytes of the pool that are not free.", |one| store(one).used_bytes),
    ("kvplane_shard_pins", "Pins held.", |one| store(one).pins),
    ("kvplane_shard_hard_pinned_bytes", "Bytes of objects that are never evicted.", |one| store(one).kept.hard_bytes),
    ("kvplane_shard_soft_pins", "Objects with a soft pin.", |one| store(one).kept.soft),
    ("kvplane_shard_retained_objects", "Objects kept by a retention.", |one| store(one).kept.retained),
    ("kvplane_shard_replicas", "Replicas of objects that other shards own.", |one| store(one).replicas.here),
    ("kvplane_shard_objects_replicated", "Replicas that replica owners may have of this shard's objects.", |one| {
        store(one).replicas.elsewhere
    }),
    ("kvplane_shard_replica_removals_outstanding", "Replicas that replica owners still have to remove.", |one| {
        one.copies.outstanding
    }),
    ("kvplane_shard_replica_slots", "Slots that the shard is the replica owner of.", |one| one.copies.second_slots),
    ("kvplane_shard_slots_exported", "Slots whose objects other shards still import from this one.", |one| {
        one.moves.exporting_slots
    }),
    ("kvplane_shard_slots_imported", "Slots whose objects are not all here yet.", |one| one.moves.importing_slots),
    ("kvplane_shard_repairs_outstanding", "Damaged objects whose repair is not over.", |one| one.repairs.outstanding),
    ("kvplane_shard_connections", "Open connections.", |one| one.connections),
];

/// Counters of shards with a far pool.
const FAR_COUNTERS: [Number; 7] = [
    ("kvplane_far_pool_hits_total", "Gets that found their object in far memory.", |one| one.far.hits),
    ("kvplane_far_pool_demotions_total", "Objects moved from DRAM to far memory.", |one| one.far.demotions),
    ("kvplane_far_pool_demoted_bytes_total", "Bytes of objects moved from DRAM to far memory.", |one| {
        one.far.demoted_bytes
    }),
    ("kvplane_far_pool_promotions_total", "Objects moved from far memory to DRAM.", |one| one.far.promotions),
    ("kvplane_far_pool_promoted_bytes_total", "Bytes of objects moved from far memory to DRAM.", |one| {
        one.far.promoted_bytes
    }),
    ("kvplane_far_pool_evictions_total", "Objects evicted from far memory.", |one| one.far.evictions),
    ("kvplane_far_pool_evicted_bytes_total", "Bytes of objects evicted from far memory.", |one| one.far.evicted_bytes),
];

const FAR_GAUGES: [Number; 3] = [
    ("kvplane_far_pool_bytes", "Bytes of the far pool.", |one| one.far.pool_bytes),
    ("kvplane_far_pool_used_bytes", "Bytes of the far pool that are not free.", |one| one.far.used_bytes),
    ("kvplane_far_pool_objects", "Visible objects in the far pool.", |one| one.far.objects),
];

/// Counters of shards with a device pool.
const DEVICE_COUNTERS: [Number; 5] = [
    ("kvplane_device_pool_gets_total", "Gets answered from the device pool.", |one| one.service.device_gets),
    ("kvplane_device_pool_promotions_total", "Objects moved to the device pool.", |one| store(one).device.promotions),
    ("kvplane_device_pool_demotions_total", "Objects moved from the device pool to memory.", |one| {
        store(one).device.demotions
    }),
    ("kvplane_device_pool_recalls_total", "Demotions on request.", |one| one.service.recalls),
    ("kvplane_device_pool_lost_total", "Objects lost with the device.", |one| store(one).device.lost),
];

const DEVICE_GAUGES: [Number; 3] = [
    ("kvplane_device_pool_bytes", "Bytes of the device pool; 0 once its device is lost.", |one| {
        store(one).device.pool_bytes
    }),
    ("kvplane_device_pool_used_bytes", "Bytes of the device pool that are not free.", |one| {
        store(one).device.used_bytes
    }),
    ("kvplane_device_pool_objects", "Visible objects in the device pool.", |one| store(one).device.objects),
];

/// Gauges and counters of shards whose memory outlives the process.
const KEPT_GAUGES: [Number; 5] = [
    ("kvplane_kept_memory_objects", "Objects of the former process that were served again at the start.", |one| {
        kept(one).objects
    }),
    ("kvplane_kept_memory_bytes", "Bytes of the objects that were served again at the start.", |one| kept(one).bytes),
    (
        "kvplane_kept_memory_dropped",
        "Objects of the former process that were dropped: others have, or had, their slots, or the shard takes fewer.",
        |one| kept(one).dropped + kept(one).left_out,
    ),
    ("kvplane_kept_memory_discarded", "1 if nothing was kept at the start; the log has the reason.", |one| {
        kept(one).discard.is_some().into()
    }),
    ("kvplane_kept_memory_withheld_bytes", "Bytes not used, as a process may still write to them.", |one| {
        kept(one).withheld_bytes
    }),
];

const KEPT_COUNTERS: [Number; 2] = [
    ("kvplane_kept_memory_checked_total", "Objects of the former process that were read, and were whole.", |one| {
        kept(one).checked
    }),
    ("kvplane_kept_memory_damaged_total", "Objects of the former process that were damaged, and so dropped.", |one| {
        kept(one).damaged
    }),
];

/// Counters of shards with an SSD.
const TIER_COUNTERS: [Number; 46] = [
    ("kvplane_tier_hits_total", "Gets answered from the SSD.", |one| tier(one).counters.hits),
    ("kvplane_tier_hit_bytes_total", "Bytes of objects read from the SSD.", |one| tier(one).stats.hit_bytes),
    ("kvplane_tier_misses_total", "Gets that found a damaged or removed object.", |one| tier(one).counters.misses),
    ("kvplane_tier_reads_queued_total", "Gets that waited for their read to start.", |one| {
        tier(one).counters.reads_queued
    }),
    ("kvplane_tier_reads_shared_total", "Gets that joined a read in flight.", |one| tier(one).counters.reads_shared),
    ("kvplane_tier_promotions_total", "Objects promoted after a read.", |one| tier(one).counters.promotions),
    ("kvplane_tier_prefetches_total", "Objects prefetched.", |one| tier(one).counters.prefetches),
    ("kvplane_tier_prefetches_used_total", "Prefetched objects that a get used.", |one| {
        tier(one).counters.prefetches_used
    }),
    ("kvplane_tier_prefetches_expired_total", "Prefetched objects that no get used in time.", |one| {
        tier(one).counters.prefetches_expired
    }),
    ("kvplane_tier_prefetch_refusals_total", "Objects not prefetched for lack of memory.", |one| {
        tier(one).counters.prefetch_refusals
    }),
    ("kvplane_tier_writes_over_budget_total", "Objects not written: the daily budget was spent.", |one| {
        tier(one).counters.writes_over_budget
    }),
    ("kvplane_tier_writes_over_quota_total", "Objects not written: their tenant's quota had no room.", |one| {
        tier(one).counters.writes_over_quota
    }),
    ("kvplane_tier_quarantined_total", "Records that the scrubber found damaged.", |one| {
        tier(one).counters.quarantined
    }),
    ("kvplane_tier_rewritten_total", "Damaged records rewritten from memory.", |one| tier(one).counters.rewritten),
    ("kvplane_tier_records_damaged_total", "Records of objects and replicas that could not be read whole.", |one| {
        one.repairs.records.damaged
    }),
    ("kvplane_tier_records_repaired_total", "Damaged records repaired from another node.", |one| {
        one.repairs.records.repaired
    }),
    ("kvplane_tier_records_lost_total", "Damaged records whose objects no other node had.", |one| {
        one.repairs.records.lost
    }),
    ("kvplane_tier_scrubbed_bytes_total", "Bytes of records read by the scrubber.", |one| {
        tier(one).scrub.checked_bytes
    }),
    ("kvplane_tier_scrub_passes_total", "Completed scrub passes.", |one| tier(one).scrub.passes),
    ("kvplane_tier_log_bytes_total", "Bytes of records written, with reclaim.", |one| tier(one).stats.written_bytes),
    ("kvplane_tier_writes_total", "Objects written to the SSD.", |one| tier(one).counters.writes),
    ("kvplane_tier_write_bytes_total", "Bytes of objects given to the SSD.", |one| tier(one).counters.write_bytes),
    ("kvplane_tier_writes_skipped_total", "Objects not written for lack of space.", |one| {
        tier(one).counters.writes_skipped
    }),
    ("kvplane_tier_writes_failed_total", "Objects that could not be written.", |one| tier(one).counters.writes_failed),
    ("kvplane_tier_writes_retried_total", "Failed writes that are retried.", |one| tier(one).counters.writes_retried),
    ("kvplane_tier_removals_total", "Tombstones written.", |one| tier(one).counters.removals),
    ("kvplane_tier_removals_unwritten_total", "Removals that a restart may undo.", |one| {
        tier(one).counters.removals_unwritten
    }),
    ("kvplane_tier_slots_reconciled_total", "Slots in doubt that were reconciled.", |one| {
        tier(one).counters.slots_compared
    }),
    ("kvplane_tier_slots_voided_total", "Slots in doubt whose records became void.", |one| {
        tier(one).counters.slots_voided
    }),
    ("kvplane_tier_reconciled_removals_total", "Objects dropped in reconciliation as outdated.", |one| {
        tier(one).counters.doubts_removed
    }),
    ("kvplane_tier_reclaimed_total", "Objects dropped by reclaim, or for a tenant's quota.", |one| {
        tier(one).counters.reclaimed
    }),
    ("kvplane_tier_reinserted_total", "Live records that reclaim rewrote.", |one| tier(one).stats.reinserted),
    ("kvplane_tier_damaged_total", "Records found damaged.", |one| tier(one).stats.damage.damaged),
    ("kvplane_tier_stale_total", "Records found stale: a write was lost.", |one| tier(one).stats.damage.stale),
    ("kvplane_tier_misdirected_total", "Records found in the wrong place.", |one| tier(one).stats.damage.misdirected),
    ("kvplane_tier_read_faults_total", "Reads that failed on the device.", |one| tier(one).stats.damage.unread),
    ("kvplane_tier_write_faults_total", "Writes that failed on the device.", |one| tier(one).stats.write_faults),
    ("kvplane_tier_device_reads_total", "Reads from the device.", |one| device(one).reads),
    ("kvplane_tier_device_writes_total", "Writes to the device.", |one| device(one).writes),
    ("kvplane_tier_device_read_bytes_total", "Bytes read from the device.", |one| device(one).read_bytes),
    ("kvplane_tier_device_written_bytes_total", "Bytes written to the device.", |one| device(one).written_bytes),
    ("kvplane_tier_device_commands_total", "Reads and writes by NVMe passthrough.", |one| device(one).commands),
    ("kvplane_tier_device_commands_failed_total", "NVMe commands that failed and were retried as plain I/O.", |one| {
        device(one).commands_failed
    }),
    ("kvplane_tier_device_polled_total", "Reads and writes whose completions were polled.", |one| device(one).polled),
    ("kvplane_tier_flushes_total", "Flushes.", |one| device(one).flush_latency.count()),
    ("kvplane_tier_flush_nanoseconds_total", "Time in flushes.", |one| device(one).flush_latency.sum_ns()),
];

const TIER_GAUGES: [Number; 25] = [
    ("kvplane_tier_objects", "Objects on the SSD.", |one| tier(one).stats.objects.into()),
    ("kvplane_tier_live_bytes", "Bytes of live records on the SSD.", |one| tier(one).stats.live_bytes),
    ("kvplane_tier_free_segments", "Segments without records.", |one| tier(one).stats.free_segments.into()),
    ("kvplane_tier_bad_segments", "Segments with write errors.", |one| tier(one).stats.bad_segments.into()),
    ("kvplane_tier_segments", "Segments.", |one| tier(one).stats.segments.into()),
    ("kvplane_tier_dead_bytes", "Bytes in used segments that no live record takes.", |one| tier(one).stats.dead_bytes),
    ("kvplane_tier_admission", "Admission to the SSD: 0 all, 1 selective, 2 promised only.", |one| {
        tier(one).admission as u64
    }),
    ("kvplane_tier_day_bytes", "Bytes written in the last day.", |one| tier(one).day_bytes),
    ("kvplane_tier_budget_bytes", "Daily write budget in bytes; 0 without a limit.", |one| tier(one).bytes_per_day),
    ("kvplane_tier_scrub_records", "Records checked in the current scrub pass.", |one| tier(one).scrub.pass.records),
    ("kvplane_tier_scrub_bytes", "Bytes checked in the running scrub pass.", |one| tier(one).scrub.pass.bytes),
    ("kvplane_tier_backlog_objects", "Objects queued for the SSD.", |one| tier(one).backlog),
    ("kvplane_tier_backlog_bytes", "Bytes of objects that wait to be written.", |one| tier(one).backlog_bytes),
    ("kvplane_tier_reading", "Reads in flight.", |one| tier(one).reading),
    ("kvplane_tier_recovered", "1 once recovery is complete.", |one| tier(one).is_recovered.into()),
    (
        "kvplane_tier_reconciling_slots",
        "Slots whose records wait to be reconciled with another owner's changes.",
        |one| tier(one).reconciling_slots,
    ),
    ("kvplane_tier_degraded", "1 if the SSD takes no writes any more.", |one| tier(one).degraded.is_some().into()),
    ("kvplane_tier_voided", "1 if the records found at the start were void.", |one| tier(one).voided.is_some().into()),
    ("kvplane_tier_get_p99_nanoseconds", "99th percentile of the latency of reads for gets.", |one| {
        device(one).get_latency.quantile_ns(0.99)
    }),
    ("kvplane_tier_flush_p99_nanoseconds", "99th percentile of the latency of flushes.", |one| {
        device(one).flush_latency.quantile_ns(0.99)
    }),
    ("kvplane_tier_flush_max_nanoseconds", "The longest flush.", |one| device(one).flush_most_ns),
    ("kvplane_tier_in_flight_gets", "Operations for gets in flight.", |one| device(one).priorities[0].in_flight),
    ("kvplane_tier_in_flight_commits", "Writes in flight.", |one| device(one).priorities[1].in_flight),
    ("kvplane_tier_in_flight_background", "Operations of reclaim and recovery in flight.", |one| {
        device(one).priorities[3].in_flight
    }),
    ("kvplane_tier_queued", "Operations queued for the device.", |one| {
        device(one).priorities.iter().map(|priority| priority.queued).sum()
    }),
];

/// Counters of shards with a shared tier.
const SHARED_COUNTERS: [Number; 18] = [
    ("kvplane_shared_uploads_total", "Objects uploaded to the shared tier.", |one| shared(one).uploaded),
    ("kvplane_shared_upload_bytes_total", "Bytes of uploaded objects.", |one| shared(one).uploaded_bytes),
    ("kvplane_shared_uploads_skipped_total", "Objects not uploaded: no room, or the store failed.", |one| {
        shared(one).skipped
    }),
    ("kvplane_shared_packs_written_total", "Packs written.", |one| shared(one).packs_written),
    ("kvplane_shared_packs_dropped_total", "Packs dropped for their age or for lack of room.", |one| {
        shared(one).packs_dropped
    }),
    ("kvplane_shared_deletions_failed_total", "Deletions that the store did not carry out yet.", |one| {
        shared(one).deletions_failed
    }),
    ("kvplane_shared_reads_total", "Objects read from the shared tier.", |one| shared(one).reads),
    ("kvplane_shared_read_bytes_total", "Bytes of objects read.", |one| shared(one).read_bytes),
    ("kvplane_shared_read_failures_total", "Reads that the store failed.", |one| shared(one).read_failures),
    ("kvplane_shared_reads_skipped_total", "Reads not tried because the store fails.", |one| shared(one).reads_skipped),
    ("kvplane_shared_damaged_total", "Bytes of the store that were not what was written.", |one| shared(one).damaged),
    ("kvplane_shared_write_failures_total", "Writes that the store failed.", |one| shared(one).write_failures),
    ("kvplane_shared_denied_total", "Operations that the store denied.", |one| shared(one).denied),
    ("kvplane_shared_throttled_total", "Operations that the store throttled.", |one| shared(one).throttled),
    ("kvplane_shared_removals_total", "Removals and replacements of objects of the shared tier.", |one| {
        shared(one).removals
    }),
    ("kvplane_shared_removals_unwritten_total", "Removals that the store did not take.", |one| {
        shared(one).removals_unwritten
    }),
    ("kvplane_shared_taken_over_total", "Objects taken over from former owners.", |one| shared(one).taken_over),
    ("kvplane_shared_slots_void_total", "Slots whose former contents are void.", |one| shared(one).slots_void),
];

const SHARED_GAUGES: [Number; 5] = [
    ("kvplane_shared_objects", "Objects in the index of the shared tier.", |one| shared(one).objects),
    ("kvplane_shared_packs", "Packs in the index.", |one| shared(one).packs),
    ("kvplane_shared_pack_bytes", "Bytes of these packs.", |one| shared(one).pack_bytes),
    ("kvplane_shared_slots", "Slots whose contents in the shared tier are known.", |one| shared(one).slots_valid),
    ("kvplane_shared_failing", "1 while the store fails.", |one| shared(one).failing),
];

fn shared(one: &ShardSnapshot) -> SharedStats {
    one.shared.unwrap_or_default()
}

fn kept(one: &ShardSnapshot) -> KeptReport {
    one.kept.unwrap_or_default()
}

fn tier(one: &ShardSnapshot) -> TierSnapshot {
    one.tier.unwrap_or_default()
}

/// Returns the device's counters; zeros for a shard without a tier.
fn device(one: &ShardSnapshot) -> &NvmeCounters {
    static NONE: LazyLock<NvmeCounters> = LazyLock::new(NvmeCounters::default);
    one.device.as_ref().unwrap_or(&NONE)
}

/// Returns the store's counters; zeros for a shard without a store.
fn store(one: &ShardSnapshot) -> kvplane_store::StoreStats {
    one.store.unwrap_or_default()
}

impl Node {
    /// Returns the counters of the node's shards as Prometheus text.
    ///
    /// # Errors
    /// When a shard does not answer.
    pub fn metrics_text(&self) -> Result<String, Error> {
        Self::metrics_text_of([self])
    }

    /// Returns the counters of several nodes of a process as one text; shards are numbered consecutively across nodes.
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
    let has_device_pool = shards.iter().any(|shard| store(shard).device != DevicePoolStats::default());
    let is_shared = shards.iter().any(|shard| shard.shared.is_some());
    let (of_shared, shared_gauges): (&[Number], &[Number]) =
        if is_shared { (&SHARED_COUNTERS, &SHARED_GAUGES) } else { (&[], &[]) };
    let (of_device, device_gauges): (&[Number], &[Number]) =
        if has_device_pool { (&DEVICE_COUNTERS, &DEVICE_GAUGES) } else { (&[], &[]) };
    let has_far_pool = shards.iter().any(|shard| shard.far.pool_bytes > 0);
    let (of_far, far_gauges): (&[Number], &[Number]) =
        if has_far_pool { (&FAR_COUNTERS, &FAR_GAUGES) } else { (&[], &[]) };
    let keeps = shards.iter().any(|shard| shard.kept.is_some());
    let (of_kept, kept_gauges): (&[Number], &[Number]) =
        if keeps { (&KEPT_COUNTERS, &KEPT_GAUGES) } else { (&[], &[]) };
    let all = COUNTERS.iter().chain(counters).chain(of_shared).chain(of_far).chain(of_device).chain(of_kept);
    for (name, help, value) in all {
        text.counter(name, help);
        numbers(&mut text, *value);
    }
    let all = GAUGES.iter().chain(gauges).chain(shared_gauges).chain(far_gauges).chain(device_gauges);
    let all = all.chain(kept_gauges);
    for (name, help, value) in all {
        text.gauge(name, help);
        numbers(&mut text, *value);
    }
    operations(&mut text, shards);
    tenants(&mut text, shards);
    devices(&mut text, shards);
    text.finish()
}

/// Appends latency histograms of requests, by operation and tier.
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
        "Time from a request's arrival to its reply's departure, by whether it waited for the SSD.",
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

/// Appends latency histograms of gets and puts by tenant, where there are others than the default one.
fn tenants(text: &mut Text, shards: &[ShardSnapshot]) {
    if shards.iter().all(|shard| shard.times.tenants.is_empty()) {
        return;
    }
    text.histogram(
        "kvplane_shard_tenant_operation_seconds",
        "Time from a request's arrival to its reply's departure, by the tenant of its object.",
    );
    for (number, shard) in shards.iter().enumerate() {
        for one in &shard.times.tenants {
            let tenant = match (&one.name, one.whose) {
                (Some(name), _) => name.clone(),
                (None, TimedTenant::Tenant(0)) => "default".to_owned(),
                (None, TimedTenant::Tenant(number)) => format!("#{number}"),
                (None, TimedTenant::Unknown) => "#unknown".to_owned(),
                (None, TimedTenant::Others) => "#others".to_owned(),
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

/// Appends the payloads that RDMA devices moved, by whether device and pool are on one NUMA node.
fn devices(text: &mut Text, shards: &[ShardSnapshot]) {
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
    fn every_shard_has_every_metric() {
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
        let device = DevicePoolStats { pool_bytes: 7, ..DevicePoolStats::default() };
        let store = kvplane_store::StoreStats { device, ..Default::default() };
        let samples = parse(&render(&[ShardSnapshot { store: Some(store), ..ShardSnapshot::default() }])).unwrap();
        let all = COUNTERS.len() + GAUGES.len() + DEVICE_COUNTERS.len() + DEVICE_GAUGES.len();
        assert_eq!((samples.len(), samples["kvplane_device_pool_bytes{shard=\"0\"}"] as u64), (all, 7));
        let far = kvplane_store::FarPoolStats { pool_bytes: 9, evictions: 8, ..Default::default() };
        let store = Some(kvplane_store::StoreStats::default());
        let samples = parse(&render(&[ShardSnapshot { store, far, ..ShardSnapshot::default() }])).unwrap();
        let of = |name: &str| samples[&format!("{name}{{shard=\"0\"}}")] as u64;
        assert_eq!(samples.len(), COUNTERS.len() + GAUGES.len() + FAR_COUNTERS.len() + FAR_GAUGES.len());
        assert_eq!((of("kvplane_far_pool_bytes"), of("kvplane_far_pool_evictions_total")), (9, 8));
        let report = KeptReport { checked: 4, damaged: 3, dropped: 2, left_out: 5, ..KeptReport::default() };
        let store = kvplane_store::StoreStats::default();
        let one = ShardSnapshot { store: Some(store), kept: Some(report), ..ShardSnapshot::default() };
        let samples = parse(&render(&[one])).unwrap();
        let of = |name: &str| samples[&format!("{name}{{shard=\"0\"}}")] as u64;
        assert_eq!(samples.len(), COUNTERS.len() + GAUGES.len() + KEPT_COUNTERS.len() + KEPT_GAUGES.len());
        assert_eq!((of("kvplane_kept_memory_checked_total"), of("kvplane_kept_memory_damaged_total")), (4, 3));
        assert_eq!(of("kvplane_kept_memory_dropped"), 7);
    }
}
