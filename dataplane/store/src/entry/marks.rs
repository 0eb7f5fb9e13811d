//! Marks of an entry: flags, one bit each; and the replicas of its object.

use kvplane_proto::map::{MAX_REPLICA_OWNERS, ReplicaSet};

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
    /// A replica owner of its slot may have a replica of it. Kept with the size, like those that follow.
    Copied = 64,
    /// Replica of an object of its slot's owner.
    Copy = 128,
    /// To be replicated.
    Wanted = 192,
    /// The put waits for replicas.
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
    /// The owner's object, whose put waits for replicas.
    Awaited,
    /// A replica.
    Second,
}

/// Replicas of an object beside the owner's: how many there are to be, and which there may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copies {
    /// Number of replicas that the object is to have, where its role says that it is replicated; above 0.
    pub wanted: u8,
    /// Number of them that its put waits for, where its role says that it does; above 0.
    pub awaited: u8,
    /// Replica owners of its slot that may have a replica.
    pub at: ReplicaSet,
}

impl Copies {
    /// One replica.
    pub const ONE: Self = Self { wanted: 1, awaited: 1, at: ReplicaSet::NONE };

    /// Returns the replicas of an object that is put with so many, the owner's included, of which its put waits for
    /// `waits`.
    #[must_use]
    pub fn of_put(replicas: u8, waits: u8) -> Self {
        let wanted = replicas.saturating_sub(1).clamp(1, MAX_REPLICA_OWNERS as u8);
        Self { wanted, awaited: waits.saturating_sub(1).clamp(1, wanted), at: ReplicaSet::NONE }
    }

    /// Returns the number of replicas, the owner's included, that the object is to have.
    #[must_use]
    pub const fn replicas(self) -> u8 {
        self.wanted + 1
    }
}

impl Default for Copies {
    fn default() -> Self {
        Self::ONE
    }
}

impl Replica {
    /// Returns true if the object is the owner's and is to be replicated.
    #[must_use]
    pub const fn is_owed_a_copy(self) -> bool {
        matches!(self, Self::First | Self::Awaited)
    }
}
