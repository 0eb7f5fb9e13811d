//! `kvplane ctl tier`: shows the SSD tier of nodes, verifies its records and reclaims log segments.
//!
//! Nodes report to the control plane with their heartbeats and take orders from the replies: the state shown is at most
//! a heartbeat old, and an order begins within one.

use std::io::IsTerminal;
use std::time::Duration;

use clap::{Args, Subcommand};
use kvplane::ControlLink;
use kvplane::rpc::message::{ListTiers, OrderTiers, TierAction, TierNode, TierShard};
use serde_json::{Value, json};

use crate::command::Failure;
use crate::command::ctl::tier_wait::{ProgressTimeout, is_done};
use crate::command::size;

/// Interval at which a waiting command polls the nodes.
const LOOK: Duration = Duration::from_millis(300);

/// Operations on the SSD tier.
#[derive(Subcommand)]
pub(crate) enum Action {
    /// Show each shard's device: segments, bytes, hits, errors, writes and scrubber.
    Status(Common),
    /// Read and check every record, while requests are served. A damaged record is written again if memory has its
    /// object, or gets its bytes from another owner of its slot, if there is one that has the object; otherwise the
    /// object is a miss from then on. Fails if any record was damaged.
    Verify(Verify),
    /// Reclaim the oldest segments until the given part of each device is free.
    Reclaim(Reclaim),
}

/// Selection of nodes, and output format.
#[derive(Args)]
pub(crate) struct Common {
    /// Number of the only node. Default: all nodes with SSDs.
    #[arg(long)]
    node: Option<u64>,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// Verify every record.
#[derive(Args)]
pub(crate) struct Verify {
    #[command(flatten)]
    common: Common,
    /// Read bandwidth of each node for the verification, in bytes per second.
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = size::parse_some)]
    rate: u64,
    /// Pause a verification in flight; the next `verify` resumes it.
    #[arg(long, conflicts_with = "rate")]
    pause: bool,
    /// Return at once instead of waiting for the end.
    #[arg(long)]
    detach: bool,
}

/// Reclaim log segments.
#[derive(Args)]
pub(crate) struct Reclaim {
    #[command(flatten)]
    common: Common,
    /// Part of each device that is to be free, in percent. 0: cancel an earlier order.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=50))]
    free: u8,
    /// Return at once instead of waiting for the end.
    #[arg(long)]
    detach: bool,
}

pub(crate) fn run(link: &ControlLink, action: &Action) -> Result<(), Failure> {
    match action {
        Action::Status(common) => {
            let nodes = link.call(ListTiers { node: common.node })?.nodes;
            if let Some(node) = common.node.filter(|_| nodes.is_empty()) {
                return Err(format!("node {node} is not known, or has no SSD: start it with --ssd").into());
            }
            if nodes.is_empty() && !common.json {
                println!("no node has an SSD");
            }
            show(&nodes, common.json);
            Ok(())
        }
        Action::Verify(verify) => {
            let bytes_per_s = if verify.pause { 0 } else { verify.rate };
            let wait = !verify.detach && !verify.pause;
            let nodes = order(link, &verify.common, TierAction::Verify { bytes_per_s }, wait)?;
            let bad: u64 = nodes.iter().flat_map(|node| &node.shards).map(|shard| shard.scrub.bad_records).sum();
            match bad {
                1.. if wait => {
                    let text =
                        "those with a copy in memory or on another node are written again, the others are misses";
                    Err(format!("{bad} records were damaged: {text}").into())
                }
                _ => Ok(()),
            }
        }
        Action::Reclaim(reclaim) => {
            let action = TierAction::Reclaim { free_percent: reclaim.free };
            order(link, &reclaim.common, action, !reclaim.detach).map(|_| ())
        }
    }
}

/// Gives an order to the nodes, waits for its end if `wait` is set, and returns the state of the tiers then.
fn order(link: &ControlLink, common: &Common, action: TierAction, wait: bool) -> Result<Vec<TierNode>, Failure> {
    let before = link.call(ListTiers { node: common.node })?.nodes;
    let ordered = link.call(OrderTiers { node: common.node, action })?.orders;
    let narrate = !common.json && std::io::stderr().is_terminal();
    let mut timeout = ProgressTimeout::new(action);
    loop {
        let nodes = link.call(ListTiers { node: common.node })?.nodes;
        let mut open = 0;
        for (number, order) in &ordered {
            let then = before.iter().find(|node| node.node == *number);
            let now = nodes.iter().find(|node| node.node == *number);
            let now = now.ok_or_else(|| format!("node {number} left before the order was done"))?;
            open += usize::from(!is_done(then, now, *order, action, wait)?);
        }
        if open == 0 {
            let nodes: Vec<TierNode> =
                nodes.into_iter().filter(|node| ordered.iter().any(|(number, _)| *number == node.node)).collect();
            show(&nodes, common.json);
            return Ok(nodes);
        }
        if narrate {
            nodes.iter().flat_map(|node| &node.shards).for_each(|shard| eprintln!("{}", progress(shard, action)));
        }
        timeout.check(&nodes)?;
        std::thread::sleep(LOOK);
    }
}

fn progress(shard: &TierShard, action: TierAction) -> String {
    match action {
        TierAction::Verify { .. } => format!(
            "shard {}: {} of about {} records, {} bytes, {} damaged",
            shard.shard, shard.scrub.records, shard.scrub.objects, shard.scrub.bytes, shard.scrub.bad_records
        ),
        TierAction::Reclaim { .. } => format!(
            "shard {}: {} of {} segments free, {} wanted",
            shard.shard, shard.segments.free, shard.segments.all, shard.wanted_free_segments
        ),
    }
}

/// Returns the write amplification: bytes written for each byte of an object.
fn amplification(shard: &TierShard) -> f64 {
    if shard.put_bytes == 0 { 0.0 } else { shard.written_bytes as f64 / shard.put_bytes as f64 }
}

/// Returns the number of segments that are opening, sealing or being reclaimed, or that recovery has not read yet.
const fn others(shard: &TierShard) -> u32 {
    let told = shard.segments.free + shard.segments.sealed + shard.segments.open + shard.segments.bad;
    shard.segments.all.saturating_sub(told)
}

fn show(nodes: &[TierNode], as_json: bool) {
    if as_json {
        println!("{:#}", json!({ "nodes": nodes.iter().map(node_json).collect::<Vec<_>>() }));
        return;
    }
    for node in nodes {
        println!("node {}, as of {} ms ago", node.node, node.age_ns / 1_000_000);
        node.shards.iter().for_each(show_shard);
    }
}

fn show_shard(shard: &TierShard) {
    let gibibytes = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    println!("  shard {}: {}, format {}, {}", shard.shard, shard.device, shard.format, shard.state);
    println!(
        "    segments {}: {} free, {} sealed, {} open, {} bad, {} others; {:.3} GiB live, {:.3} GiB dead, {} objects",
        shard.segments.all,
        shard.segments.free,
        shard.segments.sealed,
        shard.segments.open,
        shard.segments.bad,
        others(shard),
        gibibytes(shard.live_bytes),
        gibibytes(shard.dead_bytes),
        shard.objects
    );
    println!(
        "    hits: {} memory, {} SSD; {} misses; {} prefetched, {} of them used",
        shard.gets.memory_hits, shard.gets.ssd_hits, shard.gets.misses, shard.prefetches.objects, shard.prefetches.used
    );
    let budget = match shard.budget.bytes_per_day {
        0 => "no limit".to_owned(),
        bytes => format!("of {:.3} GiB a day", gibibytes(bytes)),
    };
    println!(
        "    written: {:.3} GiB, amplification {:.2}; last day {:.3} GiB, {budget}; now {}; {} not written over budget",
        gibibytes(shard.written_bytes),
        amplification(shard),
        gibibytes(shard.budget.day_bytes),
        shard.budget.admission,
        shard.budget.not_written
    );
    println!(
        "    errors: {} reads, {} writes; records: {} damaged, {} stale, {} misdirected, {} quarantined, {} rewritten",
        shard.errors.reads,
        shard.errors.writes,
        shard.errors.damaged,
        shard.errors.stale,
        shard.errors.misdirected,
        shard.errors.quarantined,
        shard.errors.rewritten
    );
    println!(
        "    scrub: {} at {} bytes/s; {} of about {} records, {} damaged; {} passes done",
        shard.scrub.state,
        shard.scrub.bytes_per_s,
        shard.scrub.records,
        shard.scrub.objects,
        shard.scrub.bad_records,
        shard.scrub.passes
    );
}

fn node_json(node: &TierNode) -> Value {
    json!({
        "node": node.node,
        "age_ns": node.age_ns,
        "shards": node.shards.iter().map(shard_json).collect::<Vec<_>>(),
    })
}

fn shard_json(shard: &TierShard) -> Value {
    json!({
        "shard": shard.shard,
        "device": shard.device,
        "format": shard.format,
        "state": shard.state,
        "objects": shard.objects,
        "segments": {
            "all": shard.segments.all,
            "free": shard.segments.free,
            "sealed": shard.segments.sealed,
            "open": shard.segments.open,
            "bad": shard.segments.bad,
            "others": others(shard),
            "bytes_each": shard.segments.bytes_each,
            "wanted_free": shard.wanted_free_segments,
        },
        "live_bytes": shard.live_bytes,
        "dead_bytes": shard.dead_bytes,
        "put_bytes": shard.put_bytes,
        "written_bytes": shard.written_bytes,
        "write_amplification": amplification(shard),
        "hits": { "memory": shard.gets.memory_hits, "ssd": shard.gets.ssd_hits, "misses": shard.gets.misses },
        "read_ahead": { "objects": shard.prefetches.objects, "used": shard.prefetches.used },
        "errors": {
            "reads": shard.errors.reads,
            "writes": shard.errors.writes,
            "damaged": shard.errors.damaged,
            "stale": shard.errors.stale,
            "misdirected": shard.errors.misdirected,
            "quarantined": shard.errors.quarantined,
            "rewritten": shard.errors.rewritten,
        },
        "budget": {
            "admission": shard.budget.admission,
            "last_day_bytes": shard.budget.day_bytes,
            "bytes_per_day": shard.budget.bytes_per_day,
            "not_written": shard.budget.not_written,
        },
        "scrub": {
            "state": shard.scrub.state,
            "bytes_per_s": shard.scrub.bytes_per_s,
            "objects": shard.scrub.objects,
            "records": shard.scrub.records,
            "bytes": shard.scrub.bytes,
            "bad_records": shard.scrub.bad_records,
            "passes": shard.scrub.passes,
        },
    })
}
