//! What an engine counted, by peer, transport and rail.

mod exposition;
mod text;

use kvplane_client::sched::Health;
use kvplane_client::{ClientMetrics, NodeCounts, PeerId, RailCounts, RailMetrics, Transport};
use kvplane_engine::ZeroCopyCounters;
use kvplane_proto::Status;
use kvplane_proto::histogram::Histogram;

use crate::TransferEngine;
pub(crate) use exposition::Exposition;

/// One way to one peer: what one transport did on one rail. The rail to a peer on the same host is there twice where
/// both of its transports, `shm` and `cma`, were used.
#[derive(Clone, Debug)]
pub struct RailSnapshot {
    /// Which of the engine's initiators.
    pub initiator: usize,
    /// The peer's segment; this engine's own for copies within it.
    pub peer: String,
    /// What carried the bytes.
    pub transport: Transport,
    /// Its number among the rails of its path.
    pub number: usize,
    /// Our RDMA device on it, where it is one over RDMA.
    pub device: Option<String>,
    /// Whether it is in use.
    pub health: Health,
    /// What it serves at the moment, by measurement.
    pub bytes_per_second: u64,
    /// Its fixed latency, by measurement.
    pub latency_ns: u64,
    /// Bytes posted and not done; of a rail that is there twice, all of them at its first place.
    pub inflight_bytes: u64,
    /// Slices done.
    pub operations: u64,
    /// Payload bytes of those.
    pub bytes: u64,
    /// Slices that it failed and that were sent again.
    pub retries: u64,
    /// Slices that it had and that another rail or transport took over.
    pub failovers: u64,
    /// Times that it was paused.
    pub pauses: u64,
    /// Connections that were given up as nothing moved on them for too long, while other rails could take over.
    pub silences: u64,
    /// Slices that took longer than [`TransferEngineConfig::slow`](crate::TransferEngineConfig::slow).
    pub slow: u64,
    /// Times that it was found not to lead to the peer from here, as shared memory does not into another container.
    pub unavailable: u64,
    /// Why it does not, until it was found to again; other paths are used meanwhile.
    pub reason: Option<String>,
    /// Slices done on a rail over RDMA, by whether our device and our memory are on one NUMA node.
    pub own_node: NodeCounts,
    /// The same of the peer's device and its memory, as far as it told.
    pub peer_node: NodeCounts,
    /// Time that slices waited for it.
    pub queue: Histogram,
    /// Time from being posted on it to being done.
    pub service: Histogram,
}

impl RailSnapshot {
    pub(crate) fn new(
        initiator: usize,
        peer: String,
        transport: Transport,
        health: Health,
        counts: &RailCounts,
    ) -> Self {
        Self {
            initiator,
            peer,
            transport,
            number: 0,
            device: None,
            health,
            bytes_per_second: 0,
            latency_ns: 0,
            inflight_bytes: 0,
            operations: counts.operations,
            bytes: counts.bytes,
            retries: counts.retries,
            failovers: counts.failovers,
            pauses: counts.pauses,
            silences: counts.silences,
            unavailable: counts.unavailable,
            reason: None,
            slow: counts.slow,
            own_node: counts.own_node,
            peer_node: counts.peer_node,
            queue: counts.queue.clone(),
            service: counts.service.clone(),
        }
    }

    /// What it is called among the rails of its transport to its peer.
    fn label(&self) -> String {
        self.device.clone().unwrap_or_else(|| self.number.to_string())
    }

    fn counts(&self) -> RailCounts {
        RailCounts {
            operations: self.operations,
            bytes: self.bytes,
            retries: self.retries,
            failovers: self.failovers,
            pauses: self.pauses,
            silences: self.silences,
            unavailable: self.unavailable,
            slow: self.slow,
            own_node: self.own_node,
            peer_node: self.peer_node,
            queue: self.queue.clone(),
            service: self.service.clone(),
        }
    }
}

/// Slices that moved from one transport to another after a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathChange {
    /// The transport that failed.
    pub from: Transport,
    /// The transport that took over.
    pub to: Transport,
    /// How many.
    pub slices: u64,
}

/// Where a slow slice spent its time: the stages follow each other and add up to all of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlowTransfer {
    /// The peer's segment.
    pub peer: String,
    /// What carried it last.
    pub transport: Transport,
    /// Bytes that it was to move.
    pub bytes: u64,
    /// Time that earlier attempts took.
    pub earlier_ns: u64,
    /// Time that it waited for a rail.
    pub queue_ns: u64,
    /// Time that it was bound to a connection and behind others there.
    pub lane_ns: u64,
    /// Time from then, when its request or payload left or its copy was next, to its end.
    pub service_ns: u64,
    /// Times that it was sent before.
    pub attempts: u8,
    /// Its outcome.
    pub status: Status,
}

/// What an engine counted since it started.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Every rail of every peer that was asked; copies within this process first of each initiator.
    pub rails: Vec<RailSnapshot>,
    /// What the rails of peers had counted that were left since.
    pub departed: Vec<(Transport, RailCounts)>,
    /// Changes of transport.
    pub path_changes: Vec<PathChange>,
    /// The latest slow transfers of each initiator, oldest first.
    pub slow: Vec<SlowTransfer>,
    /// Payloads of requests that left over TCP without a copy, or should have. What peers read is counted by the
    /// serving thread: [`TransferEngine::snapshot`].
    pub zero_copy: ZeroCopyCounters,
    /// Batches submitted.
    pub batches: u64,
    /// Batches in flight.
    pub in_flight: usize,
    /// Notices of batches that their peers took.
    pub notices_sent: u64,
    /// Notices of batches that could not be delivered.
    pub notices_failed: u64,
    /// Bytes that this process, and not this engine alone, keeps for good because a device never gave them back.
    pub leaked_bytes: u64,
}

impl TransferEngine {
    /// What was counted so far. Costs the initiators a moment each.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let (notices_sent, notices_failed) = self.courier.counts();
        let (batches, leaked_bytes) = (self.submitted(), kvplane_sys::ring::leaked().bytes);
        let mut metrics = Metrics { batches, notices_sent, notices_failed, leaked_bytes, ..Metrics::default() };
        for (number, driver) in self.drivers.iter().enumerate() {
            metrics.in_flight += driver.in_flight();
            driver.copies.add_to(&mut metrics, number, self.name());
            driver.with(|core| {
                metrics.zero_copy.add(&core.zero_copy());
                let devices = core.devices();
                let Some((client, names)) = core.books() else { return };
                // A peer without a name is being closed.
                metrics.add(number, client, &devices, &|peer| names.get(&peer).cloned().unwrap_or_default());
            });
        }
        metrics
    }
}

impl Metrics {
    /// Adds what a client counted, of a host with these RDMA devices.
    pub fn add(
        &mut self,
        initiator: usize,
        client: ClientMetrics<'_>,
        devices: &[String],
        name: &dyn Fn(PeerId) -> String,
    ) {
        let device = |rail: &RailMetrics<'_>| devices.get(usize::from(rail.devices?.own)).cloned();
        self.rails.extend(
            client
                .rail_metrics()
                .map(|rail| RailSnapshot { device: device(&rail), ..snapshot(initiator, &rail, name(rail.peer)) }),
        );
        for (transport, counts) in client.departed_metrics() {
            match self.departed.iter_mut().find(|(other, _)| other == transport) {
                Some((_, sum)) => sum.add(counts),
                None => self.departed.push((*transport, counts.clone())),
            }
        }
        for change in client.failovers() {
            match self.path_changes.iter_mut().find(|one| (one.from, one.to) == (change.from, change.to)) {
                Some(one) => one.slices += change.slices,
                None => self.path_changes.push(PathChange { from: change.from, to: change.to, slices: change.slices }),
            }
        }
        self.slow.extend(client.slow_operations().map(|slow| SlowTransfer {
            peer: name(slow.peer),
            transport: slow.transport,
            bytes: slow.bytes,
            earlier_ns: slow.queued_ns.saturating_sub(slow.begun_ns),
            queue_ns: slow.posted_ns.saturating_sub(slow.queued_ns),
            lane_ns: slow.sent_ns.saturating_sub(slow.posted_ns),
            service_ns: slow.done_ns.saturating_sub(slow.sent_ns),
            attempts: slow.attempts,
            status: slow.status,
        }));
    }
}

fn snapshot(initiator: usize, rail: &RailMetrics<'_>, peer: String) -> RailSnapshot {
    RailSnapshot {
        number: rail.number,
        bytes_per_second: rail.bytes_per_second,
        latency_ns: rail.latency_ns,
        inflight_bytes: rail.inflight_bytes,
        reason: rail.unavailable.map(str::to_owned),
        ..RailSnapshot::new(initiator, peer, rail.transport, rail.health, rail.counts)
    }
}
