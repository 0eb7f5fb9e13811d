//! What goes into the tier and what comes out.

pub mod errors;

use core::fmt;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{NodeId, ShardId, Version};

use crate::memory::Span;
use crate::ops::{BlockOp, Fault, Priority};
use crate::types::errors::{OpenError, Reason};

/// Whose device it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// A digest of the cluster's name.
    pub cluster: u128,
    /// The node.
    pub node: NodeId,
    /// The shard of that node.
    pub shard: ShardId,
}

/// How a device is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenOptions {
    /// Who opens it: a device of anybody else is refused.
    pub identity: Identity,
    /// The uuid that the device must have, where it is known.
    pub expected_uuid: Option<u128>,
    /// A new uuid, drawn at random, with which to format the device if its superblocks are blank.
    pub format_blank: Option<u128>,
}

/// The caller's name for a call; its events say it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Token(pub u64);

/// When a put or a removal is acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Ack {
    /// The device has taken it: it outlives this process, not a power failure.
    Buffered,
    /// The device has made it durable.
    Durable,
}

/// An object to be appended.
#[derive(Clone, Copy, Debug)]
pub struct Put<'a> {
    /// Its name.
    pub digest: Digest,
    /// Its key, kept with it.
    pub key: &'a [u8],
    /// Its version.
    pub version: Version,
    /// Its bytes.
    pub payload: Span,
    /// CRC-64/NVME of the payload as its writer stated it, to be checked; without it, it is computed.
    pub checksum: Option<u64>,
    /// Whether reclaim is to keep it.
    pub pinned: bool,
    /// Whether it only names where the parts of a longer object are: kept with it, and said of it without a read.
    pub names_parts: bool,
    /// Whether a second owner is to have it too: likewise.
    pub copied: bool,
    /// When it is acknowledged.
    pub ack: Ack,
    /// Names the call.
    pub token: Token,
}

/// A put that was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PutReceipt {
    /// The record's sequence.
    pub sequence: u64,
    /// Whether the payload must stay as it is until [`Event::Released`]; else it was copied.
    pub lent: bool,
}

/// A removal that was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Removal {
    /// [`Event::Removed`] or [`Event::RemoveFailed`] follows.
    Pending,
    /// The device has nothing of this digest: done, no event follows.
    Absent,
}

/// An object to be read.
#[derive(Clone, Copy, Debug)]
pub struct Get {
    /// Its name.
    pub digest: Digest,
    /// Where to: exactly as long as the object.
    pub destination: Span,
    /// Whom it serves. Only [`Priority::Get`] counts as a hit.
    pub priority: Priority,
    /// Names the call.
    pub token: Token,
}

/// What is known of an object without reading it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordView {
    /// Its name.
    pub digest: Digest,
    /// Its version.
    pub version: Version,
    /// Its size.
    pub payload_bytes: u32,
    /// Bytes of the key that is kept with it.
    pub key_bytes: u16,
    /// Whether it moves without a copy, so that its destination must be aligned.
    pub extent: bool,
    /// Whether reclaim is to keep it.
    pub pinned: bool,
    /// Whether it only names where the parts of a longer object are, as its [`Put`] said.
    pub names_parts: bool,
    /// Whether a second owner is to have it too, as its [`Put`] said.
    pub copied: bool,
}

/// Why an object that was in the index could not be given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Miss {
    /// The device could not read it.
    Fault(Fault),
    /// There is no record, or a damaged one: torn, flipped, or never written.
    Damaged,
    /// A record of an earlier use of the place: a write was lost.
    Stale,
    /// A record that belongs elsewhere.
    Misdirected,
}

/// What the tier tells its host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The device is taken; gets, puts and removes are served from now on, while recovery runs.
    Opened {
        /// The device's uuid.
        uuid: u128,
        /// How often it was opened.
        incarnation: u64,
    },
    /// What [`crate::Tier::note_ownership`] was given is durable.
    OwnershipNoted,
    /// The device is not taken.
    Refused(OpenError),
    /// Every record has been looked at.
    Recovered(RecoveryReport),
    /// The tier takes no more writes, or with [`Reason::Gone`] serves nothing: the log should say so.
    Degraded(Reason),
    /// A put has reached its acknowledgement level.
    Stored {
        /// The put.
        token: Token,
        /// What it has.
        ack: Ack,
    },
    /// A put is lost; an object of the digest that was there before is too.
    StoreFailed {
        /// The put.
        token: Token,
        /// Why.
        fault: Fault,
    },
    /// The payload of a put that was lent is the caller's again.
    Released {
        /// The put.
        token: Token,
    },
    /// The object is in its destination, every checksum right.
    Got {
        /// The get.
        token: Token,
        /// The object's version.
        version: Version,
        /// CRC-64/NVME of the whole payload.
        checksum: u64,
    },
    /// The key is there: see [`crate::Tier::take_key`].
    Key {
        /// The call.
        token: Token,
        /// The version of the object that it was kept with.
        version: Version,
    },
    /// The object could not be given and is not in the tier any more; the destination holds anything.
    Missed {
        /// The get.
        token: Token,
        /// Why.
        miss: Miss,
    },
    /// A removal has reached its acknowledgement level.
    Removed {
        /// The removal.
        token: Token,
    },
    /// The object is hidden, but its removal could not be written: repeat it, or a restart may bring it back.
    RemoveFailed {
        /// The removal.
        token: Token,
        /// Why.
        fault: Fault,
    },
    /// A record was checked, or was to be written again, and is not whole: the object is not in the tier any more.
    Quarantined {
        /// Its name.
        digest: Digest,
        /// What was wrong.
        miss: Miss,
    },
    /// Reclaim dropped the object.
    Evicted {
        /// Its name.
        digest: Digest,
        /// Whether it was to be kept, and there was no room, or its copy could not be written.
        pinned: bool,
    },
    /// A segment went of which nobody knows any more what was in it: its objects are not in the tier any more.
    Forgotten {
        /// How many they were.
        objects: u32,
    },
}

/// What the host does next.
#[derive(Clone, Copy, Debug)]
pub enum Output {
    /// Give this to the device.
    Block(BlockOp),
    /// Take note of this.
    Event(Event),
}

/// What recovery found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RecoveryReport {
    /// Segments known from their footers.
    pub sealed_segments: u32,
    /// Segments that were scanned record by record.
    pub scanned_segments: u32,
    /// Segments of which nothing could be read.
    pub unreadable_segments: u32,
    /// Objects that are served.
    pub objects: u32,
    /// Tombstones seen.
    pub tombstones: u64,
    /// Records with a right header and a payload that does not match: torn or flipped.
    pub torn_records: u64,
    /// Places that begin as a record does, but with a wrong checksum.
    pub damaged_headers: u64,
    /// Records of an earlier use of their segment.
    pub stale_records: u64,
    /// Records that belong elsewhere.
    pub misdirected_records: u64,
    /// Records of which a newer one, or a copy, is known.
    pub superseded_records: u64,
    /// Parts of segments that could not be read.
    pub unreadable_windows: u64,
    /// Segments that were in use when the incarnation before ended, and of which nothing is left, as the header of the
    /// one made ready after it says. What replaced or removed objects there may be undone.
    pub missing_segments: u32,
    /// Times when something durable was found missing that may have been a removal.
    pub lost_removals: u32,
    /// Objects given up for that, or for want of room in the index.
    pub given_up: u64,
}

impl fmt::Display for RecoveryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} objects from {} footers and {} scanned segments ({} unreadable); records: {} torn, {} stale, {} \
             misdirected, {} superseded; {} damaged headers, {} unreadable parts, {} losses of removals, {} objects \
             given up, {} segments in use are gone",
            self.objects,
            self.sealed_segments,
            self.scanned_segments,
            self.unreadable_segments,
            self.torn_records,
            self.stale_records,
            self.misdirected_records,
            self.superseded_records,
            self.damaged_headers,
            self.unreadable_windows,
            self.lost_removals,
            self.given_up,
            self.missing_segments
        )
    }
}

/// Records that were not whole, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Harm {
    /// Reads that the device could not do.
    pub unread: u64,
    /// Records that were damaged when they were read.
    pub damaged: u64,
    /// Records of an earlier use of their place: a write was lost.
    pub stale: u64,
    /// Records that belong elsewhere.
    pub misdirected: u64,
    /// Objects lost because the device could not write them.
    pub unwritten: u64,
}

impl Harm {
    /// A record was read and is not whole.
    pub(crate) const fn count(&mut self, miss: Miss) {
        match miss {
            Miss::Fault(_) => self.unread += 1,
            Miss::Damaged => self.damaged += 1,
            Miss::Stale => self.stale += 1,
            Miss::Misdirected => self.misdirected += 1,
        }
    }

    /// All of them.
    #[must_use]
    pub const fn records(&self) -> u64 {
        self.unread + self.damaged + self.stale + self.misdirected + self.unwritten
    }
}

impl fmt::Display for Harm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { unread, damaged, stale, misdirected, unwritten } = self;
        write!(
            f,
            "{} records were not whole ({damaged} damaged, {stale} old, {misdirected} misplaced, ",
            self.records()
        )?;
        write!(f, "{unread} unreadable, {unwritten} not written)")
    }
}
