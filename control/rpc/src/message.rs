//! The calls of the control protocol and their replies.
//!
//! One struct per message, each with its kind; a request's kind has the top bit clear, its reply's has it set. A
//! request without a reply type gets [`EmptyReply`]. Kinds and fields are append-only within a protocol version, and
//! golden bytes in the tests pin them.
//!
//! A member and a map travel in `kvplane-proto`'s encoding inside a byte string, so that a decoded one has passed that
//! encoding's checks of counts, lengths and ranges.

pub mod conductor;
pub(crate) mod events;
pub mod groups;
pub(crate) mod hot;
pub(crate) mod moves;
pub mod p2p;
pub mod placement;
pub(crate) mod segments;
pub(crate) mod shards;
pub(crate) mod silence;
pub(crate) mod tasks;
pub(crate) mod tenants;
pub(crate) mod tickets;
pub(crate) mod tier;

use bincode::de::{Decode, Decoder};
use bincode::enc::{Encode, Encoder};
use bincode::error::{DecodeError, EncodeError};
pub use kvplane_cluster::Load;
use kvplane_proto::ids::Epoch;
use kvplane_proto::map::{ClusterMap, Member};

use crate::codec::Message;
use crate::message::conductor::{
    CacheTaken, DeregisterInstance, ExplainPlacement, ExplainRequest, InstanceRegistered, InstanceTable,
    PlacementExplained, PlacementNotice, PrefixHolders, QueryPrefix, RegisterCapabilities, RegisterInstance,
    ReportCache, ReportLoad, RequestExplained, Reschedule, Schedule, ScheduleOnTerms, ScheduleReply,
    ScheduleWithGroups, UpdateRequest, WatchAssignments, WatchInstances,
};
pub use kvplane_proto::events::{ObjectChange, ObjectEvent, ObjectMedium};

pub use crate::message::events::{
    AnswerOrder, EVENTS_PER_REPORT, EventName, EventReport, Events, KeyFound, NodeEvents, NodeOrder, OBJECTS_PER_ORDER,
    Order, ReportEvents, WatchEvents, WatchOrders,
};
use crate::message::groups::{
    AttachMember, DescribeWorld, DetachMember, ListWorlds, MemberAttached, ProposeChange, RegisterProcess,
    ReportProcess, UnregisterProcess, WatchWorld, WorldDescription, WorldList, WorldReply, WorldStatus,
};
pub use crate::message::hot::{
    HOT_PER_REPORT, HotFigures, HotList, HotShard, ListHot, NAME_PER_REPORT_BYTES, ObjectFigures, ReportHot,
};
pub use crate::message::moves::{
    AttachDevices, DevicesKept, Drain, GetIncarnation, GetLastMember, GetMoves, LastIncarnation, LastMember, Moves,
    OfferMap, SettleReport, Undrain,
};
use crate::message::p2p::{
    DescribeObject, FetchOrders, FindObject, GetPeerKeys, HoldObject, JoinRanks, ListObjects, LocateObject,
    ObjectFound, ObjectHeld, ObjectList, ObjectMembers, ObjectPlaces, ObjectPublished, ObjectReleased, ObjectsRenewed,
    PublishObject, RanksJoined, ReleaseObject, RenewObjects, ReportObject, WantShards, WatchFetches,
};
use crate::message::placement::{
    CopiesShown, FeedsShown, HoldInstance, InstanceHeld, LimitUse, Placement, ServiceShown, SetClass, SetPlacement,
    SetWeight, ShowCopies, ShowFeeds, ShowLimits, ShowPlacement, ShowService,
};
pub use crate::message::segments::{
    ClientId, GetSegment, ListSegments, RegisterSegment, RenewReply, RenewSegments, Segment, SegmentKind, SegmentList,
    SegmentOwner, SegmentReply, UnregisterSegment,
};
pub use crate::message::shards::{
    CopyFigures, DamageFigures, DevicePoolFigures, EventFigures, EvictionFigures, FarPoolFigures, GetFigures, GetRoom,
    ListShards, OPERATIONS_PER_REPORT, OperationFigures, PoolFigures, PutFigures, ReportShard, Room, SLOW_PER_REPORT,
    ShardFigures, ShardList, ShardNode, SlowFigures, SlowLog, SsdFigures, ThreadFigures, TroubleFigures,
};
pub use crate::message::silence::ReportSilence;
pub use crate::message::tier::{
    ListTiers, LogSegments, OrderTiers, Prefetches, ReportTiers, SHARDS_PER_REPORT, ScrubFigures, TierAction,
    TierErrors, TierGets, TierList, TierNode, TierOrder, TierOrders, TierShard, TiersOrdered, WriteBudget,
};

pub use crate::message::tenants::{
    ListTenantSsds, ListTenants, RemoveTenant, SetTenant, SyncTenantSsds, SyncTenants, TenantChange, TenantFigures,
    TenantLease, TenantLeases, TenantList, TenantSsd, TenantSsdLease, TenantSsdLeases, TenantSsdList, TenantSsdStatus,
    TenantStatus,
};

pub use crate::message::tasks::{
    AnswerCopies, CancelTask, CreateTask, ListTasks, ReplicaProgress, TASK_NAME_BYTES, TASKS_PER_REPLY, TaskCreated,
    TaskList, TaskState, TaskStatus,
};

pub use crate::message::tickets::{
    GetTicket, GetTicketKeys, KEYS_PER_REPLY, RotateTickets, TicketKey, TicketKeys, TicketReply,
};

/// A request that a client sends, with its reply.
pub trait Request: Message {
    /// The reply when the call succeeds.
    type Reply: Message;
    /// True if repeating the call changes nothing more, even if others called meanwhile: it only reads, or reports the
    /// state of the caller's own incarnation.
    const IDEMPOTENT: bool;
}

/// A request that a client sends, with a stream of items in reply.
pub trait StreamingCall: Message {
    /// Type of the stream's items.
    type Item: Message;
}

impl StreamingCall for WatchOrders {
    type Item = NodeOrder;
}

impl StreamingCall for WatchEvents {
    type Item = Events;
}

impl StreamingCall for WatchInstances {
    type Item = InstanceTable;
}

impl StreamingCall for WatchAssignments {
    type Item = PlacementNotice;
}

impl StreamingCall for WatchWorld {
    type Item = WorldStatus;
}

macro_rules! messages {
    ($($name:ident = $kind:literal $size:ident $(=> $reply:ident $(, $idempotent:ident)?)?;)+) => {
        $(
            impl Message for $name {
                const KIND: u16 = $kind;
                const LARGE: bool = messages!(@large $size);
            }
            $(impl Request for $name {
                type Reply = $reply;
                const IDEMPOTENT: bool = messages!(@idempotent $($idempotent)?);
            })?
        )+

        /// Returns true if the body of this kind has the large limit.
        pub(crate) const fn is_large(kind: u16) -> bool {
            match kind {
                $($kind => messages!(@large $size),)+
                _ => false,
            }
        }

        /// Every kind and its message's name, in order of declaration.
        pub const KINDS: &[(u16, &str)] = &[$(($kind, stringify!($name))),+];
    };
    (@large small) => { false };
    (@large large) => { true };
    (@idempotent idempotent) => { true };
    (@idempotent) => { false };
}

messages! {
    Hello = 0x0001 small => Welcome, idempotent;
    Join = 0x0002 small => JoinReply, idempotent;
    Heartbeat = 0x0003 small => Alive, idempotent;
    Leave = 0x0004 small => EmptyReply;
    GetMap = 0x0005 small => MapReply, idempotent;
    WatchMap = 0x0006 small;
    RegisterSegment = 0x0007 small => EmptyReply, idempotent;
    RenewSegments = 0x0008 small => RenewReply, idempotent;
    UnregisterSegment = 0x0009 small => EmptyReply, idempotent;
    GetSegment = 0x000a small => SegmentReply, idempotent;
    ListSegments = 0x000b small => SegmentList, idempotent;
    Status = 0x000c small => StatusReply, idempotent;
    ReportTiers = 0x000d small => TierOrders;
    ListTiers = 0x000e small => TierList, idempotent;
    OrderTiers = 0x000f small => TiersOrdered;
    ReportShard = 0x0010 small => EmptyReply, idempotent;
    ListShards = 0x0011 small => ShardList, idempotent;
    GetRoom = 0x0016 small => Room, idempotent;
    ReportHot = 0x0018 small => EmptyReply, idempotent;
    ListHot = 0x0019 small => HotList, idempotent;
    WatchOrders = 0x0012 small;
    AnswerOrder = 0x0013 small => EmptyReply;
    ReportEvents = 0x0014 large => EmptyReply;
    WatchEvents = 0x0015 small;
    Drain = 0x001a small => EmptyReply;
    AttachDevices = 0x001b small => DevicesKept, idempotent;
    SettleReport = 0x001c small => EmptyReply, idempotent;
    Undrain = 0x001d small => EmptyReply;
    CreateTask = 0x001e large => TaskCreated;
    ListTasks = 0x001f small => TaskList, idempotent;
    CancelTask = 0x0024 small => EmptyReply;
    AnswerCopies = 0x0025 small => EmptyReply;
    ReportSilence = 0x0026 small => EmptyReply;
    GetMoves = 0x0027 small => Moves, idempotent;
    RemoveTenant = 0x0021 small => EmptyReply;
    ListTenants = 0x0022 small => TenantList, idempotent;
    SyncTenants = 0x0023 large => TenantLeases;
    ListTenantSsds = 0x0029 small => TenantSsdList, idempotent;
    SyncTenantSsds = 0x002a large => TenantSsdLeases;
    SetTenant = 0x002b small => EmptyReply;
    GetTicket = 0x0040 small => TicketReply, idempotent;
    GetTicketKeys = 0x0041 small => TicketKeys, idempotent;
    RotateTickets = 0x0042 small => EmptyReply;
    RegisterInstance = 0x0030 small => InstanceRegistered, idempotent;
    DeregisterInstance = 0x0031 small => EmptyReply;
    ReportLoad = 0x0032 small => EmptyReply, idempotent;
    ReportCache = 0x0033 large => CacheTaken;
    QueryPrefix = 0x0034 large => PrefixHolders, idempotent;
    Schedule = 0x0035 large => ScheduleReply, idempotent;
    UpdateRequest = 0x0036 small => EmptyReply;
    Reschedule = 0x0037 small => ScheduleReply;
    WatchInstances = 0x0038 small;
    WatchAssignments = 0x0039 small;
    ExplainRequest = 0x003a small => RequestExplained, idempotent;
    HoldInstance = 0x003c small => InstanceHeld;
    SetPlacement = 0x003d small => EmptyReply;
    ShowCopies = 0x003b small => CopiesShown, idempotent;
    ShowPlacement = 0x003e small => Placement, idempotent;
    ScheduleOnTerms = 0x003f large => ScheduleReply, idempotent;
    SetClass = 0x0044 small => EmptyReply, idempotent;
    SetWeight = 0x0045 small => EmptyReply, idempotent;
    ShowService = 0x0046 small => ServiceShown, idempotent;
    RegisterCapabilities = 0x0048 small => InstanceRegistered, idempotent;
    ScheduleWithGroups = 0x0049 large => ScheduleReply, idempotent;
    ExplainPlacement = 0x004a small => PlacementExplained, idempotent;
    ShowFeeds = 0x0070 small => FeedsShown, idempotent;
    ShowLimits = 0x0071 small => LimitUse, idempotent;
    PublishObject = 0x0050 large => ObjectPublished;
    FindObject = 0x0051 small => ObjectFound, idempotent;
    HoldObject = 0x0052 large => ObjectHeld;
    ReportObject = 0x0053 large => EmptyReply;
    RenewObjects = 0x0054 small => ObjectsRenewed, idempotent;
    ReleaseObject = 0x0055 small => ObjectReleased;
    ListObjects = 0x0056 small => ObjectList, idempotent;
    DescribeObject = 0x0057 small => ObjectMembers, idempotent;
    WatchFetches = 0x0058 small;
    GetPeerKeys = 0x0059 small => TicketKeys, idempotent;
    LocateObject = 0x005a small => ObjectPlaces, idempotent;
    JoinRanks = 0x005b small => RanksJoined;
    WantShards = 0x005c large => EmptyReply;
    RegisterProcess = 0x0080 small => WorldReply, idempotent;
    UnregisterProcess = 0x0081 small => EmptyReply, idempotent;
    ReportProcess = 0x0082 small => WorldReply;
    AttachMember = 0x0083 small => MemberAttached, idempotent;
    DetachMember = 0x0084 small => EmptyReply, idempotent;
    ProposeChange = 0x0085 small => EmptyReply, idempotent;
    WatchWorld = 0x0086 small;
    ListWorlds = 0x0087 small => WorldList, idempotent;
    DescribeWorld = 0x0088 small => WorldDescription, idempotent;
    GetIncarnation = 0x0060 small => LastIncarnation, idempotent;
    GetLastMember = 0x0062 small => LastMember, idempotent;
    OfferMap = 0x0061 large => EmptyReply;
    Welcome = 0x8001 small;
    JoinReply = 0x8002 small;
    Alive = 0x8003 small;
    EmptyReply = 0x8004 small;
    MapReply = 0x8005 large;
    RenewReply = 0x8008 small;
    DevicesKept = 0x801b small;
    Moves = 0x8027 small;
    SegmentReply = 0x800a small;
    SegmentList = 0x800b large;
    StatusReply = 0x800c large;
    TierOrders = 0x800d small;
    TierList = 0x800e large;
    TiersOrdered = 0x800f large;
    ShardList = 0x8011 large;
    Room = 0x8016 small;
    HotList = 0x8019 large;
    NodeOrder = 0x8012 small;
    Events = 0x8015 large;
    TaskCreated = 0x801e small;
    TaskList = 0x801f large;
    TenantList = 0x8022 large;
    TenantLeases = 0x8023 large;
    TenantSsdList = 0x8029 large;
    TenantSsdLeases = 0x802a large;
    TicketReply = 0x8040 small;
    TicketKeys = 0x8041 small;
    InstanceRegistered = 0x8030 small;
    CacheTaken = 0x8033 small;
    PrefixHolders = 0x8034 large;
    ScheduleReply = 0x8035 small;
    InstanceTable = 0x8038 large;
    PlacementNotice = 0x8039 small;
    RequestExplained = 0x803a small;
    InstanceHeld = 0x803c small;
    CopiesShown = 0x803b small;
    FeedsShown = 0x8070 large;
    Placement = 0x803e large;
    ServiceShown = 0x8046 large;
    PlacementExplained = 0x804a small;
    LimitUse = 0x8071 small;
    ObjectPublished = 0x8050 small;
    ObjectFound = 0x8051 large;
    ObjectHeld = 0x8052 small;
    ObjectsRenewed = 0x8054 large;
    ObjectReleased = 0x8055 small;
    ObjectList = 0x8056 large;
    ObjectMembers = 0x8057 large;
    FetchOrders = 0x8058 large;
    ObjectPlaces = 0x805a large;
    RanksJoined = 0x805b large;
    WorldReply = 0x8080 large;
    MemberAttached = 0x8083 small;
    WorldStatus = 0x8086 large;
    WorldList = 0x8087 large;
    WorldDescription = 0x8088 large;
    LastIncarnation = 0x8060 small;
    LastMember = 0x8062 small;
}

/// First call of every connection.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Hello {
    /// Program and version of the caller, for logs.
    pub software: String,
}

/// The reply to [`Hello`]: the control plane's identity and its timing.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Welcome {
    /// Program and version of the control plane.
    pub software: String,
    /// Identity of the cluster state: epochs of different states cannot be compared.
    pub state_id: u64,
    /// Epoch of its map.
    pub epoch: u64,
    /// Interval of a member's heartbeats, in nanoseconds.
    pub heartbeat_interval_ns: u64,
    /// Time without a heartbeat after which a member is expelled, in nanoseconds.
    pub heartbeat_deadline_ns: u64,
}

/// Makes a node a member. The node enters the map with its first heartbeat, which it sends at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// Node id, incarnation, addresses of the shards, and weight.
    pub member: Member,
    /// Bytes that the node contributes, for operators.
    pub capacity_bytes: u64,
    /// Version of its program, for operators.
    pub version: String,
}

/// The reply to [`Join`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct JoinReply {
    /// The newest epoch.
    pub epoch: u64,
    /// Interval of heartbeats, in nanoseconds.
    pub heartbeat_interval_ns: u64,
    /// Time without a heartbeat after which the member is expelled, in nanoseconds.
    pub heartbeat_deadline_ns: u64,
}

/// Heartbeat of a member.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Heartbeat {
    pub node: u64,
    pub incarnation: u64,
    pub load: Load,
}

/// Ends a membership. If the node shuts down by itself and has reported its devices, its slots wait for its next
/// incarnation, as long as for an unresponsive node.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Leave {
    pub node: u64,
    /// None if an operator removes the member.
    pub incarnation: Option<u64>,
}

/// Reply without contents: the call succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct EmptyReply;

/// The reply to [`Heartbeat`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Alive {
    /// The newest epoch.
    pub epoch: u64,
    /// The first epoch since which no slot has changed owners.
    pub since: u64,
}

/// Requests the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct GetMap;

/// Requests the map and all later ones: the reply is a stream of [`MapReply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WatchMap {
    /// Epoch of the caller's map, which is not sent again.
    pub known_epoch: Option<u64>,
}

/// The cluster map.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct MapReply {
    pub map: ClusterMap,
}

fn decode_map(bytes: &[u8]) -> Result<ClusterMap, DecodeError> {
    ClusterMap::decode(bytes).map_err(|error| DecodeError::OtherString(error.to_string()))
}

impl Encode for MapReply {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        let mut bytes = Vec::new();
        self.map.encode(&mut bytes);
        bytes.encode(encoder)
    }
}

impl<Context> Decode<Context> for MapReply {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        Ok(Self { map: decode_map(&Vec::<u8>::decode(decoder)?)? })
    }
}

/// A member is encoded as a cluster map with one member.
impl Encode for Join {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        let map = ClusterMap { epoch: Epoch(0), replicas: 1, members: vec![self.member.clone()], former: None };
        map.validate().map_err(|error| EncodeError::OtherString(error.to_string()))?;
        MapReply { map }.encode(encoder)?;
        self.capacity_bytes.encode(encoder)?;
        self.version.encode(encoder)
    }
}

impl<Context> Decode<Context> for Join {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let mut members = MapReply::decode(decoder)?.map.members;
        let (Some(member), true) = (members.pop(), members.is_empty()) else {
            return Err(DecodeError::Other("a join names exactly one member"));
        };
        let capacity_bytes = u64::decode(decoder)?;
        Ok(Self { member, capacity_bytes, version: String::decode(decoder)? })
    }
}

/// Requests the state of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Status;

/// The state of the cluster, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct StatusReply {
    /// Program and version of the control plane.
    pub software: String,
    pub cluster: String,
    /// Time since the control plane's start, in nanoseconds.
    pub uptime_ns: u64,
    /// Epoch of the map.
    pub epoch: u64,
    /// Replicas per slot.
    pub replicas: u8,
    /// Segments in the catalog.
    pub segments: u64,
    /// All known nodes, ended incarnations included, by node id.
    pub members: Vec<MemberStatus>,
}

/// One member, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct MemberStatus {
    pub node: u64,
    pub incarnation: u64,
    /// Name of the member's state in the control plane's state table.
    pub state: String,
    pub weight: u32,
    /// Number of shards.
    pub shards: u32,
    pub failure_domain: String,
    pub host: String,
    /// Version of the node's program.
    pub version: String,
    /// Bytes that the node reported to contribute.
    pub capacity_bytes: u64,
    /// Time since the member's last message, in nanoseconds; none if it sent none since the control plane's start.
    pub silent_ns: Option<u64>,
    /// Load in the last heartbeat.
    pub load: Option<Load>,
}
