//! Flags of frames and of records in replies. Each bit has one meaning, whatever the operation.

use core::ops::{BitOr, BitOrAssign};

/// Flags of a [`crate::frame::Header`]. A flag without a meaning for an operation is ignored there; an unknown bit is
/// an error.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FrameFlags(u32);

impl FrameFlags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// The header has the payload's checksum, and the receiver has to verify it.
    pub const CHECKSUM: Self = Self(1);
    /// `Read`, `ReadMany`: the replies have to carry checksums of their payloads.
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
    /// `Get`, `GetRange`, `Lookup`: the shard may answer as the replica owner of the slot.
    pub const READ_REPLICA: Self = Self(1 << 6);
    /// `Put`, `Reserve`, `Remove`: the owner of the slot replicates a commit, or a removal, to its replica owner.
    pub const REPLICATE: Self = Self(1 << 7);
    /// `Get`, `GetRange`, `Lookup`: the client requests a lease on the replica. If the reply has [`Self::REPLICATED`],
    /// the client may read the replica for 250 ms from when it sent the request.
    pub const REPLICA_LEASE: Self = Self(1 << 8);
    /// Replies to `Put`, `Get` and `GetRange`: the replica owner has the object too.
    pub const REPLICATED: Self = Self(1 << 9);
    /// `Hello` over a plain connection: the client begins with TLS if the shard requires it.
    pub const OFFERS_TLS: Self = Self(1 << 10);

    const KNOWN: u32 = (1 << 11) - 1;

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

/// Flags of a record in a reply that answers one item of a request.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ItemFlags(u64);

impl ItemFlags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// The replica owner has the object too.
    pub const REPLICATED: Self = Self(1);

    /// Returns the flags with these bits, or `None` if one of them is unknown.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Option<Self> {
        if bits <= 1 { Some(Self(bits)) } else { None }
    }

    /// Wire form.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns the flag of an object that is, or is not, replicated.
    #[must_use]
    pub const fn replicated(is_replicated: bool) -> Self {
        if is_replicated { Self::REPLICATED } else { Self::NONE }
    }

    /// Returns true if the replica owner has the object too.
    #[must_use]
    pub const fn is_replicated(self) -> bool {
        self.0 & Self::REPLICATED.0 != 0
    }
}
