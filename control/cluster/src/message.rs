//! What goes into the cluster's state machine and what comes out.

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{ClusterMap, Member};

use crate::adoption::Offer;
use crate::catalog::{ClientId, Segment, SegmentOwner};
use crate::record::{Record, RecordKey};
use crate::state::MemberState;
use crate::tenants::Tenant;

/// Longest version text of a member.
pub const MAX_VERSION_BYTES: usize = 64;

/// What a member holds, as it says in a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Load {
    /// Objects in its index.
    pub objects: u64,
    /// Bytes they take.
    pub used_bytes: u64,
    /// Bytes its pool has.
    pub capacity_bytes: u64,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A node asks to be a member, or to go on after a restart. Repeating it word for word does no harm.
    Join {
        /// What the map will say about it.
        member: Member,
        /// Bytes it contributes, for the operator; its share of slots follows from `member.weight`.
        capacity_bytes: u64,
        /// Version of its program, for the operator.
        version: String,
    },
    /// A member that is not known says which map it follows: of a state that was lost, if there is no map yet. It is
    /// refused where there is one.
    Offer {
        /// The member's map.
        offer: Box<Offer>,
    },
    /// An incarnation of a node that is about to join says which devices it has. One that does not has none.
    AttachDevices {
        /// Who.
        node: NodeId,
        /// Which incarnation.
        incarnation: Incarnation,
        /// A digest of the devices' identities.
        devices: u128,
    },
    /// A member is alive.
    Heartbeat {
        /// Who.
        node: NodeId,
        /// Which incarnation.
        incarnation: Incarnation,
        /// What it holds.
        load: Load,
    },
    /// A member follows this map, and has all that moved to it by this one or earlier ones. It says so of every map,
    /// also of one that moved nothing to it: liveness probes wait for that. The first comes before the first heartbeat,
    /// with epoch 0, and says that more will come: then owners change again only when it has, as long as that can wait.
    Settled {
        /// Who.
        node: NodeId,
        /// Which incarnation.
        incarnation: Incarnation,
        /// The map's epoch.
        epoch: Epoch,
    },
    /// A member is about to end in order, and waits until nothing moves to it or from it any more. It gets no slots
    /// while it says so, which it repeats within [`crate::ENDS_INTERVALS`] heartbeat intervals.
    PrepareLeave {
        /// Who.
        node: NodeId,
        /// Which incarnation.
        incarnation: Incarnation,
    },
    /// Connections to all ports of a member are refused, where they were taken before: its process is dead. Heeded
    /// where it is silent too ([`crate::Cluster::silent`]) and slots have two owners. A member with devices is lost
    /// after one and a half heartbeat intervals of silence: if it comes back before that, nobody changed anything in
    /// its slots meanwhile. Heeded too where it was never heard of since the control plane started
    /// ([`crate::Cluster::unheard`]).
    Refused {
        /// Who.
        node: NodeId,
        /// Which incarnation.
        incarnation: Incarnation,
    },
    /// No port of a member answers, where all did before: its process is stopped, or its machine or network is gone.
    /// Heeded where slots have two owners, it has been silent for two heartbeat intervals, and most of the other
    /// members are heard.
    Unanswered {
        /// Who.
        node: NodeId,
        /// Which incarnation.
        incarnation: Incarnation,
    },
    /// The ports of a member have answered: from now on it is known first-hand whether they are silent.
    Answered {
        /// Who.
        node: NodeId,
        /// Which incarnation.
        incarnation: Incarnation,
    },
    /// Somebody has asked a member for something, and heard nothing of it for about half a second. Heeded as
    /// [`Input::Unanswered`] is, for a second, where its ports cannot be asked first-hand: a report is a claim.
    Reported {
        /// Who.
        node: NodeId,
        /// Which incarnation.
        incarnation: Incarnation,
    },
    /// A member goes in order.
    Leave {
        /// Who.
        node: NodeId,
        /// Which incarnation.
        incarnation: Incarnation,
    },
    /// A member's process ends in order, and its next incarnation is expected soon: where it has devices, its slots
    /// wait for that as long as for one that is silent, since what is on them is worth more than the wait. One without
    /// devices, or that is drained, goes as by [`Self::Leave`].
    Restart {
        /// Who.
        node: NodeId,
        /// Which incarnation ends.
        incarnation: Incarnation,
    },
    /// A member is to give its slots away, as soon as what moved before has come, and stay reachable, so that their new
    /// owners can fetch what was in them. It lasts as long as this incarnation of it, or until [`Input::Undrain`].
    Drain {
        /// Who.
        node: NodeId,
        /// Which incarnation; nothing for the present one.
        incarnation: Option<Incarnation>,
    },
    /// A member that is drained is to have its share again, with what the others have fetched meanwhile.
    Undrain {
        /// Who.
        node: NodeId,
        /// Which incarnation; nothing for the present one.
        incarnation: Option<Incarnation>,
    },
    /// A client that is no member is alive: its segments live on for their time to live.
    ClientHeartbeat {
        /// Who.
        client: ClientId,
    },
    /// An owner offers a segment under a name, or changes its own entry of that name.
    RegisterSegment {
        /// The whole entry.
        segment: Segment,
    },
    /// An owner withdraws its segment. Withdrawing one that is not there does no harm.
    UnregisterSegment {
        /// Who asks; only the owner may.
        owner: SegmentOwner,
        /// Name of the segment.
        name: String,
    },
    /// An operator makes a tenant, or changes it.
    SetTenant {
        /// As it is to be.
        tenant: Tenant,
    },
    /// An operator takes a tenant away. Its objects stay until they are removed or evicted.
    RemoveTenant {
        /// Its name.
        name: String,
    },
    /// Someone asks which segments there are, in the order of their names.
    ListSegments {
        /// Only names after this one: the last of the previous page.
        after: Option<String>,
        /// Most entries to return.
        limit: usize,
    },
    /// Time has passed.
    Tick,
}

/// The answer to an input that was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To a join. The member is in the map from its first heartbeat on, which it should send at once.
    Joined {
        /// The newest epoch.
        epoch: Epoch,
        /// How often it should send a heartbeat.
        heartbeat_interval_ns: u64,
        /// How long it may be silent before it is out.
        heartbeat_deadline_ns: u64,
    },
    /// To an offer: the member goes on by its map, and says that it is alive, until it is known or refused.
    Offered,
    /// To what devices it has: what is on them is of use if it is of a map of this epoch or a later one.
    DevicesKept {
        /// See above.
        since: Epoch,
    },
    /// To a heartbeat: a member with an older map fetches the new one.
    Alive {
        /// The newest epoch.
        epoch: Epoch,
        /// The epoch since which no slot has changed hands.
        since: Epoch,
    },
    /// To what a member says of moves.
    Settled,
    /// To the announcement of a farewell.
    Moves {
        /// Other owners that may not have all yet that moved to them.
        unsettled: usize,
        /// Whether the member itself may not: slots have moved by a map of which it has not said that it follows it and
        /// has what moved to it.
        behind: bool,
    },
    /// To a farewell.
    Left {
        /// The newest epoch.
        epoch: Epoch,
    },
    /// To a drain.
    Draining {
        /// The newest epoch.
        epoch: Epoch,
    },
    /// To the end of a drain; also where there was none.
    Undrained {
        /// The newest epoch.
        epoch: Epoch,
    },
    /// To a client's heartbeat.
    Renewed {
        /// How many segments live on.
        segments: usize,
    },
    /// To a registration.
    Registered,
    /// To a withdrawal.
    Unregistered,
    /// To a change of a tenant.
    TenantSet,
    /// To a removal of a tenant.
    TenantRemoved,
    /// To a listing.
    Segments {
        /// One page, in the order of names.
        segments: Vec<Segment>,
        /// Whether there are more after the last.
        more: bool,
    },
    /// To a tick.
    Ticked,
}

/// What the driver must do, in this order.
///
/// **The contract.** After [`crate::Cluster::new`] and after every [`crate::Cluster::handle`] the driver takes all
/// outputs in order and carries each out before the next, and only then sends the reply: in particular a `Persist` is
/// durable before a `MapChanged` after it is published. If persisting fails, nothing after it may be published and
/// the process must end: what it holds in memory is ahead of what it would remember.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Make these changes durable, in order and in one transaction.
    Persist(Vec<Change>),
    /// The state that was lost is gone on with: make its identity and these changes durable, in one transaction.
    /// Whoever was told another identity of the state is to be told this one before the map that follows.
    Adopt {
        /// Identity of the state.
        state: u64,
        /// In order.
        changes: Vec<Change>,
    },
    /// A member was silent beyond its deadline: whatever waits for it should give up.
    MemberLost {
        /// Who.
        node: NodeId,
        /// Which incarnation.
        incarnation: Incarnation,
    },
    /// Publish this map. The first comes from [`crate::Cluster::new`] and repeats what was last published; each later
    /// one has a greater epoch.
    MapChanged(ClusterMap),
    /// No member offered a state while the cluster waited for one: the map of epoch 0 that is published is a new
    /// cluster's. See [`crate::Cluster::awaits_offers`].
    BeganEmpty,
}

/// A change of the durable state, which holds at most one record per key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Store the record under its key, replacing what is there.
    Put(Record),
    /// Remove what is stored under the key, if anything.
    Remove(RecordKey),
}

/// What is known of a node, for operators and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberView<'a> {
    /// As in the map.
    pub member: &'a Member,
    /// Where it stands.
    pub state: MemberState,
    /// Whether the map gives it its share: who joins or is drained waits until what moved before has come.
    pub shared: bool,
    /// Bytes it said it contributes when it joined.
    pub capacity_bytes: u64,
    /// Version of its program.
    pub version: &'a str,
    /// Its last heartbeat's load; none yet in this incarnation or since the control plane started.
    pub load: Option<Load>,
    /// From when its silence counts, on the driver's clock: its last sign of life, later if a late call gave time
    /// back. None if it was not heard of since the control plane started.
    pub heard_ns: Option<u64>,
}

/// Counts since the start, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Counters {
    /// New incarnations accepted.
    pub joins: u64,
    /// Heartbeats of current incarnations.
    pub heartbeats: u64,
    /// Messages of older or ended incarnations.
    pub stale: u64,
    /// Inputs refused, the stale ones included.
    pub rejections: u64,
    /// Times that a member became suspect.
    pub suspicions: u64,
    /// Members lost.
    pub losses: u64,
    /// Members that left in order.
    pub leaves: u64,
    /// Incarnations of members that ended in order, with devices for the next one.
    pub restarts: u64,
    /// Members that were told to give their slots away.
    pub drains: u64,
    /// Client segments that were not renewed in time.
    pub expired_segments: u64,
    /// Calls that came so late that silence was not held against anyone.
    pub late_calls: u64,
    /// Maps published with a new epoch.
    pub epochs: u64,
    /// Times that a lost state was gone on with, as members offered it.
    pub adoptions: u64,
}
