//! Device memory that is staged, beside memory of the host over the same transport: over the driver for tests, whose
//! copy engines are modelled. A modelled copy takes its time and moves nothing, because a real engine takes no core
//! from the transport; the bytes of every kind of transfer are checked before, with copies that are made.
//!
//! The wanted rate is that of the slower of the two, the copy engine and the transport. Both engines are in this
//! process, which counts the calls of the driver at both ends.

use std::time::{Duration, Instant};

use kvplane::device::{Backing, Device, DeviceId, DeviceMemory, Family};
use kvplane::{
    HugePages, Opcode, Region, RegionOptions, RegisterOptions, SegmentHandle, SubmitOptions, TaskState, TransferEngine,
    TransferRequest,
};
use kvplane_fake_cuda::load_cuda;
use kvplane_fake_devices::Control;

use crate::Failure;
use crate::bed::{Directory, engine_config};
use crate::rounds::{median, spread};

/// Modelled rate of each copy engine, in bytes a second.
const ENGINE_RATE: u64 = 25_000_000_000;
const MOST_BYTES: usize = 256 << 20;
/// Lengths of one transfer, in bytes.
const LENGTHS: [usize; 7] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, MOST_BYTES];
/// Time of one measurement, at least one transfer.
const SHARE: Duration = Duration::from_millis(30);
const DEVICES: [DeviceId; 2] =
    [DeviceId { family: Family::Cuda, ordinal: 0 }, DeviceId { family: Family::Cuda, ordinal: 1 }];

/// Kind of transfers: where the memory of each end is, and the direction.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    /// True if the initiator's memory, and that of its peer, is a device's.
    on_device: [bool; 2],
    opcode: Opcode,
}

const KINDS: [Kind; 6] = [
    Kind { name: "write, device to host", on_device: [true, false], opcode: Opcode::Write },
    Kind { name: "read, host to device", on_device: [true, false], opcode: Opcode::Read },
    Kind { name: "write, host to device", on_device: [false, true], opcode: Opcode::Write },
    Kind { name: "read, device to host", on_device: [false, true], opcode: Opcode::Read },
    Kind { name: "write, device to device", on_device: [true, true], opcode: Opcode::Write },
    Kind { name: "read, device to device", on_device: [true, true], opcode: Opcode::Read },
];

/// Engine with memory of the host and of a device.
struct End {
    engine: TransferEngine,
    host: Backing,
    device: Backing,
}

impl End {
    fn start(way: &str, directory: &Directory, device: DeviceId) -> Result<Self, Failure> {
        let config = engine_config(way, "adaptive", directory.text())?;
        // Peers of the same host reach device memory over TCP.
        let engine = TransferEngine::start(kvplane::TransferEngineConfig { tcp: true, ..config })?;
        let options = RegionOptions {
            shared: true,
            huge: HugePages::Try,
            prefault: true,
            ..RegionOptions::new("bench-staging", MOST_BYTES)
        };
        let host = Backing::from(Region::allocate(&options)?);
        let device = Backing::from(DeviceMemory::allocate(&Device::open(device)?, MOST_BYTES as u64)?);
        for memory in [&host, &device] {
            engine.register(memory.clone(), &RegisterOptions::default())?;
        }
        Ok(Self { engine, host, device })
    }

    const fn memory(&self, on_device: bool) -> &Backing {
        if on_device { &self.device } else { &self.host }
    }
}

/// Two engines and the driver.
struct Ends {
    ours: End,
    theirs: End,
    peer: SegmentHandle,
    fake: Control,
}

/// Transfers of one length in one measurement.
#[derive(Default)]
struct Measurement {
    gigabytes_per_s: f64,
    calls_per_mib: f64,
}

impl Ends {
    fn start(way: &str, directory: &Directory, fake: Control) -> Result<Self, Failure> {
        let ours = End::start(way, directory, DEVICES[0])?;
        let theirs = End::start(way, directory, DEVICES[1])?;
        let peer = ours.engine.open_segment(theirs.engine.name())?;
        Ok(Self { ours, theirs, peer, fake })
    }

    fn run(&self, kind: Kind, bytes: usize) -> Result<(), Failure> {
        let [ours, theirs] = kind.on_device;
        let request = TransferRequest {
            opcode: kind.opcode,
            source: self.ours.memory(ours).address(),
            target: self.peer,
            target_offset: self.theirs.memory(theirs).address(),
            length: bytes as u64,
        };
        let batch = self.ours.engine.submit(&[request], &SubmitOptions::default())?;
        match batch.wait().state {
            TaskState::Completed => Ok(()),
            state => Err(format!("{}: {state:?}: {:?}", kind.name, batch.problem()).into()),
        }
    }

    fn measure(&self, kind: Kind, bytes: usize) -> Result<Measurement, Failure> {
        let (start, calls) = (Instant::now(), self.fake.counters().calls);
        let mut moved = 0;
        while moved == 0 || start.elapsed() < SHARE {
            self.run(kind, bytes)?;
            moved += bytes;
        }
        let gigabytes_per_s = moved as f64 / 1e9 / start.elapsed().as_secs_f64();
        let ends = kind.on_device.iter().filter(|on_device| **on_device).count().max(1);
        let mebibytes = (moved * ends) as f64 / f64::from(1 << 20);
        Ok(Measurement { gigabytes_per_s, calls_per_mib: (self.fake.counters().calls - calls) as f64 / mebibytes })
    }

    /// Checks the bytes of a kind of transfer, with copies that are made.
    fn check(&self, kind: Kind, seed: u64) -> Result<(), Failure> {
        const BYTES: usize = 5 << 20;
        let [ours, theirs] = kind.on_device;
        let (ours, theirs) = (self.ours.memory(ours), self.theirs.memory(theirs));
        let (from, to) = if kind.opcode == Opcode::Write { (ours, theirs) } else { (theirs, ours) };
        let pattern = Control::pattern(seed, BYTES as u64);
        match from {
            Backing::Host(region) => region.copy_in(0, &pattern),
            Backing::Device(memory) => self.fake.write(memory.address(), &pattern),
        }
        self.run(kind, BYTES)?;
        let mut found = vec![0; BYTES];
        match to {
            Backing::Host(region) => region.copy_out(0, &mut found),
            Backing::Device(memory) => found = self.fake.read(memory.address(), BYTES as u64),
        }
        if found == pattern { Ok(()) } else { Err(format!("{}: wrong bytes", kind.name).into()) }
    }

    /// Returns the most bytes of chunks that the initiator's thread and the peer's had in use.
    fn used(&self) -> Result<[u64; 2], Failure> {
        let ours = self.ours.engine.metrics().staging.values().map(|counters| counters.most_used_bytes).max();
        let theirs = self.theirs.engine.snapshot()?.staging.values().map(|counters| counters.most_used_bytes).max();
        Ok([ours, theirs].map(|most| most.unwrap_or(0)))
    }
}

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("staging: one transfer at a time, device memory with copies at a modelled 25 GB/s, against host memory");
    let fake = load_cuda()?;
    let directory = Directory::new()?;
    for way in ["tcp", "shm"] {
        let ends = Ends::start(way, &directory, fake)?;
        fake.set_copies(50_000, 0, 3);
        // Over shared memory, a device at the peer is reached by TCP, as above.
        let kinds = if way == "tcp" { &KINDS[..] } else { &KINDS[..2] };
        for (seed, kind) in kinds.iter().enumerate() {
            ends.check(*kind, seed as u64)?;
        }
        fake.model_engines(ENGINE_RATE);
        for kind in kinds {
            println!(" {way}, {}", kind.name);
            for bytes in LENGTHS {
                row(&ends, *kind, bytes, rounds)?;
            }
        }
        fake.model_engines(0);
        let [ours, theirs] = ends.used()?.map(|bytes| bytes >> 10);
        println!("  chunks in use at most: {ours} KiB at the initiator, {theirs} KiB at its peer");
    }
    Ok(())
}

/// Measures one length in turns with the host's memory, and prints a row.
fn row(ends: &Ends, kind: Kind, bytes: usize, rounds: usize) -> Result<(), Failure> {
    let plain = Kind { name: "host to host", on_device: [false; 2], ..kind };
    let (mut host, mut device, mut ratios, mut calls) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    ends.run(kind, bytes)?;
    ends.run(plain, bytes)?;
    for round in 0..rounds {
        // The first of a pair has the colder caches, so the order alternates.
        let (staged, transport) = if round % 2 == 0 {
            let staged = ends.measure(kind, bytes)?;
            (staged, ends.measure(plain, bytes)?)
        } else {
            let transport = ends.measure(plain, bytes)?;
            (ends.measure(kind, bytes)?, transport)
        };
        let wanted = transport.gigabytes_per_s.min(ENGINE_RATE as f64 / 1e9);
        ratios.push(staged.gigabytes_per_s / wanted);
        host.push(transport.gigabytes_per_s);
        device.push(staged.gigabytes_per_s);
        calls.push(staged.calls_per_mib);
    }
    let (least, ratio, most) = spread(&ratios);
    println!(
        "  {:>6} KiB  host {:6.2} GB/s  device {:6.2} GB/s  ratio {ratio:5.2} ({least:.2} .. {most:.2})  \
         {:7.1} calls per MiB",
        bytes >> 10,
        median(&mut host),
        median(&mut device),
        median(&mut calls)
    );
    Ok(())
}
