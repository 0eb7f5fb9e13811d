//! Ten million keys on one node: the memory of each, and the latency of lookups compared with a hundred thousand keys.
//!
//! The memory is the process's own, as the kernel counts it (`RssAnon`, which excludes the shared memory of objects),
//! before and after the keys are put. Lookups access keys in an order that no cache can predict: one by one and in
//! batches through a client over shared memory, and in the store alone.

use std::time::Instant;

use kvplane::{Client, HugePages, Region, RegionOptions};
use kvplane_proto::rng::mix64;
use kvplane_proto::{Digest, Version};
use kvplane_store::{Store, StoreConfig};

use crate::Failure;
use crate::bed::{Bed, client_config};
use crate::rounds::Series;

const FEW: u64 = 100_000;
const MANY: u64 = 10_000_000;
/// Size of an object in the pool: the minimum.
const OBJECT_BYTES: u64 = 256;
/// Size of a value, which leaves space for its key behind it.
const VALUE_BYTES: usize = 200;
const BATCH: usize = 1024;
/// Number of keys looked up in one measurement.
const ASKED: u64 = 200 * BATCH as u64;
/// Number of keys looked up one by one.
const ASKED_SINGLY: u64 = 20_000;

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("keys: {MANY} keys on one node beside {FEW}, objects of {OBJECT_BYTES} B");
    store_alone(rounds)?;
    let (mut few, mut many) = (Node::with(FEW)?, Node::with(MANY)?);
    for node in [&few, &many] {
        println!("  {:>9} keys: {:6.1} B of memory each, wanted: at most 100", node.keys, node.bytes_per_key);
    }
    let mut series = [
        Series::new("100 thousand, one by one", "k/s"),
        Series::new("10 million, one by one", "k/s"),
        Series::new("100 thousand, batches of 1024", "k/s"),
        Series::new("10 million, batches of 1024", "k/s"),
    ];
    for round in 0..rounds as u64 {
        series[0].push(few.singly(round)?);
        series[1].push(many.singly(round)?);
        series[2].push(few.batched(round)?);
        series[3].push(many.batched(round)?);
    }
    show(&series);
    Ok(())
}

/// Prints the rates, and each with many keys as a fraction of that with few.
fn show(series: &[Series]) {
    series.iter().for_each(Series::show);
    for pair in series.chunks(2) {
        pair[1].show_ratio(&pair[0], "at least 0.77");
    }
}

/// Measures the store without a node around it.
fn store_alone(rounds: usize) -> Result<(), Failure> {
    let (few, many) = (filled(FEW)?, filled(MANY)?);
    let mut series = [
        Series::new("store, 100 thousand, one by one", "k/s"),
        Series::new("store, 10 million, one by one", "k/s"),
        Series::new("store, 100 thousand, together", "k/s"),
        Series::new("store, 10 million, together", "k/s"),
    ];
    for round in 0..rounds as u64 {
        for (at, (store, keys)) in [(&few, FEW), (&many, MANY)].into_iter().enumerate() {
            series[at].push(rate(ASKED, || {
                Ok((0..ASKED).filter(|n| store.exists(digest(pick(round, *n, keys)))).count() as u64)
            })?);
            series[2 + at].push(rate(ASKED, || {
                let mut there = 0;
                let digests = (0..ASKED).map(|n| digest(pick(round, n, keys)));
                store.objects().exist(digests, |_, here| there += u64::from(here));
                Ok(there)
            })?);
        }
    }
    show(&series);
    Ok(())
}

fn filled(keys: u64) -> Result<Store, Failure> {
    let pool_bytes = keys * OBJECT_BYTES;
    let config = StoreConfig { max_objects: u32::try_from(keys)?, hash_seed: 77, ..StoreConfig::for_pool(pool_bytes) };
    let mut store = Store::new(config, Version(1))?;
    for key in 0..keys {
        let (reservation, _) = store.reserve(digest(key), OBJECT_BYTES)?;
        store.commit(reservation, key)?;
    }
    Ok(store)
}

/// Returns a digest that is as random as that of any key.
fn digest(key: u64) -> Digest {
    Digest(u128::from(mix64(key)) << 64 | u128::from(mix64(!key)))
}

/// Returns one of `keys` keys, in random order.
const fn pick(round: u64, n: u64, keys: u64) -> u64 {
    mix64(round << 40 | n) % keys
}

/// Returns thousands of keys found per second; every one must exist.
fn rate(asked: u64, ask: impl FnOnce() -> Result<u64, Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    let there = ask()?;
    let elapsed_s = start.elapsed().as_secs_f64();
    if there != asked {
        return Err(format!("{there} of {asked} keys are there").into());
    }
    Ok(asked as f64 / elapsed_s / 1e3)
}

/// Node that holds keys, and a client of it.
struct Node {
    client: Client,
    keys: u64,
    bytes_per_key: f64,
    _bed: Bed,
}

impl Node {
    fn with(keys: u64) -> Result<Self, Failure> {
        // Keys fall to shards at random: a margin keeps any from being evicted.
        let room = keys + keys / 50;
        let bed = Bed::with_objects(room * OBJECT_BYTES, Some(room), "adaptive")?;
        let mut client = Client::connect(&client_config("shm", "adaptive", bed.directory.text())?)?;
        let options = RegionOptions { huge: HugePages::Try, ..RegionOptions::new("bench-keys", 1 << 20) };
        let memory = client.register(Region::allocate(&options)?);
        // A first batch allocates the memory that client and shard need regardless of the keys.
        let warm: Vec<String> = (0..BATCH as u64).map(key).collect();
        client.batch_exists(&warm)?;
        let before_bytes = anonymous_bytes()?;
        for first in (0..keys).step_by(BATCH) {
            let names: Vec<String> = (first..keys.min(first + BATCH as u64)).map(key).collect();
            let slice = memory.slice(0, VALUE_BYTES);
            let items: Vec<(&String, kvplane::Slice)> = names.iter().map(|name| (name, slice)).collect();
            for outcome in client.batch_put_from(&items)? {
                outcome?;
            }
        }
        let bytes_per_key = (anonymous_bytes()? - before_bytes) / keys as f64;
        Ok(Self { client, keys, bytes_per_key, _bed: bed })
    }

    fn singly(&mut self, round: u64) -> Result<f64, Failure> {
        let names: Vec<String> = (0..ASKED_SINGLY).map(|n| key(pick(round, n, self.keys))).collect();
        rate(ASKED_SINGLY, || {
            let mut there = 0;
            for name in &names {
                there += u64::from(self.client.exists(name.as_bytes())?);
            }
            Ok(there)
        })
    }

    fn batched(&mut self, round: u64) -> Result<f64, Failure> {
        let names: Vec<String> = (0..ASKED).map(|n| key(pick(round, n, self.keys))).collect();
        rate(ASKED, || {
            let mut there = 0;
            for batch in names.chunks(BATCH) {
                there += self.client.batch_exists(batch)?.into_iter().filter(|here| *here).count() as u64;
            }
            Ok(there)
        })
    }
}

fn key(number: u64) -> String {
    format!("key-{number:08}")
}

/// Returns the anonymous private memory of this process.
fn anonymous_bytes() -> Result<f64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).ok_or("the kernel tells no RssAnon")?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib * 1024.0)
}
