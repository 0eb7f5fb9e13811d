//! Shared tier beside plain transfers of the same files in the same run: a directory, and an S3 service on loopback.
//!
//! Up: from the first put until the store has every object, beside writes of the packs that came of it, by workers that
//! already have their bytes. Down: gets of objects that only the tier has, beside reads of the same packs.

mod node;
mod plain;

use std::path::PathBuf;
use std::process::Command;

use kvplane::StorePlace;
use kvplane_fake_s3::FakeS3;

use crate::Failure;
use crate::rounds::Series;
use node::NodeBed;
use plain::Plain;

/// First argument of the process that measures the S3 service, which it finds by its environment.
pub(crate) const ROLE: &str = "shared-tier-bucket";

/// Lengths of objects.
const OBJECT_BYTES: [usize; 2] = [64 << 10, 1 << 20];

/// Options of the benchmark.
struct Options {
    path: PathBuf,
    /// Bytes of the objects of a round.
    bytes: u64,
    rounds: usize,
}

impl Options {
    fn parse(words: &[String]) -> Result<Self, Failure> {
        let path = std::env::current_exe()?.with_file_name("shared-tier-bench");
        let mut options = Self { path, bytes: 128 << 20, rounds: 5 };
        let mut rest = words.iter();
        while let Some(word) = rest.next() {
            let value = rest.next().ok_or_else(|| format!("{word} takes a value"))?;
            match word.as_str() {
                "--path" => options.path = value.into(),
                "--size" => options.bytes = kvplane::parse_bytes(value)? >> 20 << 20,
                "--rounds" => options.rounds = value.parse()?,
                _ => return Err(format!("unknown flag {word}").into()),
            }
        }
        if options.rounds == 0 || options.bytes == 0 {
            return Err("--rounds and --size are above 0".into());
        }
        Ok(options)
    }
}

/// Measures a directory, and an S3 service of this process.
pub(crate) fn run(words: &[String]) -> Result<(), Failure> {
    let options = Options::parse(words)?;
    let (mib, rounds) = (options.bytes >> 20, options.rounds);
    println!("shared tier beside plain transfers of the same files: {mib} MiB a round, {rounds} rounds");
    std::fs::create_dir_all(&options.path)?;
    let measured = measure("directory", &StorePlace::Directory(options.path.clone()), &options);
    let removed = std::fs::remove_dir_all(&options.path);
    measured?;
    removed?;
    let service = FakeS3::start();
    let mut bucket = Command::new(std::env::current_exe()?);
    let status = bucket.arg(ROLE).args(words).envs(service.environment()).status()?;
    if status.success() { Ok(()) } else { Err(format!("the measurement of the S3 service: {status}").into()) }
}

/// Measures the S3 service of the environment.
pub(crate) fn bucket(words: &[String]) -> Result<(), Failure> {
    measure("S3", &"s3://bench".parse()?, &Options::parse(words)?)
}

fn measure(store: &str, place: &StorePlace, options: &Options) -> Result<(), Failure> {
    for bytes in OBJECT_BYTES {
        let series =
            |way: &str, side: &str| Series::new(format!("{store}, {} KiB, {way}, {side}", bytes >> 10), "GB/s");
        let count = options.bytes / bytes as u64;
        let mut plain = Plain::open(place)?;
        let mut known = plain.packs()?;
        let mut bed = NodeBed::start(place, options.bytes * (options.rounds as u64 + 1), bytes)?;
        let (mut up, mut plain_up) = (series("up", "tier"), series("up", "plain"));
        let mut rounds = Vec::new();
        for round in 0..options.rounds as u64 {
            up.push(bed.upload(round * count..(round + 1) * count)?);
            let all = plain.packs()?;
            let packs: Vec<_> = all.difference(&known).cloned().collect();
            plain_up.push(plain.write(&packs)?);
            known = all;
            rounds.push(packs);
        }
        bed.restart_empty(options.bytes / 2)?;
        let (mut down, mut plain_down) = (series("down", "tier"), series("down", "plain"));
        for (round, packs) in (0..).zip(&rounds) {
            down.push(bed.download(round * count..(round + 1) * count)?);
            plain_down.push(plain.read(packs)?);
        }
        drop(bed);
        plain.remove_all()?;
        for (ours, theirs) in [(&up, &plain_up), (&down, &plain_down)] {
            ours.show();
            theirs.show();
            ours.show_ratio(theirs, "no target");
        }
    }
    Ok(())
}
