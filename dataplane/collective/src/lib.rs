//! Collectives of process groups: operations that survive their members, and messages between two of them.
//!
//! [`Member`] is one membership of a group: it takes operations of its caller, the group's views
//! ([`kvplane_group::GroupStatus`]) and frames of the other members, and says which bytes are sent next, where arriving
//! ones belong, and when an operation has ended. It touches no byte, opens nothing and reads no clock: its host owns
//! the memory and the connections. The simulation in the tests hosts the same code.
//!
//! **Operations** of a group have numbers: the members call the same ones in the same order. Each frame carries its
//! operation's signature, so that members that call different ones learn who called what, instead of waiting for each
//! other. An operation is never seen half done: its source stays as it is until all of the result is there, so that it
//! can be repeated in the next view.
//!
//! **Completion.** Where every member gets the same result and it is small, a member completes the operation when the
//! result is there, and keeps it until the next one is complete: so all members have it. Otherwise a member confirms
//! that it has its result, and completes once all have. This is what [`kvplane_group::Progress`] relies on.
//!
//! **Frames never wait for the receiver's caller.** Long payloads are sent only once the receiver has begun the
//! operation or accepted the message; short ones are kept. So operations of one group do not hold up those of another
//! on the same connection.

#![forbid(unsafe_code)]

mod data_type;
mod execution;
mod failure;
mod frame;
mod member;
mod messages;
mod operation;
mod reduction;
mod schedule;
mod span;
mod work;

pub use data_type::{DataType, ParseDataTypeError};
pub use failure::Failure;
pub use frame::{AbortCause, FrameKind, HEAD_BYTES, Head, HeadError};
pub use member::{Member, MemberConfig, MemberCounts};
pub use operation::{Collective, CollectiveKind, MAX_BUFFER_BYTES, Operation, OperationError, Signature};
pub use reduction::{ParseReductionError, Reduction, divide};
pub use schedule::Thresholds;
pub use span::{Buffer, LocalStep, Placement, Span};
pub use work::{Completion, Disposition, Outgoing, Output, StashId, WorkId};
