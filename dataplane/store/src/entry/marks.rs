//! What is so or not of an entry, bit by bit.

/// Something that is so or not of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// Its tail is there.
    Tail = 1,
    /// Its commit replaces an object of its digest.
    Replace = 2,
    /// It is softly pinned: kept before others for a while.
    Soft = 4,
    /// It is never evicted.
    Hard = 8,
    /// It belongs to a group.
    Grouped = 16,
    /// It names the stripes in which another object is kept. Kept with the length, as there is no other bit left.
    Head = 32,
    /// The replica owner of its slot may have a copy of it. With the length, as are those that follow.
    Copied = 64,
    /// It is a copy of what the owner of its slot has.
    Copy = 128,
    /// The replica owner is to have a copy.
    Wanted = 192,
    /// Whoever put it waits to hear of the copy.
    Awaited = 193,
}

impl Mark {
    /// Its bit in `bytes_high`, if it is kept there.
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

/// What an object is of those that two owners have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Replica {
    /// None of them.
    #[default]
    None,
    /// The one that the owner has; the second is to have a copy.
    First,
    /// The same, and whoever put it waits to hear of that.
    Awaited,
    /// The copy.
    Second,
}

impl Replica {
    /// True for an object of its owner that the second is to have a copy of.
    #[must_use]
    pub const fn is_owed_a_copy(self) -> bool {
        matches!(self, Self::First | Self::Awaited)
    }
}
