//! The initiator: a sweep of cases, each run by its threads for its duration.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use kvplane::{Buffer, Segment, Session, Transfer, TransferEngine, cpu};
use kvplane_tools::pattern;
use kvplane_tools::tebench::{Case, CaseStats, Range, Samples, Step, Sweep, plot, stats, table};

use super::{OpType, TARGET_SEED, Tebench};
use crate::command::Failure;

const LONGEST_WARM_UP: Duration = Duration::from_secs(1);
const OPEN_DEADLINE: Duration = Duration::from_secs(5);

pub(super) fn run(options: &Tebench) -> Result<(), Failure> {
    let range = |start, max| Range { start, max };
    let sweep = Sweep::new(
        range(options.start_num_threads, options.max_num_threads),
        range(options.start_block_size, options.max_block_size),
        range(options.start_batch_size, options.max_batch_size),
        options.total_buffer_size,
    )?;
    let engine = options.engine()?;
    let region = options.region("tebench-initiator")?;
    let quiet = options.json.as_deref() == Some("-");
    if !quiet {
        println!("{}", table::header());
    }
    let mut rows = Vec::new();
    for step in sweep.steps() {
        match step {
            Step::Skip { .. } => eprintln!("{step}"),
            Step::Run(case) => {
                let row = run_case(options, &engine, &region, case)?;
                if !quiet {
                    println!("{}", table::row(&row));
                }
                rows.push(row);
            }
        }
    }
    let label = format!("kvplane tebench {:?} to {}", options.op_type, options.target_seg_name);
    match options.json.as_deref() {
        Some("-") => println!("{:#}", table::to_json(&label, &rows)),
        Some(path) => std::fs::write(path, format!("{:#}\n", table::to_json(&label, &rows)))
            .map_err(|error| format!("{path}: {error}"))?,
        None => {}
    }
    if let Some(path) = &options.plot {
        plot::write_html(&label, &rows, path).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

fn run_case(
    options: &Tebench,
    engine: &TransferEngine,
    region: &std::sync::Arc<kvplane::Region>,
    case: Case,
) -> Result<CaseStats, Failure> {
    let barrier = Barrier::new(case.threads as usize);
    let before_ns = cpu::process_cpu_ns();
    let start = Instant::now();
    let outcome: Vec<Result<(Samples, u64), String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..case.threads)
            .map(|thread| {
                let barrier = &barrier;
                scope.spawn(move || {
                    // Everyone reaches the barrier, also whoever fails, or the others would wait for ever.
                    let worker = Worker::new(options, engine, region, case, thread).and_then(|mut worker| {
                        worker.run_for(options.duration.min(LONGEST_WARM_UP), None)?;
                        Ok(worker)
                    });
                    barrier.wait();
                    let mut worker = worker.map_err(|error| error.to_string())?;
                    let mut samples = Samples::new(stats::DEFAULT_SAMPLES, 1, thread);
                    let total =
                        worker.run_for(options.duration, Some(&mut samples)).map_err(|error| error.to_string())?;
                    Ok((samples, total))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned())))
            .collect()
    });
    let threads: Vec<(Samples, u64)> = outcome.into_iter().collect::<Result<_, String>>()?;
    // CPU time covers the warm-up too; its share is the warm-up's share of the time.
    let share = options.duration.as_secs_f64() / start.elapsed().as_secs_f64().max(1e-9);
    let cpu_s = (cpu::process_cpu_ns() - before_ns) as f64 / 1e9 * share.min(1.0);
    Ok(CaseStats::new(case, &threads, Some(cpu_s)))
}

struct Worker<'a> {
    options: &'a Tebench,
    case: Case,
    session: Session,
    segment: Segment,
    buffer: Buffer,
    /// Where this thread's slot begins, in the caller's memory and in the target's.
    local_at: u64,
    target_at: u64,
    rounds: u64,
}

impl<'a> Worker<'a> {
    fn new(
        options: &'a Tebench,
        engine: &TransferEngine,
        region: &std::sync::Arc<kvplane::Region>,
        case: Case,
        thread: u64,
    ) -> Result<Self, Failure> {
        let mut session = engine.session()?;
        let buffer = session.register(std::sync::Arc::clone(region));
        let targets: Vec<&str> = options.target_seg_name.split(',').collect();
        let name = targets[(thread % targets.len() as u64) as usize].trim();
        let segment = session.open_segment(name, OPEN_DEADLINE)?;
        let slot = case.block_bytes * case.batch;
        let target_at = options.target_offset + slot * thread;
        let there = segment.regions.first().map_or(0, |region| region.bytes);
        let room = match options.target_range_size {
            0 => there.saturating_sub(options.target_offset),
            bytes => bytes.min(there.saturating_sub(options.target_offset)),
        };
        if slot * case.threads > room {
            return Err(format!(
                "{} threads with {} blocks of {} bytes need {} bytes, the target {name} has {room} for them",
                case.threads,
                case.batch,
                case.block_bytes,
                slot * case.threads
            )
            .into());
        }
        Ok(Self { options, case, session, segment, buffer, local_at: slot * thread, target_at, rounds: 0 })
    }

    /// Batches until the time is over; nanoseconds spent in them and between.
    fn run_for(&mut self, duration: Duration, mut samples: Option<&mut Samples>) -> Result<u64, Failure> {
        let start = Instant::now();
        let interval = Duration::from_micros(self.options.request_interval_us);
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

    /// One round: the times of its batches.
    fn round(&mut self) -> Result<[u64; 2], Failure> {
        self.rounds += 1;
        if self.options.check_consistency {
            return self.consistent_round();
        }
        let write = match self.options.op_type {
            OpType::Read => false,
            OpType::Write => true,
            OpType::Mix => self.rounds.is_multiple_of(2),
            OpType::WriteSeed => {
                self.fill(TARGET_SEED);
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

    /// Writes a pattern of this round, spoils the local copy, reads it back and compares.
    fn consistent_round(&mut self) -> Result<[u64; 2], Failure> {
        let seed = TARGET_SEED ^ self.rounds.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.fill(seed);
        let wrote = self.batch(true)?;
        self.fill(!seed);
        let read = self.batch(false)?;
        self.check(seed)?;
        Ok([wrote, read])
    }

    fn batch(&mut self, write: bool) -> Result<u64, Failure> {
        let bytes = self.case.block_bytes;
        let transfers: Vec<Transfer> = (0..self.case.batch)
            .map(|block| Transfer {
                local: self.buffer.slice((self.local_at + block * bytes) as usize, bytes as usize),
                region: 0,
                offset: self.target_at + block * bytes,
                write,
            })
            .collect();
        let start = Instant::now();
        self.session.run(&self.segment, &transfers, self.options.deadline())?;
        Ok(start.elapsed().as_nanos() as u64)
    }

    /// The pattern follows from the target address, so that any other process can check it.
    fn fill(&self, seed: u64) {
        let bytes = (self.case.block_bytes * self.case.batch) as usize;
        self.buffer.region().fill_with(self.local_at as usize, bytes, &mut |offset, part| {
            pattern::fill(seed, self.target_at + offset, part);
        });
    }

    fn check(&self, seed: u64) -> Result<(), Failure> {
        let bytes = (self.case.block_bytes * self.case.batch) as usize;
        let mut wrong = None;
        self.buffer.region().read_with(self.local_at as usize, bytes, &mut |offset, part| {
            if let (None, Err(mismatch)) = (&wrong, pattern::check(seed, self.target_at + offset, part)) {
                wrong = Some(mismatch);
            }
        });
        match wrong {
            None => Ok(()),
            Some(mismatch) => Err(format!("inconsistent data detected in round {}: {mismatch}", self.rounds).into()),
        }
    }
}
