//! Metrics of an engine as Prometheus text.

use std::collections::BTreeMap;

use kvplane_client::Transport;
use kvplane_engine::prometheus::Text;
use kvplane_engine::{PeerMemoryCounters, ShardSnapshot, StagingCounters};
use kvplane_sys::device::DeviceId;

use super::exposition::SeriesView;
use super::{Metrics, RailCounts};

/// Metric of a series: name, help text, and the function that reads its value.
type Counter = (&'static str, &'static str, fn(&RailCounts) -> u64);

/// Counters by device.
type Staging = BTreeMap<DeviceId, StagingCounters>;

const COUNTERS: [Counter; 8] = [
    ("kvplane_transfer_operations_total", "Completed slices.", |counts| counts.operations),
    ("kvplane_transfer_bytes_total", "Payload bytes of completed slices.", |counts| counts.bytes),
    ("kvplane_transfer_retries_total", "Slices that failed and were retried.", |counts| counts.retries),
    ("kvplane_transfer_failovers_total", "Slices that another rail or transport took over.", |counts| counts.failovers),
    ("kvplane_transfer_pauses_total", "Times that the rail was paused.", |counts| counts.pauses),
    ("kvplane_transfer_stalls_total", "Connections closed because nothing moved on them.", |counts| counts.stalls),
    ("kvplane_transfer_unavailable_total", "Times that the rail did not lead to the peer.", |counts| {
        counts.unavailable
    }),
    ("kvplane_transfer_slow_total", "Slices that took longer than the setting `slow`.", |counts| counts.slow),
];

/// Returns the metrics of an engine as Prometheus text: the series to show of its rails, the counters of the whole, and
/// what its serving thread counted.
pub(crate) fn text(metrics: &Metrics, shown: &[SeriesView], serving: Option<&ShardSnapshot>) -> String {
    let mut text = Text::default();
    series(&mut text, shown);
    whole(&mut text, metrics);
    if let Some(snapshot) = serving {
        served(&mut text, snapshot);
    }
    staging(&mut text, &metrics.staging, serving.map(|snapshot| &snapshot.staging));
    registrations(&mut text, metrics, serving);
    peer_memory(&mut text, &metrics.peer_memory);
    text.finish()
}

fn labels(one: &SeriesView) -> [(&str, &str); 3] {
    [("peer", &one.peer), ("transport", one.transport.name()), ("rail", &one.rail)]
}

fn series(text: &mut Text, shown: &[SeriesView]) {
    for (name, help, value) in COUNTERS {
        text.counter(name, help);
        shown.iter().for_each(|one| text.number(&labels(one), value(&one.counts)));
    }
    nodes(text, shown);
    text.histogram("kvplane_transfer_queue_seconds", "Time that slices were queued for the rail.");
    shown.iter().for_each(|one| text.times(&labels(one), &one.counts.queue));
    text.histogram("kvplane_transfer_service_seconds", "Time from posting on the rail to completion.");
    shown.iter().for_each(|one| text.times(&labels(one), &one.counts.service));
    let now: Vec<_> = shown.iter().filter_map(|one| Some((labels(one), one.now?))).collect();
    text.gauge("kvplane_transfer_inflight_bytes", "Bytes in flight on the rail.");
    now.iter().for_each(|(labels, now)| text.number(labels, now.inflight_bytes));
    text.gauge("kvplane_transfer_paused_rails", "Initiators for which the rail is paused after failures.");
    now.iter().for_each(|(labels, now)| text.number(labels, now.paused));
    text.gauge("kvplane_transfer_rail_bytes_per_second", "Bandwidth of the rail, measured or assumed.");
    now.iter().for_each(|(labels, now)| text.number(labels, now.bytes_per_second));
}

/// Appends the slices by NUMA locality of memory and device.
fn nodes(text: &mut Text, shown: &[SeriesView]) {
    text.counter(
        "kvplane_transfer_slices_by_node_total",
        "Slices over RDMA, by whether memory and device are on one NUMA node, locally and at the peer.",
    );
    for one in shown.iter().filter(|one| one.transport == Transport::Rdma) {
        let [peer, transport, rail] = labels(one);
        for (end, counts) in [("own", one.counts.own_node), ("peer", one.counts.peer_node)] {
            for (node, count) in [("same", counts.same), ("other", counts.other), ("unknown", counts.unknown)] {
                text.number(&[peer, transport, rail, ("end", end), ("node", node)], count);
            }
        }
    }
}

fn whole(text: &mut Text, metrics: &Metrics) {
    text.counter("kvplane_transfer_batches_total", "Batches submitted.");
    text.number(&[], metrics.batches);
    text.gauge("kvplane_transfer_batches_in_flight", "Batches in flight.");
    text.number(&[], metrics.in_flight as u64);
    text.counter("kvplane_transfer_notices_total", "Notices of batches, by whether their peers accepted them.");
    text.number(&[("result", "taken")], metrics.notices_sent);
    text.number(&[("result", "failed")], metrics.notices_failed);
    text.counter("kvplane_transfer_transport_changes_total", "Slices that another transport took over.");
    for change in &metrics.path_changes {
        text.number(&[("from", change.from.name()), ("to", change.to.name())], change.slices);
    }
}

/// Appends the copies between devices and pinned memory: for this engine's own transfers, and for those of peers.
fn staging(text: &mut Text, own: &Staging, served: Option<&Staging>) {
    let all: Vec<(String, &str, &StagingCounters)> = [("own", Some(own)), ("peer", served)]
        .into_iter()
        .filter_map(|(side, counters)| Some((side, counters?)))
        .flat_map(|(side, counters)| counters.iter().map(move |(device, counts)| (device.to_string(), side, counts)))
        .collect();
    text.counter("kvplane_staging_bytes_total", "Bytes copied between a device and pinned memory, for transfers.");
    for (device, side, counts) in &all {
        let labels = [("device", device.as_str()), ("side", *side)];
        for (direction, bytes) in [("to_host", counts.to_host_bytes), ("to_device", counts.to_device_bytes)] {
            text.number(&[labels[0], labels[1], ("direction", direction)], bytes);
        }
    }
    text.counter("kvplane_staging_batches_total", "Batches of these copies, each one call of the driver where it can.");
    all.iter().for_each(|(device, side, counts)| text.number(&[("device", device), ("side", side)], counts.batches));
    text.gauge("kvplane_staging_most_used_bytes", "Most pinned bytes that one thread had in use at one time.");
    all.iter().for_each(|(device, side, counts)| {
        text.number(&[("device", device), ("side", side)], counts.most_used_bytes);
    });
    text.counter("kvplane_staging_failures_total", "Requests whose copies from or to a device failed.");
    all.iter().for_each(|(device, side, counts)| text.number(&[("device", device), ("side", side)], counts.failed));
}

/// Appends the registrations of device memory with RDMA devices: for this engine's own transfers, and for its peers.
fn registrations(text: &mut Text, metrics: &Metrics, serving: Option<&ShardSnapshot>) {
    let served = serving.map_or(&[][..], |snapshot| &snapshot.rdma).iter().flat_map(|device| &device.registrations);
    let mut counts: BTreeMap<[String; 5], u64> = BTreeMap::new();
    for (side, one) in metrics.registrations.iter().map(|one| ("own", one)).chain(served.map(|one| ("peer", one))) {
        let reason = one.path.obstacle().map_or("", |obstacle| obstacle.kind.name());
        let labels = [&one.device.to_string(), &one.nic, one.path.name(), reason, side].map(str::to_owned);
        *counts.entry(labels).or_default() += 1;
    }
    text.gauge(
        "kvplane_device_registrations",
        "Registrations of device memory with RDMA devices, by the way in which these access it, and the reason why not \
         through a dma-buf.",
    );
    for ([device, nic, path, reason, side], count) in &counts {
        text.number(&[("device", device), ("nic", nic), ("path", path), ("reason", reason), ("side", side)], *count);
    }
}

/// Appends the copies from and to device memory of peers that is mapped here.
fn peer_memory(text: &mut Text, counts: &PeerMemoryCounters) {
    text.counter(
        "kvplane_peer_device_bytes_total",
        "Bytes copied between our memory and mapped device memory of peers.",
    );
    text.number(&[("direction", "read")], counts.read_bytes);
    text.number(&[("direction", "write")], counts.written_bytes);
    text.counter(
        "kvplane_peer_device_batches_total",
        "Batches of these copies, each one call of the driver where it can.",
    );
    text.number(&[], counts.batches);
    text.counter("kvplane_peer_device_refusals_total", "Segments of device memory that could not be mapped: staged.");
    text.number(&[], counts.refused);
    text.gauge("kvplane_peer_device_mappings", "Mappings of device memory of peers.");
    text.number(&[], counts.mappings);
}

/// Appends the requests served to peers. Copies that peers make themselves are not seen here: the peers count them.
fn served(text: &mut Text, snapshot: &ShardSnapshot) {
    let service = &snapshot.service;
    text.counter("kvplane_transfer_served_requests_total", "Requests of peers, by their protocol.");
    text.number(&[("protocol", "kvplane")], service.requests);
    text.number(&[("protocol", "mooncake")], snapshot.mooncake.reads + snapshot.mooncake.writes);
    text.counter("kvplane_transfer_served_bytes_total", "Bytes that peers read and wrote over the native protocol.");
    text.number(&[("operation", "read")], service.read_bytes);
    text.number(&[("operation", "write")], service.write_bytes);
    text.counter("kvplane_transfer_served_corrupt_total", "Payloads that did not match their checksum.");
    text.number(&[], service.corrupt);
    text.gauge("kvplane_transfer_served_connections", "Connections of peers.");
    text.number(&[], snapshot.connections);
    text.counter("kvplane_transfer_serving_cpu_nanoseconds_total", "CPU time of the serving thread.");
    text.number(&[], snapshot.cpu_ns);
}
