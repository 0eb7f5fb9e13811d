//! Messages of the P2P store: objects that are published, members that hold them, and what they are told to fetch.
//!
//! Shards are told as intervals: the first, and how many.

use bincode::{Decode, Encode};

use crate::message::StreamingCall;

/// Says what an object is. Saying it again harms nobody.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PublishObject {
    /// Whose it is.
    pub tenant: String,
    /// Its name.
    pub name: String,
    /// Its version; without one, the newest if that is equal, and else the one after it.
    pub version: Option<u64>,
    /// What it is.
    pub spec: ObjectSpec,
}

/// An object without its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct ObjectSpec {
    /// Its buffers' sizes, in bytes.
    pub sizes: Vec<u64>,
    /// Each buffer is cut into shards of this many bytes.
    pub shard_bytes: u64,
    /// By shard: the XXH3-128 of its bytes.
    pub hashes: Vec<u128>,
    /// What its users say of it.
    pub about: Vec<u8>,
}

/// The answer to [`PublishObject`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectPublished {
    /// Its version.
    pub version: u64,
}

/// Asks what an object is.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FindObject {
    /// Whose it is.
    pub tenant: String,
    /// Its name.
    pub name: String,
    /// Its version; without one, the newest.
    pub version: Option<u64>,
}

/// What an object is.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectFound {
    /// Its version.
    pub version: u64,
    /// What it is.
    pub spec: ObjectSpec,
}

/// A process announces that it has an object in its memory, wholly or in part, or is about to.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct HoldObject {
    /// The random number that the process drew.
    pub client: u64,
    /// Whose the object is.
    pub tenant: String,
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// A digest of what the process takes the object to be.
    pub digest: u128,
    /// The name by which peers open its memory.
    pub segment: String,
    /// By buffer: its address there.
    pub addresses: Vec<u64>,
    /// Whether it brought the object, and did not fetch it.
    pub origin: bool,
    /// What it has.
    pub have: Vec<(u32, u32)>,
    /// What it wants to have.
    pub want: Vec<(u32, u32)>,
    /// Its host, as a label.
    pub host: String,
    /// Its rack, as a label.
    pub rack: String,
    /// Most bytes per second that others fetch from it; 0 for no limit.
    pub upload_bytes_per_second: u64,
    /// Most bytes per second that it fetches; 0 for no limit.
    pub download_bytes_per_second: u64,
}

/// The answer to [`HoldObject`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectHeld {
    /// The member's number.
    pub member: u64,
    /// How long it is one without being heard, in nanoseconds.
    pub lease_ns: u64,
}

/// What a member got, and what it did not get.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ReportObject {
    /// Its process.
    pub client: u64,
    /// Its number.
    pub member: u64,
    /// Shards that it has and others may fetch.
    pub got: Vec<(u32, u32)>,
    /// Shards that it did not get.
    pub failed: Vec<FetchFailure>,
}

/// A shard that was not fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FetchFailure {
    /// Which.
    pub shard: u32,
    /// From which member.
    pub source: u64,
    /// Whether bytes came, and not those of the hash.
    pub corrupt: bool,
}

/// A process lives, and so do its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RenewObjects {
    /// The process.
    pub client: u64,
}

/// The answer to [`RenewObjects`]; those that are missing are to be announced again.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectsRenewed {
    /// Its members that are known.
    pub members: Vec<u64>,
}

/// A member is about to go, or goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ReleaseObject {
    /// Its process.
    pub client: u64,
    /// Its number.
    pub member: u64,
    /// Whether it stays until nobody fetches from it; asked again until then.
    pub wait: bool,
}

/// The answer to [`ReleaseObject`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectReleased {
    /// Shards that are being fetched from it.
    pub readers: u64,
}

/// Asks for a page of objects.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ListObjects {
    /// Whose.
    pub tenant: String,
    /// What their names begin with.
    pub prefix: String,
    /// Only those after this name and version: the last of the previous page.
    pub after: Option<(String, u64)>,
    /// Most to return; the control plane may return fewer.
    pub limit: u32,
}

/// A page of objects.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectList {
    /// By name and version.
    pub objects: Vec<ObjectSummary>,
    /// Whether there are more after the last.
    pub more: bool,
}

/// An object in a listing.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectSummary {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// All its bytes.
    pub total_bytes: u64,
    /// The length of a shard.
    pub shard_bytes: u64,
    /// How many shards there are.
    pub shards: u32,
    /// Members that hold it or fetch it.
    pub members: u32,
}

/// Asks who holds an object.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct DescribeObject {
    /// Whose it is.
    pub tenant: String,
    /// Its name.
    pub name: String,
    /// Its version; without one, the newest.
    pub version: Option<u64>,
}

/// Who holds an object.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectMembers {
    /// Its members.
    pub members: Vec<ObjectMember>,
    /// Shards that nobody has who may be asked.
    pub lost: u32,
}

/// A member of an object's swarm.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectMember {
    /// Its number.
    pub member: u64,
    /// The name by which peers open its memory.
    pub segment: String,
    /// Whether it brought the object.
    pub origin: bool,
    /// Shards that it has.
    pub have: u32,
    /// Shards that it lacks and wants.
    pub need: u32,
    /// Why nobody fetches from it any more; empty where it is in order.
    pub excluded: String,
}

/// Asks who has all of one buffer of an object, and where it is there: for who reads parts of it without becoming a
/// member.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct LocateObject {
    /// The random number that the process drew: others are told first to others.
    pub client: u64,
    /// Whose it is.
    pub tenant: String,
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// Which buffer.
    pub buffer: u32,
    /// The host's label: who is there comes first.
    pub host: String,
    /// The rack's label: who is in it comes next.
    pub rack: String,
}

/// The answer to [`LocateObject`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectPlaces {
    /// Some of those who may be asked, nearest first.
    pub places: Vec<ObjectPlace>,
}

/// Where a buffer is.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectPlace {
    /// The member's number.
    pub member: u64,
    /// The name by which peers open its memory.
    pub segment: String,
    /// Where the buffer begins there.
    pub address: u64,
    /// How far it is: 0 for the same host, 1 for the same rack, 2 for elsewhere.
    pub distance: u8,
}

/// A member is a rank of a job whose ranks all fetch the same object by a schedule that each of them works out. Asked
/// for each half of the shards, and again until the one is there whom that half comes from.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct JoinRanks {
    /// The random number that the process drew.
    pub client: u64,
    /// The member's number.
    pub member: u64,
    /// The job's name; all its ranks give the same.
    pub job: String,
    /// Which one this is, from 0 on.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// Where in its memory it says which shards it has: a bit for each, as 64-bit words of little endian.
    pub board: u64,
    /// Which half: 0 for shards with even numbers, 1 for those with odd ones.
    pub half: u8,
}

/// The answer to [`JoinRanks`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RanksJoined {
    /// Whom the half is fetched from, if that one is there.
    pub parent: Option<RankParent>,
}

/// Whom a rank fetches from.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RankParent {
    /// The member's number.
    pub member: u64,
    /// The name by which its memory is opened.
    pub segment: String,
    /// By buffer: its address there.
    pub addresses: Vec<u64>,
    /// Where it says which shards it has; none if it has all.
    pub board: Option<u64>,
}

/// A member is to be ordered to fetch shards that it was not to be ordered before: a rank that does not get them by
/// its schedule.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct WantShards {
    /// Its process.
    pub client: u64,
    /// Its number.
    pub member: u64,
    /// Which, those among them that it has or is told to fetch already included.
    pub want: Vec<(u32, u32)>,
    /// What it did not get by its schedule.
    pub failed: Vec<FetchFailure>,
}

/// Asks for the keys with which the peers of a tenant let each other in, and for a ticket under them: the reply is
/// [`TicketKeys`](crate::message::TicketKeys). Nodes do not believe such tickets, nor peers of other tenants.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GetPeerKeys {
    /// The random number that the process drew.
    pub client: u64,
    /// Whose objects it shares.
    pub tenant: String,
}

/// Asks for what a process is to fetch: the reply is a stream of [`FetchOrders`], beginning with what was ordered and
/// is not reported yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct WatchFetches {
    /// The process.
    pub client: u64,
}

/// What is to be fetched.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FetchOrders {
    /// One shard each.
    pub orders: Vec<FetchOrder>,
}

/// One shard that is to be fetched. If it is being fetched from elsewhere, that is given up first.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FetchOrder {
    /// Which member of the process is meant.
    pub member: u64,
    /// The shard.
    pub shard: u32,
    /// From which member.
    pub source: u64,
    /// The name by which its memory is opened.
    pub segment: String,
    /// Where the shard is there.
    pub address: u64,
}

impl StreamingCall for WatchFetches {
    type Item = FetchOrders;
}
