//! Recovery after a restart: its speed, the time to the first object, and the memory of a key.

use std::fs;
use std::time::{Duration, Instant};

use kvplane_proto::rng::Rng;
use kvplane_sys::cpu;
use kvplane_tier::{Get, Priority, Span, TierConfig, Token};

use super::alone::{Alone, anonymous_bytes, digest};
use super::{MEMORY, Options, Scratch};
use crate::Failure;
use crate::rounds::Series;

/// Size of the objects: short, so that millions of keys need no large device.
const OBJECT_BYTES: u32 = 64;
/// Size of a segment: short, so that the last, which has no footer and is scanned, is a small part of all.
const SEGMENT_BYTES: u64 = 32 << 20;
/// Number of keys that are read after each round until one is found.
const TRIES: u64 = 16;

/// Measures restarts on a device with this number of keys.
pub(crate) fn run(words: &[String]) -> Result<(), Failure> {
    let options = Options::parse(words)?;
    let keys = options.keys;
    let file = Scratch(options.beside("-recovery"));
    drop(fs::remove_file(&file.0));
    // A record takes 192 bytes and a footer's entry 56; some segments are kept free.
    let segments = keys * 256 / SEGMENT_BYTES + 6;
    let file_bytes = (1 << 20) + segments * SEGMENT_BYTES;
    println!("tier-recovery: {keys} keys in {segments} segments of {} MiB", SEGMENT_BYTES >> 20);
    let change = |config: &mut TierConfig| {
        config.segment_bytes = SEGMENT_BYTES;
        config.segments = segments as u32;
        config.max_bad_segments = config.max_bad_segments.min(config.segments);
        config.footer_pages = 512;
        // Reclaim begins when a 32nd of the index is left.
        config.max_records = (keys + keys / 31 + 64) as u32;
    };
    let mut filler = Alone::open(&file.0, file_bytes, MEMORY, change)?;
    filler.fill(0..keys, OBJECT_BYTES)?;
    filler.settle()?;
    drop(filler);
    let mut rng = Rng::new(1, "tier-recovery");
    let mut series = [
        Series::new("until an object was given", "ms"),
        Series::new("until all keys were known", "ms"),
        Series::new("CPU time of that", "ms"),
        Series::new("million keys a second of CPU time", "   "),
        Series::new("memory for each key", "bytes"),
    ];
    for _ in 0..options.rounds {
        let (start, cpu_ns) = (Instant::now(), cpu::thread_cpu_ns());
        let mut ours = Alone::open(&file.0, file_bytes, MEMORY, change)?;
        let first_hit = first_hit(&mut ours, keys, &mut rng, start)?;
        ours.until_recovered()?;
        let (all, cpu_ns) = (start.elapsed(), cpu::thread_cpu_ns() - cpu_ns);
        let known = u64::from(ours.tier.stats().objects);
        if known != keys {
            return Err(format!("{known} of {keys} keys are known").into());
        }
        let memory = anonymous_bytes()?.saturating_sub(ours.anonymous_bytes);
        series[0].push(first_hit.as_secs_f64() * 1e3);
        series[1].push(all.as_secs_f64() * 1e3);
        series[2].push(cpu_ns as f64 / 1e6);
        series[3].push(keys as f64 * 1e3 / cpu_ns as f64);
        series[4].push(memory as f64 / keys as f64);
    }
    series.iter().for_each(Series::show);
    println!(
        "  wanted: an object within 1000 ms, at least 1 million keys a second of a core, at most 64 bytes for a key"
    );
    Ok(())
}

/// Reads random keys until one is found.
fn first_hit(ours: &mut Alone, keys: u64, rng: &mut Rng, start: Instant) -> Result<Duration, Failure> {
    loop {
        for _ in 0..TRIES {
            let destination = Span::pool(0, OBJECT_BYTES);
            let get = Get { digest: digest(rng.below(keys)), destination, priority: Priority::Get, token: Token(0) };
            if ours.tier.get(&get).is_ok() {
                while !ours.take_ended()? {
                    ours.round()?;
                }
                return Ok(start.elapsed());
            }
        }
        ours.round()?;
    }
}
