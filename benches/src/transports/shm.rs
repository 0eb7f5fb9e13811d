//! Shared memory, 1 MiB objects, against memcpy of a cold working set by one thread.

use std::time::Instant;

use kvplane::{Buffer, Client, HugePages, Region, RegionOptions};

use crate::Failure;
use crate::bed::{Bed, client_config};
use crate::rounds::Series;

const BLOCK_BYTES: usize = 1 << 20;
/// Number of blocks of the working set: far larger than a core's caches.
const BLOCKS: usize = 512;
const BATCH: usize = 8;

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("shm-stream: {BLOCKS} objects of 1 MiB, cold, one client, against one thread's memcpy of as much");
    let bed = Bed::start(((BLOCKS * 5 / 4) * BLOCK_BYTES) as u64, "adaptive")?;
    println!("  {}", bed.node.notes().last().map_or("", String::as_str));
    let (source, mut destination) = (vec![1u8; BLOCKS * BLOCK_BYTES], vec![2u8; BLOCKS * BLOCK_BYTES]);
    let mut client = Client::connect(&client_config("shm", "adaptive", bed.directory.text())?)?;
    let mut unverified = Client::connect(&kvplane::ClientConfig {
        verify_shared: false,
        ..client_config("shm", "adaptive", bed.directory.text())?
    })?;
    let options = RegionOptions {
        huge: HugePages::Try,
        prefault: true,
        ..RegionOptions::new("bench-blocks", BLOCKS * BLOCK_BYTES)
    };
    let region = Region::allocate(&options)?;
    let memory = client.register(std::sync::Arc::clone(&region));
    let memory_unverified = unverified.register(region);
    let mut series = [
        Series::new("memcpy", "GB/s"),
        Series::new("put, with its checksum", "GB/s"),
        Series::new("get, checksum verified", "GB/s"),
        Series::new("get, unverified", "GB/s"),
    ];
    for round in 0..rounds {
        let keys: Vec<String> = (0..BLOCKS).map(|n| format!("block-{round}-{n}")).collect();
        series[0].push(rate(|| {
            for (to, from) in destination.chunks_exact_mut(BLOCK_BYTES).zip(source.chunks_exact(BLOCK_BYTES)) {
                std::hint::black_box(to).copy_from_slice(std::hint::black_box(from));
            }
            Ok(())
        })?);
        series[1].push(rate(|| put(&mut client, &memory, &keys))?);
        series[2].push(rate(|| get(&mut client, &memory, &keys))?);
        series[3].push(rate(|| get(&mut unverified, &memory_unverified, &keys))?);
        client.batch_remove(&keys)?;
    }
    series.iter().for_each(Series::show);
    for ours in &series[1..] {
        ours.show_ratio(&series[0], "at least 0.8");
    }
    Ok(())
}

/// Returns the GB/s of one pass over the working set.
fn rate(pass: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    pass()?;
    Ok((BLOCKS * BLOCK_BYTES) as f64 / 1e9 / start.elapsed().as_secs_f64())
}

fn put(client: &mut Client, memory: &Buffer, keys: &[String]) -> Result<(), Failure> {
    for (at, part) in keys.chunks(BATCH).enumerate() {
        let items: Vec<_> = part.iter().enumerate().map(|(n, key)| (key, slice(memory, at * BATCH + n))).collect();
        for outcome in client.batch_put_from(&items)? {
            outcome?;
        }
    }
    Ok(())
}

fn get(client: &mut Client, memory: &Buffer, keys: &[String]) -> Result<(), Failure> {
    for (at, part) in keys.chunks(BATCH).enumerate() {
        let items: Vec<_> = part.iter().enumerate().map(|(n, key)| (key, slice(memory, at * BATCH + n))).collect();
        for outcome in client.batch_get_into(&items)? {
            outcome?.ok_or("an object is missing")?;
        }
    }
    Ok(())
}

fn slice(memory: &Buffer, block: usize) -> kvplane::Slice {
    memory.slice(block * BLOCK_BYTES, BLOCK_BYTES)
}
