//! Messages of the P2P store: published objects, the members that hold them, and orders to fetch shards.
//!
//! Shards are named as intervals: the first shard, and the number of shards.

use bincode::{Decode, Encode};

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
    /// Random number that the process drew at its start.
    pub client: u64,
    /// Tenant of the object.
    pub tenant: String,
    pub name: String,
    pub version: u64,
    /// Digest of the object's description, as the process knows it.
    pub digest: u128,
    /// Name of the segment by which peers open the process's memory.
    pub segment: String,
    /// Address of each buffer in the segment.
    pub addresses: Vec<u64>,
    /// True if the process published the object, and did not fetch it.
    pub origin: bool,
    /// Shards that it holds.
    pub have: Vec<(u32, u32)>,
    /// Shards that it wants.
    pub want: Vec<(u32, u32)>,
    /// Label of its host.
    pub host: String,
    /// Label of its rack.
    pub rack: String,
    /// Most bytes per second that peers fetch from it; 0 for no limit.
    pub upload_bytes_per_second: u64,
    /// Most bytes per second that it fetches; 0 for no limit.
    pub download_bytes_per_second: u64,
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

/// A failed fetch of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct FetchFailure {
    pub shard: u32,
    /// Member that the shard was fetched from.
    pub source: u64,
    /// True if bytes arrived that do not match the shard's hash.
    pub corrupt: bool,
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

/// An object in a listing.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ObjectSummary {
    pub name: String,
    pub version: u64,
    /// Bytes of the whole object.
    pub total_bytes: u64,
    /// Bytes of a shard.
    pub shard_bytes: u64,
    /// Number of shards.
    pub shards: u32,
    /// Members that hold the object or fetch it.
    pub members: u32,
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

/// A member of an object's swarm.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectMember {
    /// Id of the member.
    pub member: u64,
    /// Name of the segment by which peers open its memory.
    pub segment: String,
    /// True if the member published the object.
    pub origin: bool,
    /// Shards that it holds.
    pub have: u32,
    /// Shards that it lacks and wants.
    pub need: u32,
    /// Reason for which peers do not fetch from it any more; empty if they do.
    pub excluded: String,
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
    /// Label of the requester's host: members on the same host come first.
    pub host: String,
    /// Label of the requester's rack: members in the same rack come next.
    pub rack: String,
}

/// The reply to [`LocateObject`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectPlaces {
    /// Some of the usable members, nearest first.
    pub places: Vec<ObjectPlace>,
}

/// Location of a buffer.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectPlace {
    /// Id of the member.
    pub member: u64,
    /// Name of the segment by which peers open its memory.
    pub segment: String,
    /// Address of the buffer in the segment.
    pub address: u64,
    /// Distance of the member: 0 for the same host, 1 for the same rack, 2 for elsewhere.
    pub distance: u8,
}

/// Makes a member a rank of a job whose ranks all fetch the same object by a schedule that each of them computes. A
/// rank repeats the call for each half of the shards until the parent for that half has joined.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct JoinRanks {
    /// Random number that the process drew at its start.
    pub client: u64,
    /// Id of the member.
    pub member: u64,
    /// Name of the job, which is the same for all its ranks.
    pub job: String,
    /// Number of this rank, from 0 on.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Address in the member's memory of the bitmap of shards that it holds: a bit per shard, as little-endian 64-bit
    /// words.
    pub board: u64,
    /// Half of the shards: 0 for even numbers, 1 for odd ones.
    pub half: u8,
}

/// The reply to [`JoinRanks`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RanksJoined {
    /// Rank to fetch the half from, once it has joined.
    pub parent: Option<RankParent>,
}

/// Rank that another rank fetches from.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RankParent {
    /// Id of the member.
    pub member: u64,
    /// Name of the segment by which its memory is opened.
    pub segment: String,
    /// Address of each buffer in the segment.
    pub addresses: Vec<u64>,
    /// Address of its bitmap of shards; none if it holds all.
    pub board: Option<u64>,
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

/// Order to fetch one shard. A fetch of the shard from another member that is in flight is aborted first.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FetchOrder {
    /// Member of the process that gets the shard.
    pub member: u64,
    /// Index of the shard.
    pub shard: u32,
    /// Member to fetch from.
    pub source: u64,
    /// Name of the segment by which the source's memory is opened.
    pub segment: String,
    /// Address of the shard in the segment.
    pub address: u64,
}

impl StreamingCall for WatchFetches {
    type Item = FetchOrders;
}
