//! Benchmark of one RDMA device against perftest's programs on the same device, in turns: bandwidth of large writes and
//! reads, and latency of small writes.
//!
//! Both run between two processes with a device each. Bandwidth: messages of one length, 128 of them in flight, with a
//! spinning sender and a sleeping receiver, as in `ib_write_bw` and `ib_read_bw`.
//!
//! Latency: both ends spin on the last word of the other's write, write back, and spin until the device completes this
//! write, before they wait for the next: that is the method of `ib_write_lat`, and half of the round trip counts for
//! both. kvplane is measured by the transfer engine, which any thread may use, and by a session, which one thread owns.
//! Beside it stands the time from a write's submission to its completion, which perftest does not measure: it includes
//! the acknowledgement of the other device.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane::{
    Buffer, HugePages, Opcode, Pacing, RdmaConfig, RdmaUse, Region, RegionOptions, RegisterOptions, Segment,
    SegmentHandle, Session, SubmitOptions, TaskState, Transfer, TransferEngine, TransferEngineConfig, TransferRequest,
};

use crate::Failure;
use crate::bed::{Directory, pacing_of};
use crate::peer::Peer;
use crate::rounds::{Series, median};

/// Devices of initiator and target, if none are named.
const DEVICES: [&str; 2] = ["rxe0", "rxe1"];
/// Number of messages in flight.
const DEPTH: usize = 128;
/// Number of messages of one batch; as many batches are in flight as make up the depth.
const BATCH: usize = 32;
/// Bytes that one round of a bandwidth measurement moves.
const ROUND_BYTES: usize = 48 << 20;
/// Memory of either side: a batch of the longest messages, as reads of one batch must not overlap.
const REGION_BYTES: usize = BATCH << 20;
/// Number of round trips of one round of a latency measurement.
const CALLS: usize = 1500;
/// Offset in either memory that the other side writes to.
const INBOX: usize = 64 << 10;
/// Time limit of one program.
const PATIENCE: Duration = Duration::from_secs(60);

/// Checks that all named devices exist.
fn present(devices: [&str; 2]) -> Result<(), Failure> {
    for device in devices {
        if !std::path::Path::new("/sys/class/infiniband").join(device).exists() {
            return Err(format!(
                "this machine has no RDMA device {device}: `cargo x bench --rig perftest` runs this in one that has"
            )
            .into());
        }
    }
    Ok(())
}

/// Part of the benchmark.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    All,
    Bandwidth,
    Latency,
}

pub(crate) fn run(rounds: usize, part: Part) -> Result<(), Failure> {
    let named = std::env::var("KVPLANE_BENCH_RDMA_DEVICES").unwrap_or_default();
    let devices = named.split_once(',').map_or(DEVICES, |(ours, theirs)| [ours, theirs]);
    present(devices)?;
    println!("perftest: {} to {}, against perftest's programs, one connection", devices[0], devices[1]);
    if part != Part::Latency {
        bandwidths(rounds, devices)?;
    }
    if part != Part::Bandwidth {
        latencies(rounds, devices)?;
    }
    Ok(())
}

fn bandwidths(rounds: usize, devices: [&str; 2]) -> Result<(), Failure> {
    let bed = Bed::start(devices, "adaptive")?;
    for bytes in [64 << 10, 256 << 10, 1 << 20] {
        for (opcode, program) in [(Opcode::Write, "ib_write_bw"), (Opcode::Read, "ib_read_bw")] {
            let mut theirs = Series::new(format!("{program}, {} KiB", bytes >> 10), "MiB/s");
            let mut ours = Series::new(format!("ours, {opcode:?} {} KiB", bytes >> 10), "MiB/s");
            for _ in 0..rounds {
                theirs.push(perftest(program, devices, bytes, ROUND_BYTES / bytes, 3)?);
                ours.push(bed.bandwidth(opcode, bytes)?);
            }
            theirs.show();
            ours.show();
            ours.show_ratio(&theirs, "at least 0.9");
        }
    }
    Ok(())
}

fn latencies(rounds: usize, devices: [&str; 2]) -> Result<(), Failure> {
    let mut bed = Bed::start(devices, "patient")?;
    for bytes in [64, 256, 1024, 4096] {
        let mut theirs = Series::new(format!("ib_write_lat, {bytes} B"), "us");
        let mut ours = Way::ALL.map(|way| {
            let half = Series::new(format!("{}, {bytes} B, half of there and back", way.name()), "us");
            (half, Series::new(format!("{}, {bytes} B, to completion", way.name()), "us"))
        });
        for _ in 0..rounds {
            theirs.push(perftest("ib_write_lat", devices, bytes, CALLS, 4)?);
            for (way, (half, completed)) in Way::ALL.into_iter().zip(&mut ours) {
                let (half_us, completed_us) = bed.ping(way, bytes)?;
                half.push(half_us);
                completed.push(completed_us);
            }
        }
        theirs.show();
        for (half, completed) in &ours {
            half.show();
            completed.show();
            half.show_ratio(&theirs, "at most 1.2");
        }
    }
    Ok(())
}

/// Program of perftest, ended on drop.
struct Tool(Child);

impl Drop for Tool {
    fn drop(&mut self) {
        // Both calls are harmless if it has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program of perftest between the devices; returns a column of its figures.
fn perftest(program: &str, devices: [&str; 2], bytes: usize, count: usize, column: usize) -> Result<f64, Failure> {
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let command = |device: &str| {
        let mut command = Command::new(program);
        command.args(["-F", "-x", "1", "-d", device, "-p", &port.to_string()]);
        command.args(["-s", &bytes.to_string(), "-n", &count.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        command
    };
    let start = |mut command: Command| {
        command
            .spawn()
            .map(Tool)
            .map_err(|error| format!("{program}: {error}: `cargo x setup bench` installs perftest"))
    };
    let mut server = start(command(devices[1]))?;
    wait_until(program, || Ok(listens(port)? || server.0.try_wait()?.is_some()))?;
    let mut asking = command(devices[0]);
    asking.arg("127.0.0.1");
    let mut client = start(asking)?;
    let output = client.0.stdout.take().ok_or("its output was to be a pipe")?;
    wait_until(program, || Ok(client.0.try_wait()?.is_some()))?;
    let text = std::io::read_to_string(output)?;
    let mut figures = text.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let line = figures.rfind(|words| words.first() == Some(&&*bytes.to_string()));
    let figure = line.as_ref().and_then(|words| words.get(column)?.parse().ok());
    figure.ok_or_else(|| format!("{program} gave no figures:\n{text}").into())
}

fn wait_until(program: &str, mut over: impl FnMut() -> Result<bool, Failure>) -> Result<(), Failure> {
    let start = Instant::now();
    while !over()? {
        if start.elapsed() > PATIENCE {
            return Err(format!("{program} takes longer than {PATIENCE:?}").into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Returns true if a process listens on this port. A connection would be taken for a client.
fn listens(port: u16) -> Result<bool, Failure> {
    let port = format!(":{port:04X}");
    let mut found = false;
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        // A machine may have no IPv6.
        let text = std::fs::read_to_string(table).unwrap_or_default();
        let mut lines = text.lines().map(|line| line.split_ascii_whitespace().skip(1));
        found |= lines
            .any(|mut words| words.next().is_some_and(|local| local.ends_with(&port)) && words.nth(1) == Some("0A"));
    }
    Ok(found)
}

fn engine(device: &str, pacing: Pacing, directory: &str) -> Result<(TransferEngine, Arc<Region>), Failure> {
    let engine = TransferEngine::start(TransferEngineConfig {
        shared_memory: false,
        tcp: false,
        stock_peers: false,
        rdma: RdmaConfig { devices: vec![device.to_owned()], ..RdmaConfig::of(RdmaUse::Require) },
        pacing,
        slice_bytes: 1 << 20,
        runtime_directory: Some(directory.into()),
        ..TransferEngineConfig::default()
    })?;
    let options =
        RegionOptions { huge: HugePages::Try, prefault: true, ..RegionOptions::new("perftest", REGION_BYTES) };
    let region = Region::allocate(&options)?;
    engine.register(Arc::clone(&region), &RegisterOptions::default())?;
    Ok((engine, region))
}

/// Interface that writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The transfer engine, for any number of threads.
    Engine,
    /// A session, for one thread.
    Session,
}

impl Way {
    const ALL: [Self; 2] = [Self::Engine, Self::Session];

    const fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Session => "session",
        }
    }

    fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|way| way.name() == name)
    }
}

/// Session of one thread to the other side.
struct Alone {
    session: Session,
    buffer: Buffer,
    segment: Segment,
}

/// Side of the ping-pong.
struct Side {
    engine: TransferEngine,
    region: Arc<Region>,
    peer: SegmentHandle,
    there: u64,
    alone: Option<Alone>,
}

impl Side {
    fn request(&self, opcode: Opcode, (from, to): (usize, usize), bytes: usize) -> TransferRequest {
        TransferRequest {
            opcode,
            source: self.region.address() + from as u64,
            target: self.peer,
            target_offset: self.there + to as u64,
            length: bytes as u64,
        }
    }

    /// Opens a session if one is needed and missing.
    fn prepare(&mut self, way: Way, peer: &str) -> Result<(), Failure> {
        if way == Way::Session && self.alone.is_none() {
            let mut session = self.engine.session()?;
            let buffer = session.register(Arc::clone(&self.region));
            let segment = session.open_segment(peer, PATIENCE)?;
            self.alone = Some(Alone { session, buffer, segment });
        }
        Ok(())
    }

    /// Writes a message that ends with this number to the other side's inbox, and waits for its completion.
    fn send(&mut self, way: Way, bytes: usize, number: u64) -> Result<(), Failure> {
        self.region.copy_in(bytes - 8, &number.to_ne_bytes());
        if let (Way::Session, Some(alone)) = (way, &mut self.alone) {
            let local = alone.buffer.slice(0, bytes);
            let write = Transfer { local, region: 0, offset: INBOX as u64, write: true };
            return Ok(alone.session.run(&alone.segment, &[write], PATIENCE)?);
        }
        let batch = self.engine.submit(&[self.request(Opcode::Write, (0, INBOX), bytes)], &SubmitOptions::default())?;
        match batch.wait().state {
            TaskState::Completed => Ok(()),
            state => Err(format!("a write ended {state:?}: {:?}", batch.problem()).into()),
        }
    }

    /// Spins until the other side's message with this number arrives.
    fn receive(&self, bytes: usize, number: u64) -> Result<(), Failure> {
        let start = Instant::now();
        let mut looks = 0u32;
        while self.region.load_u64(INBOX + bytes - 8) != number {
            std::hint::spin_loop();
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(1 << 16) && start.elapsed() > PATIENCE {
                return Err(format!("message {number} did not arrive").into());
            }
        }
        Ok(())
    }
}

/// Runs the other process: serves memory, and for each line `PEER ADDRESS WAY BYTES FIRST COUNT` writes this number of
/// messages back.
pub(crate) fn serve(device: &str, pacing: &str, directory: &str) -> Result<(), Failure> {
    let (engine, region) = engine(device, pacing_of(pacing)?, directory)?;
    crate::peer::say(&format!("{} {}", engine.name(), region.address()))?;
    let mut side = Side { engine, region, peer: SegmentHandle::LOCAL, there: 0, alone: None };
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let [peer, there, way, bytes, first, count] = words[..] else {
            return Err(format!("{line:?} is not a command").into());
        };
        let way = Way::of(way).ok_or("unknown way")?;
        (side.peer, side.there) = (side.engine.open_segment(peer)?, there.parse()?);
        side.prepare(way, peer)?;
        let (bytes, first, count): (usize, u64, u64) = (bytes.parse()?, first.parse()?, count.parse()?);
        for number in first..first + count {
            side.receive(bytes, number)?;
            side.send(way, bytes, number)?;
        }
    }
    Ok(())
}

/// Both sides of kvplane.
struct Bed {
    side: Side,
    number: u64,
    other: Peer,
    _directory: Directory,
}

impl Bed {
    /// Starts both sides: the initiator spins, the other waits as requested.
    fn start(devices: [&str; 2], pacing: &str) -> Result<Self, Failure> {
        let directory = Directory::new()?;
        let other = Peer::start(&["perftest", devices[1], pacing, directory.text()])?;
        let (engine, region) = engine(devices[0], pacing_of("patient")?, directory.text())?;
        let (name, there) = other.said.split_once(' ').ok_or("the peer did not start")?;
        let (peer, there) = (engine.open_segment(name)?, there.parse()?);
        let side = Side { engine, region, peer, there, alone: None };
        Ok(Self { side, number: 0, other, _directory: directory })
    }

    /// Returns the bandwidth of a round in messages of this length, in MiB per second.
    fn bandwidth(&self, opcode: Opcode, bytes: usize) -> Result<f64, Failure> {
        let places = REGION_BYTES / bytes;
        let request = |number: usize| {
            let at = number % places * bytes;
            self.side.request(opcode, (at, at), bytes)
        };
        let messages: Vec<TransferRequest> = (0..ROUND_BYTES / bytes).map(request).collect();
        let options = SubmitOptions::default();
        let mut open = std::collections::VecDeque::new();
        let finish = |batch: kvplane::Batch| match batch.wait().state {
            TaskState::Completed => Ok(()),
            state => Err(format!("a batch ended {state:?}: {:?}", batch.problem())),
        };
        finish(self.side.engine.submit(&messages[..1], &options)?)?;
        let start = Instant::now();
        for batch in messages.chunks(BATCH) {
            if open.len() >= DEPTH / BATCH {
                open.pop_front().map_or(Ok(()), finish)?;
            }
            open.push_back(self.side.engine.submit(batch, &options)?);
        }
        open.into_iter().try_for_each(finish)?;
        Ok((messages.len() * bytes) as f64 / f64::from(1 << 20) / start.elapsed().as_secs_f64())
    }

    /// Returns the median of half a round trip, and of one message to its completion, in microseconds.
    fn ping(&mut self, way: Way, bytes: usize) -> Result<(f64, f64), Failure> {
        let warm_up = CALLS / 10;
        let (first, count) = (self.number + 1, CALLS + warm_up);
        let (name, address) = (self.side.engine.name().to_owned(), self.side.region.address());
        self.other.tell(&format!("{name} {address} {} {bytes} {first} {count}", way.name()))?;
        self.side.prepare(way, self.other.said.split(' ').next().unwrap_or_default())?;
        let (mut halves, mut completed) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for _ in 0..count {
            self.number += 1;
            let start = Instant::now();
            self.side.send(way, bytes, self.number)?;
            completed.push(start.elapsed().as_nanos() as f64 / 1000.0);
            self.side.receive(bytes, self.number)?;
            halves.push(start.elapsed().as_nanos() as f64 / 2000.0);
        }
        Ok((median(&mut halves[warm_up..]), median(&mut completed[warm_up..])))
    }
}
