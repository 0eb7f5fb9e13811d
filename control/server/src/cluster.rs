//! Host of the cluster: feeds inputs and the time to the pure [`Cluster`], and carries out its outputs.
//!
//! Records before maps: each output is carried out before the next, so a map is published only after the records behind
//! it are durable. If they cannot be made durable, nothing more is published and the control plane stops, since its
//! state in memory is ahead of the durable one.
//!
//! One lock protects the cluster, its durable state, and what is known of its nodes ([`HostedCluster`]): they change
//! together when a member goes. It is never held while another lock of this crate is taken; [`crate::control`] has the
//! order of all of them.

pub(crate) mod owners;
pub(crate) mod port_probe;
pub(crate) mod view;

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use kvplane_cluster::{Change, Cluster, Input, Output, Reply};
use kvplane_proto::Digest;
use kvplane_proto::ids::NodeId;
use kvplane_proto::map::ClusterMap;
use kvplane_rpc::message::{
    MapReply, SyncTenantSsds, SyncTenants, TenantLeases, TenantList, TenantSsdLeases, TenantSsdList,
};
use kvplane_rpc::{ItemFrame, MapFrame, Refusal, RefusalCode};
use tokio::sync::{Notify, mpsc, watch};

use crate::cluster::owners::{KnownOwners, SlotMap};
use crate::nodes::NodeStates;
use crate::server::clock::HostClock;
use crate::store::{Store, StoreError};
use crate::tickets::Tickets;

/// Interval of checks whether changes are possible again.
const LOOK_AGAIN_NS: u64 = 100_000_000;

/// Host of the cluster.
pub(crate) struct ClusterHost {
    hosted: Mutex<HostedCluster>,
    maps: watch::Sender<MapFrame>,
    /// Set once, when the control plane must stop.
    failed: watch::Sender<Option<String>>,
    rearm: Notify,
    clock: HostClock,
}

/// The cluster with its durable state, and what is known of its nodes.
pub(crate) struct HostedCluster {
    cluster: Cluster,
    store: Store,
    owners: KnownOwners,
    /// Failure after which no change is accepted.
    failure: Option<String>,
    pub(crate) nodes: NodeStates,
    /// Issuer of data tickets, if shards require them.
    pub(crate) tickets: Option<Tickets>,
}

impl HostedCluster {
    /// Returns the cluster. Only its host feeds it with inputs, as their outputs have to be carried out.
    pub(crate) const fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Returns the epoch of the map.
    pub(crate) const fn epoch(&self) -> u64 {
        self.cluster.map().epoch.0
    }

    /// Returns the identity of the durable state.
    pub(crate) fn state_id(&self) -> u64 {
        self.store.state_id()
    }

    /// Returns true if slots may have replica owners.
    pub(crate) const fn keeps_copies(&self) -> bool {
        self.cluster.config().replicas > 1
    }

    /// Refuses a call of an incarnation that is not a member; returns the member's number of shards.
    pub(crate) fn check_incarnation(&self, node: u64, incarnation: u64) -> Result<usize, Refusal> {
        let found = self.cluster.members().find(|view| view.member.node.0 == node);
        match found.filter(|view| view.member.incarnation.0 == incarnation) {
            Some(view) => Ok(view.member.shards.len()),
            None => {
                let reason = format!("incarnation {incarnation} of node {node} is not a member");
                Err(Refusal::new(RefusalCode::UnknownMember, reason))
            }
        }
    }

    /// Drops the state of nodes that are not members any more.
    pub(crate) fn forget_gone(&mut self) {
        self.nodes.forget_gone(&self.cluster);
    }

    /// Returns the nodes that own an object's slot.
    pub(crate) fn owners(&mut self, digest: Digest) -> Vec<u64> {
        self.owners.of(self.cluster.map(), digest)
    }

    /// Returns the owner of each slot.
    pub(crate) fn slots(&mut self) -> SlotMap {
        self.owners.all(self.cluster.map())
    }

    /// Returns the members that have not reported what they have of the tenants.
    pub(crate) fn unreported_tenants(&self) -> BTreeSet<NodeId> {
        self.nodes.tenants.unreported(&self.cluster)
    }

    /// Returns all tenants with their usage.
    pub(crate) fn tenants(&self) -> TenantList {
        self.nodes.tenants.list(&self.cluster)
    }

    /// Returns the use of SSDs by all tenants.
    pub(crate) fn tenant_ssds(&self) -> TenantSsdList {
        self.nodes.tenants.list_ssds(&self.cluster)
    }

    /// Takes the use of a shard's SSD by tenants, and returns its leases of their quotas.
    pub(crate) fn sync_tenant_ssds(&mut self, call: SyncTenantSsds) -> Result<TenantSsdLeases, Refusal> {
        let shards = self.check_incarnation(call.node, call.incarnation)?;
        self.nodes.tenants.sync_ssds(call, shards, &self.cluster)
    }

    /// Returns the tenants that were removed, and have no records on SSDs any more.
    pub(crate) fn freed_tenants(&self) -> Vec<String> {
        self.nodes.tenants.freed(&self.cluster)
    }

    /// Takes a shard's usage of its tenants, and returns its leases of their quotas.
    pub(crate) fn sync_tenants(&mut self, call: SyncTenants) -> Result<TenantLeases, Refusal> {
        let shards = self.check_incarnation(call.node, call.incarnation)?;
        self.nodes.tenants.sync(call, shards, &self.cluster)
    }

    /// Refuses if no change can be made durable at present.
    fn check_durable(&self) -> Result<(), Refusal> {
        self.store.uncertainty().map_or(Ok(()), |reason| Err(Refusal::new(RefusalCode::Storage, reason)))
    }
}

impl ClusterHost {
    /// Takes a new cluster and carries out its first outputs. With `strict_tenants` only configured tenants may put.
    ///
    /// # Errors
    /// When the first changes cannot be made durable.
    pub(crate) fn new(
        cluster: Cluster,
        store: Store,
        tickets: Option<Tickets>,
        strict_tenants: bool,
    ) -> Result<Self, Refusal> {
        let first = map_frame(cluster.map().clone(), &cluster, store.state_id())?;
        let host = Self {
            hosted: Mutex::new(HostedCluster {
                cluster,
                store,
                owners: KnownOwners::default(),
                failure: None,
                nodes: NodeStates::new(strict_tenants),
                tickets,
            }),
            maps: watch::channel(first).0,
            failed: watch::channel(None).0,
            rearm: Notify::new(),
            clock: HostClock::start(),
        };
        host.carry_out(&mut *host.lock()?)?;
        Ok(host)
    }

    /// Returns the time since the start, in nanoseconds.
    pub(crate) fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Returns the moment of a time that [`Self::now_ns`] returned.
    pub(crate) fn instant(&self, time_ns: u64) -> Instant {
        self.clock.instant(time_ns)
    }

    /// Locks the cluster and what is known of its nodes, unless the control plane has failed.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, HostedCluster>, Refusal> {
        let Ok(hosted) = self.hosted.lock() else {
            let reason = "an earlier call panicked; the state in memory is not trusted";
            self.failed.send_replace(Some(reason.to_owned()));
            return Err(Refusal::new(RefusalCode::ShuttingDown, reason));
        };
        match &hosted.failure {
            Some(reason) => Err(Refusal::new(RefusalCode::Storage, reason.clone())),
            None => Ok(hosted),
        }
    }

    /// Handles one input, and carries out all outputs that follow from it.
    pub(crate) fn handle(&self, input: Input) -> Result<Reply, Refusal> {
        let mut hosted = self.lock()?;
        // Time stands still for the cluster meanwhile, so no member expires either.
        hosted.check_durable()?;
        let due_ns = hosted.cluster.poll_timeout();
        let reply = hosted.cluster.handle(input, self.now_ns());
        self.carry_out(&mut hosted)?;
        if hosted.cluster.poll_timeout() != due_ns {
            self.rearm.notify_one();
        }
        reply.map_err(Refusal::from)
    }

    fn carry_out(&self, hosted: &mut HostedCluster) -> Result<(), Refusal> {
        while let Some(output) = hosted.cluster.poll_output() {
            match output {
                Output::Persist(changes) => self.persist(hosted, &changes)?,
                Output::Adopt { state, changes } => {
                    tracing::warn!(state, records = changes.len(), "adopted the state that members offered");
                    let outcome = hosted.store.adopt(state, &changes);
                    self.check_outcome(hosted, outcome)?;
                }
                Output::MapChanged(map) => {
                    self.publish(hosted, map)?;
                    hosted.forget_gone();
                }
                Output::BeganEmpty => self.begin_empty(),
                // Nodes and clients learn of the loss from the map; the counters count it.
                Output::MemberLost { node, incarnation } => {
                    tracing::warn!(node = node.0, incarnation = incarnation.0, "expelled a dead member");
                }
            }
        }
        Ok(())
    }

    /// Makes changes durable, all or none.
    fn persist(&self, hosted: &mut HostedCluster, changes: &[Change]) -> Result<(), Refusal> {
        let outcome = hosted.store.commit(changes);
        self.check_outcome(hosted, outcome)
    }

    /// After a failure no further change is accepted, and the control plane stops.
    fn check_outcome(&self, hosted: &mut HostedCluster, outcome: Result<(), StoreError>) -> Result<(), Refusal> {
        let Err(error) = outcome else { return Ok(()) };
        let reason = error.to_string();
        tracing::error!("the state cannot be written: {reason}");
        hosted.failure = Some(reason.clone());
        self.failed.send_replace(Some(reason.clone()));
        Err(Refusal::new(RefusalCode::Storage, reason))
    }

    /// Publishes a map of the cluster. While members may offer the map of a lost state, clients wait for the next one.
    fn publish(&self, hosted: &HostedCluster, map: ClusterMap) -> Result<(), Refusal> {
        tracing::info!(epoch = map.epoch.0, members = map.members.len(), "published a map");
        let next = map_frame(map, &hosted.cluster, hosted.state_id())?;
        self.maps.send_modify(|frame| *frame = next.replacing(frame));
        Ok(())
    }

    /// Publishes the empty map to clients too: no member offered a state, so none was lost.
    fn begin_empty(&self) {
        tracing::info!("no member offered a state: this is a new cluster");
        self.maps.send_modify(|frame| *frame = frame.clone().provisional(false));
    }

    /// Makes changes of records that are not the cluster's own durable: those of the Conductor.
    pub(crate) fn keep(&self, changes: &[Change]) -> Result<(), Refusal> {
        self.persist(&mut *self.lock()?, changes)
    }

    /// Refuses if no change can be made durable at present.
    pub(crate) fn check_durable(&self) -> Result<(), Refusal> {
        self.lock()?.check_durable()
    }

    /// Drives the cluster's time until the control plane fails; returns the reason.
    pub(crate) async fn run(&self) -> String {
        let mut failed = self.failed.subscribe();
        loop {
            if let Some(reason) = failed.borrow_and_update().clone() {
                return reason;
            }
            let due_ns = self.lock().ok().and_then(|mut hosted| {
                let follow = hosted.nodes.follow.tick(self.now_ns());
                let cluster = match hosted.store.uncertainty() {
                    Some(_) => Some(self.now_ns() + LOOK_AGAIN_NS),
                    None => hosted.cluster.poll_timeout(),
                };
                [cluster, follow].into_iter().flatten().min()
            });
            tokio::select! {
                () = self.clock.sleep_until(due_ns) => {
                    // A failure is seen at the top of the loop.
                    let _ = self.handle(Input::Tick);
                }
                () = self.rearm.notified() => {}
                _ = failed.changed() => {}
            }
        }
    }

    /// Subscribes to the published maps.
    pub(crate) fn maps(&self) -> watch::Receiver<MapFrame> {
        self.maps.subscribe()
    }

    /// Subscribes to the events of all objects, beginning with a snapshot.
    pub(crate) fn watch_events(&self) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let watching = self.lock()?.nodes.follow.watch(self.now_ns());
        // The snapshot may be due later than now.
        self.rearm.notify_one();
        watching
    }

    /// Requests a new snapshot for all subscribers.
    pub(crate) fn want_snapshot(&self) {
        if let Ok(mut hosted) = self.lock() {
            hosted.nodes.follow.want_snapshot(self.now_ns());
        }
        self.rearm.notify_one();
    }
}

/// Encodes a map of this cluster, whose state has this identity.
fn map_frame(map: ClusterMap, cluster: &Cluster, state: u64) -> Result<MapFrame, Refusal> {
    match MapFrame::new(&MapReply { map }, state) {
        Ok(frame) => Ok(frame.provisional(cluster.awaits_offers())),
        Err(error) => Err(Refusal::new(RefusalCode::TooLarge, error.to_string())),
    }
}

#[cfg(test)]
impl HostedCluster {
    /// Simulates a failing disk.
    pub(crate) fn break_store(&mut self) {
        self.store.broken = true;
    }
}
