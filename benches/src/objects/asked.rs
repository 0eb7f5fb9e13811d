//! Cost of small requests to the store: a put of 4 KiB beside a get of it, and exists one by one and in batches.

use std::time::Instant;

use kvplane::{Buffer, Client, HugePages, Region, RegionOptions, Slice};
use kvplane_proto::rng::mix64;

use crate::Failure;
use crate::bed::{Bed, client_config};
use crate::rounds::{Series, median};

const BYTES: usize = 4096;
const CALLS: usize = 5_000;
/// Number of existing keys; half of the requested keys exist.
const KEYS: u64 = 1_000_000;
const OBJECT_BYTES: u64 = 200;
/// Size of an object with its key, in the pool's units.
const TAKEN_BYTES: u64 = 256;
const ASKED: u64 = 1 << 20;
const ASKED_SINGLY: u64 = 20_000;

/// Measures the p50 of a put of 4 KiB against that of a get, in turns.
pub(crate) fn put_latency(rounds: usize) -> Result<(), Failure> {
    println!("put-latency: p50 of a put of 4 KiB against a get of as much, one client");
    for way in ["tcp", "shm"] {
        let bed = Bed::start(256 << 20, "adaptive")?;
        let mut client = Client::connect(&client_config(way, "adaptive", bed.directory.text())?)?;
        let memory = client.register(Region::allocate(&RegionOptions::new("put-latency", BYTES))?);
        let (slice, mut puts_us, mut gets_us) = (memory.slice(0, BYTES), Vec::new(), Vec::new());
        let mut series = [Series::new(format!("{way}: put"), "us"), Series::new(format!("{way}: get"), "us")];
        for round in 0..rounds {
            let keys: Vec<String> = (0..CALLS).map(|call| format!("{round}-{call}")).collect();
            puts_us.clear();
            gets_us.clear();
            // Short runs alternate, so that both kinds meet the same background load.
            for some in keys.chunks(100) {
                for key in some {
                    puts_us.push(us(|| client.put_from(key.as_bytes(), slice).map(|_| true).map_err(Into::into))?);
                }
                for key in some {
                    gets_us.push(us(|| Ok(client.get_into(key.as_bytes(), slice)?.is_some()))?);
                }
            }
            series[0].push(median(&mut puts_us));
            series[1].push(median(&mut gets_us));
            client.batch_remove(&keys)?;
        }
        series.iter().for_each(Series::show);
        series[0].show_ratio(&series[1], "at most 1.3");
    }
    Ok(())
}

/// Returns the time of a call, which returns true if it succeeded.
fn us(call: impl FnOnce() -> Result<bool, Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    if !call()? {
        return Err("an object is missing".into());
    }
    Ok(start.elapsed().as_nanos() as f64 / 1e3)
}

/// Measures exists of a million keys, half of the requested ones.
pub(crate) fn exists(rounds: usize) -> Result<(), Failure> {
    println!("exists: of {KEYS} keys and as many that are not there, one thread");
    for way in ["tcp", "shm"] {
        let room = KEYS + KEYS / 20;
        let bed = Bed::with_objects(room * TAKEN_BYTES, Some(room), "adaptive")?;
        let mut client = Client::connect(&client_config(way, "adaptive", bed.directory.text())?)?;
        let options = RegionOptions { huge: HugePages::Try, ..RegionOptions::new("exists", 1 << 20) };
        let memory = client.register(Region::allocate(&options)?);
        fill(&mut client, &memory)?;
        let shapes = [("one by one", 1, 80.0), ("batches of 1,024", 1024, 5e3), ("batches of 32,768", 32_768, 5e3)];
        for (name, batch, least) in shapes {
            let mut series = Series::new(format!("{way}: {name}"), "k/s");
            for round in 0..rounds as u64 {
                series.push(rate(&mut client, batch, round)?);
            }
            series.show();
            println!("  {:44} wanted: at least {least} k/s", "");
        }
    }
    Ok(())
}

fn fill(client: &mut Client, memory: &Buffer) -> Result<(), Failure> {
    let slice = memory.slice(0, OBJECT_BYTES as usize);
    for first in (0..KEYS).step_by(1024) {
        let names: Vec<String> = (first..KEYS.min(first + 1024)).map(key).collect();
        let items: Vec<(&String, Slice)> = names.iter().map(|name| (name, slice)).collect();
        for outcome in client.batch_put_from(&items)? {
            outcome?;
        }
    }
    Ok(())
}

/// Returns thousands of keys checked per second; every answer is verified.
fn rate(client: &mut Client, batch: usize, round: u64) -> Result<f64, Failure> {
    let asked = if batch == 1 { ASKED_SINGLY } else { ASKED };
    let numbers: Vec<u64> = (0..asked).map(|n| mix64(round << 40 | n) % (2 * KEYS)).collect();
    let names: Vec<String> = numbers.iter().copied().map(key).collect();
    let mut found = Vec::with_capacity(names.len());
    let start = Instant::now();
    if batch == 1 {
        for name in &names {
            found.push(client.exists(name.as_bytes())?);
        }
    } else {
        for some in names.chunks(batch) {
            found.append(&mut client.batch_exists(some)?);
        }
    }
    let elapsed_s = start.elapsed().as_secs_f64();
    match numbers.iter().zip(&found).find(|(number, here)| (**number < KEYS) != **here) {
        Some((number, _)) => Err(format!("exists of key {number} is wrong").into()),
        None => Ok(asked as f64 / elapsed_s / 1e3),
    }
}

fn key(number: u64) -> String {
    format!("key-{number:08}")
}
