//! The control plane's driver: gives the pure [`Cluster`] its inputs and the time, and carries out what it asks for.
//!
//! Records before maps: an output is carried out before the next, so a map is published only when the records behind
//! it are durable. When they cannot be made durable, nothing more is published and the control plane stops; what it
//! holds in memory is ahead of what it would remember.
//!
//! Everything runs on one thread; the lock is there for the compiler and is never waited for.

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

/// Program and version, as callers see it.
pub(crate) const SOFTWARE: &str = concat!("kvplane-control ", env!("CARGO_PKG_VERSION"));

/// How often it is looked whether changes can be made again.
const LOOK_AGAIN_NS: u64 = 100_000_000;

/// Incarnations of members, and the ports of some.
pub(crate) type Doors = (BTreeSet<NodeIncarnation>, Vec<(NodeIncarnation, Vec<SocketAddr>)>);

pub(crate) struct Core {
    cluster: Cluster,
    store: Store,
    tiers: Tiers,
    shards: Shards,
    follow: Follow,
    quotas: Quotas,
    /// What makes data tickets, where shards want some.
    pub(crate) tickets: Option<Tickets>,
    /// The owners of all slots by the map of this epoch, once somebody asked.
    owners: Option<(Epoch, OwnerTable)>,
    /// Why nothing may be changed any more.
    failure: Option<String>,
}

impl Core {
    /// What was reported by nodes that are no members any more is of no use.
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

    /// Refuses what is no member's.
    fn check_incarnation(&self, node: u64, incarnation: u64) -> Result<usize, Refusal> {
        let found = self.cluster.members().find(|view| view.member.node.0 == node);
        match found.filter(|view| view.member.incarnation.0 == incarnation) {
            Some(view) => Ok(view.member.shards.len()),
            None => {
                let reason = format!("incarnation {incarnation} of node {node} is not that of a member");
                Err(Refusal::new(RefusalCode::UnknownMember, reason))
            }
        }
    }
}

/// The control plane, as its endpoints see it.
pub(crate) struct Control {
    core: Mutex<Core>,
    maps: watch::Sender<MapFrame>,
    /// Set once, when the control plane must stop.
    failed: watch::Sender<Option<String>>,
    rearm: Notify,
    started: Instant,
    address: OnceLock<SocketAddr>,
    /// Whether only tenants that were set may put.
    strict_tenants: bool,
    pub(crate) objects: ObjectsAccess,
    /// The Conductor, where it is hosted.
    pub(crate) conductor: Option<Arc<Host>>,
    /// The P2P store.
    pub(crate) p2p: Arc<P2p>,
    pub(crate) counts: Counts,
    pub(crate) drained: DrainStarts,
    /// Objects that are to have copies.
    pub(crate) hosted: HostedTasks,
}

impl Control {
    /// Takes a cluster that was just made and carries out its first outputs.
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

    /// With this host of the P2P store.
    pub(crate) fn with_p2p(self, p2p: P2p) -> Self {
        Self { p2p: Arc::new(p2p), ..self }
    }

    /// With a Conductor.
    pub(crate) fn with_conductor(self, conductor: Option<Arc<Host>>) -> Self {
        Self { conductor, ..self }
    }

    /// The Conductor.
    pub(crate) fn conductor(&self) -> Result<&Arc<Host>, Refusal> {
        self.conductor.as_ref().ok_or_else(|| {
            let reason = "this control plane runs without a Conductor; start it with --conductor";
            Refusal::new(RefusalCode::NotFound, reason)
        })
    }

    /// Looks at tenants: what is remembered of them, their leases, and whether others may put.
    pub(crate) fn with_quotas<T>(&self, look: impl FnOnce(&Cluster, &mut Quotas, bool) -> T) -> Result<T, Refusal> {
        let mut core = self.core()?;
        let Core { cluster, quotas, .. } = &mut *core;
        Ok(look(cluster, quotas, self.strict_tenants))
    }

    /// How many shards a member has; an error where this incarnation is not one's.
    pub(crate) fn check_member(&self, node: u64, incarnation: u64) -> Result<usize, Refusal> {
        self.core()?.check_incarnation(node, incarnation)
    }

    /// Nanoseconds since it began.
    pub(crate) fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The core, unless the control plane has failed.
    pub(crate) fn core(&self) -> Result<MutexGuard<'_, Core>, Refusal> {
        let Ok(core) = self.core.lock() else {
            let reason = "an earlier call ended in a bug; the state in memory is not trusted";
            self.failed.send_replace(Some(reason.to_owned()));
            return Err(Refusal::new(RefusalCode::ShuttingDown, reason));
        };
        match &core.failure {
            Some(reason) => Err(Refusal::new(RefusalCode::Storage, reason.clone())),
            None => Ok(core),
        }
    }

    /// One input, and everything that follows from it.
    pub(crate) fn handle(&self, input: Input) -> Result<Reply, Refusal> {
        let mut core = self.core()?;
        if let Some(reason) = core.store.doubt() {
            // Time stands still for the cluster meanwhile, so nobody's silence counts either.
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
                    tracing::warn!(state, records = changes.len(), "goes on with the state that members offered");
                    self.adopt(core, state, &changes)?;
                }
                Output::MapChanged(map) => {
                    self.publish(core, map)?;
                    core.forget_gone();
                }
                Output::BeganEmpty => self.begin_empty(),
                // Who waits for a member sees the map without it; the loss itself is in the counters.
                Output::MemberLost { node, incarnation } => {
                    tracing::warn!(
                        node = node.0,
                        incarnation = incarnation.0,
                        "a member was silent for too long: lost"
                    );
                }
            }
        }
        Ok(())
    }

    /// Lets time pass until the control plane fails; returns why.
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

    /// The incarnations of members of the map, and whose ports to probe now, at most so many: of those that were
    /// never heard, and where slots have two owners of those not in `known`, and that were reached once and are silent.
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

    /// How many nodes own slots.
    pub(crate) fn nodes(&self) -> Result<u32, Refusal> {
        let core = self.core()?;
        Ok(core.cluster.map().members.iter().filter(|member| !member.shards.is_empty()).count() as u32)
    }

    /// The nodes that own an object's slot.
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

    /// The epoch of the map, and for each slot its first owner as a place in the list of those; none where nobody owns
    /// slots.
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

    /// Asks a node where these objects are.
    pub(crate) fn find(&self, node: u64, digests: Vec<u128>) -> Result<oneshot::Receiver<Vec<KeyFound>>, Refusal> {
        self.core()?.follow.find(node, digests)
    }

    /// Has a node copy these objects.
    pub(crate) fn order_copies(
        &self,
        node: u64,
        digests: Vec<u128>,
    ) -> Result<oneshot::Receiver<Vec<CopyState>>, Refusal> {
        self.core()?.follow.copy(node, digests)
    }

    /// Whether slots may have a second owner.
    pub(crate) fn keeps_copies(&self) -> Result<bool, Refusal> {
        Ok(self.core()?.cluster.config().replicas > 1)
    }

    /// Where calls reach this control plane.
    pub(crate) fn address(&self) -> String {
        self.address.get().map_or_else(String::new, ToString::to_string)
    }

    /// Says that, once.
    pub(crate) fn set_address(&self, address: SocketAddr) {
        // It is said once, when the endpoint is there.
        let _ = self.address.set(address);
    }

    /// What becomes of all objects, beginning with a snapshot.
    pub(crate) fn follow(&self) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let watching = self.core()?.follow.watch(self.now_ns());
        // There may be something to do later now.
        self.rearm.notify_one();
        watching
    }

    /// Whoever follows wants to know everything anew.
    pub(crate) fn want_snapshot(&self) {
        if let Ok(mut core) = self.core() {
            core.follow.want_snapshot(self.now_ns());
        }
        self.rearm.notify_one();
    }

    /// What members own and hold, by their numbers.
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

    /// What HTTP shows; fails when the control plane has.
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

/// What the last known incarnation of a node owns and holds.
pub(crate) struct NodeHoldings {
    pub(crate) incarnation: u64,
    pub(crate) state: MemberState,
    /// Whether it has its share of the slots.
    pub(crate) shared: bool,
    /// Whether others have not all yet that moved to them.
    pub(crate) moving: bool,
    /// When it was heard of last, since this start.
    pub(crate) heard: Option<Instant>,
    /// In memory and on SSDs, as far as it has been heard of.
    pub(crate) objects: Option<u64>,
    /// In memory.
    pub(crate) bytes: u64,
}

/// Which shard owns which slot first.
pub(crate) struct SlotMap {
    pub(crate) epoch: u64,
    /// Nodes and their shards.
    pub(crate) owners: Vec<(u64, u16)>,
    /// By slot: a place in `owners`.
    pub(crate) slots: Vec<Option<u32>>,
}

/// A snapshot for HTTP.
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
