//! What a client has for its host to do, and where payloads go.

use core::ops::Range;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{BatchId, SegmentId};

use super::path::{Path, Via};
use super::{LaneId, Local, PeerAddress, SliceId};

/// Something for the host to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Output {
    /// Connect this lane; then [`crate::Client::connected`] or [`crate::Client::lane_gone`].
    Connect {
        /// The lane.
        lane: LaneId,
        /// Whom to connect to.
        address: PeerAddress,
        /// Over which path.
        path: Path,
    },
    /// Send a frame.
    Send {
        /// On which lane.
        lane: LaneId,
        /// Its header. Where the payload's checksum is wanted, the flag is set and the host fills in the value.
        header: Header,
        /// Its body: see [`crate::Outbox::body`].
        body: Range<usize>,
        /// Its payload, in one piece or several: see [`crate::Outbox::payload`].
        payload: Range<usize>,
    },
    /// Shared path: copy an object from the pool, check it, then [`crate::Client::copied`].
    CopyOut {
        /// The lane whose pool it is.
        lane: LaneId,
        /// For whom.
        slice: SliceId,
        /// Where in the pool.
        offset: u64,
        /// To where; exactly the object's length.
        local: Local,
        /// What the bytes must sum to; nothing where they are a part of the object only.
        checksum: Option<u64>,
    },
    /// Shared path: copy into the pool, then [`crate::Client::copied`] with the bytes' checksum.
    CopyIn {
        /// The lane whose pool it is.
        lane: LaneId,
        /// For whom.
        slice: SliceId,
        /// Where in the pool.
        offset: u64,
        /// From where.
        local: Local,
    },
    /// Shared, local and RDMA paths: copy between the caller's memory and a segment, then [`crate::Client::copied`]; or
    /// report the lane gone, when nothing touches the memory any more. `Unsupported` says that this way is closed for
    /// the segment: another is taken.
    CopySegment {
        /// The lane whose peer it belongs to.
        lane: LaneId,
        /// For whom.
        slice: SliceId,
        /// In which way.
        via: Via,
        /// The segment's region.
        segment: SegmentId,
        /// Where in it.
        offset: u64,
        /// The caller's memory.
        local: Local,
        /// Into the segment, or out of it.
        write: bool,
    },
    /// File path: move bytes between the caller's memory and a file, then [`crate::Client::copied`]. Unlike the copies
    /// it takes its time: a lane is gone only when the kernel holds nothing of it any more.
    FileTransfer {
        /// The lane.
        lane: LaneId,
        /// For whom.
        slice: SliceId,
        /// The file, by the host's name.
        file: SegmentId,
        /// Where in it.
        offset: u64,
        /// The caller's memory.
        local: Local,
        /// Into the file, or out of it.
        write: bool,
    },
    /// End all I/O of the lane, close it, then [`crate::Client::lane_gone`].
    Reset {
        /// The lane.
        lane: LaneId,
    },
    /// A batch is complete.
    Done {
        /// Which.
        batch: BatchId,
    },
    /// The map in use led to a wrong or dead owner: fetch a newer one.
    WantMap,
}

/// A copy between the caller's memory and a segment that a device makes: [`Output::CopySegment`] without what is the
/// same for all of a lane. See [`crate::Client::copies`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceCopy {
    /// For whom.
    pub slice: SliceId,
    /// The segment's region.
    pub segment: SegmentId,
    /// Where in it.
    pub offset: u64,
    /// The caller's memory.
    pub local: Local,
    /// Into the segment, or out of it.
    pub write: bool,
}

/// Where the payload that follows a frame goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PayloadTo {
    /// There is none, or it is of no use: read it and forget it.
    Discard,
    /// Into the caller's memory; then [`crate::Client::payload_done`].
    Local {
        /// Where.
        local: Local,
        /// For whom.
        slice: SliceId,
    },
    /// Into several ranges of the caller's memory: see [`crate::Client::scatter`]; then
    /// [`crate::Client::payload_done`], once.
    Scatter {
        /// For whom: stands for all that it is for.
        slice: SliceId,
    },
}
