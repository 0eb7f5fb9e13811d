//! `cargo x bench conductor-index`: the prefix index beside `kv-index` and `dynamo-kv-router`, on one core.
//!
//! All indexes get the same events: each request of a trace is stored by one worker, chosen by its number, and in part
//! by others; then each index is queried for every request once. kvplane's answers with the eight deepest holders, the
//! others score every worker that holds a block, because that is their interface. Rounds alternate, and the median of
//! the rounds' ratios counts. The answers for the deepest holder are compared, so that no index is fast by being wrong.

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

/// Stores all blocks, queries all prompts, removes a fifth of the blocks from the ends of prompts.
fn measure(subject: &mut dyn Subject, load: &Load) -> (Cell, u64, Option<String>) {
    let started = Instant::now();
    for event in &load.stores {
        subject.store(event.worker, event.prompt, event.blocks);
    }
    let store_ns = started.elapsed().as_nanos() as f64 / load.stored_blocks as f64;
    let mut sum = 0;
    let mut times = Vec::with_capacity(load.prompts.len());
    // One pass to warm up the processor's caches, as in a running scheduler.
    (0..load.prompts.len() / 4).for_each(|prompt| sum += subject.deepest(prompt));
    sum = 0;
    let started = Instant::now();
    for prompt in 0..load.prompts.len() {
        let before = Instant::now();
        sum += subject.deepest(prompt);
        times.push(before.elapsed().as_nanos() as u64);
    }
    let lookups_s = load.prompts.len() as f64 / started.elapsed().as_secs_f64();
    times.sort_unstable();
    let memory = subject.memory();
    let started = Instant::now();
    let mut removed = 0;
    for event in load.stores.iter().step_by(5) {
        let from = event.blocks - event.blocks / 2;
        subject.remove(event.worker, event.prompt, from, event.blocks);
        removed += event.blocks - from;
    }
    let remove_ns = started.elapsed().as_nanos() as f64 / removed.max(1) as f64;
    let at = |share: usize| times[times.len() * share / 100];
    (Cell { lookups_s, p50_ns: at(50), p99_ns: at(99), store_ns, remove_ns }, sum, memory)
}
