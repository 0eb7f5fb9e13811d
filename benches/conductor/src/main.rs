//! `cargo x bench conductor-index`: the prefix index beside `kv-index` and `dynamo-kv-router`, on one core.
//!
//! All indexes get the same events: each request of a trace is stored by one worker, chosen by its number, and in part
//! by others; then each index is queried for every request once. kvplane's answers with the eight deepest holders, the
//! others score every worker that holds a block, because that is their interface. Rounds alternate, and the median of
//! the rounds' ratios counts. Every call is timed, and the slowest thousandth of a round is left out for each index:
//! that is where other processes had the core, for milliseconds instead of nanoseconds. The answers for the deepest
//! holder are compared, so that no index is fast by being wrong.

#![forbid(unsafe_code)]

mod events;
mod rivals;
mod subjects;

use std::process::ExitCode;
use std::time::Instant;

use events::{Load, Shape};
use subjects::{Subject, all};

/// Measurements of one index in one round.
#[derive(Clone, Debug, Default)]
struct Cell {
    lookups_s: f64,
    p50_ns: u64,
    p99_ns: u64,
    store_ns: f64,
    remove_ns: f64,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let Some(trace) = words.first() else {
        eprintln!("usage: kvplane-bench-conductor TRACE.jsonl [ROUNDS] [ONLY WORKERS]");
        return ExitCode::from(2);
    };
    let rounds = words.get(1).and_then(|word| word.parse().ok()).unwrap_or(3);
    let only: Option<usize> = words.get(2).and_then(|word| word.parse().ok());
    let prompts = match events::read(trace) {
        Ok(prompts) => prompts,
        Err(error) => {
            eprintln!("{trace}: {error}");
            return ExitCode::FAILURE;
        }
    };
    for split in [1, 32] {
        for workers in [8, 128, 1000] {
            if only.is_none_or(|only| only == workers) {
                compare(&Shape { split, workers }, &prompts, rounds);
            }
        }
    }
    ExitCode::SUCCESS
}

/// Measures all indexes with one load and prints a row for each.
fn compare(shape: &Shape, prompts: &[Vec<u64>], rounds: usize) {
    let load = Load::new(shape, prompts);
    println!(
        "{} workers, {}-token blocks: {} requests of {:.0} blocks",
        shape.workers,
        512 / shape.split,
        load.prompts.len(),
        load.blocks as f64 / load.prompts.len() as f64
    );
    let names = all().map(|(name, _)| name);
    let mut cells: Vec<Vec<Cell>> = names.iter().map(|_| Vec::new()).collect();
    let mut memory = String::new();
    for _ in 0..rounds {
        let mut depths: Option<u64> = None;
        for (at, (name, make)) in all().into_iter().enumerate() {
            let (cell, sum, bytes) = measure(make(shape.workers, &load).as_mut(), &load);
            cells[at].push(cell);
            if let Some(bytes) = bytes {
                memory = bytes;
            }
            match depths {
                Some(expected) if expected != sum => println!("  {name}: depths differ, {sum} for {expected}"),
                _ => depths = Some(sum),
            }
        }
    }
    for (at, name) in names.iter().enumerate() {
        let median = |field: fn(&Cell) -> f64| median(cells[at].iter().map(field).collect());
        let ratio = |field: fn(&Cell) -> f64| {
            median_of(cells[0].iter().zip(&cells[at]).map(|(ours, theirs)| field(ours) / field(theirs)))
        };
        println!(
            "  {name:<22} {:>9.0} lookups/s ({:>5.2}x)  p50 {:>6} ns  p99 {:>7} ns  store {:>6.1} ns/block ({:>5.2}x)  \
             remove {:>6.1} ns/block ({:>5.2}x)",
            median(|cell| cell.lookups_s),
            ratio(|cell| cell.lookups_s),
            median(|cell| cell.p50_ns as f64),
            median(|cell| cell.p99_ns as f64),
            median(|cell| cell.store_ns),
            1.0 / ratio(|cell| cell.store_ns),
            median(|cell| cell.remove_ns),
            1.0 / ratio(|cell| cell.remove_ns),
        );
    }
    println!("  ours: {memory}");
}

fn median_of(values: impl Iterator<Item = f64>) -> f64 {
    median(values.collect())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Durations of the calls of one kind in a round.
#[derive(Default)]
struct Durations {
    /// Nanoseconds and blocks of each call.
    calls: Vec<(u64, usize)>,
}

impl Durations {
    /// Makes a call that is about this many blocks, and returns its result.
    fn time<R>(&mut self, blocks: usize, call: impl FnOnce() -> R) -> R {
        let started = Instant::now();
        let result = call();
        self.calls.push((started.elapsed().as_nanos() as u64, blocks));
        result
    }

    /// Returns the distribution of the durations.
    fn distribution(mut self) -> Distribution {
        self.calls.sort_unstable();
        Distribution { calls: self.calls }
    }
}

/// Durations of the calls, from the shortest to the longest.
struct Distribution {
    calls: Vec<(u64, usize)>,
}

impl Distribution {
    /// Returns the duration that this percentage of the calls does not exceed.
    fn percentile(&self, share: usize) -> u64 {
        self.calls[self.calls.len() * share / 100].0
    }

    /// Returns the number of calls, nanoseconds and blocks without the slowest thousandth of the calls.
    fn sums(&self) -> (f64, f64, f64) {
        let kept = &self.calls[..self.calls.len() - self.calls.len() / 1000];
        let (ns, blocks) = kept.iter().fold((0, 0), |(ns, blocks), call| (ns + call.0, blocks + call.1));
        (kept.len() as f64, ns as f64, blocks.max(1) as f64)
    }

    fn ns_per_block(&self) -> f64 {
        let (_, ns, blocks) = self.sums();
        ns / blocks
    }
}

/// Stores all blocks, queries all prompts, removes a fifth of the blocks from the ends of prompts.
fn measure(subject: &mut dyn Subject, load: &Load) -> (Cell, u64, Option<String>) {
    let mut stores = Durations::default();
    for event in &load.stores {
        stores.time(event.blocks, || subject.store(event.worker, event.prompt, event.blocks));
    }
    // One pass to warm up the processor's caches, as in a running scheduler.
    let mut sum = 0;
    (0..load.prompts.len() / 4).for_each(|prompt| sum += subject.deepest(prompt));
    std::hint::black_box(sum);
    sum = 0;
    let mut lookups = Durations::default();
    for (prompt, hashes) in load.prompts.iter().enumerate() {
        sum += lookups.time(hashes.len(), || subject.deepest(prompt));
    }
    let memory = subject.memory();
    let mut removals = Durations::default();
    for event in load.stores.iter().step_by(5) {
        let from = event.blocks - event.blocks / 2;
        removals.time(event.blocks - from, || subject.remove(event.worker, event.prompt, from, event.blocks));
    }
    let lookups = lookups.distribution();
    let (count, ns, _) = lookups.sums();
    let cell = Cell {
        lookups_s: count * 1e9 / ns,
        p50_ns: lookups.percentile(50),
        p99_ns: lookups.percentile(99),
        store_ns: stores.distribution().ns_per_block(),
        remove_ns: removals.distribution().ns_per_block(),
    };
    (cell, sum, memory)
}
