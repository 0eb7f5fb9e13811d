//! Host of replication tasks: sends orders to owners, and reports the tasks' progress to callers.
//!
//! Its lock protects the tasks alone; the lock of the cluster is never taken under it, nor it under that one.
//!
//! In memory only. Task numbers count up from one that is drawn at random when a control plane becomes leader, so that
//! after a restart no task is mistaken for an earlier one, whatever the host's clock shows.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvplane_cluster::{ReplicaProgress, Task, TaskLimits, TaskRefusal, Tasks};
use kvplane_proto::Digest;
use kvplane_rpc::message::{
    CancelTask, CreateTask, EmptyReply, ListTasks, OBJECTS_PER_ORDER, TASK_NAME_BYTES, TASKS_PER_REPLY, TaskCreated,
    TaskList, TaskStatus,
};
use kvplane_rpc::{Refusal, RefusalCode};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::cluster::ClusterHost;

/// Longest wait for owners' answers to an order. Unanswered orders are repeated.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest sleep while tasks are open.
const SLEEP: Duration = Duration::from_millis(250);

/// Host of the replication tasks of a control plane.
pub(crate) struct TaskHost {
    /// Knows the owners of objects, and sends orders to them.
    cluster: Arc<ClusterHost>,
    tasks: Mutex<Tasks>,
    made: Notify,
    /// Time of its start, in milliseconds since 1970; only for display.
    began_ms: u64,
}

fn refuse(code: RefusalCode, reason: impl Into<String>) -> Refusal {
    Refusal::new(code, reason)
}

impl TaskHost {
    /// Creates a host without tasks.
    pub(crate) fn new(cluster: Arc<ClusterHost>) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let limits = TaskLimits { objects: OBJECTS_PER_ORDER, ..TaskLimits::default() };
        let began_ms = u64::try_from(since.as_millis()).unwrap_or(0);
        // 52 bits, so that the numbers of other languages hold them: two control planes rarely draw the same. Without
        // randomness no control plane starts, as it has keys to draw.
        let first = kvplane_sys::random::random_u64().unwrap_or(began_ms << 10) >> 12;
        Self { cluster, tasks: Mutex::new(Tasks::new(limits, first)), made: Notify::new(), began_ms }
    }

    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        // The tasks are consistent between calls; only the call that panicked is lost.
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a task.
    pub(crate) fn create(&self, call: CreateTask) -> Result<TaskCreated, Refusal> {
        let CreateTask { tenant, name, digests, targets } = call;
        if name.len() > TASK_NAME_BYTES {
            let reason = format!("a task's name of {} bytes is over the limit of {TASK_NAME_BYTES}", name.len());
            return Err(refuse(RefusalCode::BadRequest, reason));
        }
        self.check_targets(&targets)?;
        let digests = digests.into_iter().map(Digest).collect();
        let made = self.tasks().create(tenant, name, digests, self.cluster.now_ns());
        self.made.notify_one();
        made.map(|id| TaskCreated { id }).map_err(|why| match why {
            TaskRefusal::Objects(objects) => {
                let reason = format!("a task has 1 to {OBJECTS_PER_ORDER} objects, not {objects}");
                refuse(RefusalCode::BadRequest, reason)
            }
            TaskRefusal::Full => refuse(RefusalCode::LimitReached, "too many tasks are open: try again later"),
        })
    }

    /// Refuses a task that this cluster cannot carry out: it keeps no replicas, or has no such segment.
    fn check_targets(&self, targets: &[String]) -> Result<(), Refusal> {
        let hosted = self.cluster.lock()?;
        if !hosted.keeps_copies() {
            let reason = "this cluster keeps no replicas: start the control plane with --replicas 2";
            return Err(refuse(RefusalCode::BadRequest, reason));
        }
        let is_known = |target: &&String| {
            let mut segments = hosted.cluster().segments();
            segments.any(|segment| segment.name == **target || segment.address.to_string() == **target)
        };
        match targets.iter().find(|target| !is_known(target)) {
            Some(target) => Err(refuse(RefusalCode::NotFound, format!("there is no segment {target:?}"))),
            None => Ok(()),
        }
    }

    /// Returns the state of tasks.
    pub(crate) fn list(&self, call: &ListTasks) -> TaskList {
        let tasks = self.tasks();
        let of = |task: &&Task| call.tenant.as_ref().is_none_or(|tenant| *tenant == task.tenant);
        let chosen: Vec<&Task> = match call.id {
            Some(id) => tasks.get(id).into_iter().filter(of).collect(),
            None => tasks.list(call.after).filter(of).take(TASKS_PER_REPLY + 1).collect(),
        };
        let more = chosen.len() > TASKS_PER_REPLY;
        let status = |task: &&Task| self.status(task);
        TaskList { tasks: chosen.iter().take(TASKS_PER_REPLY).map(status).collect(), more }
    }

    fn status(&self, task: &Task) -> TaskStatus {
        let at_ms = |at_ns: u64| self.began_ms + at_ns / 1_000_000;
        TaskStatus {
            id: task.id,
            tenant: task.tenant.clone(),
            name: task.name.clone(),
            state: task.state,
            // At most 512.
            objects: task.objects as u32,
            copied: task.copied as u32,
            bytes: task.bytes,
            created_ms: at_ms(task.created_ns),
            updated_ms: at_ms(task.updated_ns),
            message: task.message.clone(),
        }
    }

    /// Cancels a task.
    pub(crate) fn cancel(&self, call: &CancelTask) -> Result<EmptyReply, Refusal> {
        let now_ns = self.cluster.now_ns();
        let mut tasks = self.tasks();
        let of = |task: &&Task| call.tenant.as_ref().is_none_or(|tenant| *tenant == task.tenant);
        let Some(state) = tasks.get(call.id).filter(of).map(|task| task.state) else {
            return Err(refuse(RefusalCode::NotFound, format!("there is no task {}", call.id)));
        };
        if !tasks.cancel(call.id, now_ns) {
            return Err(refuse(RefusalCode::BadRequest, format!("task {} has already ended: {state:?}", call.id)));
        }
        Ok(EmptyReply)
    }

    /// Orders the replications that are due from the objects' owners, and waits for the answers.
    async fn ask_for_copies(&self, due: Vec<(u64, usize, Digest)>) {
        let mut by_node: BTreeMap<u64, Vec<(u64, usize, Digest)>> = BTreeMap::new();
        let mut unasked = Vec::new();
        for (id, object, digest) in due {
            let owners = self.cluster.lock().map(|mut hosted| hosted.owners(digest));
            match owners.ok().and_then(|owners| owners.first().copied()) {
                Some(node) => by_node.entry(node).or_default().push((id, object, digest)),
                None => unasked.push((id, object)),
            }
        }
        let mut asked = Vec::new();
        for (node, objects) in by_node {
            let digests = objects.iter().map(|(.., digest)| digest.0).collect();
            match self.cluster.lock().and_then(|mut hosted| hosted.nodes.follow.copy(node, digests)) {
                Ok(answer) => asked.push((objects, answer)),
                Err(_) => unasked.extend(objects.into_iter().map(|(id, object, _)| (id, object))),
            }
        }
        let until = Instant::now() + PATIENCE;
        for (objects, answer) in asked {
            let states = timeout_at(until, answer).await.ok().and_then(Result::ok).unwrap_or_default();
            let now_ns = self.cluster.now_ns();
            let mut tasks = self.tasks();
            for (at, (id, object, _)) in objects.into_iter().enumerate() {
                // An owner that did not answer is asked again, or the next one that a later map names.
                tasks.told(id, object, states.get(at).copied().unwrap_or(ReplicaProgress::Coming), now_ns);
            }
        }
        let (now_ns, mut tasks) = (self.cluster.now_ns(), self.tasks());
        for (id, object) in unasked {
            tasks.told(id, object, ReplicaProgress::Coming, now_ns);
        }
    }

    /// Carries out tasks, for as long as it is polled.
    pub(crate) async fn run(&self) {
        loop {
            let (due, next_ns) = {
                let mut tasks = self.tasks();
                (tasks.due(self.cluster.now_ns()), tasks.poll_timeout())
            };
            if !due.is_empty() {
                self.ask_for_copies(due).await;
                continue;
            }
            let made = self.made.notified();
            match next_ns {
                Some(at_ns) => {
                    let wait = Duration::from_nanos(at_ns.saturating_sub(self.cluster.now_ns())).min(SLEEP);
                    // Wakes up for a new task or at the deadline.
                    let _ = tokio::time::timeout(wait, made).await;
                }
                None => made.await,
            }
        }
    }
}
