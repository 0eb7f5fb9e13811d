//! Counters of an engine, by peer, transport and rail.

mod exposition;
mod text;

use std::collections::BTreeMap;

use kvplane_client::sched::Health;
use kvplane_client::{ClientMetrics, NodeCounts, PeerId, RailCounts, RailMetrics, Transport};
use kvplane_engine::{DeviceRegistration, PeerMemoryCounters, PoolReadCounters, StagingCounters, ZeroCopyCounters};
use kvplane_proto::Status;
use kvplane_proto::histogram::Histogram;
use kvplane_sys::device::DeviceId;

pub(crate) use exposition::Exposition;
pub(crate) use text::text;

/// Counters of one transport on one rail to one peer. The rail to a peer on the same host is listed twice if both of
/// its transports, `shm` and `cma`, were used.
#[derive(Clone, Debug)]
pub struct RailSnapshot {
    /// Index of the initiator.
    pub initiator: usize,
    /// Segment of the peer; this engine's own for copies within it.
    pub peer: String,
    /// Transport.
    pub transport: Transport,
    /// Index of the rail within its path.
    pub number: usize,
    /// Local RDMA device of the rail, if it is one over RDMA.
    pub device: Option<String>,
    /// Health: in use or not.
    pub health: Health,
    /// Measured bandwidth at present, in bytes a second.
    pub bytes_per_second: u64,
    /// Measured fixed latency.
    pub latency_ns: u64,
    /// Bytes in flight; if the rail is listed twice, all of them are in the first entry.
    pub inflight_bytes: u64,
    /// Completed slices.
    pub operations: u64,
    /// Payload bytes of the completed slices.
    pub bytes: u64,
    /// Slices that failed on it and were retried.
    pub retries: u64,
    /// Slices that another rail or transport took over.
    pub failovers: u64,
    /// Pauses of the rail.
    pub pauses: u64,
    /// Connections that were closed because nothing moved on them for too long, while other rails could take over.
    pub stalls: u64,
    /// Slices that took longer than [`TransferEngineConfig::slow`](crate::TransferEngineConfig::slow).
    pub slow: u64,
    /// Times that the path was found not to lead to the peer, such as shared memory into another container.
    pub unavailable: u64,
    /// Reason why the path does not lead to the peer, until it does again; other paths are used meanwhile.
    pub reason: Option<String>,
    /// Slices completed over RDMA, by whether the local device and the local memory are on one NUMA node.
    pub own_node: NodeCounts,
    /// Slices completed over RDMA, by whether the peer's device and memory are on one NUMA node, as far as known.
    pub peer_node: NodeCounts,
    /// Time that slices were queued for the rail.
    pub queue: Histogram,
    /// Time from posting to completion.
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
            stalls: counts.stalls,
            unavailable: counts.unavailable,
            reason: None,
            slow: counts.slow,
            own_node: counts.own_node,
            peer_node: counts.peer_node,
            queue: counts.queue.clone(),
            service: counts.service.clone(),
        }
    }

    /// Returns the label of the rail among those of its transport to its peer.
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
            stalls: self.stalls,
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
    /// Transport that failed.
    pub from: Transport,
    /// Transport that took over.
    pub to: Transport,
    /// Number of slices.
    pub slices: u64,
}

/// Time of each stage of a slow slice: the stages follow each other and add up to the total.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlowTransfer {
    /// Segment of the peer.
    pub peer: String,
    /// Last transport used.
    pub transport: Transport,
    /// Length of the slice.
    pub bytes: u64,
    /// Time of earlier attempts.
    pub earlier_ns: u64,
    /// Time that it was queued for a rail.
    pub queue_ns: u64,
    /// Time that it was queued on a connection, behind others.
    pub lane_ns: u64,
    /// Time from then, when its request or payload was sent or its copy began, to its completion.
    pub service_ns: u64,
    /// Number of earlier attempts that failed; ways of a segment that were found closed do not count.
    pub attempts: u8,
    /// Outcome.
    pub status: Status,
}

/// Counters of an engine since its start.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// All rails of all peers; copies within this process come first for each initiator.
    pub rails: Vec<RailSnapshot>,
    /// Counters of rails to peers that were closed since.
    pub departed: Vec<(Transport, RailCounts)>,
    /// Changes of transport.
    pub path_changes: Vec<PathChange>,
    /// Latest slow transfers of each initiator, oldest first.
    pub slow: Vec<SlowTransfer>,
    /// Payloads that were sent over TCP without a copy, or should have been. Payloads that peers read are counted by
    /// the serving thread: [`TransferEngine::snapshot`](crate::TransferEngine::snapshot).
    pub zero_copy: ZeroCopyCounters,
    /// Copies from and to each device that the transfers of this engine used.
    pub staging: BTreeMap<DeviceId, StagingCounters>,
    /// Registrations of device memory with the RDMA devices of each initiator, and those that were refused.
    pub registrations: Vec<DeviceRegistration>,
    /// Copies between memory of this process and device memory of peers on this host, which is mapped here: nothing of
    /// these is staged.
    pub peer_memory: PeerMemoryCounters,
    /// Gets of objects into memory of devices that copy engines carry out from the mapped pools of nodes of this host:
    /// nothing of these is staged.
    pub pool_reads: PoolReadCounters,
    /// Number of submitted batches.
    pub batches: u64,
    /// Number of batches in flight.
    pub in_flight: usize,
    /// Notices of batches that peers accepted.
    pub notices_sent: u64,
    /// Notices of batches that could not be delivered.
    pub notices_failed: u64,
    /// Bytes that this process, not only this engine, keeps forever because a device never released them.
    pub leaked_bytes: u64,
}

impl Metrics {
    /// Adds the counters of a client, on a host with these RDMA devices.
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
