//! `kvplane ctl shards` and `top`: counters and rates of each shard, as nodes report them with their heartbeats.

mod hot;
mod rates;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use clap::Args;
use kvplane::ControlLink;
use kvplane::rpc::message::{
    DamageFigures, ListHot, ListShards, OperationFigures, ShardFigures, ShardNode, SlowFigures,
};
use serde_json::{Value, json};

use crate::command::Failure;
use crate::command::size;
pub(crate) use hot::Hot;
use hot::Names;
use rates::{Rates, rates};

/// Show the shards of nodes.
#[derive(Args)]
pub(crate) struct Shards {
    /// Number of the only node to show. Default: all nodes.
    #[arg(long)]
    node: Option<u64>,
    /// Print as JSON, with every counter.
    #[arg(long)]
    json: bool,
    /// Show the latest slow requests too, the slowest first, with their objects and the time of each stage.
    #[arg(long)]
    slow: bool,
}

/// Show the rates of shards, live.
#[derive(Args)]
pub(crate) struct Top {
    /// Number of the only node to show. Default: all nodes.
    #[arg(long)]
    node: Option<u64>,
    /// Print one view, over one interval, and end.
    #[arg(long)]
    once: bool,
    /// Print as JSON, one view a line.
    #[arg(long)]
    json: bool,
    /// Interval between two views, in seconds.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
}

fn ask(link: &ControlLink, node: Option<u64>) -> Result<Vec<ShardNode>, Failure> {
    let nodes = link.call(ListShards { node })?.nodes;
    match node {
        Some(node) if nodes.is_empty() => {
            Err(format!("node {node} has not reported: is it a member (ctl status), and of this version?").into())
        }
        _ => Ok(nodes),
    }
}

impl Shards {
    pub(crate) fn run(&self, link: &ControlLink) -> Result<(), Failure> {
        let mut nodes = ask(link, self.node)?;
        let shards = nodes.iter_mut().flat_map(|node| &mut node.shards);
        shards.for_each(|shard| shard.slow.latest.sort_by_key(|slow| std::cmp::Reverse(slow.total_ns)));
        // Names come with another report; without it, objects are shown by their digests.
        let names = if self.slow || self.json { link.call(ListHot { node: self.node }).ok() } else { None };
        let names = names.as_ref().map(Names::of).unwrap_or_default();
        if self.json {
            let nodes: Vec<Value> = nodes.iter().map(|node| node_json(node, &names)).collect();
            println!("{:#}", json!({ "nodes": nodes }));
            return Ok(());
        }
        if nodes.is_empty() {
            println!("no node has reported yet");
        }
        for node in &nodes {
            println!("node {}, as of {} ms ago", node.node, node.age_ns / 1_000_000);
            for shard in &node.shards {
                show_shard(shard);
                if self.slow {
                    shard.slow.latest.iter().for_each(|slow| show_slow(slow, &names));
                }
            }
        }
        Ok(())
    }
}

fn show_shard(shard: &ShardFigures) {
    println!(
        "  shard {} on {}: {} objects of {}; {} of {} used; {} connections",
        shard.shard,
        shard.address,
        shard.objects,
        size::show(shard.object_bytes),
        size::show(shard.pool.used_bytes),
        size::show(shard.pool.bytes),
        shard.connections
    );
    println!(
        "    {} hits, {} misses; {} puts, {} refused; {} removed, {} evicted",
        shard.gets.hits,
        shard.gets.misses,
        shard.puts.objects,
        shard.puts.refusals,
        shard.removes,
        shard.evictions.objects
    );
    if let Some(pool) = &shard.device_pool {
        println!(
            "    device pool: {} objects; {} of {} used; {} gets; {} promoted, {} demoted, {} recalled, {} lost",
            pool.objects,
            size::show(pool.used_bytes),
            size::show(pool.bytes),
            pool.gets,
            pool.promotions,
            pool.demotions,
            pool.recalls,
            pool.lost
        );
    }
    if let Some(pool) = &shard.far_pool {
        println!(
            "    far memory: {} objects; {} of {} used; {} hits; {} demoted, {} promoted, {} evicted",
            pool.objects,
            size::show(pool.used_bytes),
            size::show(pool.bytes),
            pool.hits,
            pool.demotions,
            pool.promotions,
            pool.evictions
        );
    }
    if let Some(ssd) = &shard.ssd {
        println!(
            "    SSD: {} objects of {}; {} hits, {} written, {} waiting",
            ssd.objects,
            size::show(ssd.live_bytes),
            ssd.hits,
            ssd.writes,
            ssd.backlog
        );
    }
    let copies = &shard.copies;
    if copies.second_slots > 0 || copies.elsewhere > 0 {
        println!(
            "    replicas: {} at replica owners, {} kept for other owners; {} made, {} failed, \
             {} outstanding removals; {} gets served, {} taken over",
            copies.elsewhere,
            copies.here,
            copies.made,
            copies.failed,
            copies.outstanding,
            copies.served,
            copies.inherited
        );
    }
    show_damage("memory", &shard.memory_damage);
    show_damage("SSD", &shard.ssd_damage);
    for one in shard.operations.iter().filter(|one| one.operation != "hello") {
        println!(
            "    {:<14} {:>10}  p50 {:>9}  p99 {:>9}  p99.9 {:>9}{}",
            kind(one),
            one.count,
            time(one.quantile_ns(0.5)),
            time(one.quantile_ns(0.99)),
            time(one.quantile_ns(0.999)),
            if one.failed > 0 { format!("  {} failed", one.failed) } else { String::new() }
        );
    }
    if shard.slow.count > 0 {
        println!("    {} slower than {}", shard.slow.count, time(shard.slow.after_ns));
    }
}

/// Prints the damage of a medium, once some was found.
fn show_damage(medium: &str, damage: &DamageFigures) {
    if damage.found > 0 {
        println!(
            "    damage in {medium}: {} found, {} repaired, {} lost, {} outstanding; {} checked in {} passes",
            damage.found,
            damage.repaired,
            damage.lost,
            damage.outstanding,
            size::show(damage.checked_bytes),
            damage.passes
        );
    }
}

fn show_slow(slow: &SlowFigures, names: &Names) {
    let object = slow.digest.map_or_else(String::new, |digest| format!(" of {}", names.object(digest)));
    println!(
        "    slow: {}{object}, {} bytes, {} ago: {} = {} receive + {} ssd + {} send + {} else; {}",
        slow.operation,
        slow.bytes,
        time(slow.age_ns),
        time(slow.total_ns),
        time(slow.receive_ns),
        time(slow.ssd_ns),
        time(slow.send_ns),
        time(slow.total_ns.saturating_sub(slow.receive_ns + slow.ssd_ns + slow.send_ns)),
        slow.status
    );
}

fn kind(one: &OperationFigures) -> String {
    if one.ssd { format!("{} (SSD)", one.operation) } else { one.operation.clone() }
}

/// Formats a duration with a unit that suits it.
fn time(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} µs", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

/// Adds the names of objects to the slow requests of a shard.
fn named(mut shard: Value, names: &Names) -> Value {
    let slow = shard.pointer_mut("/slow/latest").and_then(Value::as_array_mut);
    for one in slow.into_iter().flatten() {
        let digest = one.get("digest").and_then(Value::as_str).and_then(|hex| u128::from_str_radix(hex, 16).ok());
        if let (Some((tenant, key)), Some(fields)) = (digest.and_then(|digest| names.name(digest)), one.as_object_mut())
        {
            fields.insert("tenant".to_owned(), tenant.into());
            fields.insert("key".to_owned(), key.into());
        }
    }
    shard
}

fn node_json(node: &ShardNode, names: &Names) -> Value {
    let shards = node.shards.iter().map(|shard| named(kvplane_server::shard_json(shard), names));
    json!({
        "node": node.node,
        "age_ns": node.age_ns,
        "shards": shards.collect::<Vec<_>>(),
    })
}

impl Top {
    pub(crate) fn run(&self, link: &ControlLink) -> Result<(), Failure> {
        let redraw = !self.json && !self.once && std::io::stdout().is_terminal();
        let (mut before, mut shown) = (ask(link, self.node)?, Vec::new());
        loop {
            // A node that has not reported in this interval is shown as before.
            let until = Instant::now() + Duration::from_secs(self.interval);
            std::thread::sleep(until - Instant::now());
            let now = ask(link, self.node)?;
            let elapsed = Duration::from_secs(self.interval);
            shown = rates(&before, &now, elapsed, &shown);
            before = now;
            let text = if self.json { lines_json(&shown) } else { table(&shown) };
            let mut out = std::io::stdout().lock();
            if redraw {
                // Moves the cursor to the top left and clears the screen from there.
                out.write_all(b"\x1b[H\x1b[2J")?;
            }
            // A failed write means that the reader has closed the pipe: the command ends without an error.
            if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() || self.once {
                return Ok(());
            }
        }
    }
}

fn lines_json(shown: &[Rates]) -> String {
    let shards: Vec<Value> = shown
        .iter()
        .map(|one| {
            json!({
                "node": one.node,
                "shard": one.shard,
                "objects": one.objects,
                "used_bytes": one.used_bytes,
                "pool_bytes": one.pool_bytes,
                "gets_per_s": one.gets,
                "hit_ratio": one.hit_ratio,
                "ssd_hits_per_s": one.ssd_hits,
                "puts_per_s": one.puts,
                "evictions_per_s": one.evictions,
                "get_bytes_per_s": one.get_bytes,
                "put_bytes_per_s": one.put_bytes,
                "get_p50_ns": one.get_p50_ns,
                "get_p99_ns": one.get_p99_ns,
                "slow_per_s": one.slow,
                "cpu": one.cpu,
            })
        })
        .collect();
    json!({ "shards": shards }).to_string()
}

fn table(shown: &[Rates]) -> String {
    let mut text = format!(
        "{:>20} {:>5} {:>10} {:>5} {:>10} {:>5} {:>8} {:>9} {:>8} {:>10} {:>10} {:>9} {:>9} {:>5}",
        "node",
        "shard",
        "objects",
        "used",
        "gets/s",
        "hits",
        "SSD/s",
        "puts/s",
        "evict/s",
        "out/s",
        "in/s",
        "p50",
        "p99",
        "cpu"
    );
    for one in shown {
        let used = (one.used_bytes * 100).checked_div(one.pool_bytes).unwrap_or(0);
        text.push_str(&format!(
            "\n{:>20} {:>5} {:>10} {:>4}% {:>10.0} {:>4.0}% {:>8.0} {:>9.0} {:>8.0} {:>10} {:>10} {:>9} {:>9} {:>4.0}%",
            one.node,
            one.shard,
            one.objects,
            used,
            one.gets,
            one.hit_ratio * 100.0,
            one.ssd_hits,
            one.puts,
            one.evictions,
            size::show(one.get_bytes as u64),
            size::show(one.put_bytes as u64),
            time(one.get_p50_ns),
            time(one.get_p99_ns),
            one.cpu * 100.0
        ));
    }
    if shown.is_empty() {
        text.push_str("\nno node has reported yet");
    }
    text
}
