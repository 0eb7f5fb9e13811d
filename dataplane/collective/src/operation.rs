//! Collectives as their callers describe them, and what members compare to find that they call different ones.

use core::fmt;

use kvplane_group::{GroupRank, MAX_RANKS};

use crate::data_type::DataType;
use crate::reduction::Reduction;

/// Most bytes of a buffer of an operation: 1 TiB.
pub const MAX_BUFFER_BYTES: u64 = 1 << 40;

/// Kind of a collective, with its parameters. Buffers of `places` parts have one for each rank of the group, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Collective {
    /// Every participant gets the reduction of all; in place.
    AllReduce { reduction: Reduction },
    /// The root gets the reduction of all; in place, and the other buffers stay as they are.
    Reduce { reduction: Reduction, root: GroupRank },
    /// Every participant gets the root's buffer; in place.
    Broadcast { root: GroupRank },
    /// Every participant gets the parts of all: `count` elements of the source, and `places * count` of the target.
    AllGather,
    /// The root gets the parts of all.
    Gather { root: GroupRank },
    /// Every participant gets its part of the root's source.
    Scatter { root: GroupRank },
    /// Every participant gets the reduction of its part: `places * count` elements of the source, and `count` of the
    /// target.
    ReduceScatter { reduction: Reduction },
    /// Every participant sends a part to each, of `sources` elements by rank, and gets one of `targets` elements.
    AllToAll { sources: Vec<u64>, targets: Vec<u64> },
    /// Every participant returns after all have called.
    Barrier,
}

/// A collective on buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Kind and parameters.
    pub collective: Collective,
    /// Type of the elements.
    pub data_type: DataType,
    /// Elements of a participant's part; 0 where the collective has its own.
    pub count: u64,
    /// Parts of a buffer that has one for each rank: the size of the group.
    pub places: u8,
}

/// A malformed operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum OperationError {
    /// Elements of this type are not reduced so.
    NotReducible { reduction: Reduction, data_type: DataType },
    /// The root is no rank of the group.
    NoRoot { root: u8, size: u8 },
    /// An all-to-all has not one count for each rank.
    Counts { sources: usize, targets: usize, size: u8 },
    /// A buffer is larger than [`MAX_BUFFER_BYTES`].
    TooLarge { elements: u64, data_type: DataType, limit: u64 },
    /// The group has no rank, or too many.
    Places { places: u8, limit: usize },
}

impl fmt::Display for OperationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotReducible { reduction, data_type } => {
                write!(f, "there is no reduction `{reduction}` of elements of type {data_type}")
            }
            Self::NoRoot { root, size } => write!(f, "rank {root} is no root in a group of size {size}"),
            Self::Counts { sources, targets, size } => write!(
                f,
                "an all-to-all has {sources} counts of elements to send and {targets} to receive; a group of size \
                 {size} needs that many of each"
            ),
            Self::TooLarge { elements, data_type, limit } => {
                write!(f, "a buffer of {elements} elements of type {data_type} exceeds {limit} bytes")
            }
            Self::Places { places, limit } => write!(f, "a group has 1 to {limit} ranks, not {places}"),
        }
    }
}

impl std::error::Error for OperationError {}

impl Operation {
    /// Checks that the operation is well-formed.
    ///
    /// # Errors
    /// When it is not; the error names the value.
    pub fn check(&self) -> Result<(), OperationError> {
        let (data_type, size) = (self.data_type, self.places);
        if size == 0 || usize::from(size) > MAX_RANKS {
            return Err(OperationError::Places { places: size, limit: MAX_RANKS });
        }
        if let Some(reduction) = self.reduction()
            && !reduction.is_of(data_type)
        {
            return Err(OperationError::NotReducible { reduction, data_type });
        }
        if let Some(root) = self.root()
            && root.0 >= size
        {
            return Err(OperationError::NoRoot { root: root.0, size });
        }
        if let Collective::AllToAll { sources, targets } = &self.collective
            && (sources.len() != usize::from(size) || targets.len() != usize::from(size))
        {
            return Err(OperationError::Counts { sources: sources.len(), targets: targets.len(), size });
        }
        let too_large = |elements| OperationError::TooLarge { elements, data_type, limit: MAX_BUFFER_BYTES };
        let most = match &self.collective {
            Collective::AllToAll { sources, targets } => {
                let sum = |counts: &[u64]| counts.iter().fold(0u64, |sum, count| sum.saturating_add(*count));
                sum(sources).max(sum(targets))
            }
            _ => self.count.saturating_mul(u64::from(size)),
        };
        match most.checked_mul(data_type.bytes() as u64) {
            Some(bytes) if bytes <= MAX_BUFFER_BYTES => Ok(()),
            _ => Err(too_large(most)),
        }
    }

    /// Returns the reduction of a collective that has one.
    #[must_use]
    pub const fn reduction(&self) -> Option<Reduction> {
        match &self.collective {
            Collective::AllReduce { reduction }
            | Collective::Reduce { reduction, .. }
            | Collective::ReduceScatter { reduction } => Some(*reduction),
            _ => None,
        }
    }

    /// Returns the root of a collective that has one.
    #[must_use]
    pub const fn root(&self) -> Option<GroupRank> {
        match &self.collective {
            Collective::Reduce { root, .. }
            | Collective::Broadcast { root }
            | Collective::Gather { root }
            | Collective::Scatter { root } => Some(*root),
            _ => None,
        }
    }

    /// Returns the bytes of a participant's part.
    #[must_use]
    pub const fn part_bytes(&self) -> u64 {
        self.count * self.data_type.bytes() as u64
    }

    /// Returns the bytes of the caller's source and of its target; 0 for a buffer that it does not need. An in-place
    /// collective has its buffer as both.
    #[must_use]
    pub fn buffer_bytes(&self, rank: GroupRank) -> (u64, u64) {
        let (part, all) = (self.part_bytes(), self.part_bytes() * u64::from(self.places));
        let at_root = |bytes| if self.root() == Some(rank) { bytes } else { 0 };
        match &self.collective {
            Collective::AllReduce { .. } | Collective::Reduce { .. } | Collective::Broadcast { .. } => (part, part),
            Collective::AllGather => (part, all),
            Collective::Gather { .. } => (part, at_root(all)),
            Collective::Scatter { .. } => (at_root(all), part),
            Collective::ReduceScatter { .. } => (all, part),
            Collective::AllToAll { sources, targets } => {
                let bytes = |counts: &[u64]| counts.iter().sum::<u64>() * self.data_type.bytes() as u64;
                (bytes(sources), bytes(targets))
            }
            Collective::Barrier => (0, 0),
        }
    }

    /// Returns true if the collective's buffer is its source and its target.
    #[must_use]
    pub const fn is_in_place(&self) -> bool {
        matches!(
            self.collective,
            Collective::AllReduce { .. } | Collective::Reduce { .. } | Collective::Broadcast { .. }
        )
    }

    /// Returns what a peer has to call with this operation.
    #[must_use]
    pub fn signature(&self, peer: GroupRank) -> Signature {
        let kind = match &self.collective {
            Collective::AllReduce { .. } => CollectiveKind::AllReduce,
            Collective::Reduce { .. } => CollectiveKind::Reduce,
            Collective::Broadcast { .. } => CollectiveKind::Broadcast,
            Collective::AllGather => CollectiveKind::AllGather,
            Collective::Gather { .. } => CollectiveKind::Gather,
            Collective::Scatter { .. } => CollectiveKind::Scatter,
            Collective::ReduceScatter { .. } => CollectiveKind::ReduceScatter,
            Collective::AllToAll { .. } => CollectiveKind::AllToAll,
            Collective::Barrier => CollectiveKind::Barrier,
        };
        let at = usize::from(peer.0);
        let count = |counts: &[u64]| counts.get(at).copied().unwrap_or(0);
        let (sends, receives) = match &self.collective {
            Collective::AllToAll { sources, targets } => (count(sources), count(targets)),
            // A rank that joined meanwhile has no part in a source of the former size.
            Collective::ReduceScatter { .. } | Collective::Scatter { .. } if peer.0 >= self.places => (0, self.count),
            _ => (self.count, self.count),
        };
        Signature { kind, data_type: self.data_type, reduction: self.reduction(), root: self.root(), sends, receives }
    }
}

/// Kind of a collective, by its number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
#[repr(u8)]
pub enum CollectiveKind {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    Gather,
    Scatter,
    ReduceScatter,
    AllToAll,
    Barrier,
}

const KINDS: [(CollectiveKind, &str); 9] = [
    (CollectiveKind::AllReduce, "all_reduce"),
    (CollectiveKind::Reduce, "reduce"),
    (CollectiveKind::Broadcast, "broadcast"),
    (CollectiveKind::AllGather, "all_gather"),
    (CollectiveKind::Gather, "gather"),
    (CollectiveKind::Scatter, "scatter"),
    (CollectiveKind::ReduceScatter, "reduce_scatter"),
    (CollectiveKind::AllToAll, "all_to_all"),
    (CollectiveKind::Barrier, "barrier"),
];

impl CollectiveKind {
    /// Returns the kind of this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        KINDS.get(usize::from(number)).map(|(kind, _)| *kind)
    }
}

impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(KINDS[*self as usize].1)
    }
}

/// An operation as one member tells another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Signature {
    pub kind: CollectiveKind,
    pub data_type: DataType,
    pub reduction: Option<Reduction>,
    pub root: Option<GroupRank>,
    /// Elements for the other member.
    pub sends: u64,
    /// Elements from the other member.
    pub receives: u64,
}

impl Signature {
    /// Returns true if both members call the same operation; `other` is the peer's for this member.
    #[must_use]
    pub fn fits(&self, other: &Self) -> bool {
        let mirrored = Self { sends: other.receives, receives: other.sends, ..*other };
        *self == mirrored
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some(reduction) = self.reduction {
            write!(f, " ({reduction})")?;
        }
        if self.kind != CollectiveKind::Barrier {
            write!(f, " of {} {}", self.sends, self.data_type)?;
        }
        if self.sends != self.receives {
            write!(f, " for {}", self.receives)?;
        }
        match self.root {
            Some(root) => write!(f, " with root {}", root.0),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum_of(count: u64) -> Operation {
        let collective = Collective::AllReduce { reduction: Reduction::Sum };
        Operation { collective, data_type: DataType::F32, count, places: 4 }
    }

    #[test]
    fn malformed_operations_are_named() {
        assert_eq!(sum_of(7).check(), Ok(()));
        let bits = Collective::AllReduce { reduction: Reduction::Xor };
        let error = Operation { collective: bits, ..sum_of(1) }.check().expect_err("bits of floats");
        assert_eq!(error.to_string(), "there is no reduction `xor` of elements of type f32");
        let root = Operation { collective: Collective::Broadcast { root: GroupRank(4) }, ..sum_of(1) };
        assert_eq!(root.check(), Err(OperationError::NoRoot { root: 4, size: 4 }));
        let splits = Collective::AllToAll { sources: vec![1; 4], targets: vec![1; 3] };
        let error = Operation { collective: splits, ..sum_of(0) }.check();
        assert_eq!(error, Err(OperationError::Counts { sources: 4, targets: 3, size: 4 }));
        let many = Collective::AllToAll { sources: vec![u64::MAX; 4], targets: vec![1; 4] };
        assert!(matches!(Operation { collective: many, ..sum_of(0) }.check(), Err(OperationError::TooLarge { .. })));
        assert!(matches!(sum_of(u64::MAX).check(), Err(OperationError::TooLarge { .. })));
        assert!(matches!(Operation { places: 65, ..sum_of(1) }.check(), Err(OperationError::Places { .. })));
    }

    #[test]
    fn counts_of_an_all_to_all_fit_by_pair() {
        let of = |sources: [u64; 2], targets: [u64; 2]| Operation {
            collective: Collective::AllToAll { sources: sources.to_vec(), targets: targets.to_vec() },
            data_type: DataType::U8,
            count: 0,
            places: 2,
        };
        let (first, second) = (of([1, 2], [1, 5]), of([5, 0], [2, 0]));
        assert!(first.signature(GroupRank(1)).fits(&second.signature(GroupRank(0))));
        let other = of([4, 0], [2, 0]);
        assert!(!first.signature(GroupRank(1)).fits(&other.signature(GroupRank(0))));
        assert_eq!(first.signature(GroupRank(1)).to_string(), "all_to_all of 2 u8 for 5");
        assert_eq!(sum_of(7).signature(GroupRank(1)).to_string(), "all_reduce (sum) of 7 f32");
    }
}
