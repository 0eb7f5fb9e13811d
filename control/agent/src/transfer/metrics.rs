//! What an engine counted, by peer, path and rail.

use kvplane_proto::Status;
use kvplane_proto::client::{Client, Path, PeerId, RailMetrics};
use kvplane_proto::sched::{Health, Histogram};

use super::TransferEngine;

/// One way to one peer.
#[derive(Clone, Debug)]
pub struct RailSnapshot {
    /// Which of the engine's initiators.
    pub initiator: usize,
    /// The peer's segment.
    pub peer: String,
    /// How its bytes travel.
    pub path: Path,
    /// Its number among the rails of that path.
    pub number: usize,
    /// Whether it is in use.
    pub health: Health,
    /// What it serves at the moment, by measurement.
    pub bytes_per_second: u64,
    /// Its fixed latency, by measurement.
    pub latency_ns: u64,
    /// Bytes posted and not done.
    pub inflight_bytes: u64,
    /// Slices done.
    pub operations: u64,
    /// Payload bytes of those.
    pub bytes: u64,
    /// Slices that it failed and that were sent again.
    pub retries: u64,
    /// Slices that it had and that another rail or path took over.
    pub failovers: u64,
    /// Times that it was paused.
    pub pauses: u64,
    /// Times that it was found not to lead to the peer from here, as shared memory does not into another container.
    pub unavailable: u64,
    /// Why it does not, until it was found to again; other paths are used meanwhile.
    pub reason: Option<String>,
    /// Time that slices waited for it.
    pub queue: Histogram,
    /// Time from being posted on it to being done.
    pub service: Histogram,
}

/// Slices that moved from one path to another after a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathChange {
    /// The path that failed.
    pub from: Path,
    /// The path that took over.
    pub to: Path,
    /// How many.
    pub slices: u64,
}

/// Where a slow slice spent its time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlowTransfer {
    /// The peer's segment.
    pub peer: String,
    /// Over which path.
    pub path: Path,
    /// Bytes that it was to move.
    pub bytes: u64,
    /// Time that it waited to be posted.
    pub queue_ns: u64,
    /// Time from then to its end.
    pub service_ns: u64,
    /// Times that it was sent before.
    pub attempts: u8,
    /// Its outcome.
    pub status: Status,
}

/// What an engine counted since it started.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Every rail of every peer that was asked.
    pub rails: Vec<RailSnapshot>,
    /// Changes of path.
    pub path_changes: Vec<PathChange>,
    /// The latest slow transfers of each initiator, oldest first.
    pub slow: Vec<SlowTransfer>,
    /// Batches submitted.
    pub batches: u64,
    /// Batches in flight.
    pub in_flight: usize,
    /// Notices of batches that their peers took.
    pub notices_sent: u64,
    /// Notices of batches that could not be delivered.
    pub notices_failed: u64,
}

impl TransferEngine {
    /// What was counted so far. Costs the initiators a moment each.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let (notices_sent, notices_failed) = self.courier.counts();
        let mut metrics = Metrics { batches: self.submitted(), notices_sent, notices_failed, ..Metrics::default() };
        for (number, driver) in self.drivers.iter().enumerate() {
            metrics.in_flight += driver.in_flight();
            driver.with(|core| {
                let Some((client, names)) = core.books() else { return };
                // A peer without a name is being closed.
                metrics.add(number, client, &|peer| names.get(&peer).cloned().unwrap_or_default());
            });
        }
        metrics
    }
}

impl Metrics {
    pub(super) fn add(&mut self, initiator: usize, client: &Client, name: &dyn Fn(PeerId) -> String) {
        self.rails.extend(client.rail_metrics().map(|rail| snapshot(initiator, &rail, name(rail.peer))));
        for change in client.failovers() {
            match self.path_changes.iter_mut().find(|one| (one.from, one.to) == (change.from, change.to)) {
                Some(one) => one.slices += change.slices,
                None => self.path_changes.push(PathChange { from: change.from, to: change.to, slices: change.slices }),
            }
        }
        self.slow.extend(client.slow_operations().map(|slow| SlowTransfer {
            peer: name(slow.peer),
            path: slow.path,
            bytes: slow.bytes,
            queue_ns: slow.posted_ns.saturating_sub(slow.queued_ns),
            service_ns: slow.done_ns.saturating_sub(slow.posted_ns),
            attempts: slow.attempts,
            status: slow.status,
        }));
    }
}

fn snapshot(initiator: usize, rail: &RailMetrics<'_>, peer: String) -> RailSnapshot {
    let counts = rail.counts;
    RailSnapshot {
        initiator,
        peer,
        path: rail.path,
        number: rail.number,
        health: rail.health,
        bytes_per_second: rail.bytes_per_second,
        latency_ns: rail.latency_ns,
        inflight_bytes: rail.inflight_bytes,
        operations: counts.operations,
        bytes: counts.bytes,
        retries: counts.retries,
        failovers: counts.failovers,
        pauses: counts.pauses,
        unavailable: counts.unavailable,
        reason: rail.unavailable.map(str::to_owned),
        queue: counts.queue.clone(),
        service: counts.service.clone(),
    }
}
