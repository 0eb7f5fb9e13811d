//! What goes into a client and what comes out; here the names of things in it.

use std::net::SocketAddr;

use kvplane_proto::ids::{Incarnation, NodeId, SegmentId, ShardId};

mod config;
mod error;
mod near;
mod options;
mod output;
mod path;
mod request;

pub use config::Config;
pub use error::SubmitError;
pub use near::{Near, Nearness, NodeCounts, Place};
pub use options::{Intent, RailAddress, RailDevices, SubmitOptions};
pub use output::{DeviceCopy, Output, PayloadTo};
pub use path::{Path, PeerKind, Transport, Via};
pub use request::{Request, TaskResult};

/// A connection's identity; the generation changes with every reconnect.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct LaneId {
    /// Position in the client's table.
    pub index: u32,
    /// Which connection at that position.
    pub generation: u32,
}

/// A shard that requests go to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct PeerId(pub u32);

/// Which incarnation of which shard a peer of the client is: no two that one client ever knew have the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub struct PeerIncarnation(pub u32);

/// A slice's identity.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub struct SliceId {
    /// Position in the client's table.
    pub index: u32,
    /// Which slice at that position.
    pub generation: u32,
}

/// Where a shard is reached, and as whom it must answer.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct PeerAddress {
    /// What it is.
    pub kind: PeerKind,
    /// Its node; 0 for whoever answers.
    pub node: NodeId,
    /// The node's incarnation; 0 for any.
    pub incarnation: Incarnation,
    /// Its shard.
    pub shard: ShardId,
    /// Data port.
    pub tcp: SocketAddr,
    /// Unix socket for shared memory, when the peer is on this host.
    pub shm: Option<String>,
}

/// A range of the caller's registered memory; `buffer` is the host's name for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Local {
    /// The host's index of the region.
    pub buffer: u32,
    /// Where in it.
    pub offset: u64,
    /// How much.
    pub bytes: u64,
}

/// A range of a peer's segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentTarget {
    /// Who owns it.
    pub peer: PeerId,
    /// The region.
    pub segment: SegmentId,
    /// Where in it; for a Mooncake peer an absolute address of its process.
    pub offset: u64,
    /// Whether it can be mapped over the shared path.
    pub shareable: bool,
    /// Where its memory is, by the peer's number.
    pub place: Place,
}
