//! What goes into a client and what comes out.

use core::fmt;
use core::ops::Range;
use std::net::SocketAddr;

use kvplane_proto::digest::Digest;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{BatchId, Incarnation, NodeId, SegmentId, ShardId, Version};
use kvplane_proto::limits::Limits;
use kvplane_proto::message::PageQuery;
use kvplane_proto::status::Status;

mod near;
mod options;
mod path;

pub use near::{Near, Nearness, NodeCounts, Place};
pub use options::{Intent, RailAddress, RailDevices, SubmitOptions};
pub use path::{Path, PeerKind, Transport, Via};

/// Settings of a client.
#[derive(Clone, Debug)]
pub struct Config {
    /// Cluster to belong to; peers of another refuse.
    pub cluster: String,
    /// Random id of this process.
    pub client: u64,
    /// Boot id of this host; a peer with an equal one may be reached by shared memory.
    pub host: String,
    /// Stream lanes to each shard.
    pub lanes: u16,
    /// Shared memory is used where the peer is on the same host.
    pub shared: bool,
    /// The kernel copies between the processes (CMA) where the peer is on the same host.
    pub cma: bool,
    /// TCP streams are used.
    pub stream: bool,
    /// Bytes per second of each RDMA device of this host, by the host's numbers; 0 where that is not known. None: RDMA
    /// is not used.
    pub rdma: Vec<u64>,
    /// Ranges of segments are cut into slices of this many bytes, at least
    /// [`kvplane_proto::Limits::SLICE_BYTES_LEAST`].
    pub slice_bytes: u64,
    /// Payload bytes that one lane may have asked for, sent, pinned or reserved without being done with them. A slice
    /// that is larger goes alone.
    pub lane_window_bytes: u64,
    /// Work that a rail may have posted beyond its latency: more keeps it busy, less lets the urgent overtake sooner.
    pub post_ahead_ns: u64,
    /// Slices up to this size do not wait for larger ones.
    pub small_bytes: u64,
    /// Slices of a range end where the target's offset is a multiple of this, if they can.
    pub align_bytes: u64,
    /// Requests of a batch that touch each other on both sides share slices.
    pub merge: bool,
    /// Slices that take longer are remembered with where they spent their time.
    pub slow_ns: u64,
    /// Reads and writes of segments of at most so many bytes share frames of up to `slice_bytes`; 0: each has its own.
    pub gather_range_bytes: u64,
    /// Payloads of segment reads and writes carry a checksum; objects always do.
    pub checksum_segments: bool,
    /// [`crate::Client::poll_finished`] reports the end of each task, and not only that of its batch.
    pub report_tasks: bool,
    /// The client only fetches, from former owners, what was in slots that moved: see [`crate::Client::set_sources`].
    pub fetches: bool,
    /// Requests that one lane to a peer of a foreign protocol may have under way, at least 1.
    pub foreign_depth: u32,
    /// After so long without a sign of its owner, a get leaves its request for the other owner: as long as the slowest
    /// hundredth of the owner's gets takes, at least half of this and at most this. 0: only when it must.
    pub hedge_ns: u64,
    /// Gets of whole objects that two owners have are spread over both.
    pub spread: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cluster: String::new(),
            client: 0,
            host: String::new(),
            lanes: 2,
            shared: true,
            cma: true,
            stream: true,
            rdma: Vec::new(),
            slice_bytes: 256 << 10,
            lane_window_bytes: 64 << 20,
            post_ahead_ns: 2_000_000,
            small_bytes: 64 << 10,
            align_bytes: 4_096,
            merge: true,
            slow_ns: 100_000_000,
            gather_range_bytes: 32 << 10,
            checksum_segments: true,
            report_tasks: false,
            fetches: false,
            foreign_depth: 1,
            hedge_ns: 0,
            spread: true,
        }
    }
}

impl Config {
    /// Whether a slice of so many bytes counts as small.
    pub(crate) const fn is_small(&self, bytes: u64) -> bool {
        bytes <= self.small_bytes
    }

    /// Ranges are cut into slices of at most so many bytes.
    pub(crate) fn most_slice_bytes(&self) -> u64 {
        self.slice_bytes.max(Limits::SLICE_BYTES_LEAST)
    }

    /// How peers on this host are expected to be copied from.
    pub(crate) const fn usual_via(&self) -> Via {
        if self.shared { Via::Map } else { Via::Cma }
    }

    /// What a rail of this path is expected to use.
    pub(crate) const fn usual_transport(&self, path: Path) -> Transport {
        Transport::of(path, self.usual_via())
    }
}

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

/// One request of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Is the object there?
    Exists(Digest),
    /// Is the object there? If it is on an SSD, bring it to the node's memory, to be asked for within the deadline.
    Prefetch(Digest),
    /// Which of so many objects of the batch's list, from this one on, are there? See [`crate::Client::submit_asks`].
    Asks(Digest, u32, u32),
    /// How long is it?
    Size(Digest),
    /// Remove it.
    Remove(Digest),
    /// Bring it into memory.
    Get(Digest, Local),
    /// Bring a range of the object, from this offset on, into memory.
    GetRange(Digest, u64, Local),
    /// Which objects has the owner of this digest? Alone in its batch: see [`crate::Client::take_description`].
    List(Digest, PageQuery),
    /// Keep these bytes under this digest.
    Put(Digest, Local),
    /// Keep these bytes under this digest, as the entry of this number of the batch's [`crate::PutBook`] says.
    PutAs(Digest, Local, u32),
    /// Bring a range of the object into memory, also if it is one that is being written and has that range already.
    PeekRange(Digest, u64, Local),
    /// Bring into memory what names the object's stripes.
    GetHead(Digest, Local),
    /// Remove it, also if it names stripes.
    RemoveHead(Digest),
    /// Remove it, also if it names stripes, if it is this version. `NotFound` where it is another.
    RemoveHeadOf(Digest, Version),
    /// The replica owner is to keep these bytes too, as this entry says: see [`crate::Client::set_sources`].
    PutCopy(Digest, Local, u32),
    /// The replica owner is to drop its replica.
    DropCopy(Digest),
    /// The owner is to have the replica owner drop its replica, and to wish for none. `NotFound` where it had none.
    RemoveCopy(Digest),
    /// An object of this digest and so many bytes will be written in ranges, with pauses of at most so many
    /// milliseconds, as the entry of this number of the batch's [`crate::PutBook`] says: a put session. The result's
    /// version is its number, which means something to one incarnation of one shard only: that of the result.
    Begin(Digest, u64, u32, u32),
    /// Keep these bytes at this offset of the put session of this number, which was begun with that incarnation of the
    /// owner.
    /// `Stale` where the digest's owner is another by now, and nobody is asked.
    Fill(Digest, PeerIncarnation, u64, u64, Local),
    /// A put session is complete: it becomes the object. `Stale` as for a fill.
    Seal(Digest, PeerIncarnation, u64),
    /// A put session is given up. `Stale` as for a fill.
    Discard(Digest, PeerIncarnation, u64),
    /// Bring a range of a segment into memory.
    Read(SegmentTarget, Local),
    /// Write a range of a segment.
    Write(SegmentTarget, Local),
    /// What does this peer's segment hold? See [`crate::Client::take_description`].
    OpenSegment(PeerId),
}

// Each slice has a request, and there are many.
const _: () = assert!(size_of::<Request>() <= 64);

impl Request {
    /// The caller's memory that the request uses.
    #[must_use]
    pub const fn local(&self) -> Option<Local> {
        match *self {
            Self::Get(_, local)
            | Self::GetRange(_, _, local)
            | Self::PeekRange(_, _, local)
            | Self::GetHead(_, local)
            | Self::Fill(_, _, _, _, local)
            | Self::Put(_, local)
            | Self::PutAs(_, local, _)
            | Self::PutCopy(_, local, _)
            | Self::Read(_, local)
            | Self::Write(_, local) => Some(local),
            _ => None,
        }
    }

    /// Whether it brings an object, or a part of one, into memory.
    pub(crate) const fn is_get(&self) -> bool {
        matches!(self, Self::Get(..) | Self::GetRange(..) | Self::PeekRange(..) | Self::GetHead(..))
    }

    /// The incarnation of the owner that alone may be asked this, if only one may.
    pub(crate) const fn incarnation(&self) -> Option<PeerIncarnation> {
        match *self {
            Self::Fill(_, incarnation, ..) | Self::Seal(_, incarnation, _) | Self::Discard(_, incarnation, _) => {
                Some(incarnation)
            }
            _ => None,
        }
    }

    /// The memory that an object, or a range of one, is put from.
    pub(crate) const fn source(&self) -> Option<Local> {
        match *self {
            Self::Put(_, local)
            | Self::PutAs(_, local, _)
            | Self::PutCopy(_, local, _)
            | Self::Fill(_, _, _, _, local) => Some(local),
            _ => None,
        }
    }

    /// The peer that the request names; none where the map says who is asked.
    #[must_use]
    pub const fn peer(&self) -> Option<PeerId> {
        match *self {
            Self::Read(target, _) | Self::Write(target, _) => Some(target.peer),
            Self::OpenSegment(peer) => Some(peer),
            _ => None,
        }
    }
}

/// The outcome of one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TaskResult {
    /// `Ok`, or what went wrong. For an `Exists`, `Ok` or `NotFound`.
    pub status: Status,
    /// Length of the object, or bytes moved.
    pub bytes: u64,
    /// Version of the object, for gets and puts.
    pub version: Version,
    /// For gets and puts: how many owners are known to have it; see [`Config::spread`].
    pub replicas: u8,
    /// For gets: the replica owner gave it, and the owner has not said whether it has it too.
    pub from_replica: bool,
    /// For a put session that was begun: with whom.
    pub incarnation: PeerIncarnation,
}

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

/// Why a batch was refused. Nothing of it was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SubmitError {
    /// No requests.
    Empty,
    /// More requests than one batch may hold.
    TooMany {
        /// How many.
        requests: usize,
        /// The limit.
        limit: usize,
    },
    /// A request moves 0 bytes.
    ZeroBytes {
        /// Which request.
        index: usize,
    },
    /// A request moves more than one frame may.
    TooLarge {
        /// Which request.
        index: usize,
        /// Its bytes.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A request's range of memory or of a segment ends beyond 2^64 bytes.
    OutOfRange {
        /// Which request.
        index: usize,
    },
    /// More is open than one client may have open.
    Busy {
        /// Slices that are open.
        open: usize,
        /// Slices of this batch.
        slices: usize,
        /// The limit.
        limit: usize,
    },
    /// A request names a peer that was never opened.
    UnknownPeer {
        /// Which request.
        index: usize,
    },
    /// A put names an entry that the batch's book does not have.
    UnknownPut {
        /// Which request.
        index: usize,
    },
    /// Two requests of the batch write to overlapping memory of the caller.
    Overlap {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
    },
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("a batch of no requests"),
            Self::TooMany { requests, limit } => {
                write!(f, "a batch of {requests} requests is over the limit of {limit}: submit it in parts")
            }
            Self::ZeroBytes { index } => write!(f, "request {index} moves 0 bytes"),
            Self::TooLarge { index, bytes, limit } => {
                write!(f, "request {index} moves {bytes} bytes, over the limit of {limit}")
            }
            Self::OutOfRange { index } => write!(f, "the range of request {index} ends beyond 2^64 bytes"),
            Self::Busy { open, slices, limit } => write!(
                f,
                "{open} slices are open and {slices} more would be over the limit of {limit}: wait for some to complete"
            ),
            Self::UnknownPeer { index } => write!(f, "request {index} names a segment that was not opened"),
            Self::UnknownPut { index } => write!(f, "request {index} names an entry that the book of puts has not"),
            Self::Overlap { first, second } => {
                write!(f, "requests {first} and {second} write to overlapping memory")
            }
        }
    }
}

impl std::error::Error for SubmitError {}
