//! `kvplane-bench stores`: kvplane's store beside others, same sizes, batches and number of clients, in turns.
//!
//! For each cell kvplane and every other store are measured one after the other, several times; the median of the
//! rounds' ratios is compared. Each server and each client is a process of its own, and none of them spins while idle,
//! so all stay up while others are measured. `cargo x stores` installs the programs and starts this in a network
//! namespace of its own.

mod cells;
mod client;
mod memory;
mod options;
mod ours;
mod report;
mod side;
mod targets;

use std::fs;
use std::io::Write;

use crate::Failure;
use cells::{Cell, Op};
use options::Options;
use report::{Results, Row};
use side::{Clients, Server, Side};

pub(crate) use client::{ROLE_CLIENT, run as client};
pub(crate) use ours::{ROLE_SERVER, serve};

/// Sides in the order of the tables.
pub(crate) const NAMES: [&str; 7] =
    ["ours tcp", "mooncake remote", "redis", "memcached", "ours shm", "mooncake dummy", "memcpy"];

/// Size below which a copy stays in the caches of one core.
const SMALLEST_COPY_BYTES: u64 = 1 << 20;

pub(crate) fn run(words: &[String]) -> Result<(), Failure> {
    let options = options::parse(words)?;
    let sides = side::of(&options)?;
    fs::create_dir_all(&options.folder)?;
    let path = options.folder.join("stores.jsonl");
    let mut file = fs::File::create(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut results = Results::default();
    println!("{}", report::header());
    for &size in &options.sizes {
        let pool_bytes = pool_bytes(&options, size);
        let mut servers = start_servers(&sides, pool_bytes, &options);
        for &clients in &options.clients {
            let cells = fitting(&options, size, clients, pool_bytes);
            let (modest, large): (Vec<Cell>, Vec<Cell>) = cells.into_iter().partition(Cell::is_modest);
            if let Some(buffer_bytes) = modest.iter().map(Cell::buffer_bytes).max() {
                let (servers, options) = (&servers, &options);
                let start = |side| start_clients(side, servers, options, clients, buffer_bytes);
                let mut started: Vec<_> = sides.iter().filter_map(|side| Some((side, start(side)?))).collect();
                for (cell, round) in rounds_of(&modest, options.rounds) {
                    for (side, clients) in &mut started {
                        let pids = pids_of(servers, side);
                        keep(
                            measure(side, clients, pids, *cell, round, (options, pool_bytes)),
                            &mut file,
                            &mut results,
                        )?;
                    }
                    show(&results, cell, round + 1 == options.rounds);
                }
            }
            for (cell, round) in rounds_of(&large, options.rounds) {
                for side in &sides {
                    let started = start_clients(side, &servers, &options, clients, cell.buffer_bytes());
                    let Some(mut clients) = started else { continue };
                    let pids = pids_of(&servers, side);
                    let rows = measure(side, &mut clients, pids, *cell, round, (&options, pool_bytes));
                    keep(rows, &mut file, &mut results)?;
                }
                show(&results, cell, round + 1 == options.rounds);
            }
        }
        servers.drain(..).for_each(drop);
    }
    println!("targets (ratios are ours by theirs, medians of {} rounds):", options.rounds);
    targets::verdicts(&results).iter().for_each(|line| println!("{line}"));
    if let Some(path) = &options.markdown {
        fs::write(path, results.markdown()).map_err(|error| format!("{}: {error}", path.display()))?;
        println!("tables: {}", path.display());
    }
    println!("rows: {}", path.display());
    Ok(())
}

fn rounds_of(cells: &[Cell], rounds: usize) -> impl Iterator<Item = (&Cell, usize)> {
    cells.iter().flat_map(move |cell| (0..rounds).map(move |round| (cell, round)))
}

fn keep(rows: Vec<Row>, file: &mut fs::File, results: &mut Results) -> Result<(), Failure> {
    for row in rows {
        writeln!(file, "{}", row.to_json())?;
        results.push(row);
    }
    Ok(())
}

fn show(results: &Results, cell: &Cell, done: bool) {
    if done {
        Op::BOTH.iter().for_each(|op| println!("{}", results.table(cell, *op)));
    }
}

fn server_of<'a>(servers: &'a [(&'static str, Server)], side: &Side) -> Option<&'a Server> {
    servers.iter().find(|(name, _)| *name == side.server).map(|(_, server)| server)
}

fn pids_of<'a>(servers: &'a [(&'static str, Server)], side: &Side) -> &'a [u32] {
    server_of(servers, side).map_or(&[], |server| &server.pids)
}

/// Returns the memory of each server: enough for the largest requested cell that fits, all servers' and one side's
/// clients together.
fn pool_bytes(options: &Options, size: u64) -> u64 {
    let wanted = options.clients.iter().flat_map(|clients| options.batches.iter().map(move |batch| clients * batch));
    let affordable = affordable_bytes();
    let fits = |bytes: &u64| 4 * cells::pool_for(*bytes) + 2 * bytes <= affordable;
    let largest = wanted.map(|objects| objects * size).filter(fits).max().unwrap_or(0);
    options.pool_bytes.unwrap_or_else(|| cells::pool_for(largest).max(cells::LEAST_POOL_BYTES))
}

fn fitting(options: &Options, size: u64, clients: u64, pool_bytes: u64) -> Vec<Cell> {
    let cells = options.batches.iter().map(|&batch| Cell { size, batch, clients });
    let (fit, large): (Vec<Cell>, Vec<Cell>) = cells.partition(|cell| cell.bytes() <= cells::share(pool_bytes));
    for cell in large {
        let (cell_bytes, room) = (cells::human(cell.bytes()), cells::human(pool_bytes));
        println!("skipped: {cell}: {cell_bytes} at once, and each store has {room}");
    }
    fit
}

/// Starts the required servers; reports those that do not start.
fn start_servers(sides: &[Side], pool_bytes: u64, options: &Options) -> Vec<(&'static str, Server)> {
    let mut servers: Vec<(&'static str, Server)> = Vec::new();
    for side in sides {
        if side.server.is_empty() || servers.iter().any(|(name, _)| *name == side.server) {
            continue;
        }
        match Server::start(side, pool_bytes, options) {
            Ok(server) => servers.push((side.server, server)),
            Err(problem) => println!("skipped: {}: {problem}", side.name),
        }
    }
    servers
}

fn start_clients(
    side: &Side,
    servers: &[(&'static str, Server)],
    options: &Options,
    count: u64,
    buffer_bytes: u64,
) -> Option<Clients> {
    let server = server_of(servers, side);
    if server.is_none() && !side.server.is_empty() {
        return None;
    }
    let started = Clients::start(side, server.map_or("", |server| &server.said), options, count, buffer_bytes);
    started.inspect_err(|problem| println!("skipped: {} with {count} clients: {problem}", side.name)).ok()
}

/// Puts objects, gets them, verifies them, and removes them.
fn measure(
    side: &Side,
    clients: &mut Clients,
    servers: &[u32],
    cell: Cell,
    round: usize,
    (options, pool_bytes): (&Options, u64),
) -> Vec<Row> {
    let mut rows = Vec::new();
    // The memcpy side has less memory, and small copies say nothing about memory.
    let pool_bytes = if side.server.is_empty() { cells::LEAST_POOL_BYTES } else { pool_bytes };
    if cell.bytes() > cells::share(pool_bytes) || side.server.is_empty() && cell.size < SMALLEST_COPY_BYTES {
        return rows;
    }
    let most = (cells::share(pool_bytes) / cell.bytes()).clamp(1, (options.seconds * 4e5) as u64 + 1);
    let (size, batch, seconds) = (cell.size, cell.batch, options.seconds);
    for op in Op::BOTH {
        let line = match op {
            Op::Put => format!("put {size} {batch} {seconds} {most} {}", clients.next_round()),
            Op::Get => format!("get {size} {batch} {seconds}"),
        };
        match clients.timed(&line, servers, cell) {
            Ok((figures, usage)) => rows.push(Row { side: side.name, cell, op, round, figures, usage }),
            Err(problem) => println!("no figure: {} at {cell} {}, round {round}: {problem}", side.name, op.word()),
        }
    }
    for line in [format!("check {size} {batch}"), "clear".to_owned()] {
        if let Err(problem) = clients.ask(&line) {
            println!("WRONG: {} at {cell}, round {round}: {line}: {problem}", side.name);
            rows.clear();
        }
    }
    rows
}

/// Returns the machine's available memory, less a tenth.
fn affordable_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0);
    (kib << 10) / 10 * 9
}
