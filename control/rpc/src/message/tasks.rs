//! Messages about replication tasks: objects that are to be replicated to the replica owners of their slots.
//!
//! A caller that may put for a tenant creates tasks for the tenant's objects and polls their progress. The control
//! plane sends orders ([`Order::Copy`](crate::message::Order::Copy)) to the owners, a few objects at a time, and
//! repeats them until each object is replicated. Tasks are in the control plane's memory only and end with it.

use bincode::{Decode, Encode};
pub use kvplane_cluster::{ReplicaProgress, TaskState};

/// Most tasks in one reply.
pub const TASKS_PER_REPLY: usize = 256;
/// Longest name of a task, in bytes.
pub const TASK_NAME_BYTES: usize = 256;

/// Creates a task.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CreateTask {
    /// Tenant of the objects; empty for the default tenant.
    pub tenant: String,
    /// Name to display: a key, or a number of keys.
    pub name: String,
    /// Objects, by their digests; for a striped object, its head and its stripes. At most
    /// [`OBJECTS_PER_ORDER`](crate::message::OBJECTS_PER_ORDER).
    pub digests: Vec<u128>,
    /// Segments near which replicas are wanted. They must exist; the place of a replica follows from the object's
    /// digest.
    pub targets: Vec<String>,
}

/// The reply to [`CreateTask`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TaskCreated {
    /// Number of the task, never reused.
    pub id: u64,
}

/// Requests the state of tasks.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ListTasks {
    /// Tenant of the tasks; none for all tenants, if the caller may act for all.
    pub tenant: Option<String>,
    /// Number of a single task to return.
    pub id: Option<u64>,
    /// Only tasks with greater numbers.
    pub after: u64,
}

/// The reply to [`ListTasks`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TaskList {
    /// Tasks, by number; at most [`TASKS_PER_REPLY`].
    pub tasks: Vec<TaskStatus>,
    /// True if there are more tasks.
    pub more: bool,
}

/// State of one task.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TaskStatus {
    pub id: u64,
    /// Tenant of the objects; empty for the default tenant.
    pub tenant: String,
    /// Name to display.
    pub name: String,
    pub state: TaskState,
    /// Objects of the task.
    pub objects: u32,
    /// Objects that are replicated.
    pub copied: u32,
    /// Bytes of the replicated objects.
    pub bytes: u64,
    /// Time of creation, in milliseconds since 1970.
    pub created_ms: u64,
    /// Time of the last change, in milliseconds since 1970.
    pub updated_ms: u64,
    /// Reason of the failure, or the location of replicas.
    pub message: String,
}

/// Cancels a task.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct CancelTask {
    /// Tenant given at the task's creation; none for any tenant's task, if the caller may act for all.
    pub tenant: Option<String>,
    pub id: u64,
}

/// The answer to [`Order::Copy`](crate::message::Order::Copy).
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct AnswerCopies {
    pub node: u64,
    pub incarnation: u64,
    /// Number of the order.
    pub number: u64,
    /// States, one for each object of the order.
    pub states: Vec<ReplicaProgress>,
}
