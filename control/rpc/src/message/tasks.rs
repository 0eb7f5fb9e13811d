//! Messages about tasks: objects that are to have a copy with the second owners of their slots.
//!
//! Whoever may put for a tenant makes tasks for its objects and asks how far they are. The control plane asks the first
//! owners, a few objects at a time and again until each is copied; nodes get these wishes as orders
//! ([`Order::Copy`](crate::message::Order::Copy)). Tasks are in the control plane's memory, and do not outlive it.

use bincode::{Decode, Encode};

/// Tasks in one answer at most.
pub const TASKS_PER_REPLY: usize = 256;
/// The longest name of a task, in bytes.
pub const TASK_NAME_BYTES: usize = 256;

/// Has objects copied.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CreateTask {
    /// The tenant whose objects they are; empty for the default one.
    pub tenant: String,
    /// What people are shown: a key, or a number of keys.
    pub name: String,
    /// The objects, by their digests; with one in stripes, its head and its stripes. At most
    /// [`OBJECTS_PER_ORDER`](crate::message::OBJECTS_PER_ORDER).
    pub digests: Vec<u128>,
    /// Segments near which copies are wanted. They must be there; where copies go follows from the objects' digests.
    pub targets: Vec<String>,
}

/// A task was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TaskCreated {
    /// Its number, which no other task has or had.
    pub id: u64,
}

/// Asks how tasks are.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ListTasks {
    /// Of which tenant; of all of them for who speaks for all.
    pub tenant: Option<String>,
    /// One task only, by its number.
    pub id: Option<u64>,
    /// Only those with greater numbers.
    pub after: u64,
}

/// How tasks are.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TaskList {
    /// By number; at most [`TASKS_PER_REPLY`].
    pub tasks: Vec<TaskStatus>,
    /// Whether there are more.
    pub more: bool,
}

/// One task.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TaskStatus {
    /// Its number.
    pub id: u64,
    /// Whose it is; empty for the default tenant.
    pub tenant: String,
    /// What people are shown.
    pub name: String,
    /// How it is.
    pub state: TaskState,
    /// Its objects.
    pub objects: u32,
    /// Those of them that have a copy.
    pub copied: u32,
    /// Their bytes.
    pub bytes: u64,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// When something last changed.
    pub updated_ms: u64,
    /// Why it failed, or where copies are.
    pub message: String,
}

/// How a task is. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum TaskState {
    /// None of its objects had its turn.
    Pending,
    /// Some had.
    Running,
    /// All have a copy.
    Succeeded,
    /// One cannot have one; the message says which and why.
    Failed,
    /// Somebody ended it. What was copied by then stays so.
    Cancelled,
}

/// Ends a task.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CancelTask {
    /// The tenant whose it is, as at its making; anybody's for who speaks for all.
    pub tenant: Option<String>,
    /// Its number.
    pub id: u64,
}

/// What a node answers to an order to copy.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct AnswerCopies {
    /// Which member.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
    /// The order's number.
    pub number: u64,
    /// One for each object of the order.
    pub states: Vec<CopyState>,
}

/// How far the copy of an object is. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum CopyState {
    /// The node does not own the object first.
    Elsewhere,
    /// There is no object.
    Missing,
    /// The slot has no second owner.
    Alone,
    /// It is being made.
    Coming,
    /// It is there, and so long.
    There {
        /// Bytes.
        bytes: u64,
    },
}
