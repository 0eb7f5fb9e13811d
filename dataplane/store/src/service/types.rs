//! What goes into a service and what comes out.

use core::fmt;
use core::ops::Range;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, PinId, ReservationId, SegmentId, ShardId, Version};
use kvplane_proto::message::PutAck;
use kvplane_proto::{Digest, Limits, Status};

use crate::{CommitError, GetError, ReserveError};

/// Who answers.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Name of the cluster; a hello to another is refused.
    pub cluster: String,
    /// This node.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// This shard.
    pub shard: ShardId,
    /// Name under which its segments are opened.
    pub segment_name: String,
}

/// How long owners have been as a map says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapStanding {
    /// Which state of the control plane the map is of: epochs of different states do not compare.
    pub state: u64,
    /// From this epoch up to the map's no slot has changed hands.
    pub since: Epoch,
    /// What a device holds counts only if it knew a map of this epoch or of a later one: an incarnation of the node may
    /// have gone without it before. 0 for nothing.
    pub kept: Epoch,
}

/// A connection; the host's index and generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct PeerKey {
    /// Position in the host's table, dense from 0.
    pub index: u32,
    /// Which connection at that position.
    pub generation: u32,
}

/// How a connection moves payloads.
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
    /// A registered segment.
    Segment(SegmentId),
}

/// A range of the host's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Which memory.
    pub memory: Memory,
    /// Where in it.
    pub offset: u64,
    /// How much.
    pub bytes: u64,
}

/// The memory of an answer's payload, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Places {
    /// In one piece.
    One(Place),
    /// In several: see [`super::Service::places`].
    Many(Range<usize>),
}

/// Ids of tickets have this bit in their index.
const TICKET: u32 = 1 << 31;

/// A hold on a range of a put session: its place and its generation.
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

    /// The ticket that an id names, if it names one.
    pub(in crate::service) const fn of(index: u32, generation: u32) -> Option<Self> {
        if index & TICKET != 0 { Some(Self { index: index & !TICKET, generation }) } else { None }
    }
}

/// What keeps the memory of an answer's payload in place; given back through [`super::Service::sent`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hold {
    /// An object.
    Pin(PinId),
    /// A segment.
    Segment {
        /// Which.
        segment: SegmentId,
        /// Which of the reads in flight, by the service's count.
        read: u32,
    },
    /// A range of an object that is being written.
    Ticket(TicketId),
    /// Several segments.
    Segments {
        /// Which of the gathered reads in flight, by the service's count.
        read: u32,
    },
}

/// Where a request's payload goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PayloadTo {
    /// Read it and forget it; also when there is none.
    Discard,
    /// To here.
    Place(Place),
    /// To these, in order: see [`super::Service::places`], at once.
    Places(Range<usize>),
}

/// Why a connection is closed from our side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseReason {
    /// A frame that no honest peer sends: says which.
    Malformed(&'static str),
    /// No hello in time, or a request before it.
    NotGreeted,
    /// It wanted somebody else: another cluster, node, incarnation, shard or version.
    Refused(Status),
    /// A payload stopped arriving before its reservation's deadline.
    PutDeadline,
    /// A segment it was using is being unregistered and did not fall quiet in time.
    SegmentGone,
    /// Its peer has said on another connection that this one is over.
    Fenced,
    /// Its ticket has ended, and no newer one was shown.
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
            Self::TicketEnded => f.write_str("the peer's ticket has ended and it showed no newer one"),
            Self::Fenced => f.write_str("its peer has given it up"),
            Self::SegmentGone => f.write_str("a segment in use was unregistered"),
        }
    }
}

/// Something for the host to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Output {
    /// Send an answer.
    Frame {
        /// To whom.
        peer: PeerKey,
        /// Its header. Where the checksum flag is set and the value is 0, the host fills in the payload's checksum.
        header: Header,
        /// Its body: see [`super::Service::body`].
        body: Range<usize>,
        /// Its payload, and what to give back once it has left.
        payload: Option<(Places, Hold)>,
    },
    /// End this connection's I/O, then [`super::Service::peer_gone`]. Answers before it are sent if that is possible.
    Close {
        /// Whose.
        peer: PeerKey,
        /// Why, for the log.
        reason: CloseReason,
    },
    /// Nothing uses this segment any more: its memory may go.
    Unregistered {
        /// Which.
        segment: SegmentId,
    },
}

/// The tail of an object that is being put, for the host to write to the pool: see [`super::Service::poll_tail`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TailWrite {
    /// Where in the pool.
    pub offset: u64,
    /// The bytes: see [`super::Service::body`].
    pub bytes: Range<usize>,
}

/// Memory to be registered.
#[derive(Clone, Copy, Debug)]
pub struct SegmentInfo {
    /// Its address in this process: an identity for people and for Mooncake's tools.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// Whether peers may write it.
    pub writable: bool,
    /// Whether peers on this host can map it.
    pub shareable: bool,
    /// Whether peers may use it at all; else it is not listed, and only this process does.
    pub remote_accessible: bool,
}

/// Why memory was not registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegisterError {
    /// Nothing to register.
    Empty,
    /// It overlaps memory that is registered.
    Overlap {
        /// The registered range's address.
        address: u64,
        /// Its length.
        bytes: u64,
    },
    /// As many as the limits allow are registered.
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

/// What a service counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServiceCounters {
    /// Requests that arrived.
    pub requests: u64,
    /// Connections that said hello and were welcomed.
    pub greeted: u64,
    /// Connections closed from our side.
    pub closed: u64,
    /// Connections refused for want of a ticket that is good.
    pub strangers: u64,
    /// Connections closed as their tickets had ended.
    pub tickets_ended: u64,
    /// Requests that their peer's ticket does not allow.
    pub unauthorized: u64,
    /// Requests for keys that this shard does not own.
    pub wrong_owner: u64,
    /// Objects dropped because their slot went to another owner, or may have been another's meanwhile.
    pub dropped_objects: u64,
    /// Payloads that did not match their checksum.
    pub corrupt: u64,
    /// Puts whose reservation passed its deadline.
    pub expired: u64,
    /// Objects' bytes sent or lent to peers.
    pub get_bytes: u64,
    /// Objects' bytes taken in.
    pub put_bytes: u64,
    /// Segments' bytes sent: see [`super::Segments`].
    pub read_bytes: u64,
    /// Segments' bytes taken in.
    pub write_bytes: u64,
}

/// An object that was just made visible.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommittedObject {
    pub(super) version: Version,
    pub(super) digest: Digest,
    pub(super) bytes: u64,
    /// Whether it takes the place of others.
    pub(super) replaces: bool,
    /// Whether it is a copy of what another owner has.
    pub(super) is_copy: bool,
    /// What its put's answer is to wait for, where that is not left to the policy.
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

/// The pool's memory, to look at.
pub trait PoolBytes {
    /// Copies out what lies at `offset`.
    fn read(&self, offset: u64, into: &mut [u8]);
    /// How long it is.
    fn bytes(&self) -> u64;
}
