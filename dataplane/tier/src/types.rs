//! Calls, events and reports of the tier.

pub mod errors;

use core::fmt;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{NodeId, ShardId, Version};

use crate::memory::Span;
use crate::ops::{BlockOp, Fault, Priority};
use crate::types::errors::{OpenError, Reason};

/// Identity that a device is formatted with: the cluster, node and shard that it belongs to.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Digest of the cluster's name.
    pub cluster: u128,
    pub node: NodeId,
    pub shard: ShardId,
}

/// Names the tenant that an object is charged to, by the key that is stored with it: for records that were written
/// without a footer, or by a version whose footers named no tenants.
pub type TenantOf = fn(key: &[u8]) -> u32;

/// Options for opening a device.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Identity of the opener: a device with another identity is refused.
    pub identity: Identity,
    /// The uuid that the device must have, if it is known.
    pub expected_uuid: Option<u128>,
    /// A new uuid, drawn at random, with which to format the device if its superblocks are blank.
    pub format_blank: Option<u128>,
    /// Names the tenant of a record by its key.
    pub tenant_of: TenantOf,
}

/// Token by which the caller identifies a call; the events of the call carry it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Token(pub u64);

/// Acknowledgement level of a put or a removal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Ack {
    /// The device has written it: it outlives this process, but not a power failure.
    Buffered,
    /// The device has flushed it.
    Durable,
}

/// An object to be appended.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Copy, Debug)]
pub struct Put<'a> {
    pub digest: Digest,
    /// Key of the object, stored with it.
    pub key: &'a [u8],
    /// Number of the tenant that the object is charged to: what [`OpenOptions::tenant_of`] says of the key.
    pub tenant: u32,
    pub version: Version,
    /// Bytes of the object.
    pub payload: Span,
    /// CRC-64/NVME of the payload as its writer stated it, to be verified; computed if `None`.
    pub checksum: Option<u64>,
    /// True if the object is hard-pinned: reclaim keeps it.
    pub pinned: bool,
    /// Hits that the record begins with, counted up to [`MAX_HITS`](crate::MAX_HITS): reclaim treats it as read so
    /// often, until it has rewritten it or the device is opened again.
    pub hits: u8,
    /// True if the payload is a stripe head, which only names the stripes of a larger object. Stored with the object
    /// and reported without a read.
    pub names_parts: bool,
    /// True if the object is replicated on a replica owner. Stored with the object and reported without a read.
    pub copied: bool,
    /// Level at which the put is acknowledged.
    pub ack: Ack,
    /// Identifies the call in its events.
    pub token: Token,
}

/// Receipt of an accepted put.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PutReceipt {
    /// Sequence of the record.
    pub sequence: u64,
    /// True if the payload was not copied and must stay unchanged until [`Event::Released`].
    pub lent: bool,
}

/// Result of an accepted removal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Removal {
    /// [`Event::Removed`] or [`Event::RemoveFailed`] follows.
    Pending,
    /// The device has no record of this digest: the removal is complete, no event follows.
    Absent,
}

/// An object to be read.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Copy, Debug)]
pub struct Get {
    pub digest: Digest,
    /// Destination of the payload: exactly as long as the object.
    pub destination: Span,
    /// Purpose of the read. Only [`Priority::Get`] counts as a hit.
    pub priority: Priority,
    /// Identifies the call in its events.
    pub token: Token,
}

/// Properties of an object that the index knows without a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct RecordView {
    pub digest: Digest,
    pub version: Version,
    /// Bytes of the object.
    pub payload_bytes: u32,
    /// Bytes of the key that is stored with the object.
    pub key_bytes: u16,
    /// True if the payload is read without a copy, so that its destination must be aligned.
    pub extent: bool,
    /// True if the object is hard-pinned: reclaim keeps it.
    pub pinned: bool,
    /// True if the payload is a stripe head, as its [`Put`] stated.
    pub names_parts: bool,
    /// True if the object is replicated on a replica owner, as its [`Put`] stated.
    pub copied: bool,
    /// Number of the tenant that the object is charged to; `None` if only its key says it.
    pub tenant: Option<u32>,
    /// CRC-64/NVME of the whole payload.
    pub checksum: u64,
}

/// Limit of a tenant on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TenantLimit {
    pub number: u32,
    /// Bytes that its records may take.
    pub bytes: u64,
}

/// Use of a device by a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TierUse {
    pub number: u32,
    /// Bytes that its live records take.
    pub used_bytes: u64,
    /// Bytes that they may take, if limited.
    pub limit_bytes: Option<u64>,
    /// Bytes of records that were evicted because the tenant was above its limit.
    pub evicted_bytes: u64,
    /// Puts that were refused because of the limit.
    pub refused: u64,
}

/// Reason why an object in the index could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Miss {
    /// The device failed to read it.
    Fault(Fault),
    /// There is no record, or a damaged one: torn, with flipped bits, or never written.
    Damaged,
    /// A record of an earlier use of the same location: a write was lost.
    Stale,
    /// A record that belongs to another location.
    Misdirected,
}

/// Event that the tier reports to its host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Event {
    /// The device is open; gets, puts and removals are served from now on, while recovery runs.
    Opened {
        uuid: u128,
        /// Number of times that the device was opened, this one included.
        incarnation: u64,
    },
    /// The ownership given to [`crate::Tier::note_ownership`] is durable.
    OwnershipNoted,
    /// The device was refused.
    Refused(OpenError),
    /// Recovery has read every record.
    Recovered(RecoveryReport),
    /// The tier takes no more writes, or with [`Reason::Gone`] serves no calls at all: the host should log it.
    Degraded(Reason),
    /// A put has reached its acknowledgement level.
    Stored {
        token: Token,
        /// Level that was reached.
        ack: Ack,
    },
    /// A put failed; an object of the same digest that was stored before is lost too.
    StoreFailed { token: Token, fault: Fault },
    /// The payload of a put that was not copied is the caller's again.
    Released { token: Token },
    /// The object was read into its destination, and every checksum matched.
    Got {
        token: Token,
        version: Version,
        /// CRC-64/NVME of the whole payload.
        checksum: u64,
    },
    /// The key was read: see [`crate::Tier::take_key`].
    Key {
        token: Token,
        /// Version of the object that the key was stored with.
        version: Version,
    },
    /// The object could not be read and is no longer in the tier; the destination's contents are undefined.
    Missed {
        token: Token,
        /// Properties that the object had.
        record: RecordView,
        miss: Miss,
    },
    /// A removal has reached its acknowledgement level.
    Removed { token: Token },
    /// The object is hidden, but its tombstone could not be written: repeat the removal, or a restart may bring the
    /// object back.
    RemoveFailed { token: Token, fault: Fault },
    /// A record that was scrubbed, or read for reclaim, is not whole: the object is no longer in the tier.
    Quarantined {
        /// Properties that the object had.
        record: RecordView,
        miss: Miss,
    },
    /// Reclaim evicted the object, or its tenant was above its limit.
    Evicted {
        digest: Digest,
        /// True if the object was pinned, but there was no room for it, or its copy could not be written.
        pinned: bool,
    },
    /// A segment whose list of records is lost was given up: its objects are no longer in the tier.
    Forgotten {
        /// Number of objects that were lost.
        objects: u32,
    },
}

/// Action that the host carries out next.
#[derive(Clone, Copy, Debug)]
pub enum Output {
    /// Submit this operation to the device.
    Block(BlockOp),
    /// Handle this event.
    Event(Event),
}

/// Findings of recovery.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RecoveryReport {
    /// Segments whose records were listed by their footers.
    pub sealed_segments: u32,
    /// Segments that were scanned record by record.
    pub scanned_segments: u32,
    /// Segments that could not be read at all.
    pub unreadable_segments: u32,
    /// Objects that are in the index.
    pub objects: u32,
    /// Tombstones seen.
    pub tombstones: u64,
    /// Records with a valid header and a payload that does not match: torn, or with flipped bits.
    pub torn_records: u64,
    /// Locations that begin with a record's magic number, but whose header has a wrong checksum.
    pub damaged_headers: u64,
    /// Records of an earlier use of their segment.
    pub stale_records: u64,
    /// Records that belong to another location.
    pub misdirected_records: u64,
    /// Records that a newer one, or a copy, supersedes.
    pub superseded_records: u64,
    /// Parts of segments that could not be read.
    pub unreadable_windows: u64,
    /// Segments that were in use when the previous incarnation ended and of which no trace is left, although the header
    /// of the segment prepared next names them. Replacements and removals in them may be undone.
    pub missing_segments: u32,
    /// Times that a durable record, possibly a tombstone, was found missing.
    pub lost_removals: u32,
    /// Objects given up because of that, or because the index was full.
    pub given_up: u64,
}

impl fmt::Display for RecoveryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} objects from {} footers and {} scanned segments ({} unreadable); records: {} torn, {} stale, {} \
             misdirected, {} superseded; {} damaged headers, {} unreadable parts, {} lost removals, {} objects \
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

/// Counters of records that were not whole, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DamageCounters {
    /// Reads that the device failed.
    pub unread: u64,
    /// Records that were damaged when they were read.
    pub damaged: u64,
    /// Records of an earlier use of their location: a write was lost.
    pub stale: u64,
    /// Records that belong to another location.
    pub misdirected: u64,
    /// Objects lost because the device failed to write them.
    pub unwritten: u64,
}

impl DamageCounters {
    /// Counts a record that was read and is not whole.
    pub(crate) const fn count(&mut self, miss: Miss) {
        match miss {
            Miss::Fault(_) => self.unread += 1,
            Miss::Damaged => self.damaged += 1,
            Miss::Stale => self.stale += 1,
            Miss::Misdirected => self.misdirected += 1,
        }
    }

    /// Returns the sum of all counters.
    #[must_use]
    pub const fn records(&self) -> u64 {
        self.unread + self.damaged + self.stale + self.misdirected + self.unwritten
    }
}

impl fmt::Display for DamageCounters {
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
