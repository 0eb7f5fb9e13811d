//! Latency of small messages: TCP against a raw socket ping-pong, shared memory against TCP.

use std::net::TcpStream;
use std::time::Instant;

use kvplane::{Client, Region, RegionOptions, Transfer, cpu};

use super::initiator::Initiator;
use crate::Failure;
use crate::bed::{Bed, Directory, client_config, pacing_of};
use crate::peer::{Peer, receive, send};
use crate::rounds::{Series, median};

const BYTES: usize = 4096;
/// Bytes of the request and the reply of a read of 4 KiB on kvplane's wire: header and item, header and payload.
const QUESTION_BYTES: usize = 64 + 32;
const ANSWER_BYTES: usize = 64 + BYTES;
const CALLS: usize = 20_000;

/// Measures 4 KiB by TCP against a raw ping-pong of the same size, spinning against spinning and parked against parked.
///
/// By itself, the kernel sometimes puts both ends of a parked ping-pong on one core, where no core has to be woken, and
/// sometimes not: the figures then differ twentyfold by its choice. So every thread is pinned here: on two cores, as a
/// client and a shard are, and parked ones on one core too.
pub(crate) fn tcp(rounds: usize) -> Result<(), Failure> {
    println!("tcp-latency: 4 KiB, p50, against a raw socket ping-pong of as many bytes between two processes");
    let cores = cpu::allowed_cores();
    let (Some(&ours), Some(&theirs)) = (cores.first(), cores.last()) else { return Err("no core".into()) };
    // A thread of its own, because the affinity stays with the thread.
    std::thread::scope(|scope| {
        let pinned = scope.spawn(move || {
            cpu::pin_current_thread(ours).map_err(|error| error.to_string())?;
            let cases = [
                ("tcp", "spin", "two cores", theirs, CALLS),
                ("tcp-unchecked", "spin", "two cores", theirs, CALLS),
                ("tcp", "park", "two cores", theirs, CALLS / 4),
                ("tcp", "park", "one core", ours, CALLS / 4),
            ];
            for (way, pacing, place, core, calls) in cases {
                compare(rounds, way, pacing, (place, core), calls).map_err(|error| error.to_string())?;
            }
            Ok(())
        });
        pinned.join().unwrap_or_else(|_| Err("a thread panicked".to_owned()))
    })?;
    Ok(())
}

fn compare(rounds: usize, way: &str, pacing: &str, (place, core): (&str, usize), calls: usize) -> Result<(), Failure> {
    let directory = Directory::new()?;
    let sums = if way == "tcp" { "with checksums" } else { "without" };
    println!("  {pacing}, {place}, {sums}:");
    let mut ours = Ours::start(way, pacing, core, &directory)?;
    let mut raw = Raw::start(pacing, core)?;
    let mut series = [Series::new("raw", "us"), Series::new("read", "us"), Series::new("write", "us")];
    for _ in 0..rounds {
        series[0].push(raw.measure(calls)?);
        series[1].push(ours.measure(calls, false)?);
        series[2].push(ours.measure(calls, true)?);
    }
    series.iter().for_each(Series::show);
    let wanted = if pacing == "spin" { "at most 1.3" } else { "at most 1.0" };
    series[1].show_ratio(&series[0], wanted);
    series[2].show_ratio(&series[0], wanted);
    Ok(())
}

/// Measures a get of 4 KiB from the store, by shared memory and by TCP.
pub(crate) fn shm(rounds: usize) -> Result<(), Failure> {
    println!("shm-latency: get of 4 KiB from the store, p50, shared memory against TCP, spinning");
    let bed = Bed::start(64 << 20, "spin")?;
    let mut series = [Series::new("get by shared memory", "us"), Series::new("get by TCP", "us")];
    for _ in 0..rounds {
        for (way, series) in ["shm", "tcp"].into_iter().zip(&mut series) {
            let mut client = Client::connect(&client_config(way, "spin", bed.directory.text())?)?;
            let memory = client.register(Region::allocate(&RegionOptions::new("latency", BYTES))?);
            let slice = memory.slice(0, BYTES);
            client.put_from(b"small", slice)?;
            series.push(p50_us(CALLS, || {
                client.get_into(b"small", slice)?.ok_or("the object is missing")?;
                Ok(())
            })?);
        }
    }
    series.iter().for_each(Series::show);
    series[0].show_ratio(&series[1], "under 0.333");
    Ok(())
}

fn p50_us(calls: usize, mut call: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
    for _ in 0..calls / 10 {
        call()?;
    }
    let mut samples = Vec::with_capacity(calls);
    for _ in 0..calls {
        let start = Instant::now();
        call()?;
        samples.push(start.elapsed().as_nanos() as f64 / 1000.0);
    }
    Ok(median(&mut samples))
}

struct Raw {
    stream: TcpStream,
    _peer: Peer,
}

impl Raw {
    fn start(pacing: &str, core: usize) -> Result<Self, Failure> {
        let core = core.to_string();
        let (question, answer) = (QUESTION_BYTES.to_string(), ANSWER_BYTES.to_string());
        let peer = Peer::start(&["on-core", &core, "echo", pacing, &question, &answer])?;
        let stream = TcpStream::connect(&peer.said)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(pacing == "spin")?;
        Ok(Self { stream, _peer: peer })
    }

    fn measure(&mut self, calls: usize) -> Result<f64, Failure> {
        let (question, mut answer) = ([1; QUESTION_BYTES], [0; ANSWER_BYTES]);
        p50_us(calls, || {
            send(&mut self.stream, &question)?;
            receive(&mut self.stream, &mut answer)?;
            Ok(())
        })
    }
}

struct Ours(Initiator);

impl Ours {
    fn start(way: &str, pacing: &str, core: usize, directory: &Directory) -> Result<Self, Failure> {
        // The shard's thread inherits the affinity of the thread that starts it.
        let target = Peer::start(&["on-core", &core.to_string(), "target", way, pacing, directory.text()])?;
        let memory = RegionOptions::new("latency", BYTES);
        Ok(Self(Initiator::open(target, way, pacing_of(pacing)?, &memory, directory)?))
    }

    fn measure(&mut self, calls: usize, write: bool) -> Result<f64, Failure> {
        let transfer = Transfer { local: self.0.buffer.slice(0, BYTES), region: 0, offset: 0, write };
        p50_us(calls, || self.0.run(&[transfer]))
    }
}
