//! Interface between the server and the control plane: the calls, the watched map, and counted events.
//!
//! A service is called on the endpoint's runtime and must not block for long; it replies at once or refuses. A call
//! that reaches it has passed the checks of size, form and rights.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::codec::{CodecError, Message, encode};
use crate::error::{Refusal, RefusalCode};
use crate::identity::role::Role;
use crate::message::conductor::{
    CacheTaken, DeregisterInstance, ExplainPlacement, ExplainRequest, InstanceRegistered, PlacementExplained,
    PrefixHolders, QueryPrefix, RegisterCapabilities, RegisterInstance, ReportCache, ReportLoad, RequestExplained,
    Reschedule, Schedule, ScheduleOnTerms, ScheduleReply, ScheduleWithGroups, UpdateRequest, WatchAssignments,
};
use crate::message::groups::{
    AttachMember, DescribeWorld, DetachMember, ListWorlds, MemberAttached, ProposeChange, RegisterProcess,
    ReportProcess, UnregisterProcess, WatchWorld, WorldDescription, WorldList, WorldReply,
};
use crate::message::p2p::{
    DescribeObject, FindObject, GetPeerKeys, HoldObject, JoinRanks, ListObjects, LocateObject, ObjectFound, ObjectHeld,
    ObjectList, ObjectMembers, ObjectPlaces, ObjectPublished, ObjectReleased, ObjectsRenewed, PublishObject,
    RanksJoined, ReleaseObject, RenewObjects, ReportObject, WantShards, WatchFetches,
};
use crate::message::placement::{
    CopiesShown, FeedsShown, HoldInstance, InstanceHeld, LimitUse, Placement, ServiceShown, SetClass, SetPlacement,
    SetWeight,
};
use crate::message::{
    Alive, AnswerCopies, AnswerOrder, AttachDevices, CancelTask, CreateTask, DevicesKept, Drain, EmptyReply,
    GetIncarnation, GetLastMember, GetMoves, GetSegment, GetTicket, GetTicketKeys, Heartbeat, Hello, HotList, Join,
    JoinReply, LastIncarnation, LastMember, Leave, ListHot, ListSegments, ListShards, ListTasks, ListTiers, MapReply,
    Moves, OfferMap, OrderTiers, RegisterSegment, RemoveTenant, RenewReply, RenewSegments, ReportEvents, ReportHot,
    ReportShard, ReportSilence, ReportTiers, Room, SegmentList, SegmentReply, SetTenant, SettleReport, ShardList,
    StatusReply, SyncTenantSsds, SyncTenants, TaskCreated, TaskList, TenantLeases, TenantList, TenantSsdLeases,
    TenantSsdList, TicketKeys, TicketReply, TierList, TierOrders, TiersOrdered, Undrain, UnregisterSegment,
    WatchOrders, Welcome,
};

/// Caller of a request, as its certificate proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Caller {
    pub role: Role,
    pub address: SocketAddr,
}

/// Reason for which a connection was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rejection {
    /// The peer speaks another version of the protocol.
    Protocol,
    /// The peer has no certificate, one of another authority, or one without a role in this cluster.
    Certificate,
    /// The TLS handshake took too long.
    Deadline,
    /// Too many connections are open.
    Full,
    /// Another error ended the handshake.
    Other,
}

impl Rejection {
    /// All reasons, in declaration order.
    pub const ALL: [Self; 5] = [Self::Protocol, Self::Certificate, Self::Deadline, Self::Full, Self::Other];

    /// Returns the reason's name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Protocol => "protocol",
            Self::Certificate => "certificate",
            Self::Deadline => "deadline",
            Self::Full => "full",
            Self::Other => "other",
        }
    }
}

/// Events of connections and calls, for counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Event {
    /// A caller with a role connected.
    Connected,
    /// A caller's connection closed.
    Disconnected,
    /// A connection was rejected.
    Rejected(Rejection),
    /// A peer sent a frame that is not a message; its connection was closed.
    BadFrame,
    /// A call was answered, or refused for its rights or by the service.
    Called { method: &'static str, ok: bool },
}

/// The calls of the control protocol, one method each; none may block.
pub trait Service: Send + Sync + 'static {
    /// Welcomes a caller.
    fn hello(&self, caller: Caller, call: Hello) -> Result<Welcome, Refusal>;
    /// Makes a node a member.
    fn join(&self, caller: Caller, call: Join) -> Result<JoinReply, Refusal>;
    /// Takes the map of a member that the control plane does not know.
    fn offer_map(&self, caller: Caller, call: OfferMap) -> Result<EmptyReply, Refusal>;
    /// Returns the last known incarnation of a node.
    fn get_incarnation(&self, caller: Caller, call: GetIncarnation) -> Result<LastIncarnation, Refusal>;
    /// Returns the last incarnation of a node that was a member.
    fn get_last_member(&self, caller: Caller, call: GetLastMember) -> Result<LastMember, Refusal>;
    /// Records the devices of a node's incarnation.
    fn attach_devices(&self, caller: Caller, call: AttachDevices) -> Result<DevicesKept, Refusal>;
    /// Records a heartbeat, with load.
    fn heartbeat(&self, caller: Caller, call: Heartbeat) -> Result<Alive, Refusal>;
    /// Records that a member has received all objects that moved to it.
    fn settled(&self, caller: Caller, call: SettleReport) -> Result<EmptyReply, Refusal>;
    /// Returns the members that have not received all objects yet.
    fn get_moves(&self, caller: Caller, call: GetMoves) -> Result<Moves, Refusal>;
    /// Ends a membership.
    fn leave(&self, caller: Caller, call: Leave) -> Result<EmptyReply, Refusal>;
    /// Drains a member.
    fn drain(&self, caller: Caller, call: Drain) -> Result<EmptyReply, Refusal>;
    /// Ends the draining of a member.
    fn undrain(&self, caller: Caller, call: Undrain) -> Result<EmptyReply, Refusal>;
    /// Adds a segment to the catalog.
    fn register_segment(&self, caller: Caller, call: RegisterSegment) -> Result<EmptyReply, Refusal>;
    /// Renews a client's segments.
    fn renew_segments(&self, caller: Caller, call: RenewSegments) -> Result<RenewReply, Refusal>;
    /// Removes a segment from the catalog.
    fn unregister_segment(&self, caller: Caller, call: UnregisterSegment) -> Result<EmptyReply, Refusal>;
    /// Returns one segment by name.
    fn get_segment(&self, caller: Caller, call: GetSegment) -> Result<SegmentReply, Refusal>;
    /// Returns a page of segments.
    fn list_segments(&self, caller: Caller, call: ListSegments) -> Result<SegmentList, Refusal>;
    /// Returns the state of the cluster, for operators.
    fn status(&self, caller: Caller) -> Result<StatusReply, Refusal>;
    /// Records the state of a node's tiers; the reply holds the node's outstanding orders.
    fn report_tiers(&self, caller: Caller, call: ReportTiers) -> Result<TierOrders, Refusal>;
    /// Returns the last reports of nodes' tiers.
    fn list_tiers(&self, caller: Caller, call: ListTiers) -> Result<TierList, Refusal>;
    /// Sends an order to nodes' tiers.
    fn order_tiers(&self, caller: Caller, call: OrderTiers) -> Result<TiersOrdered, Refusal>;
    /// Records the state of a node's shard.
    fn report_shard(&self, caller: Caller, call: ReportShard) -> Result<EmptyReply, Refusal>;
    /// Records the hot objects of a node's shard.
    fn report_hot(&self, caller: Caller, call: ReportHot) -> Result<EmptyReply, Refusal>;
    /// Returns the hot objects that nodes reported.
    fn list_hot(&self, caller: Caller, call: ListHot) -> Result<HotList, Refusal>;
    /// Returns the last reports of nodes' shards.
    fn list_shards(&self, caller: Caller, call: ListShards) -> Result<ShardList, Refusal>;
    /// Returns the capacity of the cluster.
    fn get_room(&self, _caller: Caller) -> Result<Room, Refusal> {
        Ok(Room { bytes: None })
    }
    /// Records that a member does not answer one of its peers.
    fn report_silence(&self, _caller: Caller, _call: ReportSilence) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    /// Creates a tenant, or changes it.
    fn set_tenant(&self, caller: Caller, call: SetTenant) -> Result<EmptyReply, Refusal>;
    /// Removes a tenant.
    fn remove_tenant(&self, caller: Caller, call: RemoveTenant) -> Result<EmptyReply, Refusal>;
    /// Returns all tenants.
    fn list_tenants(&self, caller: Caller) -> Result<TenantList, Refusal>;
    /// Records the tenants' usage of a shard; the reply holds the shard's leases.
    fn sync_tenants(&self, caller: Caller, call: SyncTenants) -> Result<TenantLeases, Refusal>;
    /// Returns the use of SSDs by all tenants.
    fn list_tenant_ssds(&self, caller: Caller) -> Result<TenantSsdList, Refusal>;
    /// Records the use of a shard's SSD by tenants; the reply holds the shard's leases of it.
    fn sync_tenant_ssds(&self, caller: Caller, call: SyncTenantSsds) -> Result<TenantSsdLeases, Refusal>;
    /// Issues a ticket for shards.
    fn get_ticket(&self, caller: Caller, call: GetTicket) -> Result<TicketReply, Refusal>;
    /// Returns the keys that a node verifies tickets with.
    fn get_ticket_keys(&self, caller: Caller, call: GetTicketKeys) -> Result<TicketKeys, Refusal>;
    /// Rotates the ticket key.
    fn rotate_tickets(&self, caller: Caller) -> Result<EmptyReply, Refusal>;
    /// Subscribes a node to its orders.
    fn watch_orders(&self, caller: Caller, call: WatchOrders) -> Result<mpsc::Receiver<ItemFrame>, Refusal>;
    /// Takes the answer to an order.
    fn answer_order(&self, caller: Caller, call: AnswerOrder) -> Result<EmptyReply, Refusal>;
    /// Takes the progress of replications that a node was ordered to make.
    fn answer_copies(&self, _caller: Caller, _call: AnswerCopies) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    /// Creates a replication task.
    fn create_task(&self, _caller: Caller, _call: CreateTask) -> Result<TaskCreated, Refusal> {
        Err(Refusal::new(RefusalCode::NotFound, "this service has no tasks"))
    }
    /// Returns the state of tasks.
    fn list_tasks(&self, _caller: Caller, _call: ListTasks) -> Result<TaskList, Refusal> {
        Ok(TaskList { tasks: Vec::new(), more: false })
    }
    /// Cancels a task.
    fn cancel_task(&self, _caller: Caller, call: CancelTask) -> Result<EmptyReply, Refusal> {
        Err(Refusal::new(RefusalCode::NotFound, format!("there is no task {}", call.id)))
    }
    /// Records events of a node's objects.
    fn report_events(&self, caller: Caller, call: ReportEvents) -> Result<EmptyReply, Refusal>;
    /// Subscribes to the events of all objects.
    fn watch_events(&self, caller: Caller) -> Result<mpsc::Receiver<ItemFrame>, Refusal>;
    /// Registers an instance with the Conductor.
    fn register_instance(&self, _caller: Caller, _call: RegisterInstance) -> Result<InstanceRegistered, Refusal> {
        Err(no_conductor())
    }
    /// Registers an instance that has capabilities.
    fn register_capabilities(
        &self,
        _caller: Caller,
        _call: RegisterCapabilities,
    ) -> Result<InstanceRegistered, Refusal> {
        Err(no_conductor())
    }
    /// Deregisters an instance.
    fn deregister_instance(&self, _caller: Caller, _call: DeregisterInstance) -> Result<EmptyReply, Refusal> {
        Err(no_conductor())
    }
    /// Records the load of an instance.
    fn report_load(&self, _caller: Caller, _call: ReportLoad) -> Result<EmptyReply, Refusal> {
        Err(no_conductor())
    }
    /// Records changes of an instance's cache.
    fn report_cache(&self, _caller: Caller, _call: ReportCache) -> Result<CacheTaken, Refusal> {
        Err(no_conductor())
    }
    /// Returns the instances that hold the prefix of a prompt.
    fn query_prefix(&self, _caller: Caller, _call: QueryPrefix) -> Result<PrefixHolders, Refusal> {
        Err(no_conductor())
    }
    /// Places a request.
    fn schedule(&self, _caller: Caller, _call: Schedule) -> Result<ScheduleReply, Refusal> {
        Err(no_conductor())
    }
    /// Ends reservations, and places a request with terms.
    fn schedule_on_terms(&self, _caller: Caller, _call: ScheduleOnTerms) -> Result<ScheduleReply, Refusal> {
        Err(no_conductor())
    }
    /// Ends reservations, and places a request on an instance or a pipeline group.
    fn schedule_with_groups(&self, _caller: Caller, _call: ScheduleWithGroups) -> Result<ScheduleReply, Refusal> {
        Err(no_conductor())
    }
    /// Records the progress of a request.
    fn update_request(&self, _caller: Caller, _call: UpdateRequest) -> Result<EmptyReply, Refusal> {
        Err(no_conductor())
    }
    /// Places a request on another instance.
    fn reschedule(&self, _caller: Caller, _call: Reschedule) -> Result<ScheduleReply, Refusal> {
        Err(no_conductor())
    }
    /// Returns the reasons for a request's placement.
    fn explain_request(&self, _caller: Caller, _call: ExplainRequest) -> Result<RequestExplained, Refusal> {
        Err(no_conductor())
    }
    /// Returns the reasons for a request's placement, with the pipeline groups.
    fn explain_placement(&self, _caller: Caller, _call: ExplainPlacement) -> Result<PlacementExplained, Refusal> {
        Err(no_conductor())
    }
    /// Holds an instance, or releases it.
    fn hold_instance(&self, _caller: Caller, _call: HoldInstance) -> Result<InstanceHeld, Refusal> {
        Err(no_conductor())
    }
    /// Sets the placement policy.
    fn set_placement(&self, _caller: Caller, _call: SetPlacement) -> Result<EmptyReply, Refusal> {
        Err(no_conductor())
    }
    /// Returns the placement policy and the held instances.
    fn show_placement(&self, _caller: Caller) -> Result<Placement, Refusal> {
        Err(no_conductor())
    }
    /// Sets or removes a class of requests.
    fn set_class(&self, _caller: Caller, _call: SetClass) -> Result<EmptyReply, Refusal> {
        Err(no_conductor())
    }
    /// Sets the weight of a flow.
    fn set_weight(&self, _caller: Caller, _call: SetWeight) -> Result<EmptyReply, Refusal> {
        Err(no_conductor())
    }
    /// Returns the classes and weights.
    fn show_service(&self, _caller: Caller) -> Result<ServiceShown, Refusal> {
        Err(no_conductor())
    }
    /// Returns figures of the replicas of hot prefixes.
    fn show_copies(&self, _caller: Caller) -> Result<CopiesShown, Refusal> {
        Err(no_conductor())
    }
    /// Returns the progress of the cache feeds.
    fn show_feeds(&self, _caller: Caller) -> Result<FeedsShown, Refusal> {
        Err(no_conductor())
    }
    /// Returns the Conductor's limits, each with its use.
    fn show_limits(&self, _caller: Caller) -> Result<LimitUse, Refusal> {
        Err(no_conductor())
    }
    /// Subscribes to the table of instances.
    fn watch_instances(&self, _caller: Caller) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        Err(no_conductor())
    }
    /// Subscribes to the placements of a client's queued requests.
    fn watch_assignments(
        &self,
        _caller: Caller,
        _call: WatchAssignments,
    ) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        Err(no_conductor())
    }
    /// Publishes an object in the P2P store.
    fn publish_object(&self, _caller: Caller, _call: PublishObject) -> Result<ObjectPublished, Refusal> {
        Err(no_objects())
    }
    /// Returns the description of an object.
    fn find_object(&self, _caller: Caller, _call: FindObject) -> Result<ObjectFound, Refusal> {
        Err(no_objects())
    }
    /// Adds a process to an object's swarm.
    fn hold_object(&self, _caller: Caller, _call: HoldObject) -> Result<ObjectHeld, Refusal> {
        Err(no_objects())
    }
    /// Records the shards that a member fetched.
    fn report_object(&self, _caller: Caller, _call: ReportObject) -> Result<EmptyReply, Refusal> {
        Err(no_objects())
    }
    /// Renews the members of a process.
    fn renew_objects(&self, _caller: Caller, _call: RenewObjects) -> Result<ObjectsRenewed, Refusal> {
        Err(no_objects())
    }
    /// Removes a member.
    fn release_object(&self, _caller: Caller, _call: ReleaseObject) -> Result<ObjectReleased, Refusal> {
        Err(no_objects())
    }
    /// Returns a page of objects.
    fn list_objects(&self, _caller: Caller, _call: ListObjects) -> Result<ObjectList, Refusal> {
        Err(no_objects())
    }
    /// Returns the members of an object's swarm.
    fn describe_object(&self, _caller: Caller, _call: DescribeObject) -> Result<ObjectMembers, Refusal> {
        Err(no_objects())
    }
    /// Returns members that hold all of a buffer.
    fn locate_object(&self, _caller: Caller, _call: LocateObject) -> Result<ObjectPlaces, Refusal> {
        Err(no_objects())
    }
    /// Makes a member a rank, and returns the rank to fetch from.
    fn join_ranks(&self, _caller: Caller, _call: JoinRanks) -> Result<RanksJoined, Refusal> {
        Err(no_objects())
    }
    /// Adds shards to those that a member gets orders for.
    fn want_shards(&self, _caller: Caller, _call: WantShards) -> Result<EmptyReply, Refusal> {
        Err(no_objects())
    }
    /// Returns the keys with which a process of the P2P store and its peers verify each other.
    fn get_peer_keys(&self, _caller: Caller, _call: GetPeerKeys) -> Result<TicketKeys, Refusal> {
        Err(no_objects())
    }
    /// Subscribes a process to its fetch orders.
    fn watch_fetches(&self, _caller: Caller, _call: WatchFetches) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        Err(no_objects())
    }
    /// Begins a process in a world.
    fn register_process(&self, _caller: Caller, _call: RegisterProcess) -> Result<WorldReply, Refusal> {
        Err(no_worlds())
    }
    /// Ends a process in order.
    fn unregister_process(&self, _caller: Caller, _call: UnregisterProcess) -> Result<EmptyReply, Refusal> {
        Err(no_worlds())
    }
    /// Records the state of a process; the reply holds its status if it has a new one.
    fn report_process(&self, _caller: Caller, _call: ReportProcess) -> Result<WorldReply, Refusal> {
        Err(no_worlds())
    }
    /// Makes a process a member of a group.
    fn attach_member(&self, _caller: Caller, _call: AttachMember) -> Result<MemberAttached, Refusal> {
        Err(no_worlds())
    }
    /// Ends a membership.
    fn detach_member(&self, _caller: Caller, _call: DetachMember) -> Result<EmptyReply, Refusal> {
        Err(no_worlds())
    }
    /// Proposes to change the view of a group.
    fn propose_change(&self, _caller: Caller, _call: ProposeChange) -> Result<EmptyReply, Refusal> {
        Err(no_worlds())
    }
    /// Returns a page of worlds.
    fn list_worlds(&self, _caller: Caller, _call: ListWorlds) -> Result<WorldList, Refusal> {
        Err(no_worlds())
    }
    /// Returns the processes and groups of a world.
    fn describe_world(&self, _caller: Caller, _call: DescribeWorld) -> Result<WorldDescription, Refusal> {
        Err(no_worlds())
    }
    /// Subscribes a process to its status.
    fn watch_world(&self, _caller: Caller, _call: WatchWorld) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        Err(no_worlds())
    }
    /// Returns the current map, and every later one, as frames of [`MapReply`].
    fn maps(&self) -> watch::Receiver<MapFrame>;
    /// Counts an event.
    fn observe(&self, event: Event);
}

/// State of a server: serving, or standby.
#[derive(Clone)]
pub enum ServiceState {
    /// The server serves with this service.
    Serving(Arc<dyn Service>),
    /// Another control plane leads: connections are closed, with this text.
    StandingBy(String),
}

fn no_conductor() -> Refusal {
    Refusal::new(RefusalCode::NotFound, "this control plane runs without a Conductor; start it with --conductor")
}

fn no_objects() -> Refusal {
    Refusal::new(RefusalCode::NotFound, "this service has no P2P store")
}

fn no_worlds() -> Refusal {
    Refusal::new(RefusalCode::NotFound, "this service has no process groups")
}

/// An item of a stream, encoded once for all its watchers.
pub type ItemFrame = Arc<[u8]>;

/// Encodes an item of a stream.
///
/// # Errors
/// [`CodecError::TooLarge`].
pub fn item_frame<I: Message>(item: &I) -> Result<ItemFrame, CodecError> {
    Ok(encode(item)?.into())
}

/// Maps before the present one that are kept for nodes, and most bytes of them.
const EARLIER: usize = 31;
const EARLIER_BYTES: usize = 8 << 20;

/// A map, encoded once for all its watchers, and those before it.
///
/// Nodes get every map, since a node that misses a change of owners cannot trust its memory any more; so the last maps
/// are kept for those that are slow, or were disconnected for a moment. For others only the newest counts.
#[derive(Clone, Debug)]
pub struct MapFrame {
    /// Identity of the cluster state that the map belongs to.
    pub(crate) state: u64,
    pub(crate) epoch: u64,
    pub(crate) frame: Arc<[u8]>,
    pub(crate) is_provisional: bool,
    /// Maps of the same state before this one, the oldest first, by epoch.
    earlier: Vec<(u64, Arc<[u8]>)>,
}

impl MapFrame {
    /// Encodes `reply`, whose map belongs to the cluster state with this identity. A connection whose caller knows
    /// another state is closed instead of getting the map.
    ///
    /// # Errors
    /// [`CodecError::TooLarge`].
    pub fn new(reply: &MapReply, state: u64) -> Result<Self, CodecError> {
        let (epoch, frame) = (reply.map.epoch.0, encode(reply)?.into());
        Ok(Self { state, epoch, frame, is_provisional: false, earlier: Vec::new() })
    }

    /// Keeps the map that this one replaces, and those before it, for nodes that have not got them.
    #[must_use]
    pub fn replacing(mut self, former: &Self) -> Self {
        if former.state != self.state || former.is_provisional || former.epoch >= self.epoch {
            return self;
        }
        self.earlier.clone_from(&former.earlier);
        self.earlier.push((former.epoch, Arc::clone(&former.frame)));
        let bytes = |maps: &[(u64, Arc<[u8]>)]| maps.iter().map(|(_, frame)| frame.len()).sum::<usize>();
        while self.earlier.len() > EARLIER || bytes(&self.earlier) > EARLIER_BYTES {
            self.earlier.remove(0);
        }
        self
    }

    /// Returns the maps for a watcher that knows the map of an epoch, or none: every later one that is kept if it
    /// `follows_all`, else the newest.
    pub(crate) fn after(&self, known: Option<u64>, follows_all: bool) -> impl Iterator<Item = &Arc<[u8]>> {
        let is_missing = move |epoch: u64| follows_all && known.is_some_and(|known| known < epoch);
        let earlier = self.earlier.iter().filter(move |(epoch, _)| is_missing(*epoch)).map(|(_, frame)| frame);
        earlier.chain(Some(&self.frame).filter(|_| known != Some(self.epoch)))
    }

    /// Marks the map as one of a control plane that may have lost its state and may be about to adopt another map.
    /// Clients do not get a provisional map, and wait for the next one: by this one, no node owns any object.
    #[must_use]
    pub fn provisional(self, is_provisional: bool) -> Self {
        Self { is_provisional, ..self }
    }

    /// Returns the map's epoch.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}
