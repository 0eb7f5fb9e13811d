//! State of the cluster and its nodes at one moment, as HTTP and `status` show it.

use std::collections::BTreeMap;
use std::time::Instant;

use kvplane_cluster::{Counters, MemberState, MemberView};
use kvplane_rpc::Refusal;
use kvplane_rpc::message::{MemberStatus, Segment, ShardNode, TenantList, TenantSsdList};

use crate::cluster::ClusterHost;
use crate::nodes::follow::PublishedEvents;

/// State of the control plane at one moment, for HTTP.
pub(crate) struct View {
    pub(crate) cluster: String,
    pub(crate) epoch: u64,
    pub(crate) replicas: u8,
    pub(crate) counters: Counters,
    pub(crate) uptime_ns: u64,
    pub(crate) members: Vec<MemberStatus>,
    pub(crate) segments: Vec<Segment>,
    pub(crate) shards: Vec<ShardNode>,
    pub(crate) published: PublishedEvents,
    pub(crate) is_followed: bool,
    pub(crate) tenants: TenantList,
    pub(crate) tenant_ssds: TenantSsdList,
}

/// Slots and objects of the last known incarnation of a node.
pub(crate) struct NodeHoldings {
    pub(crate) incarnation: u64,
    pub(crate) state: MemberState,
    /// True if the node has its share of the slots.
    pub(crate) shared: bool,
    /// True if other members have not received everything yet that moved to them.
    pub(crate) moving: bool,
    /// Time of its last message since this start.
    pub(crate) heard: Option<Instant>,
    /// Objects in memory and on SSDs, by its last reports.
    pub(crate) objects: Option<u64>,
    /// Bytes in memory.
    pub(crate) bytes: u64,
}

impl View {
    /// Returns the present state.
    ///
    /// # Errors
    /// When the control plane has failed.
    pub(crate) fn of(host: &ClusterHost) -> Result<Self, Refusal> {
        let hosted = host.lock()?;
        let (now_ns, cluster, nodes) = (host.now_ns(), hosted.cluster(), &hosted.nodes);
        Ok(Self {
            cluster: cluster.config().cluster.clone(),
            epoch: hosted.epoch(),
            replicas: cluster.config().replicas,
            counters: cluster.counters(),
            uptime_ns: now_ns,
            members: cluster.members().map(|member| member_status(&member, now_ns)).collect(),
            segments: cluster.segments().cloned().collect(),
            shards: nodes.shards.list(None, now_ns),
            published: nodes.follow.published,
            is_followed: nodes.follow.is_watched(),
            tenants: hosted.tenants(),
            tenant_ssds: hosted.tenant_ssds(),
        })
    }
}

fn member_status(view: &MemberView<'_>, now_ns: u64) -> MemberStatus {
    MemberStatus {
        node: view.member.node.0,
        incarnation: view.member.incarnation.0,
        state: format!("{:?}", view.state).to_lowercase(),
        weight: view.member.weight,
        // A member has at most a few hundred shards.
        shards: view.member.shards.len() as u32,
        failure_domain: view.member.failure_domain.clone(),
        host: view.member.host.clone(),
        version: view.version.to_owned(),
        capacity_bytes: if view.state.is_live() { view.capacity_bytes } else { 0 },
        silent_ns: view.heard_ns.map(|heard_ns| now_ns.saturating_sub(heard_ns)),
        load: view.load,
    }
}

impl NodeHoldings {
    /// Returns the slots and objects of members, by node id.
    ///
    /// # Errors
    /// When the control plane has failed.
    pub(crate) fn of_members(host: &ClusterHost) -> Result<BTreeMap<u64, Self>, Refusal> {
        let now_ns = host.now_ns();
        let mut hosted = host.lock()?;
        hosted.forget_gone();
        let mut on_ssds = BTreeMap::new();
        for node in hosted.nodes.tiers.list(None, now_ns) {
            on_ssds.insert(node.node, node.shards.iter().map(|shard| shard.objects).sum());
        }
        let moving = hosted.cluster().is_moving();
        let holding = |view: MemberView<'_>| Self {
            incarnation: view.member.incarnation.0,
            state: view.state,
            shared: view.shared,
            moving,
            heard: view.heard_ns.map(|heard_ns| host.instant(heard_ns)),
            objects: view.load.map(|load| load.objects + on_ssds.get(&view.member.node.0).copied().unwrap_or(0)),
            bytes: view.load.map_or(0, |load| load.used_bytes),
        };
        Ok(hosted.cluster().members().map(|view| (view.member.node.0, holding(view))).collect())
    }
}
