//! Tail latency of gets: alone, during evictions at full speed, and while a node joins and leaves.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvplane::{Client, Node, Region, RegionOptions};

use crate::Failure;
use crate::bed::{Bed, another_node, client_config};
use crate::peer::{Peer, say};
use crate::rounds::spread;

/// First word of the role that puts without end.
pub(crate) const ROLE_CHURN: &str = "churn";
const BYTES: usize = 4096;
const HOT: usize = 1_000;
const GETS: usize = 50_000;
const POOL_BYTES: u64 = 512 << 20;
const CHURNED_BYTES: usize = 64 << 10;
const CHURNED: usize = 16;
const STAY: Duration = Duration::from_millis(300);

/// Background activity.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    Evictions,
    Joins,
}

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("get-tails: {GETS} gets of 4 KiB, one client, {HOT} keys in turns; wanted: p99.9 at most 10 x p50");
    for way in ["tcp", "shm"] {
        for (name, meanwhile) in [
            ("alone", Meanwhile::Nothing),
            ("while another client's puts evict", Meanwhile::Evictions),
            ("while a node joins and leaves", Meanwhile::Joins),
        ] {
            let bed = Bed::start(POOL_BYTES, "adaptive")?;
            let (mut ratios, mut p50s, mut notes) = (Vec::new(), Vec::new(), String::new());
            for _ in 0..rounds {
                let round = round(&bed, way, meanwhile)?;
                ratios.push(round.p999_us / round.p50_us);
                p50s.push(round.p50_us);
                notes = round.notes;
            }
            let ((least, ratio, most), (_, p50, _)) = (spread(&ratios), spread(&p50s));
            println!(
                "  {:44} {ratio:9.2}    ({least:.2} .. {most:.2}), p50 {p50:.1} us{notes}",
                format!("{way}: {name}")
            );
        }
    }
    Ok(())
}

struct Round {
    p50_us: f64,
    p999_us: f64,
    notes: String,
}

fn round(bed: &Bed, way: &str, meanwhile: Meanwhile) -> Result<Round, Failure> {
    let mut client = Client::connect(&client_config(way, "adaptive", bed.directory.text())?)?;
    let memory = client.register(Region::allocate(&RegionOptions::new("tails", BYTES))?);
    let slice = memory.slice(0, BYTES);
    let keys: Vec<String> = (0..HOT).map(|n| format!("hot-{n}")).collect();
    // It reports when each of its puts evicts.
    let churn = match meanwhile {
        Meanwhile::Evictions => Some(Peer::start(&[ROLE_CHURN, way, bed.directory.text()])?),
        _ => None,
    };
    for key in keys.iter().chain(&keys) {
        client.put_from(key.as_bytes(), slice)?;
    }
    let before = counted(bed)?;
    let (mut samples_us, mut missed, start) = (Vec::with_capacity(GETS), 0u32, Instant::now());
    let stop = AtomicBool::new(meanwhile != Meanwhile::Joins);
    let directory = bed.directory.0.as_path();
    let joins = std::thread::scope(|scope| -> Result<u32, Failure> {
        let joins = scope.spawn(|| join_and_leave(directory, &stop).map_err(|error| error.to_string()));
        let outcome = (0..GETS).try_for_each(|n| {
            let begin = Instant::now();
            let here = client.get_into(keys[n % HOT].as_bytes(), slice)?.is_some();
            samples_us.push(begin.elapsed().as_nanos() as f64 / 1e3);
            missed += u32::from(!here);
            Ok::<(), Failure>(())
        });
        stop.store(true, Ordering::Relaxed);
        let joins = joins.join().unwrap_or_else(|_| Err("it panicked".to_owned()))?;
        outcome.map(|()| joins)
    })?;
    drop(churn);
    let (evicted, elapsed_s) = (counted(bed)?.saturating_sub(before), start.elapsed().as_secs_f64());
    samples_us.sort_by(f64::total_cmp);
    let at = |share: f64| samples_us[(share * samples_us.len() as f64) as usize];
    let notes = match meanwhile {
        Meanwhile::Nothing => String::new(),
        Meanwhile::Evictions => format!("; {:.0} evictions a second, {missed} missed", evicted as f64 / elapsed_s),
        Meanwhile::Joins => format!("; {joins} joins, {missed} missed"),
    };
    Ok(Round { p50_us: at(0.5), p999_us: at(0.999), notes })
}

/// Returns the number of objects that the node has evicted.
fn counted(bed: &Bed) -> Result<u64, Failure> {
    let stores = bed.node.snapshots()?.into_iter().filter_map(|shard| shard.store);
    Ok(stores.map(|store| store.evictions).sum())
}

/// Lets another node join and leave the cluster until `stop`.
fn join_and_leave(directory: &Path, stop: &AtomicBool) -> Result<u32, Failure> {
    let mut joins = 0;
    while !stop.load(Ordering::Relaxed) {
        let node: Node = another_node(directory, POOL_BYTES / 8)?;
        joins += 1;
        std::thread::sleep(STAY);
        drop(node);
        std::thread::sleep(STAY);
    }
    Ok(joins)
}

/// Puts new keys at full speed until its parent ends it.
pub(crate) fn churn(way: &str, directory: &str) -> Result<(), Failure> {
    let mut client = Client::connect(&client_config(way, "adaptive", directory)?)?;
    let memory = client.register(Region::allocate(&RegionOptions::new("churn", CHURNED * CHURNED_BYTES))?);
    let mut batches = 0u64;
    loop {
        let keys: Vec<String> = (0..CHURNED).map(|n| format!("churn-{}-{batches}-{n}", std::process::id())).collect();
        let slice = |n| memory.slice(n * CHURNED_BYTES, CHURNED_BYTES);
        let items: Vec<_> = keys.iter().enumerate().map(|(n, key)| (key, slice(n))).collect();
        for outcome in client.batch_put_from(&items)? {
            outcome?;
        }
        batches += 1;
        // The pool is full from here on, and each put evicts.
        if batches == 2 * POOL_BYTES / (CHURNED * CHURNED_BYTES) as u64 {
            say("full")?;
        }
    }
}
