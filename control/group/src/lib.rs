//! Membership of process groups: which ranks take part in the collectives of a group, from which operation on.
//!
//! A *world* is the processes of one job, numbered by rank; a *process group* is some of them in an order of its own.
//! [`World`] takes events ([`Input`]) with their time, returns a [`Reply`] or a [`Rejection`], and emits the work of
//! its driver ([`Output`]). It opens nothing, reads no clock and sends nothing; the control plane and the simulation in
//! the tests host the same code. No rank is special: the state is the control plane's.
//!
//! **Views.** The members that take part are a [`View`] with an epoch. Frames of collectives carry the epoch, and a
//! member refuses those of another one. A change of the view is a *flush*, as in virtual synchrony (Birman and Joseph,
//! 1987): all members of the former and of the next view are *fenced*, which ends their operation in flight, and report
//! how far they came; then the next view is made durable and published, with the number of operations that count as
//! complete. So either every member of both views has the result of an operation in the former view, or all of them
//! repeat it in the next one: no two survivors disagree about which ranks contributed.
//!
//! **Levels, not edges.** Processes report their state and get the state of their groups. A report or a status that is
//! lost is made good by the next one, and a control plane that was restarted learns from reports what it had not made
//! durable.
//!
//! **A claim is not a death.** A peer's report that a process refuses connections, or that a collective waited for it
//! until its deadline, counts only while the control plane misses that process's reports too.

#![forbid(unsafe_code)]

mod config;
mod counters;
mod flush;
mod group;
mod message;
mod proposal;
mod rank;
mod record;
mod rejection;
mod roster;
mod world;

pub use config::WorldConfig;
pub use counters::{Counters, DeathCounts, ExclusionCounts};
pub use flush::{Progress, Resolution};
pub use group::{FailureMode, GroupId, GroupSpec, GroupSummary, MemberState, View};
pub use message::{GroupStatus, Input, MemberReport, Output, Phase, Reply, Report, Status};
pub use proposal::{Change, Outcome, ProposalId};
pub use rank::{GroupRank, MAX_RANKS, Rank, RankSet, WorldRank};
pub use record::{GroupRecord, GroupRecordError};
pub use rejection::{Difference, Rejection};
pub use roster::{MAX_ADDRESS_BYTES, Process, ProcessId, ProcessState, ProcessSummary};
pub use world::World;
