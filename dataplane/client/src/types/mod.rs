//! Types of the client's interface: ids and ranges here, addresses, requests, options and outputs in the modules below.

use kvplane_proto::ids::SegmentId;

mod config;
mod error;
mod near;
mod options;
mod output;
mod path;
mod peer;
mod request;

pub use config::Config;
pub use error::SubmitError;
pub use near::{Near, Nearness, NodeCounts, Place};
pub use options::{Intent, RailAddress, RailDevices, SubmitOptions};
pub use output::{DeviceCopy, Output, PayloadTo};
pub use path::{Path, Transport, Via};
pub use peer::{PeerAddress, PeerKind};
pub use request::{Request, TaskResult};

/// Id of a lane (connection); the generation changes with every reconnect.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct LaneId {
    /// Position in the client's table.
    pub index: u32,
    /// Generation of the lane at that position.
    pub generation: u32,
}

/// Id of a peer: a shard that requests go to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct PeerId(pub u32);

/// Id of an incarnation of a shard; never reused within one client.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub struct PeerIncarnation(pub u32);

/// Id of a slice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub struct SliceId {
    /// Position in the client's table.
    pub index: u32,
    /// Generation of the slice at that position.
    pub generation: u32,
}

/// A range of the caller's registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Local {
    /// Host's index of the registered buffer.
    pub buffer: u32,
    /// Start of the range within the buffer.
    pub offset: u64,
    /// Length of the range.
    pub bytes: u64,
}

/// A range of a peer's segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentTarget {
    /// Peer that owns the segment.
    pub peer: PeerId,
    /// Id of the segment's region.
    pub segment: SegmentId,
    /// Start of the range within the region; an absolute address for a Mooncake peer.
    pub offset: u64,
    /// True if the region can be mapped over the shared path.
    pub shareable: bool,
    /// Place of the memory, by the peer's number.
    pub place: Place,
}
