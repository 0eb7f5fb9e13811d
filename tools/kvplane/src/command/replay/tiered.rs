//! `kvplane replay --tier`: replays the trace against a node of its own whose memory holds a part of the working set
//! and whose SSD holds all of it, with or without a kill in the middle, and compares the hit rate with that of an
//! unlimited cache.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use kvplane::ControlLink;
use kvplane::rpc::Role;
use kvplane::rpc::message::{ListTiers, TierShard};
use kvplane_tools::model::{self, Policy};
use kvplane_tools::report::ReplayReport;
use kvplane_tools::trace::{HitCounts, Trace};

use super::{Plan, run};
use crate::command::demo::Dev;
use crate::command::{Failure, size};

/// Overhead of a record beside its block, in bytes: header, key, padding.
const RECORD_BYTES: u64 = 8 << 10;
/// Bytes of the device for each object that the tier's index has room for.
const OBJECT_BYTES: u64 = 34 << 10;
/// Least memory with which a node with an SSD works well, in bytes.
const POOL_LEAST_BYTES: u64 = 16 << 20;
/// Time limit of recovery.
const RECOVERY: Duration = Duration::from_secs(120);

/// Settings of the node that the replay starts.
#[derive(Args, Clone)]
pub(super) struct TierFlags {
    /// Start a node with an SSD for this run, backed by a file in this directory, and compare the hit rate with that of
    /// an unlimited cache.
    #[arg(long, value_name = "DIRECTORY", conflicts_with_all = ["cluster", "runtime_directory", "server_pid"])]
    pub(super) tier: Option<PathBuf>,
    /// Memory of the node, in percent of the trace's distinct blocks; the SSD holds all of them.
    #[arg(long, default_value_t = 10, requires = "tier", value_parser = clap::value_parser!(u64).range(1..=100))]
    tier_memory: u64,
    /// Kill the node after half of the requests, and restart it.
    #[arg(long, requires = "tier")]
    restart: bool,
    /// Additional argument of the node, as `--tier-node=--ssd-prefetch=20`; may be repeated.
    #[arg(long, requires = "tier", allow_hyphen_values = true)]
    tier_node: Vec<String>,
}

/// Runs the replay; returns a report for each incarnation of the node.
pub(super) fn replay(plan: &Plan, trace: &Trace, flags: &TierFlags) -> Result<Vec<ReplayReport>, Failure> {
    let Some(place) = &flags.tier else { return Err("--tier needs a directory".into()) };
    let blocks = trace.requests.iter().flat_map(|request| &request.blocks).collect::<BTreeSet<_>>().len() as u64;
    let pool = (blocks * plan.block_bytes * flags.tier_memory / 100).max(POOL_LEAST_BYTES).next_multiple_of(1 << 20);
    let ssd_bytes = blocks * (plan.block_bytes + RECORD_BYTES).max(OBJECT_BYTES) * 5 / 4 + (256 << 20);
    let ssd_bytes = ssd_bytes.next_multiple_of(1 << 20);
    let place = place.canonicalize().map_err(|error| format!("--tier {}: {error}", place.display()))?;
    let file = File(place.join(format!("kvplane-replay-{}", std::process::id())));
    let mut node: Vec<String> = vec!["--ssd".to_owned(), format!("{}:{ssd_bytes}", file.0.display())];
    node.extend(["--ssd-ack".to_owned(), "buffered".to_owned()]);
    node.extend(flags.tier_node.iter().cloned());
    println!(
        "{blocks} blocks of {}: {} of memory, {} of SSD",
        size::show(plan.block_bytes),
        size::show(pool),
        size::show(ssd_bytes)
    );
    let halves = if flags.restart { trace.requests.len().div_ceil(2).max(1) } else { trace.requests.len().max(1) };
    let (mut reports, mut counts) = (Vec::new(), HitCounts::default());
    for (incarnation, requests) in trace.requests.chunks(halves).enumerate() {
        let part = Trace { requests: requests.to_vec(), ..trace.clone() };
        // Dropped at the end of the loop body, the node is killed: writes in its queue are lost.
        let dev = Dev::start_with(pool, &node)?;
        let plan = Plan {
            cluster: dev.cluster.clone(),
            runtime_directory: Some(dev.directory.clone()),
            server_pid: Some(dev.child.id()),
            ..plan.clone()
        };
        let admin = ControlLink::to(&plan.control(), Role::Admin)?;
        recovered(&admin)?;
        let mut report = run(&plan, &part)?;
        report.title = format!("{} with SSD, incarnation {}", report.title, incarnation + 1);
        counts.blocks += report.hits.blocks;
        counts.hit_blocks += report.hits.hit_blocks;
        reports.push(report);
        say_hits(&shards(&admin)?);
    }
    judge(trace, &counts, flags.restart);
    Ok(reports)
}

/// File of the SSD, removed at the end of the run together with the control plane's state beside it.
struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
        let _ = std::fs::remove_dir_all(self.0.with_extension("control"));
    }
}

fn shards(admin: &ControlLink) -> Result<Vec<TierShard>, Failure> {
    Ok(admin.call(ListTiers { node: None })?.nodes.into_iter().flat_map(|node| node.shards).collect())
}

/// Waits until recovery has read every record.
fn recovered(admin: &ControlLink) -> Result<(), Failure> {
    let start = Instant::now();
    loop {
        let shards = shards(admin)?;
        if !shards.is_empty() && shards.iter().all(|shard| shard.state != "recovering") {
            return Ok(());
        }
        if start.elapsed() > RECOVERY {
            return Err(format!("recovery took more than {} s", RECOVERY.as_secs()).into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn say_hits(shards: &[TierShard]) {
    let sum = |value: fn(&TierShard) -> u64| shards.iter().map(value).sum::<u64>();
    println!(
        "tiers: {} hits in memory, {} on the SSD, {} misses; {} objects on the SSD, {} prefetched, {} of them used",
        sum(|shard| shard.gets.memory_hits),
        sum(|shard| shard.gets.ssd_hits),
        sum(|shard| shard.gets.misses),
        sum(|shard| shard.objects),
        sum(|shard| shard.prefetches.objects),
        sum(|shard| shard.prefetches.used)
    );
}

fn judge(trace: &Trace, counts: &HitCounts, restarted: bool) {
    let without_limit = model::simulate(Policy::Lru, &trace.requests, 1, u64::MAX).counts.rate_blocks();
    let rate = counts.rate_blocks();
    let (what, wanted) = if restarted { ("with a kill in the middle", 0.02) } else { ("in one incarnation", 0.005) };
    println!(
        "blocks hit {what}: {rate:.4}; an unlimited cache {without_limit:.4}; {:.4} less, limit: {wanted}",
        without_limit - rate
    );
}
