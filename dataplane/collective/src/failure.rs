//! Ends of operations and messages without a result.

use core::fmt;

use kvplane_group::{GroupRank, Rank, RankSet};

use crate::operation::{OperationError, Signature};

/// Reason for which an operation or a message has no result. The group goes on with the next one, unless the member was
/// excluded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Failure {
    /// The operation is malformed.
    Malformed(OperationError),
    /// Two members call different operations as the same one of the group's sequence.
    Mismatch { rank: GroupRank, calls: Option<Signature>, other: GroupRank, ours: Option<Signature> },
    /// The deadline passed while the member waited for these ranks.
    Deadline { awaited: RankSet<GroupRank> },
    /// The deadline passed at another member, which waited for `awaited`.
    OthersDeadline { rank: GroupRank, awaited: GroupRank },
    /// A member had no memory for the operation; the number of bytes is known at that one.
    NoMemory { rank: GroupRank, bytes: Option<u64> },
    /// The other members ended the operation without a result.
    EndedElsewhere,
    /// The deadline passed before the group had its first view, or activated this member.
    NotActive,
    /// The root of the operation takes part no longer.
    RootGone { root: GroupRank },
    /// The group has deactivated this member.
    Excluded { epoch: u64 },
    /// The connection to the peer of a message was lost.
    PeerLost { rank: GroupRank },
    /// A message has another size than the memory for it.
    MessageSize { rank: GroupRank, message: u64, room: u64 },
    /// A message to a rank that is no other member of the group.
    NoPeer { rank: GroupRank },
    /// So many operations or messages wait already.
    TooMany { limit: usize },
    /// The member has left the group.
    Closed,
}

fn ranks(set: RankSet<GroupRank>) -> String {
    let names: Vec<_> = set.iter().map(|rank| rank.index().to_string()).collect();
    match names.len() {
        1 => format!("rank {}", names[0]),
        _ => format!("ranks {}", names.join(", ")),
    }
}

fn call(signature: Option<Signature>) -> String {
    signature.map_or_else(|| "another operation".to_owned(), |signature| signature.to_string())
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(error) => error.fmt(f),
            Self::Mismatch { rank, calls, other, ours } => write!(
                f,
                "the ranks call different operations: rank {} calls {}, and rank {} calls {}",
                rank.0,
                call(*calls),
                other.0,
                call(*ours)
            ),
            Self::Deadline { awaited } if awaited.is_empty() => f.write_str("the deadline passed"),
            Self::Deadline { awaited } => write!(f, "the deadline passed while {} did not answer", ranks(*awaited)),
            Self::OthersDeadline { rank, awaited } => {
                write!(
                    f,
                    "rank {} ended the operation: its deadline passed while rank {} did not answer",
                    rank.0, awaited.0
                )
            }
            Self::NoMemory { rank, bytes: Some(bytes) } => {
                write!(f, "rank {} has no {bytes} bytes of memory for the operation", rank.0)
            }
            Self::NoMemory { rank, bytes: None } => write!(f, "rank {} has no memory for the operation", rank.0),
            Self::EndedElsewhere => f.write_str("the other ranks ended the operation without a result"),
            Self::NotActive => f.write_str("the deadline passed before the group was complete"),
            Self::RootGone { root } => write!(f, "the root, rank {}, takes part no longer", root.0),
            Self::Excluded { epoch } => write!(f, "this member was deactivated by the group's view {epoch}"),
            Self::PeerLost { rank } => write!(f, "the connection to rank {} was lost", rank.0),
            Self::MessageSize { rank, message, room } => {
                write!(
                    f,
                    "a message from or to rank {} has {message} bytes, and the receiver has room for {room}",
                    rank.0
                )
            }
            Self::NoPeer { rank } => write!(f, "rank {} is no other member of the group", rank.0),
            Self::TooMany { limit } => write!(f, "{limit} operations wait already"),
            Self::Closed => f.write_str("the member has left the group"),
        }
    }
}

impl std::error::Error for Failure {}

impl From<OperationError> for Failure {
    fn from(error: OperationError) -> Self {
        Self::Malformed(error)
    }
}
