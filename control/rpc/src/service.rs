//! What a server needs behind it: the calls, the maps to watch, and someone to count.
//!
//! A service is called on the endpoint's runtime and must not block for long; it answers at once or refuses. What
//! reaches it has passed the checks of size, form and role.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::codec::{CodecError, Message, encode};
use crate::error::{Refusal, RefusalCode};
use crate::identity::role::Role;
use crate::message::conductor::{
    CacheTaken, DeregisterInstance, ExplainRequest, InstanceRegistered, PrefixHolders, QueryPrefix, RegisterInstance,
    ReportCache, ReportLoad, RequestExplained, Reschedule, Schedule, ScheduleReply, UpdateRequest, WatchAssignments,
};
use crate::message::p2p::{
    DescribeObject, FindObject, GetPeerKeys, HoldObject, JoinRanks, ListObjects, LocateObject, ObjectFound, ObjectHeld,
    ObjectList, ObjectMembers, ObjectPlaces, ObjectPublished, ObjectReleased, ObjectsRenewed, PublishObject,
    RanksJoined, ReleaseObject, RenewObjects, ReportObject, WantShards, WatchFetches,
};
use crate::message::placement::{CopiesShown, HoldInstance, InstanceHeld, Placement, SetPlacement};
use crate::message::{
    Alive, AnswerCopies, AnswerOrder, AttachDevices, CancelTask, CreateTask, DevicesKept, Drain, EmptyReply,
    GetIncarnation, GetMoves, GetSegment, GetTicket, GetTicketKeys, Heartbeat, Hello, HotList, Join, JoinReply,
    LastIncarnation, Leave, ListHot, ListSegments, ListShards, ListTasks, ListTiers, MapReply, Moves, OfferMap,
    OrderTiers, RegisterSegment, RemoveTenant, RenewReply, RenewSegments, ReportEvents, ReportHot, ReportShard,
    ReportSilence, ReportTiers, Room, SegmentList, SegmentReply, SetTenant, SettleReport, ShardList, StatusReply,
    SyncTenants, TaskCreated, TaskList, TenantLeases, TenantList, TicketKeys, TicketReply, TierList, TierOrders,
    TiersOrdered, Undrain, UnregisterSegment, WatchOrders, Welcome,
};

/// Who makes a call, as its certificate proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Its role.
    pub role: Role,
    /// Where it calls from.
    pub address: SocketAddr,
}

/// Why a connection was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rejection {
    /// Another version of the protocol.
    Protocol,
    /// No certificate, one of another authority, or one without a role in this cluster.
    Certificate,
    /// TLS took too long.
    Deadline,
    /// Too many connections.
    Full,
    /// Anything else that ends a handshake.
    Other,
}

impl Rejection {
    /// All reasons, in declaration order.
    pub const ALL: [Self; 5] = [Self::Protocol, Self::Certificate, Self::Deadline, Self::Full, Self::Other];

    /// The word for it in metrics.
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

/// What happens at the rim, for counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A caller with a role arrived.
    Connected,
    /// It went away.
    Disconnected,
    /// A connection was turned away.
    Rejected(Rejection),
    /// A peer sent something that is not a message; its connection was closed.
    BadFrame,
    /// A call was answered, or refused by role or by the service.
    Called {
        /// The method's name.
        method: &'static str,
        /// Whether it succeeded.
        ok: bool,
    },
}

/// The calls. One method each; none may block.
pub trait Service: Send + Sync + 'static {
    /// Greets a caller.
    fn hello(&self, caller: Caller, call: Hello) -> Result<Welcome, Refusal>;
    /// Makes a node a member.
    fn join(&self, caller: Caller, call: Join) -> Result<JoinReply, Refusal>;
    /// A member that is not known says which map it follows.
    fn offer_map(&self, caller: Caller, call: OfferMap) -> Result<EmptyReply, Refusal>;
    /// Which incarnation of a node is known last.
    fn get_incarnation(&self, caller: Caller, call: GetIncarnation) -> Result<LastIncarnation, Refusal>;
    /// An incarnation of a node says which devices it has.
    fn attach_devices(&self, caller: Caller, call: AttachDevices) -> Result<DevicesKept, Refusal>;
    /// A sign of life, with load.
    fn heartbeat(&self, caller: Caller, call: Heartbeat) -> Result<Alive, Refusal>;
    /// A member has what moved to it.
    fn settled(&self, caller: Caller, call: SettleReport) -> Result<EmptyReply, Refusal>;
    /// Members that wait for what moved to them.
    fn get_moves(&self, caller: Caller, call: GetMoves) -> Result<Moves, Refusal>;
    /// Ends a membership.
    fn leave(&self, caller: Caller, call: Leave) -> Result<EmptyReply, Refusal>;
    /// Has a member give its slots away.
    fn drain(&self, caller: Caller, call: Drain) -> Result<EmptyReply, Refusal>;
    /// Gives a member that was drained its share again.
    fn undrain(&self, caller: Caller, call: Undrain) -> Result<EmptyReply, Refusal>;
    /// Puts a segment into the catalog.
    fn register_segment(&self, caller: Caller, call: RegisterSegment) -> Result<EmptyReply, Refusal>;
    /// Keeps a client's segments in the catalog.
    fn renew_segments(&self, caller: Caller, call: RenewSegments) -> Result<RenewReply, Refusal>;
    /// Takes a segment out of the catalog.
    fn unregister_segment(&self, caller: Caller, call: UnregisterSegment) -> Result<EmptyReply, Refusal>;
    /// One segment by name.
    fn get_segment(&self, caller: Caller, call: GetSegment) -> Result<SegmentReply, Refusal>;
    /// A page of segments.
    fn list_segments(&self, caller: Caller, call: ListSegments) -> Result<SegmentList, Refusal>;
    /// The state of the cluster, for operators.
    fn status(&self, caller: Caller) -> Result<StatusReply, Refusal>;
    /// How a node's tiers are; the answer says what it is to do with them.
    fn report_tiers(&self, caller: Caller, call: ReportTiers) -> Result<TierOrders, Refusal>;
    /// What nodes reported of their tiers.
    fn list_tiers(&self, caller: Caller, call: ListTiers) -> Result<TierList, Refusal>;
    /// Orders something of nodes' tiers.
    fn order_tiers(&self, caller: Caller, call: OrderTiers) -> Result<TiersOrdered, Refusal>;
    /// How a node's shard does.
    fn report_shard(&self, caller: Caller, call: ReportShard) -> Result<EmptyReply, Refusal>;
    /// Which objects a node's shard was asked for most.
    fn report_hot(&self, caller: Caller, call: ReportHot) -> Result<EmptyReply, Refusal>;
    /// What nodes reported so.
    fn list_hot(&self, caller: Caller, call: ListHot) -> Result<HotList, Refusal>;
    /// What nodes reported of their shards.
    fn list_shards(&self, caller: Caller, call: ListShards) -> Result<ShardList, Refusal>;
    /// How much the cluster could hold.
    fn get_room(&self, _caller: Caller) -> Result<Room, Refusal> {
        Ok(Room { bytes: None })
    }
    /// A member says nothing to somebody who asked it.
    fn report_silence(&self, _caller: Caller, _call: ReportSilence) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    /// Makes a tenant, or changes it.
    fn set_tenant(&self, caller: Caller, call: SetTenant) -> Result<EmptyReply, Refusal>;
    /// Takes a tenant away.
    fn remove_tenant(&self, caller: Caller, call: RemoveTenant) -> Result<EmptyReply, Refusal>;
    /// All tenants.
    fn list_tenants(&self, caller: Caller) -> Result<TenantList, Refusal>;
    /// What tenants have of a shard; the answer says what they may have.
    fn sync_tenants(&self, caller: Caller, call: SyncTenants) -> Result<TenantLeases, Refusal>;
    /// A ticket for shards.
    fn get_ticket(&self, caller: Caller, call: GetTicket) -> Result<TicketReply, Refusal>;
    /// What a node needs to check tickets.
    fn get_ticket_keys(&self, caller: Caller, call: GetTicketKeys) -> Result<TicketKeys, Refusal>;
    /// Makes a new key for tickets.
    fn rotate_tickets(&self, caller: Caller) -> Result<EmptyReply, Refusal>;
    /// The orders of a node, until it goes.
    fn watch_orders(&self, caller: Caller, call: WatchOrders) -> Result<mpsc::Receiver<ItemFrame>, Refusal>;
    /// What came of an order.
    fn answer_order(&self, caller: Caller, call: AnswerOrder) -> Result<EmptyReply, Refusal>;
    /// How far copies are that a node was to make.
    fn answer_copies(&self, _caller: Caller, _call: AnswerCopies) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    /// Has objects copied.
    fn create_task(&self, _caller: Caller, _call: CreateTask) -> Result<TaskCreated, Refusal> {
        Err(Refusal::new(RefusalCode::NotFound, "tasks are not made here"))
    }
    /// How tasks are.
    fn list_tasks(&self, _caller: Caller, _call: ListTasks) -> Result<TaskList, Refusal> {
        Ok(TaskList { tasks: Vec::new(), more: false })
    }
    /// Ends a task.
    fn cancel_task(&self, _caller: Caller, call: CancelTask) -> Result<EmptyReply, Refusal> {
        Err(Refusal::new(RefusalCode::NotFound, format!("there is no task {}", call.id)))
    }
    /// What became of objects of a node.
    fn report_events(&self, caller: Caller, call: ReportEvents) -> Result<EmptyReply, Refusal>;
    /// What becomes of all objects, until the watcher goes.
    fn watch_events(&self, caller: Caller) -> Result<mpsc::Receiver<ItemFrame>, Refusal>;
    /// An instance registers with the Conductor.
    fn register_instance(&self, _caller: Caller, _call: RegisterInstance) -> Result<InstanceRegistered, Refusal> {
        Err(no_conductor())
    }
    /// An instance goes.
    fn deregister_instance(&self, _caller: Caller, _call: DeregisterInstance) -> Result<EmptyReply, Refusal> {
        Err(no_conductor())
    }
    /// How busy an instance is.
    fn report_load(&self, _caller: Caller, _call: ReportLoad) -> Result<EmptyReply, Refusal> {
        Err(no_conductor())
    }
    /// What changed in an instance's cache.
    fn report_cache(&self, _caller: Caller, _call: ReportCache) -> Result<CacheTaken, Refusal> {
        Err(no_conductor())
    }
    /// Who has how much of the beginning of a prompt.
    fn query_prefix(&self, _caller: Caller, _call: QueryPrefix) -> Result<PrefixHolders, Refusal> {
        Err(no_conductor())
    }
    /// Who should serve a request.
    fn schedule(&self, _caller: Caller, _call: Schedule) -> Result<ScheduleReply, Refusal> {
        Err(no_conductor())
    }
    /// How a request fares.
    fn update_request(&self, _caller: Caller, _call: UpdateRequest) -> Result<EmptyReply, Refusal> {
        Err(no_conductor())
    }
    /// A request must go elsewhere.
    fn reschedule(&self, _caller: Caller, _call: Reschedule) -> Result<ScheduleReply, Refusal> {
        Err(no_conductor())
    }
    /// Why a request went where it went.
    fn explain_request(&self, _caller: Caller, _call: ExplainRequest) -> Result<RequestExplained, Refusal> {
        Err(no_conductor())
    }
    /// An instance is taken out, or let take requests again.
    fn hold_instance(&self, _caller: Caller, _call: HoldInstance) -> Result<InstanceHeld, Refusal> {
        Err(no_conductor())
    }
    /// How the Conductor decides from now on.
    fn set_placement(&self, _caller: Caller, _call: SetPlacement) -> Result<EmptyReply, Refusal> {
        Err(no_conductor())
    }
    /// How it decides.
    fn show_placement(&self, _caller: Caller) -> Result<Placement, Refusal> {
        Err(no_conductor())
    }
    /// Which copies of hot prefixes it has had made.
    fn show_copies(&self, _caller: Caller) -> Result<CopiesShown, Refusal> {
        Err(no_conductor())
    }
    /// All instances, and again when something changes.
    fn watch_instances(&self, _caller: Caller) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        Err(no_conductor())
    }
    /// What becomes of a client's requests that wait.
    fn watch_assignments(
        &self,
        _caller: Caller,
        _call: WatchAssignments,
    ) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        Err(no_conductor())
    }
    /// Says what an object of the P2P store is.
    fn publish_object(&self, _caller: Caller, _call: PublishObject) -> Result<ObjectPublished, Refusal> {
        Err(no_objects())
    }
    /// What an object is.
    fn find_object(&self, _caller: Caller, _call: FindObject) -> Result<ObjectFound, Refusal> {
        Err(no_objects())
    }
    /// A process has an object, or is about to.
    fn hold_object(&self, _caller: Caller, _call: HoldObject) -> Result<ObjectHeld, Refusal> {
        Err(no_objects())
    }
    /// What a member got.
    fn report_object(&self, _caller: Caller, _call: ReportObject) -> Result<EmptyReply, Refusal> {
        Err(no_objects())
    }
    /// A process lives.
    fn renew_objects(&self, _caller: Caller, _call: RenewObjects) -> Result<ObjectsRenewed, Refusal> {
        Err(no_objects())
    }
    /// A member goes.
    fn release_object(&self, _caller: Caller, _call: ReleaseObject) -> Result<ObjectReleased, Refusal> {
        Err(no_objects())
    }
    /// A page of objects.
    fn list_objects(&self, _caller: Caller, _call: ListObjects) -> Result<ObjectList, Refusal> {
        Err(no_objects())
    }
    /// Who holds an object.
    fn describe_object(&self, _caller: Caller, _call: DescribeObject) -> Result<ObjectMembers, Refusal> {
        Err(no_objects())
    }
    /// Where an object may be read from.
    fn locate_object(&self, _caller: Caller, _call: LocateObject) -> Result<ObjectPlaces, Refusal> {
        Err(no_objects())
    }
    /// A member is a rank, and asks whom it fetches from.
    fn join_ranks(&self, _caller: Caller, _call: JoinRanks) -> Result<RanksJoined, Refusal> {
        Err(no_objects())
    }
    /// A member is to be ordered what it does not get by its schedule.
    fn want_shards(&self, _caller: Caller, _call: WantShards) -> Result<EmptyReply, Refusal> {
        Err(no_objects())
    }
    /// What a process of the P2P store needs to let its peers in, and to be let in by them.
    fn get_peer_keys(&self, _caller: Caller, _call: GetPeerKeys) -> Result<TicketKeys, Refusal> {
        Err(no_objects())
    }
    /// What a process is to fetch, until it goes.
    fn watch_fetches(&self, _caller: Caller, _call: WatchFetches) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        Err(no_objects())
    }
    /// The current map, and every later one, as frames of [`MapReply`].
    fn maps(&self) -> watch::Receiver<MapFrame>;
    /// Counts an event.
    fn observe(&self, event: Event);
}

/// Whether a server has a service behind it.
#[derive(Clone)]
pub enum ServiceState {
    /// It has, and serves.
    Serving(Arc<dyn Service>),
    /// Another control plane leads: callers are sent away, with these words.
    StandingBy(String),
}

fn no_conductor() -> Refusal {
    Refusal::new(RefusalCode::NotFound, "this control plane runs without a Conductor; start it with --conductor")
}

fn no_objects() -> Refusal {
    Refusal::new(RefusalCode::NotFound, "this service has no P2P store")
}

/// An item of a stream, encoded once for all who watch it.
pub type ItemFrame = Arc<[u8]>;

/// Encodes an item of a stream.
///
/// # Errors
/// [`CodecError::TooLarge`].
pub fn item_frame<I: Message>(item: &I) -> Result<ItemFrame, CodecError> {
    Ok(encode(item)?.into())
}

/// A map, encoded once for all who watch it.
#[derive(Clone, Debug)]
pub struct MapFrame {
    /// Identity of the state that it is of.
    pub(crate) state: u64,
    pub(crate) epoch: u64,
    pub(crate) frame: Arc<[u8]>,
    pub(crate) is_provisional: bool,
}

impl MapFrame {
    /// Encodes `reply`, whose map is of the state with this identity. A connection whose caller was told another one is
    /// closed, and not told the map.
    ///
    /// # Errors
    /// [`CodecError::TooLarge`].
    pub fn new(reply: &MapReply, state: u64) -> Result<Self, CodecError> {
        Ok(Self { state, epoch: reply.map.epoch.0, frame: encode(reply)?.into(), is_provisional: false })
    }

    /// Marks the map as one of a control plane that may have lost its state and be about to adopt another map. Clients
    /// are not sent a provisional map, and wait for the next one: by this one, no node owns any object.
    #[must_use]
    pub fn provisional(self, is_provisional: bool) -> Self {
        Self { is_provisional, ..self }
    }

    /// Epoch of the map.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}
