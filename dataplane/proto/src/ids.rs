//! Identifiers of nodes, shards, slots, requests and versions. Every id is a newtype, so that a slot is never mistaken
//! for a shard. Ids whose index is reused carry a generation, so that a message about a former holder of the index is
//! recognised as stale.
//!
//! This module neither allocates nor assigns ids; their owners do.

use core::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[cfg_attr(feature = "bincode", derive(bincode::Encode, bincode::Decode))]
        pub struct $name(pub $inner);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// Id of a node: stable across restarts, chosen by the operator or at the first start.
    NodeId(u64)
);
id!(
    /// One run of a node: greater after every restart. A message of an earlier incarnation is stale.
    Incarnation(u64)
);
id!(
    /// Index of a shard within its node, `0..shards`.
    ShardId(u16)
);
id!(
    /// Number of a cluster map; grows by one with every published change.
    Epoch(u64)
);
id!(
    /// One of [`SLOTS`] ranges of digests, given by the top 14 bits.
    Slot(u16)
);
id!(
    /// Version of an object under its digest; greater for every accepted put of that digest on a shard.
    Version(u64)
);

/// Low bits of an incarnation's number, which count the handovers of its line.
const HANDOVER_BITS: u32 = 16;

/// Incarnations of a node that hand their memory over, each to the next one, form a *line*: their numbers differ in the
/// lowest bits only. What one of them had, replicas included, the later ones have. Numbers below 65536 have no line:
/// such an incarnation continues none.
impl Incarnation {
    /// Returns the first incarnation of a new line, whose number is not below `least` unless numbers are used up.
    #[must_use]
    pub const fn line_from(least: u64) -> Self {
        let step = 1 << HANDOVER_BITS;
        Self(least.saturating_add(step - 1) & !(step - 1))
    }

    /// Returns the incarnation that continues this one next; `None` if its line ends with it.
    #[must_use]
    pub const fn successor(self) -> Option<Self> {
        let next = Self(self.0.wrapping_add(1));
        if next.continues(self) { Some(next) } else { None }
    }

    /// Returns the number of handovers in the incarnation's line before it.
    #[must_use]
    pub const fn handovers(self) -> u64 {
        if self.0 >> HANDOVER_BITS > 0 { self.0 & ((1 << HANDOVER_BITS) - 1) } else { 0 }
    }

    /// Returns true if the incarnation continues another one.
    #[must_use]
    pub const fn is_successor(self) -> bool {
        self.handovers() > 0
    }

    /// Returns true if this incarnation is `earlier`, or has its memory by handovers.
    #[must_use]
    pub const fn continues(self, earlier: Self) -> bool {
        let has_line = self.0 >> HANDOVER_BITS > 0;
        let is_same = self.0 >> HANDOVER_BITS == earlier.0 >> HANDOVER_BITS;
        self.0 == earlier.0 || self.0 > earlier.0 && has_line && is_same
    }
}

/// Number of slots.
pub const SLOTS: usize = 16_384;

/// Number of leading bits of a digest that select its slot.
pub const SLOT_BITS: u32 = 14;

macro_rules! generational {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        ///
        /// `index` is reused; `generation` differs between two holders of one index.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name {
            /// Position in the owner's table.
            pub index: u32,
            /// Generation of the holder of that position.
            pub generation: u32,
        }

        impl $name {
            /// Packs the id into one word, for frames and completion tokens.
            #[must_use]
            pub const fn to_bits(self) -> u64 {
                (self.generation as u64) << 32 | self.index as u64
            }

            /// Inverse of [`Self::to_bits`]; every word is a well-formed (perhaps stale) id.
            #[must_use]
            pub const fn from_bits(bits: u64) -> Self {
                Self { index: $crate::narrowing::low_u32(bits), generation: (bits >> 32) as u32 }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({}.{})"), self.index, self.generation)
            }
        }
    };
}

generational!(
    /// One request on a connection, chosen by the client.
    RequestId
);
generational!(
    /// A registered region of memory that peers may read and write.
    SegmentId
);
generational!(
    /// Memory that a shard reserves for an uncommitted put.
    ReservationId
);
generational!(
    /// A read pin: the object's bytes stay in place until it is released.
    PinId
);
generational!(
    /// A batch of transfers that complete together.
    BatchId
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generational_ids_survive_the_round_trip_through_a_word() {
        let id = RequestId { index: 7, generation: 0xffff_fffe };
        assert_eq!(RequestId::from_bits(id.to_bits()), id);
        assert_eq!(id.to_bits(), 0xffff_fffe_0000_0007);
        assert_eq!(format!("{id:?}"), "RequestId(7.4294967294)");
    }

    #[test]
    fn incarnations_continue_earlier_ones_of_their_line() {
        let first = Incarnation::line_from(70_000);
        assert_eq!(first, Incarnation(2 << HANDOVER_BITS));
        assert_eq!(Incarnation::line_from(first.0), first);
        let second = first.successor().expect("the line goes on");
        assert!(second.continues(first) && second.continues(second) && !first.continues(second));
        assert!(second.is_successor() && !first.is_successor());
        assert!(second.successor().is_some_and(|third| third.continues(first)));
        let last = Incarnation((3 << HANDOVER_BITS) - 1);
        assert!(last.continues(first) && last.successor().is_none());
        assert!(!Incarnation::line_from(first.0 + 1).continues(last));
        // Small numbers have no line.
        assert!(!Incarnation(2).continues(Incarnation(1)) && Incarnation(1).successor().is_none());
        assert!(!Incarnation(2).is_successor());
    }

    #[test]
    fn slots_fill_their_bits() {
        assert_eq!(SLOTS, 1 << SLOT_BITS);
    }
}
