//! `kvplane-bench peers`: kvplane's transfer engine beside others, same sizes, same run, in turns.
//!
//! For each cell kvplane and every peer are measured one after the other, several times; the median of the rounds'
//! ratios is compared. Sides that are not being measured are halted, because some of them spin. `cargo x peers`
//! installs the peers and starts this in a network namespace of its own.

pub(crate) mod cells;
mod driver;
mod entries;
pub(crate) mod meter;
mod options;
mod ours;
pub(crate) mod process;
mod programs;
mod raw;
mod report;
mod row;
mod side;
pub(crate) mod targets;

use std::fs;
use std::io::Write;

use crate::Failure;
use cells::Cell;
use meter::Usage;
use options::Options;
use report::Results;
use row::{Figures, Row};
use side::Entry;

/// Sides in the order of the table.
pub(crate) const NAMES: [&str; 16] = [
    "ours tcp",
    "ours tcp checked",
    "ours tcp parked",
    "mooncake tcp",
    "nixl tcp",
    "ucx tcp",
    "gloo",
    "iperf3",
    "raw spinning",
    "raw blocking",
    "ours shm",
    "ours shm parked",
    "ours cma",
    "nixl auto",
    "ucx shm",
    "memcpy",
];

pub(crate) fn run(words: &[String]) -> Result<(), Failure> {
    let options = options::parse(words)?;
    let mut entries = entries::of(&options)?;
    fs::create_dir_all(&options.folder)?;
    let path = options.folder.join("results.jsonl");
    let mut file = fs::File::create(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut results = Results::default();
    println!("{}", report::header());
    for &block_bytes in &options.sizes {
        let buffer_bytes =
            cells::BUFFER_BYTES.min(affordable_bytes(entries.iter().map(|entry| entry.side.buffers()).sum()));
        let (cells, skipped) = cells::of_size(block_bytes, &options.batches_of(block_bytes), buffer_bytes);
        skipped.iter().for_each(|line| println!("{line}"));
        let Some(needed) = cells.iter().map(Cell::bytes).max() else { continue };
        entries.iter_mut().for_each(|entry| start(entry, needed));
        for cell in &cells {
            for round in 0..options.rounds {
                for entry in &mut entries {
                    measure(entry, *cell, round, &options, &mut |row| {
                        writeln!(file, "{}", row.to_json())?;
                        results.push(row);
                        Ok(())
                    })?;
                }
            }
            println!("{}", results.table(cell));
        }
        entries.iter_mut().for_each(|entry| entry.side.stop());
    }
    finish(&options, &results)?;
    println!("rows: {}", path.display());
    Ok(())
}

/// Starts a side, or reports why it is not in this run.
fn start(entry: &mut Entry, buffer_bytes: u64) {
    match entry.side.start(buffer_bytes) {
        Ok(version) => entry.version = version,
        Err(problem) => {
            entry.version.clear();
            println!("skipped: {}: {problem}", entry.name);
        }
    }
}

fn measure(
    entry: &mut Entry,
    cell: Cell,
    round: usize,
    options: &Options,
    keep: &mut dyn FnMut(Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    // A side without a version did not start.
    if entry.version.is_empty() {
        return Ok(());
    }
    let mut best: Option<(Figures, Usage)> = None;
    for _ in 0..=options.retries {
        match entry.side.measure(cell, options.seconds, round) {
            Ok(Some(found)) => {
                if best.is_none_or(|(_, usage)| found.1.foreign_cores < usage.foreign_cores) {
                    best = Some(found);
                }
            }
            Ok(None) => return Ok(()),
            Err(problem) => println!("no figure: {} at {cell}, round {round}: {problem}", entry.name),
        }
        if best.is_none_or(|(_, usage)| usage.is_quiet()) {
            break;
        }
    }
    let Some((figures, usage)) = best else { return Ok(()) };
    keep(Row { side: entry.name, version: entry.version.clone(), pacing: entry.pacing, cell, round, figures, usage })
}

fn finish(options: &Options, results: &Results) -> Result<(), Failure> {
    println!("targets (ratios are ours by theirs, medians of {} rounds; * marks foreign load):", options.rounds);
    for verdict in targets::verdicts(results) {
        print!("{}", verdict.text());
    }
    if let Some(path) = &options.markdown {
        fs::write(path, results.markdown()).map_err(|error| format!("{}: {error}", path.display()))?;
        println!("tables: {}", path.display());
    }
    Ok(())
}

/// Returns a buffer size, in whole MiB, at which the sides' buffers fit in the machine's memory.
fn affordable_bytes(buffers: u64) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0);
    // Two more buffers exist while a side is measured; a tenth of the memory stays free.
    ((kib << 10) / 10 * 9 / (buffers + 2)) >> 20 << 20
}
