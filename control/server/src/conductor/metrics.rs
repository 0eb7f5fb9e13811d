//! Counters of the Conductor as Prometheus text.

use std::fmt::Write;

use kvplane_conductor::conductor::Conductor;

use super::convert::table_out;
use super::feeds::FeedCounts;

/// Renders all counters and gauges.
pub(super) fn render(conductor: &mut Conductor, now_ns: u64, feeds: &FeedCounts) -> String {
    let (counts, copies) = (conductor.counts(), conductor.copies());
    let unreachable = conductor.instances().unreachable() as u64;
    let table = table_out(&conductor.table(now_ns));
    let sum = |of: fn(&kvplane_rpc::conductor::ModelStatus) -> u64| table.models.iter().map(of).sum::<u64>();
    let counters = [
        ("placed", "Requests placed at once", counts.placed),
        ("queued", "Requests queued", counts.queued),
        ("placed_later", "Requests placed from the queue", counts.placed_later),
        ("rejected", "Requests refused", counts.refused),
        ("duplicate_requests", "Requests retried with the same id", counts.repeated),
        ("expired", "Reservations whose lease expired", counts.expired),
        ("orphaned", "Requests whose instance was lost", counts.orphaned),
        ("event_batches", "Batches of cache events applied", counts.batches),
        ("duplicate_batches", "Batches that had been applied before", counts.duplicates),
        ("event_gaps", "Gaps in cache events", counts.gaps),
        ("undecodable_events", "Events of engines that could not be decoded", feeds.unread()),
        ("foreign_events", "Events of other block sizes or groups", feeds.foreign()),
        ("lost_publishers", "Times that a publisher of events became unreachable", feeds.lost_publishers()),
        ("stale_reports", "Load reports that arrived late or twice", counts.stale_reports),
        ("prefix_replicas_made", "Hot prefixes replicated in the store", copies.counts.made),
        ("prefix_replicas_failed", "Hot prefixes that could not be replicated", copies.counts.failed),
        (
            "cache_resets",
            "Caches taken to be empty, because blocks that they had reported were missing",
            counts.disbelieved,
        ),
    ];
    let gauges = [
        ("instances", "Instances registered", table.instances.len() as u64),
        ("suspect_instances", "Instances that missed reports", suspects(&table)),
        ("unreachable_instances", "Instances whose event publisher is unreachable", unreachable),
        ("waiting_requests", "Queued requests", sum(|model| model.waiting)),
        ("requests", "Queued and booked requests", sum(|model| model.requests)),
        ("index_blocks", "Blocks in the prefix indexes", sum(|model| model.blocks)),
        ("prefix_replicas", "Hot prefixes with a replica", copies.prefixes as u64),
        ("prefix_replica_bytes", "Bytes of replicas of hot prefixes, finished and in progress", copies.bytes),
        ("mismatched_models", "Models whose hashes do not match", sum(|model| u64::from(model.mismatch))),
    ];
    let mut out = String::new();
    let mut show = |name: &str, kind: &str, help: &str, value: u64| {
        // Writing to a string does not fail.
        let _ = writeln!(out, "# HELP kvplane_conductor_{name} {help}.\n# TYPE kvplane_conductor_{name} {kind}");
        let _ = writeln!(out, "kvplane_conductor_{name} {value}");
    };
    counters.iter().for_each(|(name, help, value)| show(&format!("{name}_total"), "counter", help, *value));
    gauges.iter().for_each(|(name, help, value)| show(name, "gauge", help, *value));
    out
}

fn suspects(table: &kvplane_rpc::conductor::InstanceTable) -> u64 {
    table.instances.iter().filter(|row| row.suspect).count() as u64
}
