//! The P2P store's catalog and its swarms: who has which shards of which objects, and who fetches which from whom.
//!
//! An **object** is a name and a version; it never changes. A **member** is one process that has it, wholly or in part,
//! in memory of its own, and that fetches what it lacks. Members say what they got as intervals, and are told what to
//! fetch as [`Grant`]s, one shard each. Nothing is ever said about all members at once: what a join costs does not
//! depend on how many there are.
//!
//! All of this is soft: members have leases, and announce themselves again where they are not known any more. It is
//! pure: time comes as an argument, and grants are taken out ([`Objects::poll_grants`]).

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
pub use locate::BufferLocation;
pub use member::{Failure, FailureKind, Hold, MemberReport, Place};
pub use object::{
    Layout, MAX_ABOUT_BYTES, MAX_BUFFERS, MAX_NAME_BYTES, MAX_SHARDS, ObjectError, ObjectSpec, ShardPlace,
};
pub use objects::{ObjectKey, ObjectName, ObjectRow, Objects, ObjectsConfig};
pub use ranks::{MAX_LABEL_BYTES, RankJoin, RankParent};
pub use schedule::{HALVES, MAX_RANKS, Parent, Schedule, half_of};
pub use shards::{Interval, ShardSet};
pub use swarm::Grant;
