//! Errors of a process of a world, of its groups, and of its link to the control plane.

use std::fmt;
use std::time::Duration;

use kvplane_collective::Failure;
use kvplane_engine::RegionError;
use kvplane_group::{GroupRank, ProcessId, WorldRank};
use kvplane_mesh::MeshError;

/// Reason why a process has no link to its world any more.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupLinkError {
    /// The control plane declared this incarnation dead, as after a pause of the process or of its network: the process
    /// has to begin another one.
    Ended {
        /// The incarnation.
        process: ProcessId,
    },
    /// While the control plane did not know this process, another one registered under its rank.
    RankTaken {
        /// Rank of both.
        rank: WorldRank,
    },
    /// The link was closed by its process.
    Closed,
}

impl fmt::Display for GroupLinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended { process } => write!(
                f,
                "incarnation {:016x} of rank {} was declared dead: begin another one",
                process.incarnation, process.rank.0
            ),
            Self::RankTaken { rank } => write!(f, "another process has registered as rank {} meanwhile", rank.0),
            Self::Closed => f.write_str("the process has left its world"),
        }
    }
}

impl std::error::Error for GroupLinkError {}

/// A call of a process group that failed.
#[derive(Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum GroupError {
    /// The control plane could not be reached, or refused.
    Control(crate::Error),
    /// The connections to the other processes could not be set up.
    Mesh(MeshError),
    /// An operation or a message ended without a result.
    Failed(Failure),
    /// A buffer has another size than the operation needs, in bytes.
    BufferSize { source: u64, target: u64, needs_source: u64, needs_target: u64 },
    /// The source and the target of an operation overlap.
    Overlap { bytes: u64 },
    /// There is no memory for a frame.
    Memory(RegionError),
    /// The control plane did not answer in time.
    Late { call: &'static str, after: Duration },
    /// The member is ready, and no other one activated it in time.
    NotActivated { rank: GroupRank, after: Duration },
    /// The process has left the world: it was closed, or declared dead while it did not run.
    Ended,
    /// The system gave no random number.
    Random(std::io::Error),
    /// A handler of a signal ended the wait.
    Interrupted { call: &'static str },
    /// A thread could not be started.
    Thread(std::io::Error),
}

impl fmt::Display for GroupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Control(error) => error.fmt(f),
            Self::Mesh(error) => error.fmt(f),
            Self::Failed(failure) => failure.fmt(f),
            Self::BufferSize { source, target, needs_source, needs_target } => write!(
                f,
                "the operation needs a source of {needs_source} and a target of {needs_target} bytes; they have \
                 {source} and {target}"
            ),
            Self::Overlap { bytes } => write!(f, "source and target overlap by {bytes} bytes"),
            Self::Memory(error) => error.fmt(f),
            Self::Late { call, after } => {
                write!(f, "{call}: the control plane did not answer within {:.1} s", after.as_secs_f64())
            }
            Self::NotActivated { rank, after } => write!(
                f,
                "rank {} is ready, and was not activated within {:.1} s: an active member activates it",
                rank.0,
                after.as_secs_f64()
            ),
            Self::Random(error) => write!(f, "no random number for the incarnation: {error}"),
            Self::Interrupted { call } => write!(f, "{call}: interrupted"),
            Self::Ended => f.write_str("the process has left its world"),
            Self::Thread(error) => write!(f, "a thread of the process group could not be started: {error}"),
        }
    }
}

impl std::error::Error for GroupError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Control(error) => Some(error),
            Self::Mesh(error) => Some(error),
            Self::Failed(failure) => Some(failure),
            Self::Memory(error) => Some(error),
            Self::Thread(error) | Self::Random(error) => Some(error),
            _ => None,
        }
    }
}

impl From<Failure> for GroupError {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<RegionError> for GroupError {
    fn from(error: RegionError) -> Self {
        Self::Memory(error)
    }
}

impl From<MeshError> for GroupError {
    fn from(error: MeshError) -> Self {
        Self::Mesh(error)
    }
}

impl From<crate::Error> for GroupError {
    fn from(error: crate::Error) -> Self {
        Self::Control(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_say_what_to_do() {
        let process = ProcessId { rank: WorldRank(3), incarnation: 10 };
        let text = GroupLinkError::Ended { process }.to_string();
        assert_eq!(text, "incarnation 000000000000000a of rank 3 was declared dead: begin another one");
        let text = GroupLinkError::RankTaken { rank: WorldRank(3) }.to_string();
        assert_eq!(text, "another process has registered as rank 3 meanwhile");
    }
}
