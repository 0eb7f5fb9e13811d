//! Inputs, replies and outputs of the cluster's state machine.

use bincode::{Decode, Encode};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{ClusterMap, Member};

use crate::adoption::Offer;
use crate::catalog::{ClientId, Segment, SegmentOwner};
use crate::departure::Moves;
use crate::record::{Record, RecordKey};
use crate::state::MemberState;
use crate::tenants::TenantChange;

/// Maximum length of a member's version text.
pub const MAX_VERSION_BYTES: usize = 64;

/// Last known incarnations of a node; 0 if there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastIncarnations {
    /// Last one that is known, as a member or from its devices: later ones have greater numbers.
    pub any: Incarnation,
    /// Last one that was a member. Later ones may have reported their devices and then been refused, as an earlier one
    /// was still live: they have owned nothing.
    pub member: Incarnation,
}

/// Load of a member, as its heartbeats report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Encode, Decode)]
pub struct Load {
    /// Objects in the member's index.
    pub objects: u64,
    /// Bytes that these objects take.
    pub used_bytes: u64,
    /// Size of the member's pool in bytes.
    pub capacity_bytes: u64,
}

/// Event that the state machine processes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Input {
    /// A node requests to become a member, or to continue after a restart. Idempotent if repeated unchanged.
    Join {
        /// Description of the member for the map.
        member: Member,
        /// Bytes that the member contributes, for the operator; its share of slots follows from `member.weight`.
        capacity_bytes: u64,
        /// Version of the member's program, for the operator.
        version: String,
    },
    /// A member that the control plane does not know offers the map that it follows: one of a lost state, if there is
    /// no map yet. Rejected if there is a map.
    Offer { offer: Box<Offer> },
    /// An incarnation of a node that is about to join reports its devices. An incarnation that does not has none.
    AttachDevices {
        node: NodeId,
        incarnation: Incarnation,
        /// Digest of the devices' identities.
        devices: u128,
    },
    /// Heartbeat of a member.
    Heartbeat { node: NodeId, incarnation: Incarnation, load: Load },
    /// A member follows the map of this epoch, and has fetched everything that migrated to it by this map or earlier
    /// ones. It reports every map, also one that moved nothing to it: liveness probes wait for that. The first report
    /// precedes the first heartbeat, has epoch 0, and announces the others: from then on, a change of owners that can
    /// wait does so until the member has reported.
    Settled { node: NodeId, incarnation: Incarnation, epoch: Epoch },
    /// A member is about to end in order, and waits until no slots migrate to it or from it. It gets no slots while it
    /// repeats this input, within [`crate::ENDS_INTERVALS`] heartbeat intervals.
    PrepareLeave { node: NodeId, incarnation: Incarnation },
    /// All ports of a member, which accepted connections before, refuse them: its process is dead. Counts only if the
    /// member is silent too ([`crate::Cluster::silent`]) and slots have two owners. A member with devices is lost after
    /// one and a half heartbeat intervals of silence: if it returns before that, no object in its slots was changed
    /// meanwhile. Counts also if the member has sent nothing since the control plane started
    /// ([`crate::Cluster::unheard`]).
    Refused { node: NodeId, incarnation: Incarnation },
    /// No port of a member answers, although all did before: its process is stopped, or its machine or network is down.
    /// Counts only if slots have two owners, most of the other members are heard from, and the member has missed a
    /// heartbeat: if it has been silent for [`crate::ClusterConfig::unanswered_after_ns`], less the time since the
    /// first such input. To be repeated while no port answers.
    Unanswered { node: NodeId, incarnation: Incarnation },
    /// The ports of a member have answered: from now on the control plane itself detects their silence, and it counts
    /// from the start.
    Answered { node: NodeId, incarnation: Incarnation },
    /// A peer has sent a request to a member, and received nothing from it for a quarter of a second. The control plane
    /// probes the ports of such a member ([`crate::Cluster::reported_silent`]). If it cannot, the report counts as
    /// [`Input::Unanswered`] does, for two heartbeat intervals: a report is only a claim.
    Reported { node: NodeId, incarnation: Incarnation },
    /// A member leaves in order.
    Leave { node: NodeId, incarnation: Incarnation },
    /// A member's process ends in order, and its next incarnation is expected soon: if the member has devices, its
    /// slots wait for that incarnation as long as for one that is silent, because the objects on the devices are worth
    /// the wait. A member without devices, or one that is being drained, leaves as by [`Self::Leave`].
    Restart { node: NodeId, incarnation: Incarnation },
    /// A member is to give its slots away, as soon as earlier migrations are complete, and to stay reachable, so that
    /// their new owners can fetch the objects. The drain lasts for the member's incarnation, or until
    /// [`Input::Undrain`].
    Drain {
        node: NodeId,
        /// Incarnation to be drained; `None` for the present one.
        incarnation: Option<Incarnation>,
    },
    /// A member that is being drained is to have its share again, including the slots that other owners have fetched
    /// meanwhile.
    Undrain {
        node: NodeId,
        /// Incarnation; `None` for the present one.
        incarnation: Option<Incarnation>,
    },
    /// Heartbeat of a client that is not a member: renews the time to live of its segments.
    ClientHeartbeat { client: ClientId },
    /// An owner registers a segment under a name, or changes its own entry of that name.
    RegisterSegment { segment: Segment },
    /// An owner unregisters its segment. Idempotent.
    UnregisterSegment {
        /// Owner of the segment: only it may unregister the segment.
        owner: SegmentOwner,
        name: String,
    },
    /// An operator creates or changes a tenant. A change of which any part is rejected changes nothing.
    SetTenant { change: TenantChange },
    /// An operator removes a tenant. Its objects in memory stay until they are removed or evicted; its records on SSDs
    /// are evicted.
    RemoveTenant { name: String },
    /// A tenant that was removed has no records on SSDs any more.
    TenantFreed { name: String },
    /// A client lists the segments, in the order of their names.
    ListSegments {
        /// Last name of the previous page; only names after it are returned.
        after: Option<String>,
        /// Maximum number of returned entries.
        limit: usize,
    },
    /// Time has passed.
    Tick,
}

/// Reply to an accepted input.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Reply {
    /// Reply to a join. The member is in the map from its first heartbeat on, which it should send at once.
    Joined {
        epoch: Epoch,
        /// Interval at which the member should send heartbeats.
        heartbeat_interval_ns: u64,
        /// Silence after which the member is dead.
        heartbeat_deadline_ns: u64,
    },
    /// Reply to an offer: the member continues with its map, and sends heartbeats, until the control plane knows or
    /// rejects it.
    Offered,
    /// Reply to the report of devices: records on them are valid if they are of a map of epoch `since` or later.
    DevicesKept { since: Epoch },
    /// Reply to a heartbeat: a member with an older map fetches the new one. No slot has changed hands since epoch
    /// `since`.
    Alive { epoch: Epoch, since: Epoch },
    /// Reply to a report of finished migrations.
    Settled,
    /// Reply to the announcement of a departure.
    Moves(Moves),
    /// Reply to a departure.
    Left { epoch: Epoch },
    /// Reply to a drain.
    Draining { epoch: Epoch },
    /// Reply to the end of a drain, also if there was none.
    Undrained { epoch: Epoch },
    /// Reply to a client's heartbeat.
    Renewed {
        /// Number of renewed segments.
        segments: usize,
    },
    /// Reply to a registration.
    Registered,
    /// Reply to an unregistration.
    Unregistered,
    /// Reply to a change of a tenant.
    TenantSet,
    /// Reply to a removal of a tenant.
    TenantRemoved,
    /// Reply to a listing.
    Segments {
        /// One page, in the order of names.
        segments: Vec<Segment>,
        /// True if more segments follow the last one.
        more: bool,
    },
    /// Reply to a tick.
    Ticked,
}

/// Work of the driver, to be carried out in order.
///
/// **Contract.** After [`crate::Cluster::new`] and after every [`crate::Cluster::handle`] the driver takes all outputs
/// in order and completes each before the next, and only then sends the reply: in particular a `Persist` is durable
/// before a `MapChanged` after it is published. If persisting fails, nothing after it may be published and the process
/// must end: its memory is ahead of its durable state.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Output {
    /// Persist these changes, in order and in one transaction.
    Persist(Vec<Change>),
    /// Persist the identity of the adopted state and these changes, in one transaction. Connections that were given
    /// another identity of the state must be given this one before the map that follows.
    Adopt {
        /// Identity of the state.
        state: u64,
        /// Changes, in order.
        changes: Vec<Change>,
    },
    /// A member is dead and was expelled: requests that wait for it should fail.
    MemberLost { node: NodeId, incarnation: Incarnation },
    /// Publish this map. The first comes from [`crate::Cluster::new`] and repeats the last published map; each later
    /// one has a greater epoch.
    MapChanged(ClusterMap),
    /// No member offered a map in time: the published map of epoch 0 is a new cluster's. See
    /// [`crate::Cluster::awaits_offers`].
    BeganEmpty,
}

/// Change of the durable state, which has at most one record per key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "changes are few, and short-lived")]
pub enum Change {
    /// Store the record under its key, replacing an earlier one.
    Put(Record),
    /// Remove the record of the key, if there is one.
    Remove(RecordKey),
}

/// State of a node, for operators and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct MemberView<'a> {
    /// Description of the member in the map.
    pub member: &'a Member,
    pub state: MemberState,
    /// True if the map gives the node its share: a node that joins or is drained waits until earlier migrations are
    /// complete.
    pub shared: bool,
    /// Bytes that the node contributes, as reported when it joined.
    pub capacity_bytes: u64,
    pub version: &'a str,
    /// Load of the last heartbeat; none before the first one of this incarnation, or since the control plane started.
    pub load: Option<Load>,
    /// Time from which its silence counts, on the driver's clock: of its last sign of life, or later if a late call
    /// postponed deadlines. None if the node has sent nothing since the control plane started.
    pub heard_ns: Option<u64>,
}

/// Counters since the start, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Counters {
    /// New incarnations accepted.
    pub joins: u64,
    /// Heartbeats of current incarnations.
    pub heartbeats: u64,
    /// Messages from older or ended incarnations.
    pub stale: u64,
    /// Rejected inputs, including stale ones.
    pub rejections: u64,
    /// Times that a member became suspect.
    pub suspicions: u64,
    /// Members lost.
    pub losses: u64,
    /// Members that left in order.
    pub leaves: u64,
    /// Incarnations that ended in order on a node with devices, which are kept for the next one.
    pub restarts: u64,
    /// Members that began to be drained.
    pub drains: u64,
    /// Client segments that were not renewed in time.
    pub expired_segments: u64,
    /// Calls that came too late for silence to count.
    pub late_calls: u64,
    /// Maps published with a new epoch.
    pub epochs: u64,
    /// Adoptions of a lost state that members offered.
    pub adoptions: u64,
}
