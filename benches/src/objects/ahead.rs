//! Gets of objects that only the SSD has, with and without a prefetch by the exists before them.

use std::time::{Duration, Instant};

use kvplane::{Buffer, Client, NodeConfig, NodeId, Region, RegionOptions, SsdConfig, TierPolicy};

use crate::Failure;
use crate::bed::{Bed, client_config};
use crate::rounds::{Series, median};

const POOL_BYTES: u64 = 64 << 20;
const SSD_BYTES: u64 = 1 << 30;
/// Eight times the memory, so that objects that were not accessed lately are on the SSD only.
const STORED_BYTES: u64 = 8 * POOL_BYTES;
/// Number of gets of a kind in a round.
const GETS: usize = 100;
/// Time between exists and get: that of an engine that schedules a request.
const LEAD: Duration = Duration::from_millis(10);
const WAY: &str = "shm";

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!(
        "read ahead on exists: p50 of gets from the SSD, {} ms after the exists, {rounds} rounds",
        LEAD.as_millis()
    );
    for bytes in [64 << 10, 1 << 20] {
        of_size(bytes, rounds)?;
    }
    Ok(())
}

fn of_size(bytes: usize, rounds: usize) -> Result<(), Failure> {
    let bed = Bed::start_with(POOL_BYTES, "park", |config, directory| {
        let ssd = SsdConfig { path: directory.join("ssd"), bytes: Some(SSD_BYTES) };
        let tier = TierPolicy { prefetch_percent: 25, ..TierPolicy::default() };
        NodeConfig { node: Some(NodeId(1)), ssds: vec![ssd], tier, shards: Some(1), ..config }
    })?;
    let mut client = Client::connect(&client_config(WAY, "park", bed.directory.text())?)?;
    let buffer = client.register(Region::allocate(&RegionOptions::new("ahead", bytes))?);
    let count = STORED_BYTES / bytes as u64;
    let mut value = vec![0; bytes];
    for key in 0..count {
        value.chunks_exact_mut(8).enumerate().for_each(|(at, word)| {
            word.copy_from_slice(&(key.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at as u64).to_le_bytes());
        });
        client.put(&key.to_le_bytes(), &value)?;
        // Puts are no faster than the device, so that all objects are written.
        while bed.node.snapshots()?.iter().any(|one| one.tier.is_some_and(|tier| tier.backlog > 8)) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let size = format!("{} KiB", bytes >> 10);
    let (mut plain, mut ahead) =
        (Series::new(format!("{size}, plain"), "us"), Series::new(format!("{size}, ahead"), "us"));
    let mut next = 0;
    for round in 0..rounds {
        for turn in 0..2 {
            let is_ahead = (round + turn) % 2 == 1;
            let p50 = gets(&mut client, &buffer, bytes, &mut next, count, is_ahead)?;
            if is_ahead { ahead.push(p50) } else { plain.push(p50) }
        }
    }
    plain.show();
    ahead.show();
    ahead.show_ratio(&plain, "at most 0.5");
    Ok(())
}

/// Returns the median latency of gets in turn, in microseconds: each object was accessed last before all others.
fn gets(
    client: &mut Client,
    buffer: &Buffer,
    bytes: usize,
    next: &mut u64,
    count: u64,
    ahead: bool,
) -> Result<f64, Failure> {
    let mut times = Vec::with_capacity(GETS);
    for _ in 0..GETS {
        let key = (*next % count).to_le_bytes();
        *next += 1;
        let there = if ahead { client.batch_exists_ahead(&[key])? } else { client.batch_exists(&[key])? };
        if !there[0] {
            return Err("an object is missing".into());
        }
        std::thread::sleep(LEAD);
        let start = Instant::now();
        let got = client.get_into(&key, buffer.slice(0, bytes))?;
        times.push(start.elapsed().as_nanos() as f64 / 1e3);
        if got.is_none_or(|got| got.bytes != bytes as u64) {
            return Err("an object is missing or has changed".into());
        }
    }
    Ok(median(&mut times))
}
