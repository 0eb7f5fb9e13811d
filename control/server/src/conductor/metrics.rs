//! Counters of the Conductor for a scrape.

use kvplane_conductor::conductor::{Conductor, ModelStatus, PoolRow, Table};

use super::feeds::FeedCounts;
use super::snapshots::SnapshotCounts;
use crate::counts::MetricKind;

/// Records all counters and gauges, in the recorder of this thread.
pub(super) fn record(conductor: &mut Conductor, now_ns: u64, feeds: &FeedCounts, snapshots: Option<&SnapshotCounts>) {
    let (counts, copies) = (conductor.counts(), conductor.copies());
    let unreachable = conductor.instances().unreachable() as u64;
    let aliases = conductor.hash_aliases() as u64;
    let table = conductor.table(now_ns);
    let sum = |of: fn(&ModelStatus) -> u64| table.pools.iter().map(|pool| of(&pool.status)).sum::<u64>();
    let most = |of: fn(&ModelStatus) -> u64| table.pools.iter().map(|pool| of(&pool.status)).max().unwrap_or(0);
    let of_pools = |of: fn(&PoolRow) -> u64| table.pools.iter().map(of).sum::<u64>();
    let of_files = |of: fn(&SnapshotCounts) -> u64| snapshots.map_or(0, of);
    let unconfirmed = table.instances.iter().filter(|row| row.progress.is_some_and(|of| of.unconfirmed)).count() as u64;
    let counters = [
        ("kvplane_conductor_placed_total", "Requests placed at once.", counts.placed),
        ("kvplane_conductor_queued_total", "Requests queued.", counts.queued),
        ("kvplane_conductor_placed_later_total", "Requests placed from the queue.", counts.placed_later),
        ("kvplane_conductor_rejected_total", "Requests refused.", counts.refused),
        (
            "kvplane_conductor_queue_full_total",
            "Requests refused because the queue of their model was full: --conductor-queued.",
            counts.queue_full,
        ),
        (
            "kvplane_conductor_requests_full_total",
            "Requests refused beyond --conductor-requests or --conductor-prompt-blocks.",
            counts.requests_full,
        ),
        ("kvplane_conductor_duplicate_requests_total", "Requests retried with the same id.", counts.repeated),
        ("kvplane_conductor_expired_total", "Reservations whose lease expired.", counts.expired),
        ("kvplane_conductor_orphaned_total", "Requests whose instance was lost.", counts.orphaned),
        ("kvplane_conductor_event_batches_total", "Batches of cache events applied.", counts.batches),
        ("kvplane_conductor_duplicate_batches_total", "Batches that had been applied before.", counts.duplicates),
        ("kvplane_conductor_event_gaps_total", "Gaps in cache events.", counts.gaps),
        ("kvplane_conductor_undecodable_events_total", "Events of engines that could not be decoded.", feeds.unread()),
        ("kvplane_conductor_foreign_events_total", "Events of other block sizes or groups.", feeds.foreign()),
        (
            "kvplane_conductor_hash_only_blocks_total",
            "Blocks stored without usable tokens: they are found by the hashes of their engine only.",
            counts.by_hash_only,
        ),
        (
            "kvplane_conductor_lost_publishers_total",
            "Times that a publisher of events became unreachable.",
            feeds.lost_publishers(),
        ),
        ("kvplane_conductor_stale_reports_total", "Load reports that arrived late or twice.", counts.stale_reports),
        ("kvplane_conductor_prefix_replicas_made_total", "Hot prefixes replicated in the store.", copies.counts.made),
        (
            "kvplane_conductor_prefix_replicas_failed_total",
            "Hot prefixes that could not be replicated.",
            copies.counts.failed,
        ),
        (
            "kvplane_conductor_cache_resets_total",
            "Caches taken to be empty, because blocks that they had reported were missing.",
            counts.implausible,
        ),
        (
            "kvplane_conductor_snapshots_written_total",
            "Snapshots of the index written.",
            of_files(SnapshotCounts::written),
        ),
        (
            "kvplane_conductor_snapshots_failed_total",
            "Snapshots of the index that could not be written.",
            of_files(SnapshotCounts::failed),
        ),
        (
            "kvplane_conductor_snapshots_refused_total",
            "Snapshots of the index that could not be used at the start.",
            of_files(SnapshotCounts::refused),
        ),
        (
            "kvplane_conductor_restored_caches_confirmed_total",
            "Instances that confirmed the blocks of a snapshot.",
            counts.confirmed,
        ),
        (
            "kvplane_conductor_restored_caches_dropped_total",
            "Instances that did not confirm the blocks of a snapshot, which were dropped.",
            counts.dropped,
        ),
    ];
    let gauges = [
        ("kvplane_conductor_instances", "Instances registered.", table.instances.len() as u64),
        ("kvplane_conductor_suspect_instances", "Instances that missed reports.", suspects(&table)),
        ("kvplane_conductor_unreachable_instances", "Instances whose event publisher is unreachable.", unreachable),
        (
            "kvplane_conductor_degraded_instances",
            "Instances whose caches are not completely known.",
            of_pools(|pool| (pool.feeds - pool.complete_feeds) as u64),
        ),
        (
            "kvplane_conductor_unconfirmed_instances",
            "Instances that have not confirmed the blocks of a snapshot.",
            unconfirmed,
        ),
        (
            "kvplane_conductor_missing_batches",
            "Batches of cache events that were published and are not applied yet.",
            of_pools(|pool| pool.missing_batches),
        ),
        (
            "kvplane_conductor_snapshot_bytes",
            "Bytes of the snapshots of the index that were written last.",
            of_files(SnapshotCounts::bytes),
        ),
        ("kvplane_conductor_waiting_requests", "Queued requests.", sum(|model| model.waiting)),
        ("kvplane_conductor_requests", "Queued and booked requests.", sum(|model| model.requests)),
        ("kvplane_conductor_index_blocks", "Blocks in the prefix indexes.", sum(|model| model.blocks)),
        (
            "kvplane_conductor_decode_reports",
            "Reports from which the models of decode steps were fitted.",
            sum(|model| model.decode.reports),
        ),
        (
            "kvplane_conductor_decode_error_permille",
            "Mean relative error of predicted decode steps, of the model with the greatest, in thousandths.",
            most(|model| model.decode.error_permille.into()),
        ),
        (
            "kvplane_conductor_decode_step_nanoseconds",
            "Learned duration of a decode step without resident tokens, of the model with the longest.",
            most(|model| model.decode.base_ns),
        ),
        (
            "kvplane_conductor_output_error_permille",
            "Mean relative error of expected outputs, of the model with the greatest, in thousandths.",
            most(|model| model.decode.output_error_permille.into()),
        ),
        ("kvplane_conductor_sessions", "Sessions whose next turn is expected.", sum(|model| model.sessions)),
        ("kvplane_conductor_hash_aliases", "Engine hashes whose token hashes are known.", aliases),
        ("kvplane_conductor_prefix_replicas", "Hot prefixes with a replica.", copies.prefixes as u64),
        (
            "kvplane_conductor_prefix_replica_bytes",
            "Bytes of replicas of hot prefixes, finished and in progress.",
            copies.bytes,
        ),
        (
            "kvplane_conductor_mismatched_models",
            "Models whose hashes do not match.",
            sum(|model| u64::from(model.mismatch)),
        ),
    ];
    MetricKind::Counter.record(&counters);
    MetricKind::Gauge.record(&gauges);
}

fn suspects(table: &Table) -> u64 {
    table.instances.iter().filter(|row| row.status.suspect).count() as u64
}
