//! Tasks that replicate sets of objects: a bounded number of objects is in progress at a time, and each is retried
//! until it has a replica, or cannot have one.
//!
//! The host knows the owners and how to reach them: it takes the due objects ([`Tasks::due`]) and reports the result of
//! each ([`Tasks::told`]). Tasks are not durable; a lost task did no harm, and can be created again: an object that has
//! its replica is done at once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bincode::{Decode, Encode};
use kvplane_proto::Digest;
use kvplane_proto::events::ReplicaProgress;

/// Limits of tasks.
#[derive(Clone, Copy, Debug)]
pub struct TaskLimits {
    /// Maximum number of open tasks.
    pub open: usize,
    /// Number of finished tasks that are kept for queries.
    pub kept: usize,
    /// Maximum number of objects of one task.
    pub objects: usize,
    /// Maximum number of objects of all open tasks.
    pub all_objects: usize,
    /// Maximum number of objects in progress.
    pub under_way: usize,
    /// Interval between two requests for the same object, in nanoseconds.
    pub again_ns: u64,
    /// Timeout of an object from its first request on, in nanoseconds.
    pub object_ns: u64,
}

impl Default for TaskLimits {
    fn default() -> Self {
        Self {
            open: 10_000,
            kept: 10_000,
            objects: 512,
            all_objects: 1 << 18,
            under_way: 64,
            again_ns: 100_000_000,
            object_ns: 300_000_000_000,
        }
    }
}

/// State of a task. Tags are append-only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub enum TaskState {
    /// No object was requested yet.
    Pending,
    /// Some objects were requested.
    Running,
    /// All objects have a replica.
    Succeeded,
    /// An object cannot have a replica.
    Failed,
    /// Cancelled by a client.
    Cancelled,
}

impl TaskState {
    /// Returns true if the state is final.
    #[must_use]
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }
}

/// Reason for rejecting a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TaskRefusal {
    /// The task has no objects, or too many: their number.
    Objects(usize),
    /// There are too many tasks, or objects of tasks.
    Full,
}

/// State of a task, for queries.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Task {
    /// Number of the task: greater than those of all earlier ones.
    pub id: u64,
    /// Tenant of the objects.
    pub tenant: String,
    /// Description for people.
    pub name: String,
    pub state: TaskState,
    /// Number of objects of the task.
    pub objects: usize,
    /// Number of objects that have a replica.
    pub copied: usize,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Time of creation.
    pub created_ns: u64,
    /// Time of the last change.
    pub updated_ns: u64,
    /// Reason for a failure.
    pub message: String,
}

#[derive(Debug)]
struct Open {
    digests: Vec<Digest>,
    /// Index of the first object that was not requested yet.
    next: usize,
    /// Requested objects, with the time of the first request of each.
    asked: BTreeMap<usize, u64>,
}

/// All tasks, open and finished.
#[derive(Debug)]
pub struct Tasks {
    limits: TaskLimits,
    last: u64,
    tasks: BTreeMap<u64, Task>,
    open: BTreeMap<u64, Open>,
    /// Finished tasks, in the order in which they ended.
    over: VecDeque<u64>,
    /// Requested objects that wait for a retry: time, task, index of the object.
    due: BTreeSet<(u64, u64, usize)>,
    /// Objects whose owner has not answered yet: task, index of the object.
    awaited: BTreeSet<(u64, usize)>,
    all_objects: usize,
}

impl Tasks {
    /// Creates an empty set of tasks; the first will have a greater number than `after`.
    #[must_use]
    pub fn new(limits: TaskLimits, after: u64) -> Self {
        Self {
            limits,
            last: after,
            tasks: BTreeMap::new(),
            open: BTreeMap::new(),
            over: VecDeque::new(),
            due: BTreeSet::new(),
            awaited: BTreeSet::new(),
            all_objects: 0,
        }
    }

    /// Creates a task; returns its number.
    ///
    /// # Errors
    /// When it has no objects or too many, or there are too many tasks.
    pub fn create(
        &mut self,
        tenant: String,
        name: String,
        digests: Vec<Digest>,
        now_ns: u64,
    ) -> Result<u64, TaskRefusal> {
        let objects = digests.len();
        if objects == 0 || objects > self.limits.objects {
            return Err(TaskRefusal::Objects(objects));
        }
        if self.open.len() >= self.limits.open || self.all_objects + objects > self.limits.all_objects {
            return Err(TaskRefusal::Full);
        }
        self.last += 1;
        self.all_objects += objects;
        let task = Task {
            id: self.last,
            tenant,
            name,
            state: TaskState::Pending,
            objects,
            copied: 0,
            bytes: 0,
            created_ns: now_ns,
            updated_ns: now_ns,
            message: String::new(),
        };
        self.tasks.insert(self.last, task);
        self.open.insert(self.last, Open { digests, next: 0, asked: BTreeMap::new() });
        Ok(self.last)
    }

    /// Returns the objects whose owners are to be asked now, each with its task and its index there; [`Self::told`]
    /// must be called for each of them.
    pub fn due(&mut self, now_ns: u64) -> Vec<(u64, usize, Digest)> {
        let mut due = Vec::new();
        while let Some(&(at_ns, id, object)) = self.due.first()
            && at_ns <= now_ns
        {
            self.due.pop_first();
            let Some(open) = self.open.get(&id) else { continue };
            if now_ns.saturating_sub(open.asked.get(&object).copied().unwrap_or(now_ns)) >= self.limits.object_ns {
                let waited_s = self.limits.object_ns / 1_000_000_000;
                self.end(id, TaskState::Failed, format!("object {object} had no replica within {waited_s} s"), now_ns);
                continue;
            }
            due.push((id, object, open.digests[object]));
        }
        let mut busy = self.due.len() + self.awaited.len() + due.len();
        for (id, open) in &mut self.open {
            while busy < self.limits.under_way && open.next < open.digests.len() {
                due.push((*id, open.next, open.digests[open.next]));
                open.asked.insert(open.next, now_ns);
                open.next += 1;
                busy += 1;
                let task = self.tasks.get_mut(id).expect("an open task is one");
                if task.state == TaskState::Pending {
                    (task.state, task.updated_ns) = (TaskState::Running, now_ns);
                }
            }
        }
        self.awaited.extend(due.iter().map(|(id, object, _)| (*id, *object)));
        due
    }

    /// Returns the time of the next retry.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        self.due.first().map(|(at_ns, ..)| *at_ns)
    }

    /// Processes the result for an object that was due. Ignored if its task is over.
    pub fn told(&mut self, id: u64, object: usize, state: ReplicaProgress, now_ns: u64) {
        if !self.awaited.remove(&(id, object)) {
            return;
        }
        let (Some(open), Some(task)) = (self.open.get_mut(&id), self.tasks.get_mut(&id)) else { return };
        match state {
            // A later map names the next owner to ask.
            ReplicaProgress::Coming | ReplicaProgress::Elsewhere => {
                self.due.insert((now_ns.saturating_add(self.limits.again_ns), id, object));
            }
            ReplicaProgress::There { bytes } => {
                open.asked.remove(&object);
                (task.copied, task.bytes, task.updated_ns) = (task.copied + 1, task.bytes + bytes, now_ns);
                if task.copied == task.objects {
                    self.end(id, TaskState::Succeeded, String::new(), now_ns);
                }
            }
            ReplicaProgress::Missing => {
                self.end(id, TaskState::Failed, format!("object {object} does not exist"), now_ns);
            }
            ReplicaProgress::Alone => {
                let why = "no second node can take a replica".to_owned();
                self.end(id, TaskState::Failed, why, now_ns);
            }
        }
    }

    /// Cancels a task. Replicas that were made stay. Returns false if the task does not exist or is over.
    pub fn cancel(&mut self, id: u64, now_ns: u64) -> bool {
        let open = self.open.contains_key(&id);
        if open {
            self.end(id, TaskState::Cancelled, String::new(), now_ns);
        }
        open
    }

    /// Returns a task.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<&Task> {
        self.tasks.get(&id)
    }

    /// Returns the tasks with numbers above `after`, in order.
    pub fn list(&self, after: u64) -> impl Iterator<Item = &Task> {
        self.tasks.range(after.saturating_add(1)..).map(|(_, task)| task)
    }

    fn end(&mut self, id: u64, state: TaskState, message: String, now_ns: u64) {
        let Some(open) = self.open.remove(&id) else { return };
        self.all_objects -= open.digests.len();
        self.due.retain(|(_, of, _)| *of != id);
        self.awaited.retain(|(of, _)| *of != id);
        if let Some(task) = self.tasks.get_mut(&id) {
            (task.state, task.message, task.updated_ns) = (state, message, now_ns);
        }
        self.over.push_back(id);
        while self.over.len() > self.limits.kept {
            let oldest = self.over.pop_front().expect("there are some");
            self.tasks.remove(&oldest);
        }
    }
}
