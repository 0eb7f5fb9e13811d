//! Requests of a batch, and their results.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{Epoch, Slot, Version};
use kvplane_proto::map::ReplicaSet;
use kvplane_proto::message::{PageQuery, RetainItem};
use kvplane_proto::status::Status;

use super::{Local, PeerId, PeerIncarnation, SegmentTarget};

/// One request of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Tests whether the object exists.
    Exists(Digest),
    /// Tests whether the object exists. If it is on the SSD, prefetches it into the node's memory, for a get within the
    /// deadline.
    Prefetch(Digest),
    /// Tests which of so many objects of the batch's list exist, beginning with this position. See
    /// [`crate::Client::submit_asks`].
    Asks(Digest, u32, u32),
    /// Gets the length of the object.
    Size(Digest),
    /// Removes the object.
    Remove(Digest),
    /// Gets the object.
    Get(Digest, Local),
    /// Gets a range of the object, beginning at this offset.
    GetRange(Digest, u64, Local),
    /// Lists the objects of the owner of this digest. Must be alone in its batch: see
    /// [`crate::Client::take_description`].
    List(Digest, PageQuery),
    /// Puts an object.
    Put(Digest, Local),
    /// Puts an object with the options and the name in this entry of the batch's [`crate::PutBook`].
    PutAs(Digest, Local, u32),
    /// Gets a range of the object, also if the object is an uncommitted put session in which that range is written.
    PeekRange(Digest, u64, Local),
    /// Gets the stripe head of the object.
    GetHead(Digest, Local),
    /// Removes the object, also if it is a stripe head.
    RemoveHead(Digest),
    /// Removes this version of the object, also if it is a stripe head. `NotFound` if the object has another version.
    RemoveHeadOf(Digest, Version),
    /// Puts a replica on this replica owner, with this entry of the [`crate::PutBook`]. For a client of an owner: see
    /// [`crate::Client::set_sources`].
    PutCopy(Digest, Local, u32, PeerId),
    /// Gets the object's bytes from this other owner of its slot, to repair a damaged copy. For a client of an owner,
    /// as [`Self::PutCopy`].
    GetCopy(Digest, Local, PeerId),
    /// Lists this object, with its name, at this other owner of its slot, as for [`Self::GetCopy`]. Must be alone in
    /// its batch, as [`Self::List`].
    ListCopy(Digest, PeerId),
    /// Removes the replica from this replica owner.
    DropCopy(Digest, PeerId),
    /// Ends the exports of this former owner to the owner of this slot: everything was imported, by the map of this
    /// epoch. For a client of an owner, as [`Self::PutCopy`].
    EndExport(Slot, Epoch, PeerId),
    /// Has the owner drop the object's replicas on its replica owners, and replicate the object no more. `NotFound` if
    /// there was no replica.
    RemoveCopy(Digest),
    /// Pins an object, a group or a retention, or ends that. The result has the number of objects in its bytes;
    /// `NotFound` if the object is not in memory, `PinLimit` beyond the limits of hard pins.
    Retain(RetainItem),
    /// Begins a put session: an object of this digest and so many bytes, which is written in ranges, with pauses of at
    /// most so many milliseconds, and with this entry of the batch's [`crate::PutBook`]. The version in the result is
    /// the number of the put session. It is valid for one incarnation of one shard only, which is in the result too.
    Begin(Digest, u64, u32, u32),
    /// Writes these bytes at this offset of a put session, which was begun with that incarnation of the owner. Fails as
    /// `Stale`, without a request, if the digest has another owner by now.
    Fill(Digest, PeerIncarnation, u64, u64, Local),
    /// Commits a put session. `Stale` as for a fill.
    Seal(Digest, PeerIncarnation, u64),
    /// Aborts a put session. `Stale` as for a fill.
    Discard(Digest, PeerIncarnation, u64),
    /// Reads a range of a segment.
    Read(SegmentTarget, Local),
    /// Writes a range of a segment.
    Write(SegmentTarget, Local),
    /// Gets the descriptor of the peer's segment. See [`crate::Client::take_description`].
    OpenSegment(PeerId),
}

// Every slice contains a request, and there are many slices.
const _: () = assert!(size_of::<Request>() <= 64);

impl Request {
    /// Returns the caller's memory that the request uses.
    #[must_use]
    pub const fn local(&self) -> Option<Local> {
        match *self {
            Self::Get(_, local)
            | Self::GetRange(_, _, local)
            | Self::PeekRange(_, _, local)
            | Self::GetHead(_, local)
            | Self::GetCopy(_, local, _)
            | Self::Fill(_, _, _, _, local)
            | Self::Put(_, local)
            | Self::PutAs(_, local, _)
            | Self::PutCopy(_, local, ..)
            | Self::Read(_, local)
            | Self::Write(_, local) => Some(local),
            _ => None,
        }
    }

    /// Returns the request with other memory of the caller; unchanged if it uses none.
    #[must_use]
    pub const fn with_local(self, local: Local) -> Self {
        match self {
            Self::Get(digest, _) => Self::Get(digest, local),
            Self::GetRange(digest, offset, _) => Self::GetRange(digest, offset, local),
            Self::PeekRange(digest, offset, _) => Self::PeekRange(digest, offset, local),
            Self::GetHead(digest, _) => Self::GetHead(digest, local),
            Self::GetCopy(digest, _, peer) => Self::GetCopy(digest, local, peer),
            Self::Fill(digest, incarnation, session, offset, _) => {
                Self::Fill(digest, incarnation, session, offset, local)
            }
            Self::Put(digest, _) => Self::Put(digest, local),
            Self::PutAs(digest, _, entry) => Self::PutAs(digest, local, entry),
            Self::PutCopy(digest, _, entry, peer) => Self::PutCopy(digest, local, entry, peer),
            Self::Read(target, _) => Self::Read(target, local),
            Self::Write(target, _) => Self::Write(target, local),
            other => other,
        }
    }

    /// Returns the entry of the batch's [`crate::PutBook`] that the request names.
    #[must_use]
    pub const fn entry(&self) -> Option<u32> {
        match *self {
            Self::PutAs(_, _, entry) | Self::PutCopy(_, _, entry, _) | Self::Begin(_, _, _, entry) => Some(entry),
            _ => None,
        }
    }

    /// Returns the request with another entry; unchanged if it names none.
    #[must_use]
    pub const fn with_entry(self, entry: u32) -> Self {
        match self {
            Self::PutAs(digest, local, _) => Self::PutAs(digest, local, entry),
            Self::PutCopy(digest, local, _, peer) => Self::PutCopy(digest, local, entry, peer),
            Self::Begin(digest, bytes, idle_ms, _) => Self::Begin(digest, bytes, idle_ms, entry),
            other => other,
        }
    }

    /// Returns true if the bytes of the caller's memory are sent; false if it is read into.
    #[must_use]
    pub const fn is_sent(&self) -> bool {
        matches!(self, Self::Write(..)) || self.source().is_some()
    }

    /// Returns true if the request is for an object, not for a segment.
    #[must_use]
    pub const fn is_of_object(&self) -> bool {
        !matches!(self, Self::Read(..) | Self::Write(..) | Self::OpenSegment(..))
    }

    /// Returns true if the request reads an object, or a part of one.
    pub(crate) const fn is_get(&self) -> bool {
        matches!(self, Self::Get(..) | Self::GetRange(..) | Self::PeekRange(..) | Self::GetHead(..) | Self::GetCopy(..))
    }

    /// Returns the only incarnation of the owner that the request is valid for, if there is one.
    pub(crate) const fn incarnation(&self) -> Option<PeerIncarnation> {
        match *self {
            Self::Fill(_, incarnation, ..) | Self::Seal(_, incarnation, _) | Self::Discard(_, incarnation, _) => {
                Some(incarnation)
            }
            _ => None,
        }
    }

    /// Returns the memory that the request writes an object, or a range of one, from.
    pub(crate) const fn source(&self) -> Option<Local> {
        match *self {
            Self::Put(_, local)
            | Self::PutAs(_, local, _)
            | Self::PutCopy(_, local, ..)
            | Self::Fill(_, _, _, _, local) => Some(local),
            _ => None,
        }
    }

    /// Returns the peer that the request names; `None` if its peer follows from the map.
    #[must_use]
    pub const fn peer(&self) -> Option<PeerId> {
        match *self {
            Self::Read(target, _) | Self::Write(target, _) => Some(target.peer),
            Self::OpenSegment(peer)
            | Self::PutCopy(.., peer)
            | Self::GetCopy(.., peer)
            | Self::ListCopy(_, peer)
            | Self::DropCopy(_, peer)
            | Self::EndExport(_, _, peer) => Some(peer),
            _ => None,
        }
    }
}

/// The outcome of one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TaskResult {
    /// `Ok`, or the reason of the failure. For an `Exists`, `Ok` or `NotFound`.
    pub status: Status,
    /// Length of the object, or the bytes moved.
    pub bytes: u64,
    /// Version of the object, for gets and puts.
    pub version: Version,
    /// For gets and puts: number of replicas that the object is known to have, the owner's included, 1 to 8; see
    /// [`Config::spread`](crate::Config::spread).
    pub replicas: u8,
    /// For gets and puts: replica owners that are known to have the object, by the map in use.
    pub replica_owners: ReplicaSet,
    /// For gets and queries: a replica owner answered, and the owner has not confirmed that it has the object too.
    pub from_replica: bool,
    /// For a put session that was begun: incarnation of the owner that holds it.
    pub incarnation: PeerIncarnation,
}

impl TaskResult {
    /// Result of a request that has moved nothing.
    #[must_use]
    pub const fn of(status: Status) -> Self {
        Self {
            status,
            bytes: 0,
            version: Version(0),
            replicas: 0,
            replica_owners: ReplicaSet::NONE,
            from_replica: false,
            incarnation: PeerIncarnation(0),
        }
    }
}
