//! Control plane of a leader: its components, as QUIC and HTTP use them, and the order of their locks. QUIC calls it as
//! a [`kvplane_rpc::Service`] (`control/calls.rs`).
//!
//! | component | owns | lock |
//! |---|---|---|
//! | [`ClusterHost`] | the cluster, its durable state, what is known of its nodes, tickets | one for all of it |
//! | [`ConductorService`] | the Conductor and its streams; the event feeds that are followed | one for each |
//! | [`P2p`] | the catalog of the P2P store and the streams of fetch orders | one |
//! | [`TaskHost`] | replication tasks | one |
//! | [`Worlds`] | the worlds of processes with their groups, and the streams of statuses | one |
//! | [`Counts`] | counters of connections, calls and HTTP requests | one |
//!
//! Everything runs on one thread, so no lock is contended: each says which values change together, and none is held
//! while something is awaited. Where one is taken under another, the order is: feeds, Conductor or worlds, cluster. The
//! Conductor and the worlds take the cluster's to make their changes durable before they answer. All others are taken
//! alone.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use kvplane_cluster::{Input, MemberState, Reply};
use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_rpc::message::{EmptyReply, RemoveTenant, SetTenant};
use kvplane_rpc::{Refusal, RefusalCode};

use crate::cluster::ClusterHost;
use crate::cluster::view::NodeHoldings;
use crate::conductor::ConductorService;
use crate::counts::Counts;
use crate::p2p::P2p;
use crate::tasks::TaskHost;
use crate::worlds::Worlds;

mod calls;

/// Program and version, as reported to callers.
pub(crate) const SOFTWARE: &str = concat!("kvplane-control ", env!("CARGO_PKG_VERSION"));

/// The control plane, as its endpoints use it.
pub(crate) struct Control {
    pub(crate) cluster: Arc<ClusterHost>,
    /// The Conductor, if enabled.
    pub(crate) conductor: Option<Arc<ConductorService>>,
    /// Host of the P2P store.
    pub(crate) p2p: Arc<P2p>,
    /// Host of replication tasks.
    pub(crate) tasks: Arc<TaskHost>,
    /// Host of process groups.
    pub(crate) worlds: Arc<Worlds>,
    pub(crate) counts: Counts,
    address: OnceLock<SocketAddr>,
}

impl Control {
    /// Joins the components to a control plane.
    pub(crate) fn new(
        cluster: Arc<ClusterHost>,
        conductor: Option<Arc<ConductorService>>,
        p2p: P2p,
        worlds: Worlds,
    ) -> Self {
        let tasks = Arc::new(TaskHost::new(Arc::clone(&cluster)));
        let (p2p, worlds, counts) = (Arc::new(p2p), Arc::new(worlds), Counts::default());
        Self { cluster, conductor, p2p, tasks, worlds, counts, address: OnceLock::new() }
    }

    /// Returns the Conductor.
    pub(crate) fn conductor(&self) -> Result<&Arc<ConductorService>, Refusal> {
        self.conductor.as_ref().ok_or_else(|| {
            let reason = "this control plane runs without a Conductor; start it with --conductor";
            Refusal::new(RefusalCode::NotFound, reason)
        })
    }

    /// Returns the address at which calls reach this control plane.
    pub(crate) fn address(&self) -> String {
        self.address.get().map_or_else(String::new, ToString::to_string)
    }

    /// Sets this address, once.
    pub(crate) fn set_address(&self, address: SocketAddr) {
        // It is set once, when the endpoint is open.
        let _ = self.address.set(address);
    }

    /// Creates or changes a tenant.
    pub(crate) fn set_tenant_now(&self, call: SetTenant) -> Result<EmptyReply, Refusal> {
        match self.cluster.handle(Input::SetTenant { change: call.change })? {
            Reply::TenantSet => Ok(EmptyReply),
            reply => Err(unexpected(&reply)),
        }
    }

    /// Removes a tenant; with `only_empty`, not while it has objects, or while a node may have some that has not
    /// reported.
    pub(crate) fn remove_tenant_now(&self, call: RemoveTenant) -> Result<EmptyReply, Refusal> {
        // The default tenant has no name, and cannot be removed.
        if call.only_empty && !call.name.is_empty() {
            let hosted = self.cluster.lock()?;
            let in_memory = hosted.tenants().tenants.into_iter().find(|tenant| tenant.name == call.name);
            let on_ssds = hosted.tenant_ssds().tenants.into_iter().find(|tenant| tenant.name == call.name);
            let unreported = hosted.unreported_tenants();
            drop(hosted);
            let in_memory = in_memory.map_or(0, |tenant| tenant.used_bytes);
            let on_ssds = on_ssds.map_or(0, |tenant| tenant.used_bytes);
            if in_memory + on_ssds > 0 {
                let (name, ssds) =
                    (&call.name, if on_ssds > 0 { format!(", {on_ssds} on SSDs") } else { String::new() });
                let reason = format!("tenant {name:?} has {in_memory} bytes{ssds}: remove its objects first");
                return Err(Refusal::new(RefusalCode::AlreadyExists, reason));
            }
            if let Some(first) = unreported.first() {
                let others = match unreported.len() - 1 {
                    0 => String::new(),
                    count => format!(" (and {count} more)"),
                };
                let reason = format!(
                    "node {first}{others} has not reported what it has of tenant {:?}: start it, or wait for its \
                     report; `kvplane ctl remove {first}` if it does not return",
                    call.name
                );
                return Err(Refusal::new(RefusalCode::AlreadyExists, reason));
            }
        }
        self.cluster.handle(Input::RemoveTenant { name: call.name }).map(|_| EmptyReply)
    }

    /// Drains a node, of this incarnation if one is named.
    pub(crate) fn drain_now(&self, node: NodeId, incarnation: Option<Incarnation>) -> Result<EmptyReply, Refusal> {
        self.refuse_unless_live(node, incarnation)?;
        self.cluster.handle(Input::Drain { node, incarnation })?;
        tracing::info!(node = node.0, "began to drain a node");
        Ok(EmptyReply)
    }

    /// Ends the drain of a node.
    pub(crate) fn undrain_now(&self, node: NodeId, incarnation: Option<Incarnation>) -> Result<EmptyReply, Refusal> {
        self.refuse_unless_live(node, incarnation)?;
        self.cluster.handle(Input::Undrain { node, incarnation })?;
        tracing::info!(node = node.0, "ended the drain of a node");
        Ok(EmptyReply)
    }

    /// Refuses an operator's call, which names no incarnation, if the node is not live. A node that names its
    /// incarnation gets the core's refusal, with the next step.
    fn refuse_unless_live(&self, node: NodeId, incarnation: Option<Incarnation>) -> Result<(), Refusal> {
        if incarnation.is_some() {
            return Ok(());
        }
        let reason = match NodeHoldings::of_members(&self.cluster)?.get(&node.0).map(|holding| holding.state) {
            None => format!("node {node} is not known: see `kvplane ctl status`"),
            Some(MemberState::Dead) => format!(
                "node {node} is dead: its slots have other owners already; run `kvplane ctl remove {node}` if it does \
                 not return"
            ),
            Some(MemberState::Left) => format!("node {node} has left the cluster: its slots have other owners already"),
            Some(_) => return Ok(()),
        };
        Err(Refusal::new(RefusalCode::UnknownMember, reason))
    }
}

/// Returns the refusal for a reply of the wrong kind: the core answers each input with one kind of reply.
fn unexpected(reply: &Reply) -> Refusal {
    let reason = format!("a bug: the cluster answered {reply:?}");
    Refusal::new(RefusalCode::ShuttingDown, reason)
}

#[cfg(test)]
mod tests;
