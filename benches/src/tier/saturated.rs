//! Puts on a saturated disk: with the tier under the node, and without it.

use std::process::{Child, Stdio};

use kvplane::PutAck;

use super::fio::Fio;
use super::node::NodeBed;
use super::{KIB4, MEMORY, MIB, Options};
use crate::Failure;
use crate::rounds::Series;

/// Program that is ended on drop.
struct RunningProgram(Child);

impl Drop for RunningProgram {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Measures the p99 of puts, one at a time, with a saturated disk.
pub(crate) fn run(words: &[String]) -> Result<(), Failure> {
    let options = Options::parse(words)?;
    println!("tier-puts: p99 of puts by one client, the disk written to by fio as fast as it goes");
    let [file, load] = options.scratch(["-node", "-fio"]);
    let fio = Fio::on(&load.0, 0..options.file_bytes / 2);
    fio.lay_out()?;
    let words = ["--rw=randwrite", "--bs=1M", "--iodepth=32", "--time_based", "--runtime=1h", "--thread"];
    for (ack, word) in [(PutAck::Memory, "acknowledged in memory"), (PutAck::Buffered, "acknowledged when written")] {
        let mut with = NodeBed::start(Some((&file.0, options.file_bytes)), ack, MEMORY)?;
        let mut without = NodeBed::start(None, ack, MEMORY)?;
        let _load = RunningProgram(fio.command(&words).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
        let mut key = 1 << 41;
        for bytes in [KIB4, 64 << 10, MIB] {
            println!("  puts of {} KiB, {word}:", bytes >> 10);
            let name = |what: &str| [format!("tier off, {what}"), format!("tier on, {what}")];
            let [mut p50, mut p99] = ["p50", "p99"].map(|what| name(what).map(|name| Series::new(name, "us")));
            for _ in 0..options.rounds {
                for (bed, at) in [(&mut without, 0), (&mut with, 1)] {
                    let figures = bed.put_for(options.time, 1, bytes, &mut key)?;
                    p50[at].push(figures.p50_us);
                    p99[at].push(figures.p99_us);
                }
            }
            p50.iter().chain(&p99).for_each(Series::show);
            p99[1].show_ratio(&p99[0], if ack == PutAck::Memory { "at most 2" } else { "no target" });
        }
        for shard in with.node().snapshots()? {
            println!("  {:?}", shard.tier.map(|tier| tier.counters));
        }
    }
    Ok(())
}
