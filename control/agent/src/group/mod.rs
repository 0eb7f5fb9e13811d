//! Process groups: collectives among the processes of a job that survive their members.
//!
//! [`GroupProcess`] is one run of the process of a rank in a *world*: the control plane knows it, and it has
//! connections to the other processes. [`ProcessGroup`] is its membership of a group, whose members call the same
//! operations in the same order. An operation that is in flight when a member dies is repeated by the survivors, so
//! that all of them get the same result; the [`Completion`] of a [`Work`] names the ranks that contributed.
//!
//! Memory is passed as [`IoBuf`](kvplane_engine::IoBuf); it stays valid and unchanged until the work has ended. Any
//! thread may call.

mod error;
mod host;
mod link;
mod mailbox;
mod membership;
mod memory;
mod process;
mod process_group;
mod work;

use kvplane_rpc::Role;

pub use error::{GroupError, GroupLinkError};
pub use host::GroupCounters;
pub use kvplane_collective::{
    Collective, Completion, DataType, Failure, Operation, OperationError, ParseDataTypeError, ParseReductionError,
    Reduction,
};
pub use kvplane_group::{
    Change, FailureMode, GroupRank, GroupSpec, MAX_RANKS, MemberState, Outcome, ProcessId, ProcessState, Rank, RankSet,
    View, WorldRank,
};
pub use kvplane_mesh::MeshError;
pub use kvplane_tls::DataTls;
pub use link::{GroupLink, GroupLinkConfig, MemberHost};
pub use mailbox::ReportSignal;
pub use process::{GroupProcess, GroupProcessConfig, open_devices};
pub use process_group::{ProcessGroup, mask};
pub use work::Work;

/// Roles of a process of a world, the one that is meant for it first.
const ROLES: [Role; 2] = [Role::Client, Role::Node];
