//! Marks of an entry: flags, one bit each.

/// Flag of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// The tail is present.
    Tail = 1,
    /// The commit replaces an object of the digest.
    Replace = 2,
    /// Softly pinned: evicted after others for a while.
    Soft = 4,
    /// Hard pinned: never evicted.
    Hard = 8,
    /// Member of a group.
    Grouped = 16,
    /// Stripe head: names the stripes of another object. Kept with the size, for lack of another bit.
    Head = 32,
    /// The replica owner of its slot may have a replica of it. Kept with the size, like those that follow.
    Copied = 64,
    /// Replica of an object of its slot's owner.
    Copy = 128,
    /// To be replicated to the replica owner.
    Wanted = 192,
    /// The put waits for the replica.
    Awaited = 193,
}

impl Mark {
    /// Returns its bit in `bytes_high`, if it is kept there.
    pub(super) const fn high(self) -> Option<u8> {
        match self {
            Self::Head => Some(1 << 7),
            Self::Copied => Some(1 << 6),
            Self::Copy => Some(1 << 5),
            Self::Wanted => Some(1 << 4),
            Self::Awaited => Some(1 << 3),
            _ => None,
        }
    }
}

/// Role of an object in replication.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Replica {
    /// Not replicated.
    #[default]
    None,
    /// The owner's object, which is to be replicated.
    First,
    /// The owner's object, whose put waits for the replica.
    Awaited,
    /// The replica.
    Second,
}

impl Replica {
    /// Returns true if the object is the owner's and is to be replicated.
    #[must_use]
    pub const fn is_owed_a_copy(self) -> bool {
        matches!(self, Self::First | Self::Awaited)
    }
}
