//! Metrics of the control plane as Prometheus text: its own, the cluster's, those of process groups, the Conductor's,
//! and those under the names of Mooncake's master.
//!
//! A scrape copies all numbers into a fresh recorder and renders that, so nothing is global and a removed node leaves
//! no series behind.

use kvplane_rpc::Rejection;
use kvplane_rpc::message::{MemberStatus, TenantSsdStatus};
use metrics::{Unit, counter, describe_counter, describe_gauge, gauge, with_local_recorder};
use metrics_exporter_prometheus::PrometheusBuilder;

use crate::cluster::view::View;
use crate::control::Control;
use crate::counts::{MetricKind, Numbers};
use crate::http::mooncake_metrics;

/// States of a member in the order of the state table, so that an unused one shows as 0.
const STATES: [&str; 6] = ["joining", "active", "suspect", "draining", "dead", "left"];

/// Renders all numbers of a leader.
pub(crate) fn render(control: &Control, view: &View) -> String {
    let numbers = &control.counts.numbers();
    let recorder = PrometheusBuilder::new().build_recorder();
    let calls = |method: &str| {
        let (answered, refused) = numbers.calls_of(method);
        (answered + refused, refused)
    };
    let sums = mooncake_metrics::Sums::of(view, &calls);
    with_local_recorder(&recorder, || {
        describe();
        record_leadership(true);
        record_rim(numbers);
        record_cluster(view);
        mooncake_metrics::record(&sums);
        control.worlds.record_metrics();
        if let Some(conductor) = &control.conductor {
            conductor.record_metrics();
        }
    });
    recorder.handle().render() + &mooncake_metrics::sizes_text(&sums)
}

/// Renders all numbers of a standby.
pub(crate) fn render_standby() -> String {
    let recorder = PrometheusBuilder::new().build_recorder();
    with_local_recorder(&recorder, || record_leadership(false));
    recorder.handle().render()
}

fn record_leadership(leads: bool) {
    let help = "1 if this control plane is the leader, 0 if it is a standby.";
    MetricKind::Gauge.record(&[("kvplane_control_leads", help, leads.into())]);
}

/// A metric of each tenant's use of SSDs: name, type, help, and its value.
type TenantSsdNumber = (&'static str, MetricKind, &'static str, fn(&TenantSsdStatus) -> u64);

/// Metrics of every tenant's use of SSDs.
const OF_TENANT_SSDS: [TenantSsdNumber; 6] = [
    ("kvplane_tenant_ssd_used_bytes", MetricKind::Gauge, "Bytes of a tenant's live records on SSDs.", |one| {
        one.used_bytes
    }),
    ("kvplane_tenant_ssd_quota_bytes", MetricKind::Gauge, "A tenant's quota of SSD bytes; 0 for none.", |one| {
        one.ssd.ssd_bytes.unwrap_or(0)
    }),
    ("kvplane_tenant_ssd_leased_bytes", MetricKind::Gauge, "Bytes of that quota leased to shards.", |one| {
        one.leased_bytes.unwrap_or(0)
    }),
    ("kvplane_tenant_ssd_weight", MetricKind::Gauge, "A tenant's weight in the bandwidth of SSDs.", |one| {
        one.ssd.weight.unwrap_or(1).into()
    }),
    ("kvplane_tenant_ssd_evicted_bytes_total", MetricKind::Counter, "Bytes evicted from SSDs for the quota.", |one| {
        one.evicted_bytes
    }),
    ("kvplane_tenant_ssd_refused_total", MetricKind::Counter, "Writes to SSDs that the quota refused.", |one| {
        one.refused
    }),
];

fn record_tenant_ssds(view: &View) {
    for (name, kind, help, value) in OF_TENANT_SSDS {
        kind.describe(name, help);
        for tenant in &view.tenant_ssds.tenants {
            let called = if tenant.name.is_empty() { "default" } else { &tenant.name };
            kind.set_labelled(name, "tenant", called, value(tenant));
        }
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

fn record_rim(numbers: &Numbers) {
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

fn record_cluster(view: &View) {
    gauge!("kvplane_cluster_epoch").set(view.epoch as f64);
    gauge!("kvplane_cluster_segments").set(view.segments.len() as f64);
    gauge!("kvplane_uptime_seconds").set(view.uptime_ns as f64 / 1e9);
    for state in STATES {
        let count = view.members.iter().filter(|member| member.state == state).count();
        gauge!("kvplane_members", "state" => state).set(count as f64);
    }
    view.members.iter().filter(|member| is_live(member)).for_each(record_node);
    let counters = &view.counters;
    counter!("kvplane_cluster_joins_total").absolute(counters.joins);
    counter!("kvplane_cluster_expulsions_total").absolute(counters.losses);
    counter!("kvplane_cluster_suspicions_total").absolute(counters.suspicions);
    counter!("kvplane_cluster_rejections_total").absolute(counters.rejections);
    counter!("kvplane_cluster_late_calls_total").absolute(counters.late_calls);
    counter!("kvplane_control_adoptions_total").absolute(counters.adoptions);
    record_tenant_ssds(view);
}

pub(crate) fn is_live(member: &MemberStatus) -> bool {
    !matches!(member.state.as_str(), "dead" | "left")
}

fn record_node(member: &MemberStatus) {
    let node = member.node.to_string();
    let load = member.load.unwrap_or_default();
    // Before the first heartbeat, only the capacity reported at the join is known.
    let capacity_bytes = member.load.map_or(member.capacity_bytes, |load| load.capacity_bytes);
    gauge!("kvplane_node_objects", "node" => node.clone()).set(load.objects as f64);
    gauge!("kvplane_node_used_bytes", "node" => node.clone()).set(load.used_bytes as f64);
    gauge!("kvplane_node_capacity_bytes", "node" => node).set(capacity_bytes as f64);
}
