//! Replication of hot prefixes by tasks of the store: the Conductor picks the prefixes that pay; this module finds
//! their objects, creates the tasks and waits for them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvplane_cluster::Cluster;
use kvplane_conductor::conductor::{CopyKey, CopyState, CopyWanted};
use kvplane_rpc::message::{CreateTask, ListTasks, OBJECTS_PER_ORDER, TaskState};
use kvplane_rpc::placement::CopiesShown;
use tokio::time::{MissedTickBehavior, interval};

use super::host::ConductorHost;
use super::store_blocks::StoreBlocks;
use crate::cluster::ClusterHost;
use crate::tasks::TaskHost;

/// Interval of checks for new prefixes to replicate, and for the progress of tasks.
const LOOK: Duration = Duration::from_secs(1);

/// Replications in progress, with the tasks of each.
type CopiesInFlight = BTreeMap<CopyKey, Vec<u64>>;

/// Replicates hot prefixes until the control plane ends. In a cluster without replicas there are none.
pub(crate) async fn make(
    host: Arc<ConductorHost>,
    blocks: Arc<StoreBlocks>,
    cluster: Arc<ClusterHost>,
    tasks: Arc<TaskHost>,
) {
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut coming = CopiesInFlight::new();
    loop {
        look.tick().await;
        coming.retain(|key, ids| match outcome(&tasks, ids) {
            Some(made) => {
                ended(&host, *key, made);
                false
            }
            None => true,
        });
        // A standby has no cluster.
        let Ok(Some(nodes)) =
            cluster.lock().map(|hosted| hosted.keeps_copies().then(|| owning_nodes(hosted.cluster())))
        else {
            continue;
        };
        for wanted in host.look(|conductor, now_ns| conductor.copies_wanted(nodes, now_ns)) {
            match begin(&blocks, &tasks, &wanted) {
                Some(ids) => drop(coming.insert(wanted.key, ids)),
                None => ended(&host, wanted.key, false),
            }
        }
    }
}

/// Returns the number of nodes that own slots.
fn owning_nodes(cluster: &Cluster) -> u32 {
    cluster.map().members.iter().filter(|member| !member.shards.is_empty()).count() as u32
}

fn ended(host: &ConductorHost, key: CopyKey, made: bool) {
    host.look(|conductor, now_ns| conductor.copy_ended(key, made, now_ns));
}

/// Returns whether all tasks have succeeded; none while some are open.
fn outcome(tasks: &TaskHost, ids: &[u64]) -> Option<bool> {
    let mut made = true;
    for id in ids {
        let call = ListTasks { id: Some(*id), tenant: None, after: 0 };
        // A task that is not listed any more has ended long ago.
        match tasks.list(&call).tasks.first().map(|task| task.state) {
            Some(TaskState::Pending | TaskState::Running) => return None,
            Some(TaskState::Succeeded) => {}
            Some(TaskState::Failed | TaskState::Cancelled) | None => made = false,
        }
    }
    Some(made)
}

/// Creates tasks for the blocks of a prefix that the store is known to hold; none if it holds no block, or accepts no
/// tasks.
fn begin(blocks: &StoreBlocks, tasks: &TaskHost, wanted: &CopyWanted) -> Option<Vec<u64>> {
    let pool = &wanted.pool;
    let objects = blocks.objects(&pool.tenant, &pool.model, &wanted.hashes);
    let digests: Vec<u128> = objects.into_iter().map(|object| object.0).collect();
    let mut ids = Vec::new();
    for part in digests.chunks(OBJECTS_PER_ORDER) {
        let name = format!("{} blocks of a hot prefix of {:.64}", part.len(), pool.model);
        let call = CreateTask { tenant: pool.tenant.clone(), name, digests: part.to_vec(), targets: Vec::new() };
        match tasks.create(call) {
            Ok(task) => ids.push(task.id),
            Err(refusal) => {
                tracing::debug!(refusal.reason, "cannot replicate a hot prefix");
                break;
            }
        }
    }
    let whole = !ids.is_empty() && ids.len() == digests.len().div_ceil(OBJECTS_PER_ORDER);
    // Tasks that were created still run; an incomplete prefix is retried later.
    whole.then_some(ids)
}

/// Returns figures of the replicas; `possible` tells whether the cluster keeps replicas.
pub(super) fn shown(copies: &CopyState, possible: bool) -> CopiesShown {
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
