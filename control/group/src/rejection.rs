//! Reasons for which an input is rejected.

use core::fmt;

use bincode::{Decode, Encode};

use crate::group::{FailureMode, GroupId};
use crate::rank::WorldRank;
use crate::roster::ProcessId;

/// Difference between a group that exists and what a process says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Difference {
    /// Other members, or another order of them.
    Order,
    MaxSize {
        group: u8,
        process: u8,
    },
    FailureMode {
        group: FailureMode,
        process: FailureMode,
    },
}

/// Reason for which an input was rejected; nothing but time has changed.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Rejection {
    /// A rank from the limit on.
    RankBeyondLimit { rank: u8, limit: usize },
    /// An address that is too long.
    LongAddress { bytes: usize, limit: usize },
    /// Another live process has this rank.
    RankTaken { rank: WorldRank, by: u64 },
    /// The process was declared dead, or has left: it has to register as another incarnation.
    Ended { process: ProcessId },
    /// The process has not registered, or the control plane has restarted since.
    UnknownProcess { process: ProcessId },
    /// No group with this id.
    UnknownGroup { group: GroupId },
    /// The name of a group that is too long, or empty.
    GroupName { bytes: usize, limit: usize },
    /// A group without members, with more than its largest size, or with a largest size beyond the limit.
    GroupSize { members: usize, max_size: usize, limit: usize },
    /// A rank that is twice among the members of a group.
    DuplicateRank { rank: WorldRank },
    /// The process is not among the members that it named.
    NotNamed { rank: WorldRank },
    /// The process is not a member of the group.
    NotMember { rank: WorldRank, group: GroupId },
    /// The group exists with other members, another order, size or failure mode.
    OtherGroup { name: String, difference: Difference },
    /// A joiner named a group that does not exist: it never creates one.
    NoGroupToJoin,
    /// The limit of groups is reached.
    TooManyGroups { limit: usize },
    /// The limit of proposals that wait is reached.
    TooManyProposals { limit: usize },
    /// A change that names ranks beyond the group's largest size, or none.
    ChangeOfNone,
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RankBeyondLimit { rank, limit } => write!(f, "rank {rank} is beyond the limit of {limit} ranks"),
            Self::LongAddress { bytes, limit } => write!(f, "an address of {bytes} bytes; at most {limit} fit"),
            Self::RankTaken { rank, by } => {
                write!(f, "rank {} has a live process already, incarnation {by:016x}; it has to end first", rank.0)
            }
            Self::Ended { process } => write!(
                f,
                "incarnation {:016x} of rank {} was declared dead or has left; register another one",
                process.incarnation, process.rank.0
            ),
            Self::UnknownProcess { process } => {
                write!(f, "incarnation {:016x} of rank {} is not registered", process.incarnation, process.rank.0)
            }
            Self::UnknownGroup { group } => write!(f, "no group {:016x}", group.0),
            Self::GroupName { bytes, limit } => write!(f, "a group's name of {bytes} bytes; it has 1 to {limit}"),
            Self::GroupSize { members, max_size, limit } => write!(
                f,
                "{members} members in a group of at most {max_size}: it has at least one member, and its largest size \
                 is at most {limit}"
            ),
            Self::DuplicateRank { rank } => write!(f, "rank {} is twice among the members", rank.0),
            Self::NotNamed { rank } => write!(f, "rank {} is not among the members that it names", rank.0),
            Self::NotMember { rank, group } => write!(f, "rank {} is no member of group {:016x}", rank.0, group.0),
            Self::OtherGroup { name, difference: Difference::Order } => {
                write!(f, "group {name:?} has other members, or another order of them")
            }
            Self::OtherGroup { name, difference: Difference::MaxSize { group, process } } => {
                write!(f, "group {name:?} has at most {group} members, and this process says {process}")
            }
            Self::OtherGroup { name, difference: Difference::FailureMode { group, process } } => {
                write!(f, "group {name:?} has the failure mode {group:?}, and this process says {process:?}")
            }
            Self::NoGroupToJoin => write!(f, "no group has this name and a beginning of these members to be joined"),
            Self::TooManyGroups { limit } => write!(f, "the limit of {limit} groups is reached"),
            Self::TooManyProposals { limit } => write!(f, "the limit of {limit} waiting proposals is reached"),
            Self::ChangeOfNone => write!(f, "a change of no rank, or of ranks beyond the group's largest size"),
        }
    }
}

impl core::error::Error for Rejection {}
