//! Input and output types of a service.

use core::fmt;
use core::ops::Range;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, PinId, ReservationId, SegmentId, ShardId, Version};
use kvplane_proto::message::PutAck;
use kvplane_proto::{Digest, Limits, Status};

use crate::{CommitError, GetError, ReserveError};

/// Identity of the shard that a service belongs to.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Identity {
    /// Name of the cluster; a hello to another is refused.
    pub cluster: String,
    pub node: NodeId,
    /// Incarnation of the node.
    pub incarnation: Incarnation,
    pub shard: ShardId,
    /// Name under which its segments are opened.
    pub segment_name: String,
}

/// Standing of a map: since when its owners have been as they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapStanding {
    /// Cluster state that the map belongs to: epochs of different states cannot be compared.
    pub state: u64,
    /// Since this epoch, up to the map's, no slot has changed hands.
    pub since: Epoch,
    /// Oldest epoch that a device must have recorded for its objects to count: an incarnation of the node may have run
    /// without the device before. 0 for no limit.
    pub kept: Epoch,
}

/// Connection, by the host's index and generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct PeerKey {
    /// Index in the host's table, dense from 0.
    pub index: u32,
    /// Generation of the connection at that index.
    pub generation: u32,
}

/// Way in which a connection moves payloads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    /// Payloads follow their frames.
    Stream,
    /// The peer maps the pool and copies by itself.
    Shared,
}

/// Memory that the shard's host owns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// The shard's pool.
    Pool,
    /// The shard's device pool.
    DevicePool,
    /// A registered segment.
    Segment(SegmentId),
}

/// Extent of the host's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryExtent {
    /// Memory that the extent is in.
    pub memory: Memory,
    /// Offset in that memory.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// Extents of a reply's payload, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Extents {
    /// A single extent.
    One(MemoryExtent),
    /// Several extents: see [`super::Service::extents`].
    Many(Range<usize>),
}

/// Bit of the index that marks the ids of tickets.
const TICKET: u32 = 1 << 31;

/// Hold on a range of a put session: its index and generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TicketId {
    pub(in crate::service) index: u32,
    pub(in crate::service) generation: u32,
}

impl TicketId {
    pub(super) const fn reservation(self) -> ReservationId {
        ReservationId { index: self.index | TICKET, generation: self.generation }
    }

    pub(super) const fn pin(self) -> PinId {
        PinId { index: self.index | TICKET, generation: self.generation }
    }

    /// Returns the ticket of an id, if the id names one.
    pub(in crate::service) const fn of(index: u32, generation: u32) -> Option<Self> {
        if index & TICKET != 0 { Some(Self { index: index & !TICKET, generation }) } else { None }
    }
}

/// Hold that keeps the memory of a reply's payload in place; released through [`super::Service::sent`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Hold {
    /// Read pin of an object.
    Pin(PinId),
    /// Use of a segment.
    Segment {
        segment: SegmentId,
        /// Number of the read in flight.
        read: u32,
    },
    /// Range of an object that is being written.
    Ticket(TicketId),
    /// Use of several segments.
    Segments {
        /// Number of the gathered read in flight.
        read: u32,
    },
}

/// Destination of a request's payload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PayloadTo {
    /// Read and discard it; also if there is none.
    Discard,
    /// Receive it into this extent.
    Extent(MemoryExtent),
    /// Receive it into these extents, in order: see [`super::Service::extents`], at once.
    Extents(Range<usize>),
}

/// Reason for which a connection is closed from this side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseReason {
    /// The peer sent a frame that no correct peer sends; the text says which.
    Malformed(&'static str),
    /// No hello in time, or a request before it.
    NotGreeted,
    /// The peer was refused: for instance, it wanted another cluster, node, incarnation, shard or version.
    Refused(Status),
    /// A payload stopped arriving before its reservation's deadline.
    PutDeadline,
    /// A segment that the peer was using is being unregistered, and its I/O did not end in time.
    SegmentGone,
    /// The client has fenced this connection on another one.
    Fenced,
    /// The peer's ticket has expired, and no newer one was proved.
    TicketEnded,
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(what) => write!(f, "the peer sent {what}"),
            Self::NotGreeted => write!(f, "the peer did not say hello within {} ms", Limits::HELLO_NS / 1_000_000),
            Self::Refused(status) => write!(f, "the peer was refused: {status}"),
            Self::PutDeadline => {
                write!(f, "a put's payload did not arrive within {} s", Limits::RESERVATION_NS / 1_000_000_000)
            }
            Self::TicketEnded => f.write_str("the peer's ticket has expired and the peer proved no newer one"),
            Self::Fenced => f.write_str("the client has fenced it on another connection"),
            Self::SegmentGone => f.write_str("a segment in use was unregistered"),
        }
    }
}

/// Action for the host to carry out.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Output {
    /// Send a reply.
    Frame {
        peer: PeerKey,
        /// Header of the frame. Where the checksum flag is set and the value is 0, the host fills in the payload's
        /// checksum.
        header: Header,
        /// Body of the frame: see [`super::Service::body`].
        body: Range<usize>,
        /// Payload, and the hold to release once it was sent.
        payload: Option<(Extents, Hold)>,
    },
    /// End this connection's I/O, then call [`super::Service::peer_gone`]. Replies before it are sent if possible.
    Close {
        peer: PeerKey,
        /// Reason, for the log.
        reason: CloseReason,
    },
    /// No I/O uses this segment any more: its memory may be freed.
    Unregistered { segment: SegmentId },
}

/// Tail of an object that is being put, for the host to write to the pool: see [`super::Service::poll_tail`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TailWrite {
    /// Offset in the pool.
    pub offset: u64,
    /// Bytes of the tail: see [`super::Service::body`].
    pub bytes: Range<usize>,
}

/// Memory to register.
#[derive(Clone, Copy, Debug)]
pub struct SegmentInfo {
    /// Address in this process: an identity for operators and for Mooncake's tools.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// True if peers may write it.
    pub writable: bool,
    /// True if peers on this host can map it.
    pub shareable: bool,
    /// True if peers may use it at all; otherwise it is not listed, and only this process uses it.
    pub remote_accessible: bool,
}

/// Reason for which memory was not registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegisterError {
    /// The range is empty.
    Empty,
    /// The range overlaps registered memory.
    Overlap {
        /// The registered range's address.
        address: u64,
        /// Its length.
        bytes: u64,
    },
    /// The limit of registered regions is reached.
    TooMany {
        /// The limit.
        limit: usize,
    },
}

impl fmt::Display for RegisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("a range of 0 bytes cannot be registered"),
            Self::Overlap { address, bytes } => {
                write!(f, "the range overlaps {bytes} bytes at {address:#x}, which are registered already")
            }
            Self::TooMany { limit } => write!(f, "{limit} regions are registered, which is the limit: unregister some"),
        }
    }
}

impl std::error::Error for RegisterError {}

/// Counters of a service.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServiceCounters {
    /// Requests received.
    pub requests: u64,
    /// Connections that said hello and were welcomed.
    pub greeted: u64,
    /// Connections closed from this side.
    pub closed: u64,
    /// Connections refused for lack of a valid ticket.
    pub unauthenticated: u64,
    /// Connections closed because their tickets expired.
    pub tickets_ended: u64,
    /// Requests that their peer's ticket does not allow.
    pub unauthorized: u64,
    /// Requests for keys that this shard does not own.
    pub wrong_owner: u64,
    /// Objects dropped because their slot went to another owner, or may have belonged to one meanwhile.
    pub dropped_objects: u64,
    /// Payloads that did not match their checksum.
    pub corrupt: u64,
    /// Puts whose reservation passed its deadline.
    pub expired: u64,
    /// Bytes of objects sent or lent to peers.
    pub get_bytes: u64,
    /// Bytes of objects received.
    pub put_bytes: u64,
    /// Gets answered from the device pool.
    pub device_gets: u64,
    /// Objects that were requested back from the device pool, for peers that map memory or to be replicated.
    pub recalls: u64,
    /// Bytes of segments sent: see [`super::Segments`].
    pub read_bytes: u64,
    /// Bytes of segments received.
    pub write_bytes: u64,
}

/// Object that was just committed.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommittedObject {
    pub(super) version: Version,
    pub(super) digest: Digest,
    pub(super) bytes: u64,
    /// True if it replaces an earlier version.
    pub(super) replaces: bool,
    /// True if it is a replica of another owner's object.
    pub(super) is_copy: bool,
    /// Acknowledgement level of its put, if the put named one.
    pub(super) ack: Option<PutAck>,
}

pub(super) const fn get_status(error: GetError) -> Status {
    match error {
        GetError::NotFound => Status::NotFound,
        GetError::TooManyPins { .. } => Status::Busy,
    }
}

pub(super) const fn reserve_status(error: ReserveError) -> Status {
    match error {
        ReserveError::Empty => Status::Empty,
        ReserveError::TooLarge { .. } => Status::TooLarge,
        ReserveError::Exists => Status::Exists,
        ReserveError::NoSpace { .. } | ReserveError::TooManyObjects { .. } => Status::NoSpace,
        ReserveError::Quota { .. } => Status::QuotaExceeded,
        ReserveError::PinLimit { .. } => Status::PinLimit,
        ReserveError::TooManyReservations { .. } => Status::Busy,
    }
}

pub(super) const fn commit_status(error: CommitError) -> Status {
    match error {
        CommitError::Stale => Status::Stale,
        CommitError::Exists => Status::Exists,
        CommitError::Expired => Status::DeadlineExceeded,
    }
}

/// Read access to the pool's memory.
pub trait PoolBytes {
    /// Copies the bytes at `offset` into `into`.
    fn read(&self, offset: u64, into: &mut [u8]);
    /// Returns the length of the pool.
    fn bytes(&self) -> u64;
}

/// Memory of the pool, to copy objects into that come from the shared tier.
pub trait PoolMemory: PoolBytes {
    /// Copies these bytes to `offset`.
    fn write(&mut self, offset: u64, bytes: &[u8]);
}
