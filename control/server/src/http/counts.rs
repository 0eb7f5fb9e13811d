//! Counters of connections, calls and HTTP requests, and their rendering as Prometheus text.
//!
//! Counting is an addition to a plain number. A scrape copies all numbers into a fresh recorder and renders that, so
//! nothing is global and a removed node leaves no series behind.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use kvplane_rpc::message::MemberStatus;
use kvplane_rpc::{Event, Rejection};
use metrics::{Unit, counter, describe_counter, describe_gauge, gauge, with_local_recorder};
use metrics_exporter_prometheus::PrometheusBuilder;

use crate::cluster::view::View;
use crate::http::mooncake_metrics;

/// States of a member in the order of the state table, so that an unused one shows as 0.
const STATES: [&str; 6] = ["joining", "active", "suspect", "draining", "dead", "left"];

#[derive(Default)]
struct Numbers {
    connections: u64,
    bad_frames: u64,
    rejected: BTreeMap<Rejection, u64>,
    calls: BTreeMap<(&'static str, bool), u64>,
    http: BTreeMap<(&'static str, u16), u64>,
}

/// Counters of one control plane. Methods, paths and reasons are fixed sets, so the tables are small.
#[derive(Default)]
pub(crate) struct Counts {
    numbers: Mutex<Numbers>,
}

impl Counts {
    fn with<T>(&self, change: impl FnOnce(&mut Numbers) -> T) -> T {
        // Numbers are consistent at every point, so a panic elsewhere does not spoil them.
        change(&mut self.numbers.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn observe(&self, event: Event) {
        self.with(|numbers| match event {
            Event::Connected => numbers.connections += 1,
            Event::Disconnected => numbers.connections = numbers.connections.saturating_sub(1),
            Event::Rejected(reason) => *numbers.rejected.entry(reason).or_default() += 1,
            Event::BadFrame => numbers.bad_frames += 1,
            Event::Called { method, ok } => *numbers.calls.entry((method, ok)).or_default() += 1,
        });
    }

    pub(crate) fn observe_http(&self, path: &'static str, status: u16) {
        self.with(|numbers| *numbers.http.entry((path, status)).or_default() += 1);
    }

    /// Renders all numbers as Prometheus text.
    pub(crate) fn render(&self, view: &View) -> String {
        let recorder = PrometheusBuilder::new().build_recorder();
        with_local_recorder(&recorder, || {
            describe();
            self.with(|numbers| fill_rim(numbers));
            fill_cluster(view);
        });
        let calls = |method: &str| {
            self.with(|numbers| {
                let of = |ok| numbers.calls.iter().find(|((name, was), _)| *name == method && *was == ok);
                let count = |ok| of(ok).map_or(0, |(_, count)| *count);
                (count(true) + count(false), count(false))
            })
        };
        recorder.handle().render() + &mooncake_metrics::render(view, &calls)
    }
}

fn describe() {
    let gauges = [
        ("kvplane_cluster_epoch", Unit::Count, "Epoch of the cluster map."),
        ("kvplane_cluster_segments", Unit::Count, "Segments in the catalog."),
        ("kvplane_members", Unit::Count, "Nodes known, by state; dead and left ones are ended incarnations."),
        ("kvplane_node_objects", Unit::Count, "Objects of a live node, by its last heartbeat."),
        ("kvplane_node_used_bytes", Unit::Bytes, "Bytes in use of a live node's pools, by its last heartbeat."),
        ("kvplane_node_capacity_bytes", Unit::Bytes, "Bytes of a live node's pools."),
        ("kvplane_uptime_seconds", Unit::Seconds, "Time since the control plane's start."),
        ("kvplane_rpc_connections", Unit::Count, "Open control connections."),
    ];
    for (name, unit, text) in gauges {
        describe_gauge!(name, unit, text);
    }
    let counters = [
        ("kvplane_rpc_calls_total", "Calls, by method and result."),
        ("kvplane_rpc_rejected_connections_total", "Connections rejected, by reason."),
        ("kvplane_rpc_bad_frames_total", "Connections closed because of malformed messages."),
        ("kvplane_http_requests_total", "HTTP requests, by path and status."),
        ("kvplane_cluster_joins_total", "Incarnations of nodes that joined."),
        ("kvplane_cluster_expulsions_total", "Members that failed and were expelled."),
        ("kvplane_cluster_suspicions_total", "Times that a member became suspect."),
        ("kvplane_cluster_rejections_total", "Inputs that the cluster refused."),
        ("kvplane_cluster_late_calls_total", "Times that the control plane itself was late."),
        ("kvplane_control_adoptions_total", "Times that a state offered by members was adopted."),
    ];
    for (name, text) in counters {
        describe_counter!(name, Unit::Count, text);
    }
}

fn fill_rim(numbers: &Numbers) {
    gauge!("kvplane_rpc_connections").set(numbers.connections as f64);
    counter!("kvplane_rpc_bad_frames_total").absolute(numbers.bad_frames);
    for reason in Rejection::ALL {
        let count = numbers.rejected.get(&reason).copied().unwrap_or(0);
        counter!("kvplane_rpc_rejected_connections_total", "reason" => reason.name()).absolute(count);
    }
    for (&(method, ok), &count) in &numbers.calls {
        let result = if ok { "ok" } else { "refused" };
        counter!("kvplane_rpc_calls_total", "method" => method, "result" => result).absolute(count);
    }
    for (&(path, status), &count) in &numbers.http {
        counter!("kvplane_http_requests_total", "path" => path, "status" => status.to_string()).absolute(count);
    }
}

fn fill_cluster(view: &View) {
    gauge!("kvplane_cluster_epoch").set(view.epoch as f64);
    gauge!("kvplane_cluster_segments").set(view.segments.len() as f64);
    gauge!("kvplane_uptime_seconds").set(view.uptime_ns as f64 / 1e9);
    for state in STATES {
        let count = view.members.iter().filter(|member| member.state == state).count();
        gauge!("kvplane_members", "state" => state).set(count as f64);
    }
    view.members.iter().filter(|member| is_live(member)).for_each(fill_node);
    let counters = &view.counters;
    counter!("kvplane_cluster_joins_total").absolute(counters.joins);
    counter!("kvplane_cluster_expulsions_total").absolute(counters.losses);
    counter!("kvplane_cluster_suspicions_total").absolute(counters.suspicions);
    counter!("kvplane_cluster_rejections_total").absolute(counters.rejections);
    counter!("kvplane_cluster_late_calls_total").absolute(counters.late_calls);
    counter!("kvplane_control_adoptions_total").absolute(counters.adoptions);
}

pub(crate) fn is_live(member: &MemberStatus) -> bool {
    !matches!(member.state.as_str(), "dead" | "left")
}

fn fill_node(member: &MemberStatus) {
    let node = member.node.to_string();
    let load = member.load.unwrap_or_default();
    // Before the first heartbeat, only the capacity reported at the join is known.
    let capacity_bytes = member.load.map_or(member.capacity_bytes, |load| load.capacity_bytes);
    gauge!("kvplane_node_objects", "node" => node.clone()).set(load.objects as f64);
    gauge!("kvplane_node_used_bytes", "node" => node.clone()).set(load.used_bytes as f64);
    gauge!("kvplane_node_capacity_bytes", "node" => node).set(capacity_bytes as f64);
}
