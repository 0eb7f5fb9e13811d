//! Driver of the control plane: feeds inputs and the time to the pure [`Cluster`], and carries out its outputs.
//!
//! Records before maps: each output is carried out before the next, so a map is published only after the records behind
//! it are durable. If they cannot be made durable, nothing more is published and the control plane stops, since its
//! state in memory is ahead of the durable one.
//!
//! Everything runs on one thread; the lock satisfies the compiler and is never contended.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use kvplane_cluster::{Cluster, Counters, Input, MemberState, Output, Quotas, Reply};
use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, SLOTS, Slot};
use kvplane_proto::map::{Member, OwnerTable};
use kvplane_rpc::message::{CopyState, KeyFound, Load, MemberStatus, Segment, ShardNode, TenantList};
use kvplane_rpc::{ItemFrame, MapFrame, Refusal, RefusalCode};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::sleep_until;

use crate::conductor::Host;
use crate::http::admin::DrainStarts;
use crate::http::counts::Counts;
use crate::http::objects::ObjectsAccess;
use crate::nodes::follow::{Follow, PublishedEvents};
use crate::nodes::port_probe::NodeIncarnation;
use crate::nodes::shards::Shards;
use crate::nodes::tasks::HostedTasks;
use crate::nodes::tiers::Tiers;
use crate::p2p::P2p;
use crate::store::Store;
use crate::tickets::Tickets;

mod calls;
mod durable;
mod maps;

/// Program and version, as reported to callers.
pub(crate) const SOFTWARE: &str = concat!("kvplane-control ", env!("CARGO_PKG_VERSION"));

/// Interval of checks whether changes are possible again.
const LOOK_AGAIN_NS: u64 = 100_000_000;

/// Incarnations of all members, and the ports of the members to probe.
pub(crate) type Doors = (BTreeSet<NodeIncarnation>, Vec<(NodeIncarnation, Vec<SocketAddr>)>);

pub(crate) struct Core {
    cluster: Cluster,
    store: Store,
    tiers: Tiers,
    shards: Shards,
    follow: Follow,
    quotas: Quotas,
    /// Issuer of data tickets, if shards require them.
    pub(crate) tickets: Option<Tickets>,
    /// Owners of all slots by the map of this epoch, computed on demand.
    owners: Option<(Epoch, OwnerTable)>,
    /// Failure after which no change is accepted.
    failure: Option<String>,
}

impl Core {
    /// Drops the reports of nodes that are not members any more.
    fn forget_gone(&mut self) {
        let Self { cluster, tiers, shards, follow, quotas, .. } = self;
        tiers.retain(|node, incarnation| {
            let is_it = |view: &kvplane_cluster::MemberView<'_>| {
                let member = view.member;
                (member.node.0, member.incarnation.0) == (node, incarnation) && view.state != MemberState::Left
            };
            cluster.members().any(|view| is_it(&view))
        });
        let live: BTreeSet<(u64, u64)> = cluster
            .members()
            .filter(|view| !matches!(view.state, MemberState::Dead | MemberState::Left))
            .map(|view| (view.member.node.0, view.member.incarnation.0))
            .collect();
        shards.retain(|node, incarnation| live.contains(&(node, incarnation)));
        follow.retain(|node, incarnation| live.contains(&(node, incarnation)));
        quotas.retain(|node, incarnation| live.contains(&(node, incarnation)));
    }

    /// Refuses a call of an incarnation that is not a member; returns the member's number of shards.
    fn check_incarnation(&self, node: u64, incarnation: u64) -> Result<usize, Refusal> {
        let found = self.cluster.members().find(|view| view.member.node.0 == node);
        match found.filter(|view| view.member.incarnation.0 == incarnation) {
            Some(view) => Ok(view.member.shards.len()),
            None => {
                let reason = format!("incarnation {incarnation} of node {node} is not a member");
                Err(Refusal::new(RefusalCode::UnknownMember, reason))
            }
        }
    }
}

/// The control plane, as its endpoints use it.
pub(crate) struct Control {
    core: Mutex<Core>,
    maps: watch::Sender<MapFrame>,
    /// Set once, when the control plane must stop.
    failed: watch::Sender<Option<String>>,
    rearm: Notify,
    started: Instant,
    address: OnceLock<SocketAddr>,
    /// True if only configured tenants may put.
    strict_tenants: bool,
    pub(crate) objects: ObjectsAccess,
    /// Host of the Conductor, if enabled.
    pub(crate) conductor: Option<Arc<Host>>,
    /// Host of the P2P store.
    pub(crate) p2p: Arc<P2p>,
    pub(crate) counts: Counts,
    pub(crate) drained: DrainStarts,
    /// Replication tasks.
    pub(crate) hosted: HostedTasks,
}

impl Control {
    /// Takes a new cluster and carries out its first outputs.
    pub(crate) fn new(cluster: Cluster, store: Store, started: Instant) -> Result<Self, Refusal> {
        let first = maps::frame(cluster.map().clone(), &cluster, store.state_id())?;
        let control = Self {
            core: Mutex::new(Core {
                cluster,
                store,
                tiers: Tiers::default(),
                shards: Shards::default(),
                follow: Follow::default(),
                quotas: Quotas::default(),
                tickets: None,
                owners: None,
                failure: None,
            }),
            maps: watch::channel(first).0,
            failed: watch::channel(None).0,
            rearm: Notify::new(),
            started,
            address: OnceLock::new(),
            strict_tenants: false,
            objects: ObjectsAccess::default(),
            conductor: None,
            p2p: Arc::new(P2p::new(1, 0)),
            counts: Counts::default(),
            drained: DrainStarts::default(),
            hosted: HostedTasks::default(),
        };
        control.carry_out(&mut *control.core()?)?;
        Ok(control)
    }

    /// With what was set of tenants, and a way to the objects.
    pub(crate) fn with_tenants(self, strict_tenants: bool, objects: ObjectsAccess) -> Self {
        Self { strict_tenants, objects, ..self }
    }

    /// With tickets for data connections.
    pub(crate) fn with_tickets(self, tickets: Option<Tickets>) -> Result<Self, Refusal> {
        self.core()?.tickets = tickets;
        Ok(self)
    }

    /// Epoch of the map.
    pub(crate) fn epoch(&self) -> Result<u64, Refusal> {
        Ok(self.core()?.cluster.map().epoch.0)
    }

    /// Adds the host of the P2P store.
    pub(crate) fn with_p2p(self, p2p: P2p) -> Self {
        Self { p2p: Arc::new(p2p), ..self }
    }

    /// Adds the Conductor's host.
    pub(crate) fn with_conductor(self, conductor: Option<Arc<Host>>) -> Self {
        Self { conductor, ..self }
    }

    /// Returns the Conductor's host.
    pub(crate) fn conductor(&self) -> Result<&Arc<Host>, Refusal> {
        self.conductor.as_ref().ok_or_else(|| {
            let reason = "this control plane runs without a Conductor; start it with --conductor";
            Refusal::new(RefusalCode::NotFound, reason)
        })
    }

    /// Gives `look` the tenants' records, their quota leases, and whether other tenants may not put.
    pub(crate) fn with_quotas<T>(&self, look: impl FnOnce(&Cluster, &mut Quotas, bool) -> T) -> Result<T, Refusal> {
        let mut core = self.core()?;
        let Core { cluster, quotas, .. } = &mut *core;
        Ok(look(cluster, quotas, self.strict_tenants))
    }

    /// Returns the number of a member's shards; an error if this incarnation is not a member.
    pub(crate) fn check_member(&self, node: u64, incarnation: u64) -> Result<usize, Refusal> {
        self.core()?.check_incarnation(node, incarnation)
    }

    /// Returns the time since the start, in nanoseconds.
    pub(crate) fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the core, unless the control plane has failed.
    pub(crate) fn core(&self) -> Result<MutexGuard<'_, Core>, Refusal> {
        let Ok(core) = self.core.lock() else {
            let reason = "an earlier call panicked; the state in memory is not trusted";
            self.failed.send_replace(Some(reason.to_owned()));
            return Err(Refusal::new(RefusalCode::ShuttingDown, reason));
        };
        match &core.failure {
            Some(reason) => Err(Refusal::new(RefusalCode::Storage, reason.clone())),
            None => Ok(core),
        }
    }

    /// Handles one input, and carries out all outputs that follow from it.
    pub(crate) fn handle(&self, input: Input) -> Result<Reply, Refusal> {
        let mut core = self.core()?;
        if let Some(reason) = core.store.doubt() {
            // Time stands still for the cluster meanwhile, so no member expires either.
            return Err(Refusal::new(RefusalCode::Storage, reason));
        }
        let due_ns = core.cluster.poll_timeout();
        let reply = core.cluster.handle(input, self.now_ns());
        self.carry_out(&mut core)?;
        if core.cluster.poll_timeout() != due_ns {
            self.rearm.notify_one();
        }
        reply.map_err(Refusal::from)
    }

    fn carry_out(&self, core: &mut Core) -> Result<(), Refusal> {
        while let Some(output) = core.cluster.poll_output() {
            match output {
                Output::Persist(changes) => self.persist(core, &changes)?,
                Output::Adopt { state, changes } => {
                    tracing::warn!(state, records = changes.len(), "adopted the state that members offered");
                    self.adopt(core, state, &changes)?;
                }
                Output::MapChanged(map) => {
                    self.publish(core, map)?;
                    core.forget_gone();
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

    /// Drives the cluster's time until the control plane fails; returns the reason.
    pub(crate) async fn run(&self) -> String {
        let mut failed = self.failed.subscribe();
        loop {
            if let Some(reason) = failed.borrow_and_update().clone() {
                return reason;
            }
            let due_ns = self.core().ok().and_then(|mut core| {
                let follow = core.follow.tick(self.now_ns());
                let cluster = match core.store.doubt() {
                    Some(_) => Some(self.now_ns() + LOOK_AGAIN_NS),
                    None => core.cluster.poll_timeout(),
                };
                [cluster, follow].into_iter().flatten().min()
            });
            let due = async {
                match due_ns {
                    Some(due_ns) => {
                        let due = self.started + Duration::from_nanos(due_ns);
                        sleep_until(due.into()).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {
                    // A failure is seen at the top of the loop.
                    let _ = self.handle(Input::Tick);
                }
                () = self.rearm.notified() => {}
                _ = failed.changed() => {}
            }
        }
    }

    /// Returns the incarnations of the map's members, and the ports of at most `most` members to probe now: members
    /// that have not been heard since the start; if slots have replicas, members that are not in `known`; and silent
    /// members that were reached before.
    pub(crate) fn doors(&self, known: &BTreeMap<NodeIncarnation, bool>, most: usize) -> Result<Doors, Refusal> {
        let core = self.core()?;
        let of = |member: &Member| (member.node, member.incarnation);
        let (members, now_ns) = (&core.cluster.map().members, self.now_ns());
        let incarnations = members.iter().map(of).collect();
        let silent = core.cluster.silent(now_ns).filter(|member| known.get(&of(member)) == Some(&true));
        let several = core.cluster.map().replicas > 1;
        let new = members.iter().filter(|member| several && !known.contains_key(&of(member)));
        let ports = |member: &Member| member.shards.iter().map(|shard| shard.tcp).collect();
        let all = silent.chain(new).chain(core.cluster.unheard(now_ns));
        Ok((incarnations, all.take(most).map(|member| (of(member), ports(member))).collect()))
    }

    /// Returns the number of nodes that own slots.
    pub(crate) fn nodes(&self) -> Result<u32, Refusal> {
        let core = self.core()?;
        Ok(core.cluster.map().members.iter().filter(|member| !member.shards.is_empty()).count() as u32)
    }

    /// Returns the nodes that own an object's slot.
    pub(crate) fn owners(&self, digest: Digest) -> Result<Vec<u64>, Refusal> {
        let mut core = self.core()?;
        let Core { cluster, owners, .. } = &mut *core;
        let map = cluster.map();
        let (_, table) = match owners {
            Some(known) if known.0 == map.epoch => known,
            _ => owners.insert((map.epoch, OwnerTable::compute(map))),
        };
        let members = table.owners(digest.slot()).iter().filter_map(|owner| map.members.get(usize::from(owner.member)));
        Ok(members.map(|member| member.node.0).collect())
    }

    /// Returns the epoch of the map, and for each slot its owner as an index into the list of owners; none if no node
    /// owns slots.
    pub(crate) fn slots(&self) -> Result<SlotMap, Refusal> {
        let mut core = self.core()?;
        let Core { cluster, owners, .. } = &mut *core;
        let map = cluster.map();
        let (_, table) = match owners {
            Some(known) if known.0 == map.epoch => known,
            _ => owners.insert((map.epoch, OwnerTable::compute(map))),
        };
        let (mut found, mut places) = (Vec::new(), BTreeMap::new());
        let slots = (0..SLOTS as u16).map(|slot| {
            let owner = table.owners(Slot(slot)).first()?;
            let node = map.members.get(usize::from(owner.member))?.node.0;
            Some(*places.entry((node, owner.shard.0)).or_insert_with(|| {
                found.push((node, owner.shard.0));
                found.len() as u32 - 1
            }))
        });
        let slots = slots.collect();
        Ok(SlotMap { epoch: map.epoch.0, owners: found, slots })
    }

    /// Requests the locations of these objects from a node.
    pub(crate) fn find(&self, node: u64, digests: Vec<u128>) -> Result<oneshot::Receiver<Vec<KeyFound>>, Refusal> {
        self.core()?.follow.find(node, digests)
    }

    /// Orders a node to replicate these objects.
    pub(crate) fn order_copies(
        &self,
        node: u64,
        digests: Vec<u128>,
    ) -> Result<oneshot::Receiver<Vec<CopyState>>, Refusal> {
        self.core()?.follow.copy(node, digests)
    }

    /// Returns true if slots may have replica owners.
    pub(crate) fn keeps_copies(&self) -> Result<bool, Refusal> {
        Ok(self.core()?.cluster.config().replicas > 1)
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

    /// Subscribes to the events of all objects, beginning with a snapshot.
    pub(crate) fn follow(&self) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let watching = self.core()?.follow.watch(self.now_ns());
        // The snapshot may be due later than now.
        self.rearm.notify_one();
        watching
    }

    /// Requests a new snapshot for all subscribers.
    pub(crate) fn want_snapshot(&self) {
        if let Ok(mut core) = self.core() {
            core.follow.want_snapshot(self.now_ns());
        }
        self.rearm.notify_one();
    }

    /// Returns the slots and objects of members, by node id.
    pub(crate) fn holdings(&self) -> Result<BTreeMap<u64, NodeHoldings>, Refusal> {
        let now_ns = self.now_ns();
        let mut core = self.core()?;
        core.forget_gone();
        let mut on_ssds = BTreeMap::new();
        for node in core.tiers.list(None, now_ns) {
            on_ssds.insert(node.node, node.shards.iter().map(|shard| shard.objects).sum());
        }
        let moving = core.cluster.is_moving();
        let holding = |view: kvplane_cluster::MemberView<'_>| NodeHoldings {
            incarnation: view.member.incarnation.0,
            state: view.state,
            shared: view.shared,
            moving,
            heard: view.heard_ns.map(|heard_ns| self.started + Duration::from_nanos(heard_ns)),
            objects: view.load.map(|load| load.objects + on_ssds.get(&view.member.node.0).copied().unwrap_or(0)),
            bytes: view.load.map_or(0, |load| load.used_bytes),
        };
        Ok(core.cluster.members().map(|view| (view.member.node.0, holding(view))).collect())
    }

    /// Returns the state that HTTP shows; an error if the control plane has failed.
    pub(crate) fn view(&self) -> Result<View, Refusal> {
        let tenants = self.tenant_list()?;
        let core = self.core()?;
        let mut view = View {
            cluster: core.cluster.config().cluster.clone(),
            epoch: core.cluster.map().epoch.0,
            counters: core.cluster.counters(),
            uptime_ns: self.now_ns(),
            members: Vec::new(),
            segments: core.cluster.segments().map(|segment| Segment::from(segment.clone())).collect(),
            shards: core.shards.list(None, self.now_ns()),
            published: core.follow.published,
            is_followed: core.follow.is_watched(),
            tenants,
        };
        view.members.extend(core.cluster.members().map(|member| self.member_status(&member)));
        Ok(view)
    }

    fn member_status(&self, view: &kvplane_cluster::MemberView<'_>) -> MemberStatus {
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
            silent_ns: view.heard_ns.map(|heard_ns| self.now_ns().saturating_sub(heard_ns)),
            load: view.load.map(Load::from),
        }
    }
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

/// Owner of each slot.
pub(crate) struct SlotMap {
    pub(crate) epoch: u64,
    /// Owners: nodes and their shards.
    pub(crate) owners: Vec<(u64, u16)>,
    /// By slot: an index into `owners`.
    pub(crate) slots: Vec<Option<u32>>,
}

/// State of the control plane at one moment, for HTTP.
pub(crate) struct View {
    pub(crate) cluster: String,
    pub(crate) epoch: u64,
    pub(crate) counters: Counters,
    pub(crate) uptime_ns: u64,
    pub(crate) members: Vec<MemberStatus>,
    pub(crate) segments: Vec<Segment>,
    pub(crate) shards: Vec<ShardNode>,
    pub(crate) published: PublishedEvents,
    pub(crate) is_followed: bool,
    pub(crate) tenants: TenantList,
}

#[cfg(test)]
mod tests;
