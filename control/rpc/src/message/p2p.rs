//! Messages of the P2P store: published objects, the members that hold them, and orders to fetch shards.
//!
//! Shards are named as intervals: the first shard, and the number of shards.

use bincode::{Decode, Encode};
pub use kvplane_cluster::p2p::{
    FetchFailure, FetchOrder, Hold, ObjectMember, ObjectPlace, ObjectSummary, PeerLocation, RankJoin, RankParent,
};

use crate::message::StreamingCall;

/// Publishes an object. Idempotent.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct PublishObject {
    /// Tenant of the object.
    pub tenant: String,
    pub name: String,
    /// Version to publish; none for the newest version if its spec is equal, otherwise for the one after it.
    pub version: Option<u64>,
    pub spec: ObjectSpec,
}

/// Description of an object, without its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct ObjectSpec {
    /// Sizes of the buffers, in bytes.
    pub sizes: Vec<u64>,
    /// Size of a shard, in bytes: each buffer is cut into shards of this size.
    pub shard_bytes: u64,
    /// XXH3-128 of each shard's bytes.
    pub hashes: Vec<u128>,
    /// Data of the application about the object.
    pub about: Vec<u8>,
}

/// The reply to [`PublishObject`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ObjectPublished {
    pub version: u64,
}

/// Requests the description of an object.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct FindObject {
    /// Tenant of the object.
    pub tenant: String,
    pub name: String,
    /// Version of the object; none for the newest.
    pub version: Option<u64>,
}

/// The reply to [`FindObject`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ObjectFound {
    pub version: u64,
    pub spec: ObjectSpec,
}

/// Announces that a process holds an object in its memory, wholly or in part, or is about to.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct HoldObject {
    /// Tenant of the object.
    pub tenant: String,
    pub name: String,
    pub version: u64,
    /// Digest of the object's description, as the process knows it.
    pub digest: u128,
    pub hold: Hold,
}

/// The reply to [`HoldObject`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectHeld {
    /// Id of the new member.
    pub member: u64,
    /// Time that the member lasts without a renewal, in nanoseconds.
    pub lease_ns: u64,
}

/// Reports the shards that a member fetched, and those that it could not fetch.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ReportObject {
    /// Random number of the member's process.
    pub client: u64,
    /// Id of the member.
    pub member: u64,
    /// Shards that it holds and peers may fetch.
    pub got: Vec<(u32, u32)>,
    /// Shards that it could not fetch.
    pub failed: Vec<FetchFailure>,
}

/// Renews the lease of a process's members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RenewObjects {
    /// Random number of the process.
    pub client: u64,
}

/// The reply to [`RenewObjects`]; the process announces missing members again.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectsRenewed {
    /// The process's members that the control plane knows.
    pub members: Vec<u64>,
}

/// Withdraws a member, or prepares to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ReleaseObject {
    /// Random number of the member's process.
    pub client: u64,
    /// Id of the member.
    pub member: u64,
    /// True if the member stays until no peer fetches from it; the process repeats the call until then.
    pub wait: bool,
}

/// The reply to [`ReleaseObject`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectReleased {
    /// Fetches of shards from the member that are in flight.
    pub readers: u64,
}

/// Requests a page of objects.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ListObjects {
    /// Tenant of the objects.
    pub tenant: String,
    /// Prefix of the objects' names.
    pub prefix: String,
    /// Only objects after this name and version: the last of the previous page.
    pub after: Option<(String, u64)>,
    /// Most objects to return; the control plane may return fewer.
    pub limit: u32,
}

/// The reply to [`ListObjects`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectList {
    /// Objects, by name and version.
    pub objects: Vec<ObjectSummary>,
    /// True if more objects follow the last one.
    pub more: bool,
}

/// Requests the members of an object's swarm.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct DescribeObject {
    /// Tenant of the object.
    pub tenant: String,
    pub name: String,
    /// Version of the object; none for the newest.
    pub version: Option<u64>,
}

/// The reply to [`DescribeObject`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ObjectMembers {
    pub members: Vec<ObjectMember>,
    /// Shards that no usable member holds.
    pub lost: u32,
}

/// Requests members that hold all of one buffer of an object, for a process that reads parts of the buffer without
/// becoming a member.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct LocateObject {
    /// Random number that the process drew at its start: replies to different processes are in different orders.
    pub client: u64,
    /// Tenant of the object.
    pub tenant: String,
    pub name: String,
    pub version: u64,
    /// Index of the buffer.
    pub buffer: u32,
    /// Place of the requester: members on the same host come first, then those in the same rack.
    pub near: PeerLocation,
}

/// The reply to [`LocateObject`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectPlaces {
    /// Some of the usable members, nearest first.
    pub places: Vec<ObjectPlace>,
}

/// Makes a member a rank of a job whose ranks all fetch the same object by a schedule that each of them computes. A
/// rank repeats the call for each half of the shards until the parent for that half has joined.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct JoinRanks {
    /// Random number that the process drew at its start.
    pub client: u64,
    /// Id of the member.
    pub member: u64,
    pub join: RankJoin,
    /// Half of the shards: 0 for even numbers, 1 for odd ones.
    pub half: u8,
}

/// The reply to [`JoinRanks`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RanksJoined {
    /// Rank to fetch the half from, once it has joined.
    pub parent: Option<RankParent>,
}

/// Requests fetch orders for shards that a member did not request before: for a rank that does not get them by its
/// schedule.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct WantShards {
    /// Random number of the member's process.
    pub client: u64,
    /// Id of the member.
    pub member: u64,
    /// Shards to be ordered; those that the member holds, or has an order for, may be among them.
    pub want: Vec<(u32, u32)>,
    /// Fetches of the schedule that failed.
    pub failed: Vec<FetchFailure>,
}

/// Requests the keys with which the peers of a tenant verify each other's tickets, and a ticket under them: the reply
/// is [`TicketKeys`](crate::message::TicketKeys). Nodes and the peers of other tenants reject such tickets.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GetPeerKeys {
    /// Random number that the process drew at its start.
    pub client: u64,
    /// Tenant of the objects that the process shares.
    pub tenant: String,
}

/// Subscribes a process to its fetch orders: the reply is a stream of [`FetchOrders`], which begins with the orders
/// that the process has not reported yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct WatchFetches {
    /// Random number of the process.
    pub client: u64,
}

/// An item of a process's stream of fetch orders.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FetchOrders {
    /// Orders, for one shard each.
    pub orders: Vec<FetchOrder>,
}

impl StreamingCall for WatchFetches {
    type Item = FetchOrders;
}
