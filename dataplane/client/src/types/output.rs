//! Outputs: actions that a client requests from its host, and destinations of payloads.

use core::ops::Range;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{BatchId, SegmentId};

use super::path::{Path, Via};
use super::peer::PeerAddress;
use super::{LaneId, Local, SliceId};

/// An action for the host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Output {
    /// Connects this lane. The host then calls [`crate::Client::connected`] or [`crate::Client::lane_gone`].
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Connect { lane: LaneId, address: PeerAddress, path: Path },
    /// Sends a frame.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Send {
        lane: LaneId,
        /// Header of the frame. If the payload needs a checksum, the flag is set and the host fills in the value.
        header: Header,
        /// Body of the frame: see [`crate::Outbox::body`].
        body: Range<usize>,
        /// Payload of the frame, in one or several ranges: see [`crate::Outbox::payload`].
        payload: Range<usize>,
    },
    /// Shared path: copies an object from the pool and verifies it. The host then calls [`crate::Client::copied`].
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    CopyOut {
        /// Lane whose pool has the object.
        lane: LaneId,
        slice: SliceId,
        /// Start of the object within the pool.
        offset: u64,
        /// Destination, of exactly the object's length.
        local: Local,
        /// Expected checksum of the bytes; `None` if they are a part of the object only.
        checksum: Option<u64>,
    },
    /// Shared path: copies into the pool. The host then calls [`crate::Client::copied`] with the checksum of the bytes.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    CopyIn {
        /// Lane whose pool is written.
        lane: LaneId,
        slice: SliceId,
        /// Start of the reservation within the pool.
        offset: u64,
        /// Bytes to copy.
        local: Local,
    },
    /// Shared, local and RDMA paths: copies between the caller's memory and a segment. The host then calls
    /// [`crate::Client::copied`], or reports the lane gone when no I/O touches the memory any more. `Unsupported`
    /// reports that this way is closed for the segment: the client takes another.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    CopySegment {
        /// Lane to the peer that owns the segment.
        lane: LaneId,
        slice: SliceId,
        via: Via,
        /// Id of the segment's region.
        segment: SegmentId,
        /// Start of the range within the region.
        offset: u64,
        /// Range of the caller's memory.
        local: Local,
        /// True to write the segment, false to read it.
        write: bool,
    },
    /// File path: moves bytes between the caller's memory and a file. The host then calls [`crate::Client::copied`].
    /// Unlike the copies it is asynchronous: a lane is gone only when the kernel has no operation of it in flight any
    /// more.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    FileTransfer {
        lane: LaneId,
        slice: SliceId,
        /// Id of the file, assigned by the host.
        file: SegmentId,
        /// Start of the range within the file.
        offset: u64,
        /// Range of the caller's memory.
        local: Local,
        /// True to write the file, false to read it.
        write: bool,
    },
    /// Ends all I/O of the lane and closes it. The host then calls [`crate::Client::lane_gone`].
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Reset { lane: LaneId },
    /// A batch is complete.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Done { batch: BatchId },
    /// Requests a newer map: the map in use led to a wrong or dead owner.
    WantMap,
}

/// A copy between the caller's memory and a segment that a device executes: [`Output::CopySegment`] without the fields
/// that are common to a lane. See [`crate::Client::copies`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct DeviceCopy {
    pub slice: SliceId,
    /// Id of the segment's region.
    pub segment: SegmentId,
    /// Start of the range within the region.
    pub offset: u64,
    /// Range of the caller's memory.
    pub local: Local,
    /// True to write the segment, false to read it.
    pub write: bool,
}

/// Destination of the payload that follows a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PayloadTo {
    /// The payload is empty or not needed: the host reads and discards it.
    Discard,
    /// A range of the caller's memory. The host then calls [`crate::Client::payload_done`].
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Local { local: Local, slice: SliceId },
    /// Several ranges of the caller's memory: see [`crate::Client::scatter`]. The host then calls
    /// [`crate::Client::payload_done`] once.
    Scatter {
        /// One slice of the frame, which stands for all of them.
        slice: SliceId,
    },
}
