//! Identities. Every id is a newtype, so that a slot is never mistaken for a shard; ids of things that are
//! reused carry a generation, so that a message about the former holder is recognised as stale.
//!
//! Nothing here allocates or hands out ids; owners do.

use core::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
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
    /// A member of the cluster: stable over restarts, chosen by the operator or at first start.
    NodeId(u64)
);
id!(
    /// One incarnation of a node: greater after every restart. A message that carries an older one is stale.
    Incarnation(u64)
);
id!(
    /// A shard's index within its node, `0..shards`.
    ShardId(u16)
);
id!(
    /// The version of the cluster map. Grows by one with every published change.
    Epoch(u64)
);
id!(
    /// One of [`SLOTS`] parts of the key space: the top 14 bits of a digest.
    Slot(u16)
);
id!(
    /// The version of an object under its digest; greater for every accepted put of that digest on a shard.
    Version(u64)
);

/// Number of slots in the key space.
pub const SLOTS: usize = 16_384;

/// Bits of a digest that name its slot.
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
            /// Which holder of that position.
            pub generation: u32,
        }

        impl $name {
            /// The id as one word, for wire frames and completion tokens.
            #[must_use]
            pub const fn to_bits(self) -> u64 {
                (self.generation as u64) << 32 | self.index as u64
            }

            /// The inverse of [`Self::to_bits`]; every word is a well-formed (perhaps stale) id.
            #[must_use]
            pub const fn from_bits(bits: u64) -> Self {
                Self { index: bits as u32, generation: (bits >> 32) as u32 }
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
    /// One request on a connection, chosen by the side that asks.
    RequestId
);
generational!(
    /// A registered piece of memory that peers may read and write.
    SegmentId
);
generational!(
    /// Space that a shard holds for a put that has not been committed.
    ReservationId
);
generational!(
    /// A hold on an object's bytes: they stay where they are until it is released.
    PinId
);
generational!(
    /// A group of transfers that complete together.
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
    fn slots_fill_their_bits() {
        assert_eq!(SLOTS, 1 << SLOT_BITS);
    }
}
