//! The Conductor's counters as Prometheus text.

use std::fmt::Write;
use std::sync::atomic::Ordering;

use super::Host;

impl Host {
    /// All counters and gauges.
    pub(crate) fn metrics(&self) -> String {
        // One after the other: both lock.
        let (counts, copies, unreachable) = {
            let core = self.core();
            (core.conductor.counts(), core.conductor.copies(), core.conductor.instances().unreachable() as u64)
        };
        let lost_publishers = self.lost_publishers.load(Ordering::Relaxed);
        let table = self.table();
        let sum = |of: fn(&kvplane_rpc::conductor::ModelStatus) -> u64| table.models.iter().map(of).sum::<u64>();
        let counters = [
            ("placed", "Requests placed at once", counts.placed),
            ("queued", "Requests that had to wait", counts.queued),
            ("placed_later", "Requests placed after they had waited", counts.placed_later),
            ("refused", "Requests refused", counts.refused),
            ("repeated", "Requests asked again with the same id", counts.repeated),
            ("expired", "Reservations whose lease ran out", counts.expired),
            ("orphaned", "Requests whose instance was lost", counts.orphaned),
            ("event_batches", "Batches of cache events taken", counts.batches),
            ("duplicate_batches", "Batches that had been taken before", counts.duplicates),
            ("event_gaps", "Gaps in cache events", counts.gaps),
            ("unread_events", "Events of engines that could not be read", self.unread.load(Ordering::Relaxed)),
            ("foreign_events", "Events of other block sizes or groups", self.foreign.load(Ordering::Relaxed)),
            ("lost_publishers", "Times that a publisher of events went out of reach", lost_publishers),
            ("stale_reports", "Load reports that came late or twice", counts.stale_reports),
            ("prefix_copies_made", "Hot prefixes copied to second nodes of the store", copies.counts.made),
            ("prefix_copies_failed", "Hot prefixes that could not be copied", copies.counts.failed),
            ("disbelieved", "Instances that had not what they had said", counts.disbelieved),
        ];
        let gauges = [
            ("instances", "Instances registered", table.instances.len() as u64),
            ("doubted_instances", "Instances that missed reports", doubted(&table)),
            ("unreachable_instances", "Instances whose events nobody reaches", unreachable),
            ("waiting_requests", "Requests that wait", sum(|model| model.waiting)),
            ("requests", "Requests that wait or are booked", sum(|model| model.requests)),
            ("index_blocks", "Blocks in the prefix indexes", sum(|model| model.blocks)),
            ("prefix_copies", "Hot prefixes that have a copy", copies.prefixes as u64),
            ("prefix_copy_bytes", "Bytes of these copies and of those being made", copies.bytes),
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
}

fn doubted(table: &kvplane_rpc::conductor::InstanceTable) -> u64 {
    table.instances.iter().filter(|row| row.doubted).count() as u64
}
