//! Why a placement is refused, or nothing can be planned from two of them.

use std::fmt;

use super::tensor_box::TensorBox;

/// What is wrong, with the names that the placements have for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReshardError {
    /// Something said makes no sense: what, and what to do.
    Malformed(String),
    /// Two ranks claim parts of a tensor that overlap and are not the same: which of them is right, nobody can say.
    Overlap {
        /// The tensor.
        tensor: String,
        /// The two claims, and whose they are.
        claims: Box<[(String, TensorBox); 2]>,
    },
    /// Nobody has a part of a tensor that is wanted.
    Gap {
        /// The tensor.
        tensor: String,
        /// Who wants it.
        participant: String,
        /// A part that nobody has; there may be more.
        missing: TensorBox,
    },
    /// Both placements have a tensor of this name, and not the same.
    Differs {
        /// The tensor.
        tensor: String,
        /// In what.
        what: String,
    },
    /// A participant is not in the placement.
    NoParticipant {
        /// Its name.
        participant: String,
        /// Some that are.
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
