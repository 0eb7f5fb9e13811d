//! Errors of placements, and of plans between two of them.

use std::fmt;

use super::tensor_box::TensorBox;

/// Error of a placement or plan, with the names that the placements use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ReshardError {
    /// The placement is malformed; the text says how to correct it.
    Malformed(String),
    /// Two ranks claim parts of a tensor that overlap and differ, so that the right one is unknown.
    Overlap {
        tensor: String,
        /// The two claims, each with its rank.
        claims: Box<[(String, TensorBox); 2]>,
    },
    /// No source has a requested part of a tensor.
    Gap {
        tensor: String,
        /// Rank that requests it.
        participant: String,
        /// A missing part; there may be more.
        missing: TensorBox,
    },
    /// Both placements have a tensor of this name, but the two differ.
    Differs {
        tensor: String,
        /// Difference, as text.
        what: String,
    },
    /// The placement has no such participant.
    NoParticipant {
        participant: String,
        /// Some of the participants.
        known: String,
    },
}

impl fmt::Display for ReshardError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(what) => f.write_str(what),
            Self::Overlap { tensor, claims } => {
                let [(one, first), (other, second)] = &**claims;
                write!(
                    f,
                    "tensor {tensor:?}: {first} of {one:?} and {second} of {other:?} overlap and are not the same: \
                     boxes of a tensor must be equal or apart"
                )
            }
            Self::Gap { tensor, participant, missing } => {
                write!(f, "tensor {tensor:?}: {participant:?} is to have {missing}, which no source has")
            }
            Self::Differs { tensor, what } => {
                write!(f, "tensor {tensor:?} is not the same in source and target: {what}; bytes are only copied")
            }
            Self::NoParticipant { participant, known } => {
                write!(f, "the placement has no participant {participant:?}; it has {known}")
            }
        }
    }
}

impl std::error::Error for ReshardError {}
