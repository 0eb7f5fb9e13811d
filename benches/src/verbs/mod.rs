//! CPU cost of kvplane's own code for an RDMA transfer, on software devices: the part that does not depend on the NIC.
//!
//! Slices go through the driver as a host drives it, on a device that completes everything at once and moves nothing.
//! Instructions are counted by cachegrind: this program runs itself under it for two numbers of slices, and the
//! difference of the totals leaves out the start. Registrations and connections are made on devices that move bytes
//! within the process; the NIC's own part of them, pinning and commands to its firmware, is not in these figures.

mod bed;
mod counted;
mod whole;

use std::fs;
use std::time::{Duration, Instant};

use kvplane_transport::RdmaOptions;

use crate::Failure;
use crate::rounds::Series;
use bed::{End, SliceCost, Stream, connect, loopback, part, region};
use kvplane_soft_verbs::null_verbs;
use whole::{Shape, Whole};

pub(crate) use counted::ROLE;

const SLICE_BYTES: usize = 64 << 10;
const SMALL_BYTES: usize = 4 << 10;
/// Size of a single message, in bytes.
const MESSAGE_BYTES: usize = 64;
/// Number of slices of one round: about a second.
const SLICES: u64 = 8_000_000;
/// Numbers of registrations, connections and endpoints of one round.
const REGISTRATIONS: usize = 1_000;
const CONNECTIONS: usize = 500;
const ENDPOINTS: u32 = 1_000;
/// Grant of each endpoint to its peer: the minimum.
const GRANT: u16 = 4;

/// Layers that slices pass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// All layers: client, host, driver, verbs. Slices of 64 KiB: the cuts of a range of 8 MiB.
    Range,
    /// All layers, with 128 requests to a batch, each of one slice.
    Requests,
    /// All layers, with 128 requests of 4 KiB to a batch.
    Small,
    /// Driver and verbs layer alone.
    Driver,
    /// All layers, with one write of 64 bytes at a time.
    Message,
}

/// Target for slices.
enum Pipe {
    Whole(Box<Whole>),
    Driver(Box<Stream>),
}

impl Way {
    /// Variants with many slices.
    const STREAMS: [Self; 4] = [Self::Range, Self::Requests, Self::Small, Self::Driver];

    /// Returns the argument that names it for a process.
    const fn word(self) -> &'static str {
        match self {
            Self::Range => "range",
            Self::Requests => "requests",
            Self::Small => "small",
            Self::Driver => "driver",
            Self::Message => "message",
        }
    }

    const fn title(self) -> &'static str {
        match self {
            Self::Range => "one request of 8 MiB, slices of 64 KiB",
            Self::Requests => "128 requests of 64 KiB, scattered",
            Self::Small => "128 requests of 4 KiB, scattered",
            Self::Driver => "the driver alone, 64 KiB",
            Self::Message => "one write of 64 B at a time",
        }
    }

    fn open(self) -> Result<Pipe, Failure> {
        Ok(match self {
            Self::Range => Pipe::Whole(Box::new(Whole::new(Shape::Range, SLICE_BYTES)?)),
            Self::Requests => Pipe::Whole(Box::new(Whole::new(Shape::Scattered, SLICE_BYTES)?)),
            Self::Small => Pipe::Whole(Box::new(Whole::new(Shape::Scattered, SMALL_BYTES)?)),
            Self::Driver => Pipe::Driver(Box::new(Stream::new(SLICE_BYTES)?)),
            Self::Message => Pipe::Whole(Box::new(Whole::new(Shape::One, MESSAGE_BYTES)?)),
        })
    }
}

impl Pipe {
    fn run(&mut self, slices: u64) -> Result<SliceCost, Failure> {
        match self {
            Self::Whole(whole) => whole.run(slices),
            Self::Driver(stream) => stream.run(slices),
        }
    }
}

/// Runs the part of a round that is counted.
pub(crate) fn counted(words: &[String]) -> Result<(), Failure> {
    let [word, slices] = words else { return Err("give a way and a number of slices".into()) };
    let mut ways = Way::STREAMS.into_iter().chain([Way::Message]);
    let way = ways.find(|way| way.word() == word).ok_or("unknown way")?;
    way.open()?.run(slices.parse()?)?;
    Ok(())
}

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("verbs: what a slice costs on the null device, one thread, and what else RDMA costs on software devices");
    for way in Way::STREAMS {
        println!("  {}", way.title());
        slices(way, rounds)?;
        counted::show(way.word(), 256_000, "wanted: under 400")?;
    }
    println!("  {}", Way::Message.title());
    counted::show(Way::Message.word(), 16_000, "no target: what it adds to the device's own time")?;
    registrations(rounds)?;
    connections(rounds)?;
    endpoints()
}

fn slices(way: Way, rounds: usize) -> Result<(), Failure> {
    let mut rate = Series::new("slices", "M/s a core");
    let mut requests = Series::new("work requests", "a slice");
    let mut doorbells = Series::new("doorbells", "a slice");
    let mut signalled = Series::new("signalled completions", "a slice");
    let mut pipe = way.open()?;
    for _ in 0..rounds {
        let taken = pipe.run(SLICES)?;
        let each = |count: u64| count as f64 / SLICES as f64;
        rate.push(SLICES as f64 / taken.elapsed.as_secs_f64() / 1e6);
        requests.push(each(taken.counters.requests));
        doorbells.push(each(taken.counters.doorbells));
        signalled.push(each(taken.counters.signalled));
    }
    rate.show();
    println!("  {:44} wanted: 10", "");
    requests.show();
    doorbells.show();
    println!("  {:44} wanted: under 1/8 = 0.125", "");
    signalled.show();
    println!("  {:44} wanted: at most 1/16 = 0.063", "");
    Ok(())
}

fn registrations(rounds: usize) -> Result<(), Failure> {
    let devices = loopback()?;
    let mut end = End::new(&devices[0], RdmaOptions::default())?;
    let regions: Vec<_> = (0..REGISTRATIONS).map(|_| region(SLICE_BYTES)).collect::<Result<_, _>>()?;
    let mut made = Series::new("registrations, our part", "thousand/s");
    let mut ended = Series::new("deregistrations, our part", "thousand/s");
    for _ in 0..rounds {
        let start = Instant::now();
        regions.iter().for_each(|region| end.rdma.register(region));
        made.push(REGISTRATIONS as f64 / start.elapsed().as_secs_f64() / 1e3);
        let start = Instant::now();
        regions.iter().for_each(|region| end.rdma.forget(region));
        ended.push(REGISTRATIONS as f64 / start.elapsed().as_secs_f64() / 1e3);
        if let Some(problem) = end.rdma.take_problem() {
            return Err(problem.into());
        }
    }
    made.show();
    ended.show();
    Ok(())
}

/// Measures offer, answer and completion on both sides, in one thread: the time of both ends together.
fn connections(rounds: usize) -> Result<(), Failure> {
    let devices = loopback()?;
    let options = RdmaOptions { endpoints: 8, ..RdmaOptions::default() };
    let (mut asking, mut asked) = (End::new(&devices[0], options)?, End::new(&devices[1], options)?);
    let mut made = Series::new("connection set-ups, both ends, our part", "thousand/s");
    for _ in 0..rounds {
        let mut spent = Duration::ZERO;
        for _ in 0..CONNECTIONS {
            let (up, start) = ((asking.up, asked.up), Instant::now());
            let (ask, serve) = connect(&mut asking, &mut asked)?;
            asking.round();
            asked.round();
            if (asking.up, asked.up) != (up.0 + 1, up.1 + 1) {
                return Err("a connection did not come up".into());
            }
            spent += start.elapsed();
            part([(&mut asking, ask), (&mut asked, serve)])?;
        }
        made.push(CONNECTIONS as f64 / spent.as_secs_f64() / 1e3);
    }
    made.show();
    Ok(())
}

/// Measures the memory of this process for each end of a connection, beside the receives that it is granted.
fn endpoints() -> Result<(), Failure> {
    let device = null_verbs().device("null0")?;
    let receives = ENDPOINTS * u32::from(GRANT);
    let options = RdmaOptions { endpoints: ENDPOINTS, receives, grant: GRANT, ..RdmaOptions::default() };
    let (mut asking, mut asked) = (End::new(&device, options)?, End::new(&device, options)?);
    let before = resident_bytes()?;
    for _ in 0..ENDPOINTS {
        connect(&mut asking, &mut asked)?;
    }
    let grown = resident_bytes()?.saturating_sub(before);
    let each = grown as f64 / f64::from(2 * ENDPOINTS) / 1024.0;
    println!("  {:44} {each:9.1} KiB  (2 x {ENDPOINTS} ends connected, none used)", "memory of an endpoint");
    let granted = u32::from(options.grant) * options.message_bytes / 1024;
    let usual = u32::from(RdmaOptions::default().grant) * options.message_bytes / 1024;
    println!(
        "  {:44} {granted:9} KiB  ({usual} KiB by default), pinned with the device",
        "receives granted to its peer"
    );
    Ok(())
}

/// Returns the resident memory of this process.
fn resident_bytes() -> Result<u64, Failure> {
    const PAGE_BYTES: u64 = 4096;
    let text = fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = text.split_ascii_whitespace().nth(1).ok_or("/proc/self/statm has no second number")?.parse()?;
    Ok(pages * PAGE_BYTES)
}
