//! Thread of a case: runs batch after batch, by the engine or by a session of its own, and verifies every byte if
//! requested.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane::device::{Backing, DeviceId};
use kvplane::{
    Buffer, Metrics, Notice, Opcode, Segment, SegmentHandle, Session, TaskState, Transfer, TransferEngine,
    TransferRequest,
};
use kvplane_tools::pattern;
use kvplane_tools::tebench::Samples;

use super::engine::LOCAL;
use super::load::{LoadFlags, Lot};
use super::memory::BenchMemory;
use super::values::GpuChoice;
use super::{Failure, OpType, TARGET_SEED};

const OPEN_DEADLINE: Duration = Duration::from_secs(5);
/// Pause before a notice is sent again to a target that has no space for it.
const NOTICE_PAUSE: Duration = Duration::from_millis(1);

/// State shared by all threads of a case.
pub(super) struct Ground<'a> {
    pub(super) load: &'a LoadFlags,
    pub(super) engine: &'a TransferEngine,
    /// Buffers of the caller, at least one; threads use them in turn.
    pub(super) memories: &'a [BenchMemory],
    /// Buffers of the target, if this process is the target.
    pub(super) own: &'a [BenchMemory],
    /// GPUs whose buffers of a target are used.
    pub(super) target_gpu: GpuChoice,
    /// Names of targets, at least one.
    pub(super) targets: &'a [&'a str],
    /// Each thread has a session of its own.
    pub(super) sessions: bool,
    /// Number of threads, and the bytes that each uses in the memory of both sides.
    pub(super) threads: u64,
    pub(super) slot_bytes: u64,
}

/// Interface that moves the bytes of a thread.
enum Mover<'a> {
    /// A session, which no other thread uses.
    Session(Box<Own>),
    /// The engine, which other threads use too.
    Engine { engine: &'a TransferEngine, target: SegmentHandle, base: u64 },
}

/// Session, with the target's segment, the index of its buffer, and the caller's memory.
struct Own {
    session: Session,
    segment: Segment,
    index: usize,
    buffer: Buffer,
}

pub(super) struct Worker<'a> {
    ground: &'a Ground<'a>,
    lot: Lot,
    /// Memory of this thread's side.
    memory: &'a BenchMemory,
    mover: Mover<'a>,
    /// Notice that is sent to the target after each batch.
    notice: Option<(SegmentHandle, Notice)>,
    /// Offsets of this thread's slot, in the caller's memory and in the target's buffer.
    local_at: u64,
    target_at: u64,
    rounds: u64,
}

impl<'a> Worker<'a> {
    pub(super) fn new(ground: &'a Ground<'a>, lot: Lot, thread: u64) -> Result<Self, Failure> {
        let Ground { load, engine, memories, targets, slot_bytes, threads, .. } = *ground;
        let memory = &memories[thread as usize % memories.len()];
        let name = targets[(thread % targets.len() as u64) as usize];
        // Threads of one target use its buffers in turn.
        let turn = (thread / targets.len() as u64) as usize;
        let (mover, there) = if let (true, Some(region)) = (ground.sessions, memory.region()) {
            let mut session = engine.session()?;
            let buffer = session.register(Arc::clone(region));
            let segment = session.open_segment(name, OPEN_DEADLINE)?;
            let index = turn % segment.regions.len().max(1);
            let there = segment.regions.get(index).map_or(0, |region| region.bytes);
            (Mover::Session(Box::new(Own { session, segment, index, buffer })), there)
        } else {
            let (target, base, there) = open(ground, name, turn)?;
            (Mover::Engine { engine, target, base }, there)
        };
        let beyond = there.saturating_sub(load.target_offset);
        let room = match load.target_range_size {
            0 => beyond,
            bytes => bytes.min(beyond),
        };
        let needed = slot_bytes.saturating_mul(threads);
        if needed > room {
            let words = format!("{threads} threads with {slot_bytes} bytes each need {needed} bytes");
            return Err(format!("{words}, but the target {name} has only {room}").into());
        }
        let notice = match (&mover, load.notifi) {
            (Mover::Engine { target, .. }, true) => {
                Some((*target, Notice { name: engine.name().to_owned(), message: format!("thread {thread}") }))
            }
            _ => None,
        };
        let (local_at, target_at) = (slot_bytes * thread, load.target_offset + slot_bytes * thread);
        Ok(Self { ground, lot, memory, mover, notice, local_at, target_at, rounds: 0 })
    }

    /// Runs batches until the time is over; returns the nanoseconds spent in them and between.
    pub(super) fn run_for(&mut self, duration: Duration, mut samples: Option<&mut Samples>) -> Result<u64, Failure> {
        let start = Instant::now();
        let interval = Duration::from_micros(self.ground.load.request_interval_us);
        while start.elapsed() < duration {
            let began = Instant::now();
            let ns = self.round()?;
            if let Some(samples) = samples.as_deref_mut() {
                ns.iter().filter(|&&ns| ns > 0).for_each(|&ns| samples.record(ns));
            }
            while began.elapsed() < interval {
                std::thread::yield_now();
            }
        }
        Ok(start.elapsed().as_nanos() as u64)
    }

    /// Returns the counters of the thread's session; `None` if it uses the engine.
    pub(super) fn metrics(&mut self) -> Option<Metrics> {
        match &mut self.mover {
            Mover::Session(own) => Some(own.session.metrics()),
            Mover::Engine { .. } => None,
        }
    }

    /// Runs one round; returns the times of its batches.
    fn round(&mut self) -> Result<[u64; 2], Failure> {
        self.rounds += 1;
        if self.ground.load.check_consistency {
            return self.consistent_round();
        }
        let write = match self.ground.load.op_type {
            OpType::Read => false,
            OpType::Write => true,
            OpType::Mix => self.rounds.is_multiple_of(2),
            OpType::WriteSeed => {
                self.fill(TARGET_SEED)?;
                true
            }
            OpType::ReadVerify => {
                let ns = self.batch(false)?;
                self.check(TARGET_SEED)?;
                return Ok([ns, 0]);
            }
        };
        Ok([self.batch(write)?, 0])
    }

    /// Writes a pattern of this round, overwrites the local copy, reads the pattern back and compares it.
    fn consistent_round(&mut self) -> Result<[u64; 2], Failure> {
        let seed = TARGET_SEED ^ self.rounds.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.fill(seed)?;
        let wrote = self.batch(true)?;
        self.fill(!seed)?;
        let read = self.batch(false)?;
        self.check(seed)?;
        Ok([wrote, read])
    }

    /// Runs one batch and sends its notice; returns the time in nanoseconds.
    fn batch(&mut self, write: bool) -> Result<u64, Failure> {
        let (bytes, batch) = (self.lot.block_bytes, self.lot.batch);
        let (local_at, target_at) = (self.local_at, self.target_at);
        let timeout = self.ground.load.timeout();
        let start;
        match &mut self.mover {
            Mover::Session(own) => {
                let Own { session, segment, index, buffer } = &mut **own;
                let transfer = |block| Transfer {
                    local: buffer.slice((local_at + block * bytes) as usize, bytes as usize),
                    region: *index,
                    offset: target_at + block * bytes,
                    write,
                };
                let transfers: Vec<Transfer> = (0..batch).map(transfer).collect();
                start = Instant::now();
                session.run(segment, &transfers, timeout)?;
            }
            Mover::Engine { engine, target, base } => {
                let source = self.memory.backing().address() + local_at;
                let request = |block| TransferRequest {
                    opcode: if write { Opcode::Write } else { Opcode::Read },
                    source: source + block * bytes,
                    target: *target,
                    target_offset: *base + target_at + block * bytes,
                    length: bytes,
                };
                let requests: Vec<TransferRequest> = (0..batch).map(request).collect();
                start = Instant::now();
                run(engine, &requests, &self.lot)?;
                if let Some((target, notice)) = &self.notice {
                    leave(engine, *target, notice, start + timeout)?;
                }
            }
        }
        Ok(start.elapsed().as_nanos() as u64)
    }

    /// The pattern follows from the offset in the target's buffer, so that any other process can verify it.
    fn fill(&self, seed: u64) -> Result<(), Failure> {
        let bytes = self.lot.block_bytes * self.lot.batch;
        self.memory.fill_with(self.local_at, bytes, &mut |offset, part| {
            pattern::fill(seed, self.target_at + offset, part);
        })
    }

    fn check(&self, seed: u64) -> Result<(), Failure> {
        let bytes = self.lot.block_bytes * self.lot.batch;
        let mut wrong = None;
        self.memory.read_with(self.local_at, bytes, &mut |offset, part| {
            if let (None, Err(mismatch)) = (&wrong, pattern::check(seed, self.target_at + offset, part)) {
                wrong = Some(mismatch);
            }
        })?;
        match wrong {
            None => Ok(()),
            Some(mismatch) => Err(format!("inconsistent data detected in round {}: {mismatch}", self.rounds).into()),
        }
    }
}

/// Opens the target of this name; returns the address and the length of the buffer whose turn it is, of all or of those
/// on the chosen GPU.
fn open(ground: &Ground<'_>, name: &str, turn: usize) -> Result<(SegmentHandle, u64, u64), Failure> {
    let gpu = ground.target_gpu;
    let is_meant = |id: Option<DeviceId>| gpu == GpuChoice::All || id.is_some_and(|id| gpu.takes(id));
    if name == LOCAL {
        let mine = ground.own.iter().map(BenchMemory::backing);
        let id = |one: &Backing| one.device().map(|memory| memory.device().id());
        let buffers: Vec<Backing> = mine.filter(|one| is_meant(id(one))).collect();
        let buffer = buffers.get(turn % buffers.len().max(1)).ok_or_else(|| no_buffer(name, gpu))?;
        return Ok((SegmentHandle::LOCAL, buffer.address(), buffer.bytes()));
    }
    let target = ground.engine.open_segment(name)?;
    let mut buffers = ground.engine.segment_info(target)?.buffers;
    buffers.retain(|one| is_meant(one.location.as_deref().and_then(DeviceId::parse)));
    if buffers.is_empty() && gpu != GpuChoice::All {
        return Err(no_buffer(name, gpu));
    }
    let buffer = buffers.get(turn % buffers.len().max(1));
    Ok((target, buffer.map_or(0, |buffer| buffer.address), buffer.map_or(0, |buffer| buffer.bytes)))
}

fn no_buffer(name: &str, gpu: GpuChoice) -> Failure {
    format!("the target {name} tells of no memory on GPU {gpu}: omit --target_gpu_id to use all of its memory").into()
}

/// Runs transfers as one batch; fails if any of them failed.
fn run(engine: &TransferEngine, requests: &[TransferRequest], lot: &Lot) -> Result<(), Failure> {
    let batch = engine.submit(requests, &lot.options)?;
    let status = batch.wait();
    if status.state == TaskState::Completed {
        return Ok(());
    }
    let cause = batch.problem().map(|cause| format!(" ({cause})")).unwrap_or_default();
    let moved = status.transferred_bytes;
    Err(format!("a batch of {} ended as {:?} after {moved} bytes{cause}", requests.len(), status.state).into())
}

/// Sends a notice; retries until `until` if the target has no space for it.
fn leave(engine: &TransferEngine, target: SegmentHandle, notice: &Notice, until: Instant) -> Result<(), Failure> {
    loop {
        match engine.notify(target, notice) {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() >= until => return Err(error.into()),
            Err(_) => std::thread::sleep(NOTICE_PAUSE),
        }
    }
}
