//! Calls of processes of a world, and of operators that inspect worlds.
//!
//! A process registers, reports its state every interval and at each change, and gets a status whenever it has a new
//! one: over its watch, and in the reply to a report that does not know it. The types of `kvplane-group` are
//! documented there.

use kvplane_group::{
    Change, GroupId, GroupRank, GroupSpec, GroupSummary, Process, ProcessId, ProcessSummary, ProposalId, Report, Status,
};

/// Names a world: the processes of one job.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, bincode::Encode, bincode::Decode)]
pub struct WorldName {
    /// Tenant that the world belongs to; empty for the default tenant.
    pub tenant: String,
    /// Name within the tenant: 1 to 128 bytes without control characters.
    pub world: String,
}

/// Revision of the status of a process. Of two, the greater is newer, over restarts of the control plane too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, bincode::Encode, bincode::Decode)]
pub struct StatusRevision {
    /// Number of the start of the world at the control plane; 0 for a process that has no status yet.
    pub start: u32,
    /// Number of the change since that start.
    pub number: u64,
}

/// Status of a process, with its revision.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct WorldStatus {
    pub revision: StatusRevision,
    pub status: Status,
}

/// Begins a process in a world, which begins with its first one.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct RegisterProcess {
    pub world: WorldName,
    pub process: Process,
}

/// Ends a process in order.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct UnregisterProcess {
    pub world: WorldName,
    pub process: ProcessId,
}

/// Reports the state of a process. Not repeated when a connection breaks: the next report is newer.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ReportProcess {
    pub world: WorldName,
    /// Revision of the newest status that the process has.
    pub known: StatusRevision,
    pub report: Report,
}

/// The reply to [`RegisterProcess`] and [`ReportProcess`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WorldReply {
    /// The status of the process; none if it has the newest.
    pub status: Option<WorldStatus>,
}

/// Makes a process a member of a group.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct AttachMember {
    pub world: WorldName,
    pub process: ProcessId,
    pub spec: GroupSpec,
}

/// The reply to [`AttachMember`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct MemberAttached {
    pub group: GroupId,
    pub rank: GroupRank,
}

/// Ends a membership.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct DetachMember {
    pub world: WorldName,
    pub process: ProcessId,
    pub group: GroupId,
}

/// Proposes to change the view of a group. The outcome is in the status of the process.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ProposeChange {
    pub world: WorldName,
    pub id: ProposalId,
    pub group: GroupId,
    pub change: Change,
}

/// Requests the status of a process at each change: the reply is a stream of [`WorldStatus`]. A process has one stream;
/// another one ends the first. A status that the process is too slow to read is left out, not kept.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct WatchWorld {
    pub world: WorldName,
    pub process: ProcessId,
    /// Revision of the newest status that the process has, which is not sent again.
    pub known: StatusRevision,
}

/// Requests a page of worlds, by tenant and name.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ListWorlds {
    /// The last world of the page before.
    pub after: Option<WorldName>,
}

/// The reply to [`ListWorlds`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct WorldList {
    pub worlds: Vec<WorldFigures>,
    /// True if other worlds follow.
    pub more: bool,
}

/// A world, for operators.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WorldFigures {
    /// Its name.
    pub name: WorldName,
    /// Live processes.
    pub processes: u32,
    /// Groups.
    pub groups: u32,
    /// Groups whose view is changing.
    pub changing: u32,
    /// Views that replaced another one, since the start of the world.
    pub view_changes: u64,
    /// Participants that view changes left out without a proposal.
    pub exclusions: u64,
}

/// Requests the processes and groups of a world.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct DescribeWorld {
    pub world: WorldName,
}

/// The reply to [`DescribeWorld`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WorldDescription {
    /// Live processes, by rank.
    pub processes: Vec<ProcessSummary>,
    /// Groups, by id.
    pub groups: Vec<GroupSummary>,
}
