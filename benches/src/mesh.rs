//! Channels of a mesh against blocking TCP sockets, between as many processes: the time of a frame from process to
//! process, and the rate of long frames.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvplane_mesh::{HEAD_BYTES, Mesh, MeshConfig, MeshEvent, PayloadPart, Peer, SendOutcome};
use kvplane_sys::{HugePages, Region, RegionOptions};

use crate::rounds::{Series, median};
use crate::{Failure, peer};

/// First argument of a process of the mesh or the ring of sockets.
pub(crate) const ROLE: &str = "--mesh-peer";
const LANES: [&str; 2] = ["shm", "tcp"];
/// Frames that are passed around for one figure, and bytes that are streamed for one.
const PASSES: usize = 2000;
const STREAMED_BYTES: usize = 1 << 30;
const LONG_BYTES: usize = 128 << 10;
/// First byte of a head: pass the frame on to the next rank; take it; take it and answer.
const PASS: u8 = 1;
const TAKE: u8 = 2;
const ANSWER: u8 = 3;

/// Measures meshes of 2, 4 and 8 processes.
pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("mesh: frames passed around 2, 4 and 8 processes, p50 of a hop; long frames from one to another");
    for (ranks, bytes) in [(2, 8), (2, 4096), (4, 8), (8, 8), (8, 4096)] {
        let mut raw = Raw::start(ranks, bytes)?;
        let mut ours = LANES.map(|lane| Ours::start(lane, ranks));
        let mut series = [Series::new("sockets", "us"), Series::new("shm", "us"), Series::new("tcp", "us")];
        for _ in 0..rounds {
            series[0].push(raw.pass(bytes)?);
            for (ours, series) in ours.iter_mut().zip(&mut series[1..]) {
                series.push(ours.as_mut().map_err(|error| error.to_string())?.pass(bytes)?);
            }
        }
        println!("  {ranks} processes, {bytes} bytes:");
        show(&series, "below 1");
    }
    let mut raw = Raw::start(2, LONG_BYTES)?;
    let mut ours = LANES.map(|lane| Ours::start(lane, 2));
    let mut series = [Series::new("sockets", "GB/s"), Series::new("shm", "GB/s"), Series::new("tcp", "GB/s")];
    for _ in 0..rounds {
        series[0].push(raw.stream()?);
        for (ours, series) in ours.iter_mut().zip(&mut series[1..]) {
            series.push(ours.as_mut().map_err(|error| error.to_string())?.stream()?);
        }
    }
    println!("  2 processes, frames of 128 KiB one way:");
    show(&series, "above 1");
    Ok(())
}

fn show(series: &[Series; 3], wanted: &str) {
    series.iter().for_each(Series::show);
    series[1..].iter().for_each(|ours| ours.show_ratio(&series[0], wanted));
}

/// Runs a process in another role: `mesh LANE RANK RANKS` or `sockets BYTES`.
pub(crate) fn peer(words: &[String]) -> Result<(), Failure> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["mesh", lane, rank, ranks] => {
            let mut mesh = start(lane, rank.parse()?)?;
            println!("{}", mesh.address());
            let mut addresses = String::new();
            std::io::stdin().read_line(&mut addresses)?;
            let (rank, ranks) = (rank.parse()?, ranks.parse()?);
            connect(&mut mesh, addresses.split_whitespace(), rank, ranks)?;
            serve(&mut mesh, rank, ranks)
        }
        ["sockets", bytes] => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            println!("{}", listener.local_addr()?);
            let mut next = String::new();
            std::io::stdin().read_line(&mut next)?;
            let mut next = TcpStream::connect(next.trim())?;
            next.set_nodelay(true)?;
            let mut former = listener.accept()?.0;
            let mut frame = vec![0; HEAD_BYTES + bytes.parse::<usize>()?];
            while former.read_exact(&mut frame).is_ok() {
                if frame[0] != TAKE {
                    next.write_all(&frame)?;
                }
            }
            Ok(())
        }
        _ => Err("no such role".into()),
    }
}

fn start(lane: &str, rank: u8) -> Result<Mesh, Failure> {
    let mut config = MeshConfig::new("bench", rank, 1);
    config.shared_memory = lane == "shm";
    Ok(Mesh::start(config)?)
}

/// Connects to all others; then each reports to rank 0, which begins when all have.
fn connect<'a>(mesh: &mut Mesh, addresses: impl Iterator<Item = &'a str>, rank: u8, ranks: u8) -> Result<(), Failure> {
    let peers = addresses.zip(0..).map(|(address, rank)| Peer { rank, incarnation: 1, address: address.to_owned() });
    let peers: Vec<Peer> = peers.collect();
    mesh.set_peers(&peers);
    let limit = Instant::now() + Duration::from_secs(20);
    let mut reports = 0;
    while mesh.channels().open.count_ones() + 1 < u32::from(ranks) || rank == 0 && reports + 1 < ranks {
        match mesh.poll() {
            _ if Instant::now() > limit => return Err("the processes do not connect".into()),
            Some(MeshEvent::Frame(_)) => reports += 1,
            Some(_) => {}
            None => mesh.wait(limit),
        }
    }
    if rank > 0 {
        let memory = memory()?;
        send(mesh, 0, TAKE, PayloadPart { region: &memory, offset: 0, bytes: 0 })?;
    }
    Ok(())
}

/// Sends a frame as soon as there is room.
fn send(mesh: &mut Mesh, to: u8, kind: u8, part: PayloadPart<'_>) -> Result<(), Failure> {
    let mut head = [0; HEAD_BYTES];
    head[0] = kind;
    loop {
        match mesh.send(to, &head, &[part]) {
            SendOutcome::Sent => return Ok(()),
            // Events that nobody takes would end each wait at once.
            SendOutcome::Full => match mesh.poll() {
                None => mesh.wait(Instant::now() + Duration::from_secs(1)),
                Some(MeshEvent::Up(_)) => {}
                Some(MeshEvent::Down { .. }) => return Err("a process is gone".into()),
                Some(MeshEvent::Frame(_)) => return Err("a frame arrived where none is expected".into()),
            },
            SendOutcome::Down => return Err("a process is gone".into()),
        }
    }
}

/// Takes the next frame; its payload is passed to `f` in place.
fn take(mesh: &mut Mesh, f: &mut dyn FnMut(u8, &kvplane_mesh::Frame)) -> Result<(), Failure> {
    loop {
        match mesh.poll() {
            Some(MeshEvent::Frame(frame)) => {
                f(frame.head[0], &frame);
                return Ok(());
            }
            Some(MeshEvent::Down { .. }) => return Err("a process is gone".into()),
            Some(MeshEvent::Up(_)) => {}
            None => mesh.wait(Instant::now() + Duration::from_secs(1)),
        }
    }
}

fn memory() -> Result<std::sync::Arc<Region>, Failure> {
    let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("bench", LONG_BYTES) };
    Ok(Region::allocate(&options)?)
}

fn serve(mesh: &mut Mesh, rank: u8, ranks: u8) -> Result<(), Failure> {
    let memory = memory()?;
    loop {
        let (mut kind, mut bytes, mut from) = (0, 0, 0);
        take(mesh, &mut |found, frame| {
            (kind, bytes, from) = (found, frame.payload.bytes(), frame.from);
            Region::copy_between(&memory, 0, frame.payload.region(), frame.payload.offset(), bytes);
        })?;
        let part = PayloadPart { region: &memory, offset: 0, bytes };
        match kind {
            PASS => send(mesh, (rank + 1) % ranks, PASS, part)?,
            ANSWER => send(mesh, from, TAKE, part)?,
            _ => {}
        }
    }
}

/// Rank 0 of a mesh, with the others.
struct Ours {
    mesh: Mesh,
    ranks: u8,
    memory: std::sync::Arc<Region>,
    _others: Vec<peer::Peer>,
}

impl Ours {
    fn start(lane: &str, ranks: u8) -> Result<Self, Failure> {
        let mut mesh = start(lane, 0)?;
        let mut others = Vec::new();
        for rank in 1..ranks {
            others.push(peer::Peer::start_as(ROLE, &["mesh", lane, &rank.to_string(), &ranks.to_string()])?);
        }
        let mut addresses = mesh.address().to_owned();
        for other in &others {
            addresses += " ";
            addresses += &other.said;
        }
        for other in &mut others {
            other.tell(&addresses)?;
        }
        connect(&mut mesh, addresses.split(' '), 0, ranks)?;
        Ok(Self { mesh, ranks, memory: memory()?, _others: others })
    }

    /// Returns the microseconds of a hop.
    fn pass(&mut self, bytes: usize) -> Result<f64, Failure> {
        let mut times = Vec::with_capacity(PASSES);
        for _ in 0..PASSES {
            let start = Instant::now();
            send(&mut self.mesh, 1, PASS, PayloadPart { region: &self.memory, offset: 0, bytes })?;
            take(&mut self.mesh, &mut |_, _| {})?;
            times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(self.ranks));
        }
        Ok(median(&mut times))
    }

    /// Returns the bytes of long frames in a nanosecond.
    fn stream(&mut self) -> Result<f64, Failure> {
        let start = Instant::now();
        let part = PayloadPart { region: &self.memory, offset: 0, bytes: LONG_BYTES };
        for _ in 0..STREAMED_BYTES / LONG_BYTES {
            send(&mut self.mesh, 1, TAKE, part)?;
        }
        send(&mut self.mesh, 1, ANSWER, PayloadPart { bytes: 0, ..part })?;
        take(&mut self.mesh, &mut |_, _| {})?;
        Ok(STREAMED_BYTES as f64 / start.elapsed().as_nanos() as f64)
    }
}

/// First process of a ring of blocking sockets.
struct Raw {
    former: TcpStream,
    next: TcpStream,
    ranks: u8,
    _others: Vec<peer::Peer>,
}

impl Raw {
    fn start(ranks: u8, bytes: usize) -> Result<Self, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut others: Vec<peer::Peer> = Vec::new();
        for _ in 1..ranks {
            others.push(peer::Peer::start_as(ROLE, &["sockets", &bytes.to_string()])?);
        }
        let mut addresses: Vec<String> = others.iter().map(|other| other.said.clone()).collect();
        addresses.push(listener.local_addr()?.to_string());
        for (other, next) in others.iter_mut().zip(&addresses[1..]) {
            other.tell(next)?;
        }
        let next = TcpStream::connect(&addresses[0])?;
        next.set_nodelay(true)?;
        Ok(Self { former: listener.accept()?.0, next, ranks, _others: others })
    }

    fn pass(&mut self, bytes: usize) -> Result<f64, Failure> {
        let mut frame = vec![0; HEAD_BYTES + bytes];
        frame[0] = PASS;
        let mut times = Vec::with_capacity(PASSES);
        for _ in 0..PASSES {
            let start = Instant::now();
            self.next.write_all(&frame)?;
            self.former.read_exact(&mut frame)?;
            times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(self.ranks));
        }
        Ok(median(&mut times))
    }

    fn stream(&mut self) -> Result<f64, Failure> {
        let mut frame = vec![0; HEAD_BYTES + LONG_BYTES];
        frame[0] = TAKE;
        let start = Instant::now();
        for _ in 0..STREAMED_BYTES / LONG_BYTES {
            self.next.write_all(&frame)?;
        }
        frame[0] = ANSWER;
        self.next.write_all(&frame)?;
        self.former.read_exact(&mut frame)?;
        Ok(STREAMED_BYTES as f64 / start.elapsed().as_nanos() as f64)
    }
}
