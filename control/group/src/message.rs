//! Inputs, replies and outputs of a world; reports of processes, and the status that they get.

use bincode::{Decode, Encode};

use crate::flush::Progress;
use crate::group::{GroupId, GroupSpec, MemberState, View};
use crate::proposal::{Change, Outcome, ProposalId};
use crate::rank::{GroupRank, RankSet, WorldRank};
use crate::record::GroupRecord;
use crate::roster::{Process, ProcessId, ProcessState};

/// State of a process, which it reports once an interval and at every change.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Report {
    /// The process that reports.
    pub process: ProcessId,
    /// Version of the roster that the sets of peers are about.
    pub roster: u64,
    /// Peers that it reaches: its connection to them was accepted, and theirs by it.
    pub linked: RankSet<WorldRank>,
    /// Peers whose address refuses connections: their processes have probably ended.
    pub refused: RankSet<WorldRank>,
    /// Peers that a collective waited for until its deadline, without a sign of life.
    pub overdue: RankSet<WorldRank>,
    /// State of its memberships.
    pub groups: Vec<MemberReport>,
}

/// State of a membership, as its process reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct MemberReport {
    /// The group.
    pub group: GroupId,
    /// Epoch of the view that the process has applied last; 0 before the first.
    pub epoch: u64,
    /// Phase of the membership.
    pub phase: Phase,
}

/// Phase of a membership in its view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Phase {
    /// Not ready: the process is still draining earlier operations, or connecting.
    Joining,
    /// Ready to take part from the next view on.
    Ready,
    /// Takes part in collectives.
    Running {
        /// Peers with which the operation in flight failed. The operation waits for the next view.
        failed: RankSet<GroupRank>,
    },
    /// Fenced: it refuses the frames of its view and sends none, so that its progress is final.
    Fenced(Progress),
}

/// Event that a world processes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Input {
    /// A process begins. Idempotent.
    Register { process: Process },
    /// A process ends in order, and leaves its groups. Idempotent.
    Unregister { process: ProcessId },
    /// The state of a process.
    Report { report: Report },
    /// A process becomes a member of a group, which is founded by its first members. Idempotent.
    Attach { process: ProcessId, spec: GroupSpec },
    /// A member leaves its group for good. Idempotent.
    Detach { process: ProcessId, group: GroupId },
    /// A process proposes to change a group's view. Idempotent by its id; the outcome is in the process's status.
    Propose { id: ProposalId, group: GroupId, change: Change },
    /// Time has passed.
    Tick,
}

/// Reply to an accepted input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Reply {
    /// The process is registered, or has left, or its report was applied.
    Done,
    /// The process is the member of this rank.
    Attached { group: GroupId, rank: GroupRank },
}

/// Work of the driver, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Makes a group durable, in place of its former record. Later outputs wait for it.
    Persist(GroupRecord),
    /// Removes the record of a group.
    Forget(GroupId),
    /// Sends its new [`Status`] to the process of a rank.
    Changed(WorldRank),
}

/// State of a world, for one of its processes.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Status {
    /// Version of the roster.
    pub roster: u64,
    /// The live processes.
    pub peers: Vec<Process>,
    /// The groups of which the process is a member.
    pub groups: Vec<GroupStatus>,
}

/// State of a group, for one of its members.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GroupStatus {
    /// The group.
    pub group: GroupId,
    /// Rank of the process in it.
    pub rank: GroupRank,
    /// Ranks in the world, by rank in the group.
    pub order: Vec<WorldRank>,
    /// The newest view.
    pub view: View,
    /// True while the view changes: members of this view fence themselves and report their progress.
    pub is_changing: bool,
    /// States of the members, by rank.
    pub members: Vec<MemberState>,
    /// States of the members' processes, by rank.
    pub processes: Vec<ProcessState>,
    /// Outcomes of the process's proposals, oldest first.
    pub outcomes: Vec<(ProposalId, Outcome)>,
}
