//! Metrics under the names of Mooncake's master, so that its dashboards keep working.
//!
//! They are served beside kvplane's own metrics, not instead: a name does not always mean the same here, since kvplane
//! has no master. Metrics without a counterpart are 0. docs/mooncake-parity.md lists both kinds, and a test compares
//! that list with this one.

use kvplane_rpc::message::{SegmentOwner, ShardFigures, SsdFigures, TenantList, TenantStatus};

use metrics::Key;
use metrics_exporter_prometheus::LabelSet;
use metrics_exporter_prometheus::formatting::{write_help_line, write_metric_line, write_type_line};

use crate::cluster::view::View;
use crate::counts::MetricKind;
use crate::http::admin::effective_bytes;

/// Sums over all shards, and counters of calls.
pub(crate) struct Sums<'a> {
    view: &'a View,
    all: ShardFigures,
    ssd: SsdFigures,
    /// Calls and failed calls, by method.
    calls: &'a dyn Fn(&str) -> (u64, u64),
}

/// A metric: name, type, help, and its value.
type Number = (&'static str, MetricKind, &'static str, fn(&Sums<'_>) -> u64);

const COUNTER: MetricKind = MetricKind::Counter;
const GAUGE: MetricKind = MetricKind::Gauge;

/// A metric of each tenant: name, type, help, and its value.
type TenantNumber = (&'static str, MetricKind, &'static str, fn(&TenantStatus, &TenantList) -> u64);

/// Metrics of every tenant, under the names of Mooncake's quotas.
const OF_TENANTS: [TenantNumber; 8] = [
    ("mooncake_tenant_quota_requested_bytes", GAUGE, "A tenant's quota of memory; 0 for none.", |one, _| {
        one.dram_bytes.unwrap_or(0)
    }),
    ("mooncake_tenant_quota_effective_bytes", GAUGE, "Bytes of memory that it may use at present.", |one, all| {
        effective_bytes(one, all)
    }),
    ("mooncake_tenant_quota_charged_bytes", GAUGE, "Bytes that its objects take.", |one, _| one.used_bytes),
    ("mooncake_tenant_quota_admission_closed", GAUGE, "1 if its quota is 0.", |one, _| {
        u64::from(one.dram_bytes == Some(0))
    }),
    ("mooncake_tenant_quota_over_quota", GAUGE, "1 if it exceeds its quota.", |one, _| {
        u64::from(one.dram_bytes.is_some_and(|quota| one.used_bytes > quota))
    }),
    ("mooncake_tenant_quota_explicit_policy", GAUGE, "1 if an operator set it.", |one, _| u64::from(one.is_set)),
    ("mooncake_tenant_quota_reject_total", COUNTER, "Puts refused for lack of quota.", |one, _| one.refused),
    ("mooncake_tenant_evict_bytes_total", COUNTER, "Bytes of its objects that were evicted.", |one, _| {
        one.evicted_bytes
    }),
];

/// Metrics with a counterpart.
const NUMBERS: [Number; 61] = [
    ("master_allocated_bytes", GAUGE, "Bytes of memory in use, over all nodes.", |sums| sums.all.pool.used_bytes),
    ("master_total_capacity_bytes", GAUGE, "Bytes of memory for objects, over all nodes.", |sums| sums.all.pool.bytes),
    ("master_allocated_file_size_bytes", GAUGE, "Bytes of live records on SSDs.", |sums| sums.ssd.live_bytes),
    ("master_total_file_capacity_bytes", GAUGE, "Bytes of SSDs.", |sums| sums.ssd.bytes),
    ("master_key_count", GAUGE, "Objects in memory.", |sums| sums.all.objects),
    ("mem_cache_nums_", GAUGE, "Objects in memory.", |sums| sums.all.objects),
    ("file_cache_nums_", GAUGE, "Objects on SSDs.", |sums| sums.ssd.objects),
    ("master_active_clients", GAUGE, "Nodes that are members.", |sums| sums.live_members()),
    ("mem_cache_hit_nums_", COUNTER, "Gets answered from memory.", |sums| sums.all.gets.hits),
    ("file_cache_hit_nums_", COUNTER, "Gets answered from SSDs.", |sums| sums.ssd.hits),
    ("mem_cache_hit_bytes_total", COUNTER, "Bytes returned from memory.", |sums| {
        sums.all.gets.bytes.saturating_sub(sums.ssd.hit_bytes)
    }),
    ("file_cache_hit_bytes_total", COUNTER, "Bytes returned from SSDs.", |sums| sums.ssd.hit_bytes),
    ("valid_get_nums_", COUNTER, "Gets that were answered.", |sums| sums.all.gets.hits + sums.ssd.hits),
    ("total_get_nums_", COUNTER, "Gets.", |sums| sums.all.gets.hits + sums.all.gets.misses),
    ("master_get_replica_list_requests_total", COUNTER, "Gets over the network.", |sums| sums.count("get")),
    ("master_get_replica_list_failures_total", COUNTER, "Gets that missed or failed.", |sums| sums.failed("get")),
    ("master_batch_get_replica_list_requests_total", COUNTER, "Requests over shared memory.", |sums| {
        sums.count("lookup")
    }),
    ("master_batch_get_replica_list_items_total", COUNTER, "Objects in these requests.", |sums| sums.items("lookup")),
    ("master_batch_get_replica_list_failures_total", COUNTER, "Requests that failed.", |sums| sums.failed("lookup")),
    ("master_put_start_requests_total", COUNTER, "Puts over the network.", |sums| sums.count("put")),
    ("master_put_start_failures_total", COUNTER, "Puts that were refused or failed.", |sums| sums.failed("put")),
    ("master_put_start_alloc_failures_total", COUNTER, "Puts refused for lack of space.", |sums| {
        sums.all.puts.refusals
    }),
    ("master_put_start_discard_cnt", COUNTER, "Puts whose deadline passed.", |sums| sums.all.puts.expirations),
    ("master_put_start_discarded_staging_size", GAUGE, "Bytes of reservations, expired ones included.", |sums| {
        sums.all.pool.reserved_bytes
    }),
    ("master_put_end_requests_total", COUNTER, "Objects that became visible.", |sums| sums.all.puts.objects),
    ("master_put_end_failures_total", COUNTER, "Puts of existing keys.", |sums| sums.all.puts.conflicts),
    ("master_put_revoke_requests_total", COUNTER, "Puts aborted.", |sums| sums.all.puts.aborts),
    ("master_batch_put_start_requests_total", COUNTER, "Reserve requests over shared memory.", |sums| {
        sums.count("reserve")
    }),
    ("master_batch_put_start_items_total", COUNTER, "Objects in these requests.", |sums| sums.items("reserve")),
    ("master_batch_put_start_failures_total", COUNTER, "Requests that failed.", |sums| sums.failed("reserve")),
    ("master_batch_put_end_requests_total", COUNTER, "Commits over shared memory.", |sums| sums.count("commit")),
    ("master_batch_put_end_items_total", COUNTER, "Objects in these requests.", |sums| sums.items("commit")),
    ("master_batch_put_end_failures_total", COUNTER, "Requests that failed.", |sums| sums.failed("commit")),
    ("master_batch_put_revoke_items_total", COUNTER, "Objects aborted over shared memory.", |sums| sums.items("abort")),
    ("master_batch_exist_key_requests_total", COUNTER, "Requests for the existence of objects.", |sums| {
        sums.count("exists")
    }),
    ("master_batch_exist_key_items_total", COUNTER, "Objects in these requests.", |sums| sums.items("exists")),
    ("master_batch_exist_key_failures_total", COUNTER, "Requests that failed.", |sums| sums.failed("exists")),
    ("master_remove_requests_total", COUNTER, "Objects in remove requests.", |sums| sums.items("remove")),
    ("master_remove_failures_total", COUNTER, "Remove requests that failed.", |sums| sums.failed("remove")),
    ("master_mount_segment_requests_total", COUNTER, "Segments registered.", |sums| (sums.calls)("register_segment").0),
    ("master_mount_segment_failures_total", COUNTER, "Registrations refused.", |sums| {
        (sums.calls)("register_segment").1
    }),
    ("master_unmount_segment_requests_total", COUNTER, "Segments unregistered.", |sums| {
        (sums.calls)("unregister_segment").0
    }),
    ("master_unmount_segment_failures_total", COUNTER, "Unregistrations refused.", |sums| {
        (sums.calls)("unregister_segment").1
    }),
    ("master_remount_segment_requests_total", COUNTER, "Joins of nodes.", |sums| (sums.calls)("join").0),
    ("master_remount_segment_failures_total", COUNTER, "Joins refused.", |sums| (sums.calls)("join").1),
    ("master_ping_requests_total", COUNTER, "Heartbeats.", |sums| (sums.calls)("heartbeat").0),
    ("master_ping_failures_total", COUNTER, "Heartbeats refused.", |sums| (sums.calls)("heartbeat").1),
    ("master_create_copy_task_requests_total", COUNTER, "Replication tasks requested.", |sums| {
        (sums.calls)("create_task").0
    }),
    ("master_create_copy_task_failures_total", COUNTER, "Replication tasks refused.", |sums| {
        (sums.calls)("create_task").1
    }),
    ("master_query_task_requests_total", COUNTER, "Queries of tasks.", |sums| (sums.calls)("list_tasks").0),
    ("master_successful_evictions_total", COUNTER, "Objects evicted.", |sums| sums.all.evictions.objects),
    ("master_successful_evictions_mem", COUNTER, "Objects evicted.", |sums| sums.all.evictions.objects),
    ("master_attempted_evictions_total", COUNTER, "Objects evicted, and puts that found nothing to evict.", |sums| {
        sums.all.evictions.objects + sums.all.puts.refusals
    }),
    ("master_attempted_evictions_mem", COUNTER, "Objects evicted, and puts that found nothing to evict.", |sums| {
        sums.all.evictions.objects + sums.all.puts.refusals
    }),
    ("master_evicted_key_count", COUNTER, "Objects evicted.", |sums| sums.all.evictions.objects),
    ("master_evicted_key_count_mem", COUNTER, "Objects evicted.", |sums| sums.all.evictions.objects),
    ("master_evicted_size_bytes", COUNTER, "Bytes of objects evicted.", |sums| sums.all.evictions.bytes),
    ("master_evicted_size_bytes_mem", COUNTER, "Bytes of objects evicted.", |sums| sums.all.evictions.bytes),
    ("master_evict_disk_replica_requests_total", COUNTER, "Objects dropped by reclaim on SSDs.", |sums| {
        sums.ssd.reclaimed
    }),
    ("master_promotion_admitted_total", COUNTER, "Objects promoted to memory by a read.", |sums| sums.ssd.promotions),
    ("master_promotion_completed_total", COUNTER, "Objects promoted to memory by a read.", |sums| sums.ssd.promotions),
];

/// Metrics without a counterpart: always 0, so that panels show 0 instead of no data.
const ABSENT: [(&str, MetricKind); 52] = [
    ("master_soft_pin_key_count", GAUGE),
    ("master_nof_allocated_bytes", GAUGE),
    ("master_total_nof_capacity_bytes", GAUGE),
    ("master_exist_key_requests_total", COUNTER),
    ("master_exist_key_failures_total", COUNTER),
    ("master_put_revoke_failures_total", COUNTER),
    ("master_put_start_release_cnt", COUNTER),
    ("master_put_start_partial_allocations_total", COUNTER),
    ("master_batch_put_revoke_requests_total", COUNTER),
    ("master_batch_query_ip_requests_total", COUNTER),
    ("master_batch_query_ip_items_total", COUNTER),
    ("master_batch_replica_clear_requests_total", COUNTER),
    ("master_batch_replica_clear_items_total", COUNTER),
    ("master_get_replica_list_by_regex_requests_total", COUNTER),
    ("master_get_replica_list_by_regex_failures_total", COUNTER),
    ("master_remove_by_regex_requests_total", COUNTER),
    ("master_remove_by_regex_failures_total", COUNTER),
    ("master_remove_all_requests_total", COUNTER),
    ("master_remove_all_failures_total", COUNTER),
    ("master_mount_nof_segment_requests_total", COUNTER),
    ("master_unmount_nof_segment_requests_total", COUNTER),
    ("master_remount_nof_segment_requests_total", COUNTER),
    ("master_nof_heartbeat_success_total", COUNTER),
    ("master_nof_heartbeat_failure_total", COUNTER),
    ("master_nof_heartbeat_timeout_total", COUNTER),
    ("master_nof_segments_unmounted_by_heartbeat_total", COUNTER),
    ("master_successful_evictions_nof", COUNTER),
    ("master_attempted_evictions_nof", COUNTER),
    ("master_evicted_key_count_nof", COUNTER),
    ("master_evicted_size_bytes_nof", COUNTER),
    ("master_copy_start_requests_total", COUNTER),
    ("master_copy_start_failures_total", COUNTER),
    ("master_copy_end_requests_total", COUNTER),
    ("master_copy_end_failures_total", COUNTER),
    ("master_copy_revoke_requests_total", COUNTER),
    ("master_move_start_requests_total", COUNTER),
    ("master_move_start_failures_total", COUNTER),
    ("master_move_end_requests_total", COUNTER),
    ("master_move_end_failures_total", COUNTER),
    ("master_move_revoke_requests_total", COUNTER),
    ("master_create_move_task_requests_total", COUNTER),
    ("master_create_move_task_failures_total", COUNTER),
    ("master_fetch_tasks_requests_total", COUNTER),
    ("master_update_task_requests_total", COUNTER),
    ("master_promotion_in_flight", GAUGE),
    ("master_promotion_completed_bytes_total", COUNTER),
    ("master_promotion_expired_total", COUNTER),
    ("master_promotion_failed_total", COUNTER),
    ("master_promotion_cancelled_total", COUNTER),
    ("master_promotion_rejected_frequency_total", COUNTER),
    ("master_promotion_rejected_watermark_total", COUNTER),
    ("master_promotion_rejected_cap_total", COUNTER),
];

const SEGMENT_USED: &str = "segment_allocated_bytes";
const SEGMENT_BYTES: &str = "segment_total_capacity_bytes";
const SIZES: &str = "master_value_size_bytes";
/// Bounds of the sizes, as powers of two: 4 KiB to 64 MiB.
const SIZE_BOUNDS: core::ops::RangeInclusive<usize> = 12..=26;

impl<'a> Sums<'a> {
    /// Adds up the figures of all shards. `calls` returns the calls of a method, and how many of them were refused.
    pub(crate) fn of(view: &'a View, calls: &'a dyn Fn(&str) -> (u64, u64)) -> Self {
        let mut sums = Self { view, all: ShardFigures::default(), ssd: SsdFigures::default(), calls };
        for shard in view.shards.iter().flat_map(|node| &node.shards) {
            add(&mut sums.all, &mut sums.ssd, shard);
        }
        sums
    }

    fn live_members(&self) -> u64 {
        self.view.members.iter().filter(|member| crate::http::metrics::is_live(member)).count() as u64
    }

    fn of_operation(&self, operation: &str, number: fn(&kvplane_rpc::message::OperationFigures) -> u64) -> u64 {
        self.all.operations.iter().filter(|one| one.operation == operation).map(number).sum()
    }

    fn count(&self, operation: &str) -> u64 {
        self.of_operation(operation, |one| one.count)
    }

    fn failed(&self, operation: &str) -> u64 {
        self.of_operation(operation, |one| one.failed)
    }

    fn items(&self, operation: &str) -> u64 {
        self.of_operation(operation, |one| one.items)
    }
}

fn add(all: &mut ShardFigures, ssd: &mut SsdFigures, shard: &ShardFigures) {
    all.pool.used_bytes += shard.pool.used_bytes;
    all.pool.bytes += shard.pool.bytes;
    all.objects += shard.objects;
    all.gets.hits += shard.gets.hits;
    all.gets.misses += shard.gets.misses;
    all.gets.bytes += shard.gets.bytes;
    all.puts.bytes += shard.puts.bytes;
    all.puts.objects += shard.puts.objects;
    all.puts.conflicts += shard.puts.conflicts;
    all.puts.refusals += shard.puts.refusals;
    all.puts.expirations += shard.puts.expirations;
    all.puts.aborts += shard.puts.aborts;
    all.pool.reserved_bytes += shard.pool.reserved_bytes;
    all.evictions.objects += shard.evictions.objects;
    all.evictions.bytes += shard.evictions.bytes;
    all.sizes.resize(all.sizes.len().max(shard.sizes.len()), 0);
    all.sizes.iter_mut().zip(&shard.sizes).for_each(|(sum, more)| *sum += more);
    all.operations.extend(shard.operations.iter().cloned());
    if let Some(more) = &shard.ssd {
        ssd.objects += more.objects;
        ssd.live_bytes += more.live_bytes;
        ssd.bytes += more.bytes;
        ssd.hits += more.hits;
        ssd.hit_bytes += more.hit_bytes;
        ssd.promotions += more.promotions;
        ssd.reclaimed += more.reclaimed;
    }
}

/// Records all of them but the sizes of objects.
pub(crate) fn record(sums: &Sums<'_>) {
    for (name, kind, help, value) in NUMBERS {
        kind.record(&[(name, help, value(sums))]);
    }
    for (name, kind) in ABSENT {
        kind.record(&[(name, "Always 0: kvplane has no counterpart.", 0)]);
    }
    record_segments(sums.view);
    record_tenants(sums.view);
}

fn record_tenants(view: &View) {
    for (name, kind, help, value) in OF_TENANTS {
        kind.describe(name, help);
        for tenant in &view.tenants.tenants {
            let called = if tenant.name.is_empty() { "default" } else { &tenant.name };
            kind.set_labelled(name, "tenant_id", called, value(tenant, &view.tenants));
        }
    }
}

fn record_segments(view: &View) {
    let used = |node| {
        let of = view.shards.iter().filter(|one| one.node == node).flat_map(|one| &one.shards);
        of.map(|shard| shard.pool.used_bytes).sum()
    };
    GAUGE.describe(SEGMENT_USED, "Bytes in use of a segment's memory; 0 for a client's, which reports none.");
    GAUGE.describe(SEGMENT_BYTES, "Bytes of a segment.");
    for segment in &view.segments {
        let bytes = if let SegmentOwner::Node { node, .. } = segment.owner { used(node.0) } else { 0 };
        GAUGE.set_labelled(SEGMENT_USED, "segment", &segment.name, bytes);
        GAUGE.set_labelled(SEGMENT_BYTES, "segment", &segment.name, segment.bytes);
    }
}

/// Formats the histogram of the sizes of objects. The shards count them in buckets, and a recorder takes histograms
/// only as one sample for each object.
pub(crate) fn sizes_text(sums: &Sums<'_>) -> String {
    let mut text = String::new();
    write_help_line(&mut text, SIZES, None, None, "Sizes of objects that became visible.");
    write_type_line(&mut text, SIZES, None, None, "histogram");
    let labels = LabelSet::from_key_and_global(&Key::from_static_name(SIZES), &Default::default());
    let mut line = |suffix, bound: Option<String>, value: u64| {
        let bound = bound.map(|bound| ("le", bound));
        write_metric_line(&mut text, SIZES, Some(suffix), &labels, bound, value, None);
    };
    let sizes = &sums.all.sizes;
    for power in SIZE_BOUNDS {
        line("bucket", Some((1u64 << power).to_string()), sizes.iter().take(power + 1).sum());
    }
    let count = sizes.iter().sum();
    line("bucket", Some("+Inf".to_owned()), count);
    line("sum", None, sums.all.puts.bytes);
    line("count", None, count);
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns the names in the fenced block of the parity page that follows this line.
    fn listed(marker: &str) -> BTreeSet<String> {
        let page = include_str!("../../../../docs/mooncake-parity.md");
        let (_, rest) = page.split_once(marker).unwrap_or_else(|| panic!("no {marker:?} in the parity page"));
        let block = rest.split("```").nth(1).expect("a fenced block");
        block.lines().skip(1).flat_map(str::split_whitespace).map(str::to_owned).collect()
    }

    fn names(all: impl IntoIterator<Item = &'static str>) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for name in all {
            assert!(names.insert(name.to_owned()), "{name} is there twice");
        }
        names
    }

    #[test]
    fn the_parity_page_lists_every_metric_and_no_other() {
        let more = [SEGMENT_USED, SEGMENT_BYTES, SIZES];
        assert_eq!(
            names(NUMBERS.iter().map(|one| one.0).chain(OF_TENANTS.iter().map(|one| one.0)).chain(more)),
            listed("<!-- metrics: served -->")
        );
        assert_eq!(names(ABSENT.iter().map(|one| one.0)), listed("<!-- metrics: always 0 -->"));
    }
}
