//! Tasks: objects that are to have a copy, asked for a few at a time and again until each has one, or one cannot.
//!
//! Who has to be asked, and how, is the host's to know: it takes what is due ([`Tasks::due`]) and says what came of it
//! ([`Tasks::told`]). Nothing here lasts longer than the process; a task that is lost did no harm, and can be made
//! again: an object that has its copy is done at once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::Digest;

/// What tasks may take.
#[derive(Clone, Copy, Debug)]
pub struct TaskLimits {
    /// Tasks that are not over.
    pub open: usize,
    /// Tasks that are over and still told of.
    pub kept: usize,
    /// Objects of one task.
    pub objects: usize,
    /// Objects of all open tasks.
    pub all_objects: usize,
    /// Objects that are asked for at the same time.
    pub under_way: usize,
    /// Between two questions after the same object, in nanoseconds.
    pub again_ns: u64,
    /// How long an object may take from its first question on, in nanoseconds.
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

/// How a task is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TaskState {
    /// None of its objects had its turn.
    Pending,
    /// Some had.
    Running,
    /// All have a copy.
    Succeeded,
    /// One cannot have one.
    Failed,
    /// Somebody ended it.
    Cancelled,
}

impl TaskState {
    /// Whether nothing changes any more.
    #[must_use]
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }
}

/// What the first owner of an object says of its copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyProgress {
    /// It is there, and so long.
    There(u64),
    /// It is being made, or nobody could be asked.
    Coming,
    /// There is no object.
    Missing,
    /// There is nobody who could have a copy.
    Alone,
}

/// Why a task is not made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TaskRefusal {
    /// Without objects, or with more than one may have.
    Objects(usize),
    /// There are too many tasks, or objects of tasks.
    Full,
}

/// A task as it is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Task {
    /// Its number: greater than those of all before it.
    pub id: u64,
    /// Whose objects.
    pub tenant: String,
    /// What people are shown.
    pub name: String,
    /// How it is.
    pub state: TaskState,
    /// Its objects.
    pub objects: usize,
    /// Those that have a copy.
    pub copied: usize,
    /// Their bytes.
    pub bytes: u64,
    /// When it was made.
    pub created_ns: u64,
    /// When something last changed.
    pub updated_ns: u64,
    /// Why it failed.
    pub message: String,
}

#[derive(Debug)]
struct Open {
    digests: Vec<Digest>,
    /// Not asked for yet: those from here on.
    next: usize,
    /// Asked for: when first.
    asked: BTreeMap<usize, u64>,
}

/// All tasks.
#[derive(Debug)]
pub struct Tasks {
    limits: TaskLimits,
    last: u64,
    tasks: BTreeMap<u64, Task>,
    open: BTreeMap<u64, Open>,
    /// Over, in that order.
    over: VecDeque<u64>,
    /// Objects that are asked for: when next, of which task, which of its objects.
    due: BTreeSet<(u64, u64, usize)>,
    /// The same while an answer is awaited.
    awaited: BTreeSet<(u64, usize)>,
    all_objects: usize,
}

impl Tasks {
    /// No tasks; the first will have a greater number than `after`.
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

    /// A new task; its number.
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

    /// The objects whose owners are to be asked now, each with its task and its place there; [`Self::told`] is to be
    /// called for each of them.
    pub fn due(&mut self, now_ns: u64) -> Vec<(u64, usize, Digest)> {
        let mut due = Vec::new();
        while let Some(&(at_ns, id, object)) = self.due.first()
            && at_ns <= now_ns
        {
            self.due.pop_first();
            let Some(open) = self.open.get(&id) else { continue };
            if now_ns.saturating_sub(open.asked.get(&object).copied().unwrap_or(now_ns)) >= self.limits.object_ns {
                let waited_s = self.limits.object_ns / 1_000_000_000;
                self.end(id, TaskState::Failed, format!("object {object} had no copy within {waited_s} s"), now_ns);
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

    /// When something may be due that is not now.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        self.due.first().map(|(at_ns, ..)| *at_ns)
    }

    /// What is known of the copy of an object that was due. Of a task that is over it says nothing.
    pub fn told(&mut self, id: u64, object: usize, progress: CopyProgress, now_ns: u64) {
        if !self.awaited.remove(&(id, object)) {
            return;
        }
        let (Some(open), Some(task)) = (self.open.get_mut(&id), self.tasks.get_mut(&id)) else { return };
        match progress {
            CopyProgress::Coming => {
                self.due.insert((now_ns.saturating_add(self.limits.again_ns), id, object));
            }
            CopyProgress::There(bytes) => {
                open.asked.remove(&object);
                (task.copied, task.bytes, task.updated_ns) = (task.copied + 1, task.bytes + bytes, now_ns);
                if task.copied == task.objects {
                    self.end(id, TaskState::Succeeded, String::new(), now_ns);
                }
            }
            CopyProgress::Missing => {
                self.end(id, TaskState::Failed, format!("object {object} is not there"), now_ns);
            }
            CopyProgress::Alone => {
                let why = "there is no second node that could have a copy".to_owned();
                self.end(id, TaskState::Failed, why, now_ns);
            }
        }
    }

    /// Ends a task. What was copied stays copied. False where there is none, or it is over.
    pub fn cancel(&mut self, id: u64, now_ns: u64) -> bool {
        let open = self.open.contains_key(&id);
        if open {
            self.end(id, TaskState::Cancelled, String::new(), now_ns);
        }
        open
    }

    /// A task.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<&Task> {
        self.tasks.get(&id)
    }

    /// Tasks with numbers above `after`, in their order.
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
