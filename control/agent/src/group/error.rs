//! Errors of a process of a world; those of its calls are errors of the control plane.

use std::fmt;

use kvplane_group::{ProcessId, WorldRank};

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
