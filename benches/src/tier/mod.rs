//! SSD tier against `fio` on a file beside it: same file system, block size, queue depth and O_DIRECT, in turns.
//!
//! There are two kvplane sides: the tier with its driver alone, whose queue is exactly as deep as fio's, and a node
//! with its client, which keeps as many objects in flight, in batches. Checksums are on.

mod alone;
mod figures;
mod fio;
mod node;
mod recovery;
mod saturated;

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvplane::PutAck;
use kvplane_proto::rng::Rng;
use kvplane_tier::Ack;

use crate::Failure;
use crate::rounds::Series;
use alone::Alone;
use figures::Figures;
use fio::Fio;
use node::NodeBed;
pub(crate) use recovery::run as recovery;
pub(crate) use saturated::run as saturated;

const KIB4: u32 = 4 << 10;
const MIB: u32 = 1 << 20;
/// Number of parts in which a file is filled, in turn with the others.
const PARTS: u32 = 8;
/// Most bytes that are in flight at once.
const MEMORY: usize = 64 << 20;

/// Options of the benchmark.
pub(crate) struct Options {
    path: PathBuf,
    file_bytes: u64,
    rounds: usize,
    time: Duration,
    only: Option<String>,
    keys: u64,
}

impl Options {
    pub(crate) fn parse(words: &[String]) -> Result<Self, Failure> {
        let mut options = Self {
            path: std::env::current_exe()?.with_file_name("tier-bench"),
            file_bytes: 3 << 30,
            rounds: 5,
            time: Duration::from_secs(2),
            only: None,
            keys: 5_000_000,
        };
        let mut rest = words.iter();
        while let Some(word) = rest.next() {
            let value = rest.next().ok_or_else(|| format!("{word} takes a value"))?;
            match word.as_str() {
                "--path" => options.path = value.into(),
                // Whole blocks: a file of another length does not support direct I/O.
                "--size" => options.file_bytes = kvplane::parse_bytes(value)? >> 20 << 20,
                "--rounds" => options.rounds = value.parse()?,
                "--seconds" => options.time = Duration::from_secs_f64(value.parse()?),
                "--keys" => options.keys = value.parse()?,
                "--only" => options.only = Some(value.clone()),
                _ => return Err(format!("unknown flag {word}").into()),
            }
        }
        Ok(options)
    }

    fn beside(&self, name: &str) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(name);
        path.into()
    }

    /// Returns scratch files that do not exist yet.
    fn scratch<const N: usize>(&self, names: [&str; N]) -> [Scratch; N] {
        names.map(|name| {
            let file = Scratch(self.beside(name));
            drop(std::fs::remove_file(&file.0));
            file
        })
    }

    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }
}

/// File that is removed on drop.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
        // State of the control plane of a node over the file.
        let _ = std::fs::remove_dir_all(self.0.with_extension("control"));
    }
}

/// Figures of one case, kvplane's and fio's.
struct Case {
    name: String,
    sides: [Side; 3],
    wanted: f64,
    by_bytes: bool,
}

struct Side {
    speed: Series,
    p50: Series,
    cpu: Series,
}

impl Case {
    fn new(name: &str, wanted: f64, by_bytes: bool) -> Self {
        let side = |side: &str| Side {
            speed: Series::new(side, if by_bytes { "MB/s" } else { "/s" }),
            p50: Series::new(format!("  {side}, p50"), "us"),
            cpu: Series::new(format!("  {side}, CPU for each"), "us"),
        };
        Self { name: name.to_owned(), sides: ["fio", "tier alone", "node"].map(side), wanted, by_bytes }
    }

    fn push(&mut self, side: usize, figures: Figures) {
        let by_bytes = self.by_bytes;
        let side = &mut self.sides[side];
        side.speed.push(if by_bytes { figures.mb_s } else { figures.per_s });
        side.p50.push(figures.p50_us);
        side.cpu.push(figures.cpu_us);
    }

    fn show(&self) {
        println!("  {}:", self.name);
        for side in &self.sides {
            side.speed.show();
            side.p50.show();
            side.cpu.show();
        }
        for side in &self.sides[1..] {
            side.speed.show_ratio(&self.sides[0].speed, &format!("at least {}", self.wanted));
        }
    }
}

/// Compares everything with fio.
pub(crate) fn run(words: &[String]) -> Result<(), Failure> {
    let options = Options::parse(words)?;
    println!("tier: gets and puts on {}, against fio beside it", options.path.display());
    let files = options.scratch(["-alone", "-node", "-fio"]);
    let [alone, node, fio] = files.each_ref().map(|file| file.0.as_path());
    if GETS.iter().any(|(bytes, depth)| options.wants(&name_of(*bytes, *depth))) {
        reads(&options, fio, alone, node)?;
    }
    let fio = Fio::on(fio, 0..options.file_bytes);
    let mut is_laid_out = false;
    for (ack, word) in [(PutAck::Buffered, "buffered"), (PutAck::Durable, "durable")] {
        if !options.wants(word) {
            continue;
        }
        if !is_laid_out {
            lay_out(&options, &fio, alone, node)?;
            is_laid_out = true;
        }
        writes(&options, &fio, alone, node, ack, word)?;
    }
    Ok(())
}

/// Writes all of each file, so that the file system has allocated its blocks.
fn lay_out(options: &Options, fio: &Fio, alone: &Path, node: &Path) -> Result<(), Failure> {
    let keys = 1 << 42..(1 << 42) + options.file_bytes / u64::from(MIB) + 64;
    let mut ours = open(options, alone)?;
    ours.until_recovered()?;
    ours.fill(keys.clone(), MIB)?;
    NodeBed::start(Some((node, options.file_bytes)), PutAck::Buffered, MEMORY)?.fill(keys, MIB)?;
    fio.lay_out()
}

fn open(options: &Options, path: &Path) -> Result<Alone, Failure> {
    // As many objects as the node has memory for.
    Alone::open(path, options.file_bytes, MEMORY, |config| *config = config.clone().with_object_bytes(KIB4))
}

/// Sizes and queue depths of reads.
const GETS: [(u32, usize); 5] = [(KIB4, 1), (KIB4, 32), (KIB4, 128), (MIB, 8), (MIB, 32)];

fn name_of(bytes: u32, depth: usize) -> String {
    format!("gets of {} KiB, {depth} at a time", bytes >> 10)
}

/// Measures reads. A third of each file are objects of 4 KiB, another of 1 MiB. fio reads as many bytes, which were
/// written at the same time: their age and amount determine the hits of caches below the tier.
fn reads(options: &Options, fio: &Path, alone: &Path, node: &Path) -> Result<(), Failure> {
    let third = options.file_bytes / 3 / u64::from(PARTS * MIB) * u64::from(PARTS * MIB);
    let mut ours = open(options, alone)?;
    let start = || NodeBed::start(Some((node, options.file_bytes)), PutAck::Buffered, MEMORY);
    let mut bed = start()?;
    let [small, large] = [(KIB4, 0, 0), (MIB, 1 << 40, third)]
        .map(|(bytes, key, start)| (bytes, key..key + third / u64::from(bytes), Fio::on(fio, start..start + third)));
    for ((bytes, keys, _), start) in [(&small, 0), (&large, third)] {
        for part in 0..u64::from(PARTS) {
            let (step, range) = ((keys.end - keys.start) / u64::from(PARTS), third / u64::from(PARTS));
            let keys = keys.start + part * step..keys.start + (part + 1) * step;
            ours.fill(keys.clone(), *bytes)?;
            bed.fill(keys, *bytes)?;
            Fio::on(fio, start + part * range..start + (part + 1) * range).lay_out()?;
        }
    }
    // Memory is empty after a restart.
    drop(bed);
    let mut bed = start()?;
    let mut rng = Rng::new(1, "tier-bench");
    for (bytes, depth) in GETS {
        let is_small = bytes == KIB4;
        let (_, keys, fio) = if is_small { &small } else { &large };
        let name = name_of(bytes, depth);
        if !options.wants(&name) {
            continue;
        }
        let mut case = Case::new(&name, if is_small { 0.8 } else { 0.9 }, !is_small);
        for _ in 0..options.rounds {
            case.push(0, fio.measure(options.time, "randread", bytes, depth, &[])?);
            case.push(1, ours.get_for(options.time, depth, bytes, keys.clone(), &mut rng)?);
            case.push(2, bed.get_for(options.time, depth, bytes, keys.clone(), &mut rng)?);
        }
        case.show();
    }
    device_lines(&ours, &bed)
}

fn writes(options: &Options, fio: &Fio, alone: &Path, node: &Path, ack: PutAck, word: &str) -> Result<(), Failure> {
    let durable = ack == PutAck::Durable;
    let mut ours = open(options, alone)?;
    ours.until_recovered()?;
    let mut bed = NodeBed::start(Some((node, options.file_bytes)), ack, MEMORY)?;
    let first = if durable { 1 << 43 } else { 1 << 41 };
    let (mut ours_key, mut bed_key) = (first, first);
    for depth in [8, 32] {
        let name = format!("{word} puts of 1024 KiB, {depth} at a time");
        let sync = format!("--fdatasync={depth}");
        let more: &[&str] = if durable { &[&sync] } else { &[] };
        let alone_ack = if durable { Ack::Durable } else { Ack::Buffered };
        let mut case = Case::new(&name, 0.9, true);
        for _ in 0..options.rounds {
            case.push(0, fio.measure(options.time, "write", MIB, depth, more)?);
            case.push(1, ours.put_for(options.time, depth, MIB, alone_ack, &mut ours_key)?);
            case.push(2, bed.put_for(options.time, depth, MIB, &mut bed_key)?);
        }
        case.show();
    }
    device_lines(&ours, &bed)
}

/// Prints the driver's modes, which explain the figures.
fn device_lines(ours: &Alone, bed: &NodeBed) -> Result<(), Failure> {
    let remarks = ours.nvme.remarks().join("; ");
    println!("  tier alone: {:?} {remarks}", ours.nvme.counters());
    for shard in bed.node().snapshots()? {
        println!("  node: {:?}", shard.device);
    }
    Ok(())
}
