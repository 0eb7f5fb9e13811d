//! Cost of TLS on data connections: the same operations over TCP with a node that requires it and with one that does
//! not, in turns.

use std::time::Instant;

use kvplane::{Client, DataTls, HugePages, NodeConfig, Region, RegionOptions};

use crate::Failure;
use crate::bed::{Bed, client_config};
use crate::rounds::{Series, median};

/// Size of an object, and number of objects.
const SHAPES: [(&str, usize, usize); 3] = [("4 KiB", 4 << 10, 2000), ("64 KiB", 64 << 10, 512), ("1 MiB", 1 << 20, 64)];
const POOL_BYTES: u64 = 256 << 20;
const CONNECTS: usize = 20;

/// Node and client, both with or both without TLS.
struct Side {
    name: &'static str,
    client: Client,
    tls: DataTls,
    bed: Bed,
}

impl Side {
    fn start(name: &'static str, tls: DataTls) -> Result<Self, Failure> {
        let bed = Bed::start_with(POOL_BYTES, "spin", |config, _| NodeConfig { data_tls: tls, ..config })?;
        let client = connect(&bed, tls)?;
        Ok(Self { name, client, tls, bed })
    }
}

fn connect(bed: &Bed, tls: DataTls) -> Result<Client, Failure> {
    let config = client_config("tcp", "spin", bed.directory.text())?;
    Ok(Client::connect(&kvplane::ClientConfig { data_tls: tls, ..config })?)
}

/// Measures puts and gets of each length, one at a time, and the time until a new client has its first reply.
pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("data-tls: TLS 1.3 on TCP data connections against none, one client, one operation at a time, spinning");
    let mut sides = [Side::start("sealed", DataTls::Require)?, Side::start("plain", DataTls::Off)?];
    for (shape, bytes, count) in SHAPES {
        let mut puts = sides.each_ref().map(|side| Series::new(format!("put of {shape}: {}", side.name), "us"));
        let mut gets = sides.each_ref().map(|side| Series::new(format!("get of {shape}: {}", side.name), "us"));
        for round in 0..rounds {
            for (at, side) in sides.iter_mut().enumerate() {
                let (put_us, get_us) = measure(side, bytes, count, round)?;
                puts[at].push(put_us);
                gets[at].push(get_us);
            }
        }
        for series in [puts, gets] {
            series.iter().for_each(Series::show);
            series[0].show_ratio(&series[1], "no target");
        }
    }
    let mut first = sides.each_ref().map(|side| Series::new(format!("new client's first get: {}", side.name), "us"));
    for _ in 0..rounds {
        for (at, side) in sides.iter().enumerate() {
            let mut took = Vec::new();
            for _ in 0..CONNECTS {
                let mut client = connect(&side.bed, side.tls)?;
                let start = Instant::now();
                client.get(b"nothing")?;
                took.push(start.elapsed().as_nanos() as f64 / 1e3);
            }
            first[at].push(median(&mut took));
        }
    }
    first.iter().for_each(Series::show);
    first[0].show_ratio(&first[1], "no target");
    Ok(())
}

/// Returns the p50 of puts and of gets; short runs alternate, so that both meet the same background load.
fn measure(side: &mut Side, bytes: usize, count: usize, round: usize) -> Result<(f64, f64), Failure> {
    let options = RegionOptions { huge: HugePages::Try, ..RegionOptions::new("data-tls", bytes) };
    let memory = side.client.register(Region::allocate(&options)?);
    let slice = memory.slice(0, bytes);
    let keys: Vec<String> = (0..count).map(|key| format!("{bytes}-{round}-{key}")).collect();
    let (mut puts_us, mut gets_us) = (Vec::new(), Vec::new());
    for some in keys.chunks(32) {
        for key in some {
            let start = Instant::now();
            side.client.put_from(key.as_bytes(), slice)?;
            puts_us.push(start.elapsed().as_nanos() as f64 / 1e3);
        }
        for key in some {
            let start = Instant::now();
            side.client.get_into(key.as_bytes(), slice)?.ok_or("an object is missing")?;
            gets_us.push(start.elapsed().as_nanos() as f64 / 1e3);
        }
    }
    side.client.batch_remove(&keys)?;
    Ok((median(&mut puts_us), median(&mut gets_us)))
}
