//! Errors of resharding: manifests, placements, and locations of bytes.

use std::fmt;

use kvplane_cluster::reshard::ReshardError;

use super::manifest::ManifestError;

/// Reason why a rank cannot get its part of the target from the source.
#[derive(Debug)]
#[non_exhaustive]
pub enum ReshardingError {
    /// A manifest is refused.
    Manifest(ManifestError),
    /// The source's manifest is refused.
    SourceManifest(ManifestError),
    /// The target's manifest is refused.
    TargetManifest(ManifestError),
    /// A placement, or two of them, contradict each other, or lack a rank.
    Placement(ReshardError),
    /// The location of the bytes of a rank of the source is given twice.
    PartTwice {
        /// Name of the rank.
        participant: String,
    },
    /// Bytes of a rank of the source are needed, but their location is not given.
    NoLocation {
        /// Name of the rank.
        participant: String,
    },
    /// The packed fragments of a rank of the source do not fill the buffer that is to hold them.
    PartBytes {
        /// Name of the object.
        object: String,
        /// Index of the buffer.
        buffer: usize,
        /// Length of the buffer; 0 for one that the object lacks.
        buffer_bytes: u64,
        /// Name of the rank.
        participant: String,
        /// Bytes of the packed fragments.
        bytes: u64,
    },
    /// The offsets of the fragments of a rank of the source do not fit the buffer.
    PartOffsets {
        /// Name of the object.
        object: String,
        /// Index of the buffer.
        buffer: usize,
        /// Name of the rank.
        participant: String,
        /// Contradiction.
        why: OffsetsError,
    },
    /// The packed fragments of the rank of the target do not fill the memory.
    MemoryBytes {
        /// Name of the rank.
        participant: String,
        /// Bytes of the packed fragments.
        bytes: u64,
        /// Length of the memory.
        memory_bytes: u64,
    },
    /// The offsets of the fragments of the rank of the target do not fit the memory.
    MemoryOffsets(OffsetsError),
    /// Two fragments of the rank of the target overlap in memory.
    FragmentsOverlap {
        /// Offset at which the first of them ends.
        end: u64,
        /// Offset at which the next one begins.
        next_offset: u64,
    },
}

impl fmt::Display for ReshardingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Manifest(why) => write!(f, "the manifest: {why}"),
            Self::SourceManifest(why) => write!(f, "of the source: the manifest: {why}"),
            Self::TargetManifest(why) => write!(f, "of the target: the manifest: {why}"),
            Self::Placement(error) => write!(f, "{error}"),
            Self::PartTwice { participant } => write!(f, "part {participant:?} is given twice"),
            Self::NoLocation { participant } => {
                write!(f, "bytes of part {participant:?} are needed, but its location is not given")
            }
            Self::PartBytes { object, buffer, buffer_bytes, participant, bytes } => write!(
                f,
                "buffer {buffer} of {object:?} has {buffer_bytes} bytes, and {participant:?} {bytes}: give the \
                 offsets of its fragments"
            ),
            Self::PartOffsets { object, buffer, participant, why } => {
                write!(f, "buffer {buffer} of {object:?}, which is to have the bytes of {participant:?}: {why}")
            }
            Self::MemoryBytes { participant, bytes, memory_bytes } => {
                write!(f, "{participant:?} has {bytes} bytes, and the memory {memory_bytes}")
            }
            Self::MemoryOffsets(why) => write!(f, "the memory: {why}"),
            Self::FragmentsOverlap { end, next_offset } => {
                write!(f, "the memory: a fragment ends at {end}, and the next one begins at {next_offset}")
            }
        }
    }
}

impl std::error::Error for ReshardingError {}

/// Error of the offsets of a part's fragments in memory.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum OffsetsError {
    /// The numbers of offsets and fragments differ.
    Count {
        /// Number of offsets.
        offsets: usize,
        /// Number of fragments.
        fragments: usize,
    },
    /// A fragment does not fit into the memory.
    Outside {
        /// Name of the fragment's tensor.
        tensor: String,
        /// Length of the fragment.
        bytes: u64,
        /// Offset of the fragment.
        offset: u64,
        /// Length of the memory.
        memory_bytes: u64,
    },
}

impl fmt::Display for OffsetsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count { offsets, fragments } => write!(f, "{offsets} offsets for {fragments} fragments"),
            Self::Outside { tensor, bytes, offset, memory_bytes } => {
                write!(f, "{bytes} bytes of {tensor:?} from {offset} on are not within its {memory_bytes}")
            }
        }
    }
}

impl std::error::Error for OffsetsError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_the_ranks_and_the_numbers() {
        let says = |error: ReshardingError, text: &str| assert_eq!(error.to_string(), text);
        let manifest = || ManifestError::Missing { field: "parts" };
        says(ReshardingError::Manifest(manifest()), "the manifest: parts is missing");
        says(ReshardingError::SourceManifest(manifest()), "of the source: the manifest: parts is missing");
        let (object, participant) = ("model".to_owned(), "tp0".to_owned());
        let why = OffsetsError::Count { offsets: 1, fragments: 2 };
        says(
            ReshardingError::PartOffsets { object, buffer: 0, participant, why },
            "buffer 0 of \"model\", which is to have the bytes of \"tp0\": 1 offsets for 2 fragments",
        );
    }
}
