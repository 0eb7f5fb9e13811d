//! Requests of a batch, and their results.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::message::PageQuery;
use kvplane_proto::status::Status;

use super::{Local, PeerId, PeerIncarnation, SegmentTarget};

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
    /// For gets and puts: how many owners are known to have it; see [`Config::spread`](crate::Config::spread).
    pub replicas: u8,
    /// For gets: the replica owner gave it, and the owner has not said whether it has it too.
    pub from_replica: bool,
    /// For a put session that was begun: with whom.
    pub incarnation: PeerIncarnation,
}
