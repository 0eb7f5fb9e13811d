//! P2P store: the catalog of objects and their swarms, and the scheduling of fetches between members.
//!
//! An **object** is a name and a version; it is immutable. A **member** is one process that has the object, wholly or
//! in part, in its own memory, and fetches the shards that it lacks. Members report received shards as intervals; the
//! catalog notifies them of shards to fetch as [`Grant`]s, one shard each. No message lists all members: the cost of a
//! join does not depend on their number.
//!
//! The state is soft: members have leases, and announce themselves again after the catalog has forgotten them. The
//! module is sans-IO: time is an argument, and grants are polled ([`Objects::poll_grants`]).

mod choose;
mod counts;
mod follow;
mod locate;
mod member;
mod object;
mod objects;
mod pace;
mod ranks;
mod roster;
mod schedule;
mod shards;
mod swarm;

pub use follow::Follow;
pub use locate::ObjectPlace;
pub use member::{FetchFailure, Hold, ObjectMember, PeerLocation};
pub use object::{
    Layout, MAX_ABOUT_BYTES, MAX_BUFFERS, MAX_NAME_BYTES, MAX_SHARDS, ObjectError, ObjectSpec, ShardPlace,
};
pub use objects::{ObjectKey, ObjectName, ObjectSummary, Objects, ObjectsConfig};
pub use ranks::{MAX_LABEL_BYTES, RankJoin, RankParent};
pub use schedule::{HALVES, MAX_RANKS, Parent, Schedule, half_of};
pub use shards::{Interval, ShardSet};
pub use swarm::{FetchOrder, Grant};
