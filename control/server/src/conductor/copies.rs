//! Replication of hot prefixes by tasks of the store: the Conductor picks the prefixes that pay; this module finds
//! their objects, creates the tasks and waits for them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvplane_conductor::conductor::{CopyKey, CopyWanted};
use kvplane_rpc::message::{CreateTask, ListTasks, OBJECTS_PER_ORDER, TaskState};
use kvplane_rpc::placement::CopiesShown;
use tokio::time::{MissedTickBehavior, interval};

use super::Host;
use crate::control::Control;

/// Interval of checks for new prefixes to replicate, and for the progress of tasks.
const LOOK: Duration = Duration::from_secs(1);

/// Replications in progress, with the tasks of each.
type CopiesInFlight = BTreeMap<CopyKey, Vec<u64>>;

/// Replicates hot prefixes until the control plane ends. In a cluster without replicas there are none.
pub(crate) async fn make(host: Arc<Host>, control: Arc<Control>) {
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut coming = CopiesInFlight::new();
    loop {
        look.tick().await;
        coming.retain(|key, tasks| match outcome(&control, tasks) {
            Some(made) => {
                host.copy_ended(*key, made);
                false
            }
            None => true,
        });
        // A standby has no cluster.
        let (Ok(true), Ok(nodes)) = (control.keeps_copies(), control.nodes()) else { continue };
        for wanted in host.copies_wanted(nodes) {
            match begin(&host, &control, &wanted) {
                Some(tasks) => drop(coming.insert(wanted.key, tasks)),
                None => host.copy_ended(wanted.key, false),
            }
        }
    }
}

/// Returns whether all tasks have succeeded; none while some are open.
fn outcome(control: &Control, tasks: &[u64]) -> Option<bool> {
    let mut made = true;
    for id in tasks {
        let call = ListTasks { id: Some(*id), tenant: None, after: 0 };
        // A task that is not listed any more has ended long ago.
        match control.task_list(&call).tasks.first().map(|task| task.state) {
            Some(TaskState::Pending | TaskState::Running) => return None,
            Some(TaskState::Succeeded) => {}
            Some(TaskState::Failed | TaskState::Cancelled) | None => made = false,
        }
    }
    Some(made)
}

/// Creates tasks for the blocks of a prefix that the store is known to hold; none if it holds no block, or accepts no
/// tasks.
fn begin(host: &Host, control: &Control, wanted: &CopyWanted) -> Option<Vec<u64>> {
    let pool = &wanted.pool;
    let digests: Vec<u128> = {
        let stored = host.stored();
        wanted
            .hashes
            .iter()
            .filter_map(|hash| stored.object(&pool.tenant, &pool.model, *hash))
            .map(|one| one.0)
            .collect()
    };
    let mut tasks = Vec::new();
    for part in digests.chunks(OBJECTS_PER_ORDER) {
        let name = format!("{} blocks of a hot prefix of {:.64}", part.len(), pool.model);
        let call = CreateTask { tenant: pool.tenant.clone(), name, digests: part.to_vec(), targets: Vec::new() };
        match control.create_task_now(call) {
            Ok(task) => tasks.push(task.id),
            Err(refusal) => {
                tracing::debug!(refusal.reason, "cannot replicate a hot prefix");
                break;
            }
        }
    }
    let whole = !tasks.is_empty() && tasks.len() == digests.len().div_ceil(OBJECTS_PER_ORDER);
    // Tasks that were created still run; an incomplete prefix is retried later.
    whole.then_some(tasks)
}

impl Host {
    fn copies_wanted(&self, nodes: u32) -> Vec<CopyWanted> {
        let now_ns = self.now_ns();
        self.core().conductor.copies_wanted(nodes, now_ns)
    }

    fn copy_ended(&self, key: CopyKey, made: bool) {
        let now_ns = self.now_ns();
        self.core().conductor.copy_ended(key, made, now_ns);
    }

    /// Returns figures of the replicas; `possible` tells whether the cluster keeps replicas.
    pub(crate) fn copies_shown(&self, possible: bool) -> CopiesShown {
        let copies = self.core().conductor.copies();
        CopiesShown {
            most_bytes: copies.config.most_bytes,
            possible,
            bytes: copies.bytes,
            prefixes: copies.prefixes as u64,
            coming: copies.coming as u64,
            made: copies.counts.made,
            failed: copies.counts.failed,
            forgotten: copies.counts.forgotten,
        }
    }
}
