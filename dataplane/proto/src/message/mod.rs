//! What frames say: kinds, and the fixed-size items their bodies hold.
//!
//! A body is `items` records of one type, packed; so decoding is a length check and an iterator, and nothing is
//! allocated for a peer. `docs/wire.md` lists which kind carries which item.

mod hello;
mod items;
mod keys;
mod put;
mod runs;
mod segment;

pub use hello::{Hello, HelloError, Welcome};
pub use items::{
    Bitmap, CommitItem, CommitReply, DigestItem, FillItem, GetItem, IdItem, Item, Items, KeyItem, ListItem, ListReply,
    LookupReply, PutItem, RangeItem, ReadItem, ReserveReply, RunItem, SizeReply, VersionItem, WriteItem, decode_items,
    encode_items,
};
pub use keys::{KEY_PAGE_BYTES, KeyPage, KeyView, PageQuery};
pub use put::{ObjectName, Part, PutAck, PutFlags, PutOptions, Puts, Zeros, decode_puts};
pub use runs::RunPacker;
pub use segment::{RegionDescriptor, SegmentDescriptor, SegmentError};

/// Bit that tells a reply from its request.
const REPLY: u8 = 0x80;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $code:literal;)*) => {
        /// What a frame asks for; its reply has the same operation and the reply bit.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
        #[repr(u8)]
        pub enum Operation {
            $($(#[$doc])* $name = $code,)*
        }

        impl Operation {
            /// Every operation.
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
    /// First frame of a connection: who speaks, and to whom. Body: [`Hello`] / [`Welcome`].
    Hello = 1;
    /// Which of these objects are there? [`DigestItem`]s / [`Bitmap`]. Counts as no access.
    Exists = 2;
    /// How long are these objects? [`DigestItem`]s / [`SizeReply`]s. Counts as no access.
    Size = 3;
    /// Remove these objects. [`DigestItem`]s / [`Bitmap`] of those that were there.
    Remove = 4;
    /// Send these objects. [`GetItem`]s / one reply for each item, under the item's own request id, the object as
    /// payload, argument = version.
    Get = 5;
    /// Keep this object: one [`PutItem`] and its name, the object as payload / argument = version.
    Put = 6;
    /// Send these ranges of a segment. [`ReadItem`]s / one reply for each item, the range as payload.
    Read = 7;
    /// Write this range of a segment: one [`WriteItem`], payload.
    Write = 8;
    /// What is in this segment? Body: its name / [`SegmentDescriptor`].
    OpenSegment = 9;
    /// Send these many ranges of segments: [`RunItem`]s / one reply, the ranges as one payload, in order. A refusal
    /// names the first bad range in the argument.
    ReadMany = 10;
    /// Write these many ranges of segments: [`RunItem`]s, the ranges as one payload, in order / one reply. A refusal
    /// names the first bad range in the argument, and nothing was written.
    WriteMany = 11;
    /// These connections of the asker are over: nothing of them is carried out any more. [`IdItem`]s, as in
    /// [`Hello::connection`] / no body.
    Fence = 12;
    /// Send these ranges of objects. [`RangeItem`]s / one reply for each item, the range as payload with its checksum,
    /// argument = version.
    GetRange = 13;
    /// Which objects are there? One [`ListItem`] / a [`KeyPage`]. Counts as no access.
    List = 14;
    /// Shared memory: where are these objects? Pins them. [`DigestItem`]s / [`LookupReply`]s.
    Lookup = 16;
    /// Shared memory: give room for these objects. [`PutItem`]s and their names / [`ReserveReply`]s.
    Reserve = 17;
    /// Shared memory: these reservations are filled. [`CommitItem`]s / [`CommitReply`]s.
    Commit = 18;
    /// Shared memory: these reservations will not be filled. [`IdItem`]s / no reply.
    Abort = 19;
    /// Shared memory: these pins are no longer needed. [`IdItem`]s / no reply.
    Release = 20;
    /// Let us talk over RDMA instead: the body is one side's half of a connection, for the drivers. This connection
    /// then carries nothing more, but as long as it stays, so does that one.
    Rdma = 21;
    /// These objects will be written in ranges: give room for them. [`PutItem`]s and their names; the deadline is how
    /// long nothing may be written to them / [`ReserveReply`]s, whose reservation is the object's number as a draft.
    Begin = 22;
    /// A range of a draft. Stream: one [`FillItem`], the range as payload with its checksum / no body. Shared memory:
    /// give room for these: [`FillItem`]s / [`ReserveReply`]s, to be committed or aborted as reservations are.
    Fill = 23;
    /// These drafts are complete. [`IdItem`]s / [`CommitReply`]s.
    Seal = 24;
    /// These drafts are given up. [`IdItem`]s / [`Bitmap`] of those that were there.
    Discard = 25;
    /// Shared memory: where are these ranges of objects, also of those that are being written? Pins them.
    /// [`RangeItem`]s / [`LookupReply`]s of whole objects.
    Peek = 26;
    /// That the asker holds a ticket: a proof (crate `kvplane-ticket`), for the challenge that a greeting was answered
    /// with ([`Status::Prove`](crate::Status::Prove)), or on a greeted connection a newer ticket for the same one /
    /// [`Welcome`], and the shard's own proof.
    Prove = 27;
    /// Have second owners give their copies of these objects up, which are to have none any more. [`DigestItem`]s /
    /// [`Bitmap`] of those of which a second owner may have had one, and has none now.
    RemoveCopy = 28;
}

/// Kind of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Kind {
    /// Somebody asks.
    Request(Operation),
    /// Somebody answers.
    Reply(Operation),
}

impl Kind {
    /// The number on the wire.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Request(operation) => operation as u8,
            Self::Reply(operation) => operation as u8 | REPLY,
        }
    }

    /// The kind with this number, if it is one this version knows.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match Operation::from_code(code & !REPLY) {
            Some(operation) if code & REPLY != 0 => Some(Self::Reply(operation)),
            Some(operation) => Some(Self::Request(operation)),
            None => None,
        }
    }
}
