//! Messages: the kinds of frames, and the fixed-size items of their bodies.
//!
//! A body is `items` records of one type, packed, so decoding is a length check and an iterator, and allocates nothing
//! on behalf of a peer. `docs/wire.md` lists the items of each kind.

mod hello;
mod items;
mod keys;
mod priority;
mod put;
mod put_flags;
mod retain;
mod runs;
mod segment;

pub use hello::{Hello, HelloError, Welcome};
pub use items::{
    Bitmap, CommitItem, CommitReply, DigestItem, FillItem, GetItem, IdItem, Item, Items, KeyItem, ListItem, ListReply,
    LookupReply, PutItem, RangeItem, ReadItem, ReserveReply, RetainItem, RetainReply, RunItem, SizeReply, VersionItem,
    WriteItem, decode_items, encode_items,
};
pub use keys::{KEY_PAGE_BYTES, KeyPage, KeyView, PageQuery};
pub use priority::{ObjectPriority, PriorityOutOfRange};
pub use put::{ObjectName, PutOptions, Puts, decode_puts};
pub use put_flags::{Part, PutAck, PutFlags, Zeros};
pub use retain::Retaining;
pub use runs::RunPacker;
pub use segment::{RegionDescriptor, SegmentDescriptor, SegmentError};

/// Bit that distinguishes a reply from its request.
const REPLY: u8 = 0x80;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $code:literal;)*) => {
        /// Operation of a frame; a reply has the operation of its request, and the reply bit.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
        #[repr(u8)]
        pub enum Operation {
            $($(#[$doc])* $name = $code,)*
        }

        impl Operation {
            /// Every operation, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// First frame of a connection: both sides identify themselves. Body: [`Hello`] / [`Welcome`].
    Hello = 1;
    /// Tests which objects exist. [`DigestItem`]s / [`Bitmap`]. Does not count as an access.
    Exists = 2;
    /// Gets the lengths of objects. [`DigestItem`]s / [`SizeReply`]s. Does not count as an access.
    Size = 3;
    /// Removes objects. [`DigestItem`]s / [`Bitmap`] of those that existed.
    Remove = 4;
    /// Gets objects. [`GetItem`]s / one reply for each item, under the item's own request id: the object as payload,
    /// argument = version.
    Get = 5;
    /// Puts one object: one [`PutItem`] and its name, the object as payload / argument = version.
    Put = 6;
    /// Reads ranges of segments. [`ReadItem`]s / one reply for each item, the range as payload.
    Read = 7;
    /// Writes one range of a segment: one [`WriteItem`], the range as payload / no body.
    Write = 8;
    /// Opens a segment by name. Body: the name / [`SegmentDescriptor`].
    OpenSegment = 9;
    /// Gathered read: reads many ranges of segments. [`RunItem`]s / one reply, the ranges as one payload, in order. A
    /// refusal names the first bad range in the argument.
    ReadMany = 10;
    /// Gathered write: writes many ranges of segments. [`RunItem`]s, the ranges as one payload, in order / one reply. A
    /// refusal names the first bad range in the argument, and nothing was written.
    WriteMany = 11;
    /// Fences connections that the client has closed: the shard executes none of their requests any more. [`IdItem`]s
    /// of [`Hello::connection`] numbers / no body.
    Fence = 12;
    /// Reads ranges of objects. [`RangeItem`]s / one reply for each item, the range as payload with its checksum,
    /// argument = version.
    GetRange = 13;
    /// Lists objects, page by page. One [`ListItem`] / a [`KeyPage`]. Does not count as an access.
    List = 14;
    /// Shared memory: looks objects up and pins them. [`DigestItem`]s / [`LookupReply`]s.
    Lookup = 16;
    /// Shared memory: reserves memory for objects. [`PutItem`]s and their names / [`ReserveReply`]s.
    Reserve = 17;
    /// Shared memory: commits reservations that are filled. [`CommitItem`]s / [`CommitReply`]s.
    Commit = 18;
    /// Shared memory: aborts reservations. [`IdItem`]s / no reply.
    Abort = 19;
    /// Shared memory: releases pins. [`IdItem`]s / no reply.
    Release = 20;
    /// Sets up an RDMA connection: the body is one side's half of its parameters, for the drivers. This connection then
    /// carries no further frames; the RDMA connection lives as long as it stays open.
    Rdma = 21;
    /// Begins put sessions: reserves memory for objects that are written in ranges. [`PutItem`]s and their names; the
    /// deadline is the idle timeout of the sessions / [`ReserveReply`]s, whose reservation is the number of the put
    /// session.
    Begin = 22;
    /// Writes a range of a put session. Stream: one [`FillItem`], the range as payload with its checksum / no body.
    /// Shared memory: reserves ranges. [`FillItem`]s / [`ReserveReply`]s, each to be committed or aborted like a
    /// reservation.
    Fill = 23;
    /// Commits put sessions. [`IdItem`]s / [`CommitReply`]s.
    Seal = 24;
    /// Aborts put sessions. [`IdItem`]s / [`Bitmap`] of those that existed.
    Discard = 25;
    /// Shared memory: looks up and pins objects to read ranges of, including uncommitted put sessions. [`RangeItem`]s /
    /// [`LookupReply`]s of whole objects.
    Peek = 26;
    /// Proves that the client holds a ticket. The body is a proof (crate `kvplane-ticket`): either for the challenge
    /// that answered the hello ([`Status::Prove`](crate::Status::Prove)), or, on a welcomed connection, with a newer
    /// ticket for the same challenge / [`Welcome`], and the shard's own proof.
    Prove = 27;
    /// Makes the owner have its replica owner drop the replicas of objects that are no longer to have one.
    /// [`DigestItem`]s / [`Bitmap`] of those that may have had a replica, and have none now.
    RemoveCopy = 28;
    /// Pins objects in memory for a time, or ends that: soft pins, and retentions. [`RetainItem`]s /
    /// [`RetainReply`]s. Does not count as an access.
    Retain = 29;
    /// First frame between two processes of a mesh (crate `kvplane-mesh`), which both sides identify themselves with.
    /// Shards do not serve it.
    Mesh = 30;
    /// Frame of a mesh, in either direction: the payload is the head and the payload of the mesh's frame. The accepting
    /// side sends its frames as replies; no frame is answered.
    MeshFrame = 31;
}

/// Kind of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[allow(missing_docs, reason = "the variants are named for what they are")]
pub enum Kind {
    Request(Operation),
    Reply(Operation),
}

impl Kind {
    /// Returns the number on the wire.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Request(operation) => operation as u8,
            Self::Reply(operation) => operation as u8 | REPLY,
        }
    }

    /// Returns the kind with this number, or `None` if this version does not know it.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match Operation::from_code(code & !REPLY) {
            Some(operation) if code & REPLY != 0 => Some(Self::Reply(operation)),
            Some(operation) => Some(Self::Request(operation)),
            None => None,
        }
    }
}
