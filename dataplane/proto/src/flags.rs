//! Flags of frames and of records in replies. Each bit has one meaning, whatever the operation.

use core::ops::{BitOr, BitOrAssign};

use crate::map::ReplicaSet;

/// Flags of a [`crate::frame::Header`]. A flag without a meaning for an operation is ignored there; an unknown bit is
/// an error.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FrameFlags(u32);

impl FrameFlags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// The header has the payload's checksum, and the receiver has to verify it.
    pub const CHECKSUM: Self = Self(1);
    /// `Read`, `ReadMany`: the replies have to carry checksums of their payloads. `Get`, `GetRange`, `Lookup`: the
    /// object is compared with its checksum before it is sent, as the client has received other bytes.
    pub const SUM_REPLIES: Self = Self(1 << 1);
    /// `Exists`: objects on the SSD are prefetched into memory, within the deadline of the request.
    pub const PREFETCH: Self = Self(1 << 2);
    /// `Get`, `Lookup`, `Remove`: stripe heads are read, or removed, like other objects. Without the flag the
    /// reply is `Striped`.
    pub const HEADS: Self = Self(1 << 3);
    /// `GetRange`, `Peek`: ranges of put sessions may be read before their commit.
    pub const UNCOMMITTED: Self = Self(1 << 4);
    /// `Remove`: the body has [`crate::message::VersionItem`]s, and an object of another version stays.
    pub const OF_VERSION: Self = Self(1 << 5);
    /// `Get`, `GetRange`, `Lookup`: the shard may answer as the replica owner of the slot. Of a fetching client: it is
    /// another owner of the slot, whose copy of the object is damaged.
    pub const READ_REPLICA: Self = Self(1 << 6);
    /// `Put`, `Reserve`, `Remove`: the owner of the slot replicates a commit, or a removal, to a replica owner.
    pub const REPLICATE: Self = Self(1 << 7);
    /// `Get`, `GetRange`, `Lookup`: the client requests a lease on the replicas. The client may read those that the
    /// reply names ([`Self::replicas`]) for 250 ms from when it sent the request.
    pub const REPLICA_LEASE: Self = Self(1 << 8);
    /// Replies to `Put`, `Get` and `GetRange`: the first replica owner has the object too. To a put without
    /// [`Self::REPLICA_OWNERS`]: any replica owner has it.
    pub const REPLICATED: Self = Self(1 << 9);
    /// `Hello` over a plain connection: the client begins with TLS if the shard requires it.
    pub const OFFERS_TLS: Self = Self(1 << 10);
    /// `Get`, `GetRange`, `Lookup`, `Put`, `Commit`, `Seal`: the reply may name replica owners beyond the first. Sent
    /// only where slots have several, so that nodes of earlier versions do not receive it.
    pub const REPLICA_OWNERS: Self = Self(1 << 11);

    /// Lowest of the bits for the second replica owner and those behind it, in replies.
    const FURTHER_AT: u32 = 16;
    const FURTHER: u32 = ((ReplicaSet::first(usize::MAX).bits() >> 1) as u32) << Self::FURTHER_AT;
    const KNOWN: u32 = ((1 << 12) - 1) | Self::FURTHER;

    /// Returns the flags with these bits, or `None` if one of them is unknown.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits & !Self::KNOWN == 0 { Some(Self(bits)) } else { None }
    }

    /// Wire form.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns true if all of these flags are set.
    #[must_use]
    pub const fn has(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Returns the flags with these added if `set`.
    #[must_use]
    pub const fn with(self, flags: Self, set: bool) -> Self {
        if set { Self(self.0 | flags.0) } else { self }
    }

    /// Returns the flags of a reply that names these replica owners.
    #[must_use]
    pub const fn with_replicas(self, replicas: ReplicaSet) -> Self {
        let further = Self(((replicas.bits() >> 1) as u32) << Self::FURTHER_AT);
        self.with(Self::REPLICATED, replicas.has(0)).with(further, true)
    }

    /// Returns the replica owners that a reply names.
    #[must_use]
    pub const fn replicas(self) -> ReplicaSet {
        let further = crate::narrowing::to_u8(((self.0 & Self::FURTHER) >> Self::FURTHER_AT) as u64);
        let first = self.has(Self::REPLICATED) as u8;
        match ReplicaSet::from_bits(further << 1 | first) {
            Some(replicas) => replicas,
            None => ReplicaSet::NONE,
        }
    }

    /// Returns the flags without these.
    #[must_use]
    pub const fn without(self, flags: Self) -> Self {
        Self(self.0 & !flags.0)
    }
}

impl BitOr for FrameFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for FrameFlags {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// Flags of a record in a reply that answers one item of a request: a bit for each replica owner that has the object.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ItemFlags(u64);

impl ItemFlags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// The first replica owner has the object too.
    pub const REPLICATED: Self = Self(1);

    /// Returns the flags with these bits, or `None` if one of them is unknown.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Option<Self> {
        if bits <= ReplicaSet::first(usize::MAX).bits() as u64 { Some(Self(bits)) } else { None }
    }

    /// Wire form.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns the flags of an object that these replica owners have.
    #[must_use]
    pub const fn of_replicas(replicas: ReplicaSet) -> Self {
        Self(replicas.bits() as u64)
    }

    /// Returns the replica owners that have the object too.
    #[must_use]
    pub const fn replicas(self) -> ReplicaSet {
        match ReplicaSet::from_bits(crate::narrowing::to_u8(self.0)) {
            Some(replicas) => replicas,
            None => ReplicaSet::NONE,
        }
    }
}
