//! Initiator of a benchmark: runs the cases one after the other, each by its threads for its duration, and reports
//! them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane::{Metrics, TransferEngine, ZeroCopyCounters, cpu};
use kvplane_tools::tebench::counts::{DeadlineGroup, Slow, Transport as Counted};
use kvplane_tools::tebench::devices::Device;
use kvplane_tools::tebench::qos::{Report, Sample};
use kvplane_tools::tebench::table::Beside;
use kvplane_tools::tebench::{Case, CaseStats, Class, Samples, Step, classes, plot, stats, table};

use super::engine::LOCAL;
use super::gate::Gate;
use super::load::{Lot, Work};
use super::memory::BenchMemory;
use super::thread_error::ThreadError;
use super::values::Transport;
use super::worker::{Ground, Worker};
use super::{Api, Failure, Tebench};
use crate::command::NothingRun;
use crate::command::process::metrics;

/// Benchmark run in progress.
struct BenchRun<'a> {
    options: &'a Tebench,
    engine: Arc<TransferEngine>,
    /// Memory of this side; threads use its buffers in turn.
    memories: Vec<BenchMemory>,
    own: Vec<BenchMemory>,
    targets: Vec<&'a str>,
    sessions: bool,
    quiet: bool,
    rows: Vec<CaseStats>,
    beside: Beside,
    zero_copy: ZeroCopyCounters,
}

pub(super) fn run(options: &Tebench) -> Result<(), Failure> {
    let work = options.load.work(options.engine.total_buffer_size)?;
    let targets: Vec<&str> =
        options.target_seg_name.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if targets.is_empty() {
        return Err(format!("--target_seg_name {:?} names no target", options.target_seg_name).into());
    }
    let sessions = sessions(options, &targets)?;
    check_any(&work)?;
    let engine = options.engine.start(options.initiators.unwrap_or_else(|| options.load.initiators()), false)?;
    let server = options.engine.serve_metrics(&engine)?;
    if let Some(server) = &server {
        // Standard output is for the table.
        eprintln!("{}", metrics::say(server, "metrics"));
    }
    let own = match targets.contains(&LOCAL) {
        true => options.engine.serve(&engine)?,
        false => Vec::new(),
    };
    let memories = options.engine.initiate(&engine)?;
    let quiet = options.json.as_deref() == Some("-");
    let (rows, beside, zero_copy) = (Vec::new(), Beside::default(), ZeroCopyCounters::default());
    BenchRun { options, engine, memories, own, targets, sessions, quiet, rows, beside, zero_copy }.work(&work)
}

/// Fails if no case can run: the run would pass for a good one.
fn check_any(work: &Work) -> Result<(), Failure> {
    let Work::Sweep(sweep, _) = work else { return Ok(()) };
    if sweep.steps().any(|step| matches!(step, Step::Run(_))) {
        return Ok(());
    }
    let mut skipped = 0;
    for step in sweep.steps() {
        eprintln!("{step}");
        skipped += 1;
    }
    let what = if skipped == 1 { "the only case was".to_owned() } else { format!("all {skipped} cases were") };
    Err(NothingRun(format!("{what} skipped, nothing was measured: raise --total_buffer_size or lower the sizes"))
        .into())
}

/// Returns true if each thread gets a session of its own, the default where sessions can do the work.
fn sessions(options: &Tebench, targets: &[&str]) -> Result<bool, Failure> {
    let way = options.engine.transport()?;
    let files = targets.iter().filter(|name| name.starts_with("file:")).count();
    let local = targets.iter().filter(|&&name| name == LOCAL).count();
    for (transport, count, what) in [(Transport::Uring, files, "file:///path"), (Transport::Local, local, LOCAL)] {
        if way == transport && count < targets.len() {
            let name = way.name();
            return Err(format!("--xport_type {name} needs --target_seg_name {what} and no other").into());
        }
    }
    if options.engine.has_gpus() && files > 0 {
        return Err("memory of a GPU is not moved to and from files: use --seg_type DRAM for file:///path".into());
    }
    let needed =
        options.load.needs_engine() || options.engine.is_stock() || options.engine.names_gpus() || files + local > 0;
    match (options.api, needed) {
        (Some(Api::Session), true) => {
            Err("--api session is for DRAM between kvplane's engines only: omit it here".into())
        }
        (Some(Api::Session), _) if options.engine.metrics_port.is_some() => {
            Err("--metrics_port shows the engine's counters, which exclude sessions: not with --api session".into())
        }
        (Some(api), _) => Ok(api == Api::Session),
        (None, needed) => Ok(!needed && options.engine.metrics_port.is_none()),
    }
}

impl BenchRun<'_> {
    fn work(mut self, work: &Work) -> Result<(), Failure> {
        let load = &self.options.load;
        match work {
            Work::Sweep(sweep, classes) => {
                for step in sweep.steps() {
                    match step {
                        Step::Skip { .. } => eprintln!("{step}"),
                        Step::Run(case) => self.case(case, load.lots(case, classes), classes)?,
                    }
                }
            }
            Work::Mixed(workloads) => {
                let classes: Vec<Class> = workloads.iter().map(|workload| workload.class.clone()).collect();
                let lots = load.mixed_lots(workloads, &classes);
                let case = Case { threads: lots.len() as u64, block_bytes: 0, batch: 0 };
                self.case(case, lots, &classes)?;
            }
        }
        let metrics = self.engine.metrics();
        self.add_counts(&metrics);
        self.zero_copy.add(&metrics.zero_copy);
        for counts in &self.beside.transports {
            self.say(|| counts.line());
        }
        for device in &self.beside.devices {
            self.say(|| device.line());
        }
        let lent = self.zero_copy;
        if lent.calls + lent.fallbacks > 0 {
            self.say(|| {
                format!(
                    "sent without a copy: {} bytes in {} calls; the kernel copied in {} of them and refused {} more",
                    lent.bytes, lent.calls, lent.copied, lent.fallbacks
                )
            });
        }
        self.hand_out()?;
        self.check_way()
    }

    fn say(&self, line: impl FnOnce() -> String) {
        if !self.quiet {
            println!("{}", line());
        }
    }

    /// Runs a case and reports it. Classes that move different sizes have a case of 0 bytes.
    fn case(&mut self, case: Case, lots: Vec<Lot>, classes: &[Class]) -> Result<(), Failure> {
        let bytes: Vec<u64> = lots.iter().map(|lot| lot.block_bytes * lot.batch).collect();
        let (threads, cpu_s) = self.threads(case, lots)?;
        if case.block_bytes > 0 {
            let row = CaseStats::new(case, &threads, Some(cpu_s));
            // Printed above the first row, not earlier: a run that fails prints no empty table.
            if self.rows.is_empty() {
                self.say(table::header);
            }
            self.say(|| table::row(&row));
            self.rows.push(row);
        }
        if !classes.is_empty() {
            let report = self.report(case, &threads, &bytes, classes);
            self.say(|| report.lines());
            if let Some(path) = &self.options.load.qos_output_jsonl {
                report.append(path)?;
            }
            self.beside.qos.push(report);
        }
        if let Some((deadline_us, tight)) = self.options.load.tight() {
            let groups = DeadlineGroup::of(case, &threads, tight, deadline_us);
            groups.iter().for_each(|group| self.say(|| group.line()));
            self.beside.deadlines.extend(groups);
        }
        Ok(())
    }

    /// Returns the samples of each thread with its duration in nanoseconds, and the CPU seconds spent meanwhile.
    fn threads(&mut self, case: Case, lots: Vec<Lot>) -> Result<(Vec<(Samples, u64)>, f64), Failure> {
        let load = &self.options.load;
        let ground = Ground {
            load,
            engine: &self.engine,
            memories: &self.memories,
            own: &self.own,
            target_gpu: self.options.engine.target_gpu(),
            targets: &self.targets,
            sessions: self.sessions,
            threads: case.threads,
            slot_bytes: lots.iter().map(|lot| lot.block_bytes * lot.batch).max().unwrap_or(0),
        };
        let gate = Gate::new(lots.len());
        let before_ns = cpu::process_cpu_ns();
        let start = Instant::now();
        let outcomes: Vec<Result<_, ThreadError>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(lots)
                .map(|(thread, lot)| {
                    let (ground, gate) = (&ground, &gate);
                    let body = move || thread_of(ground, gate, lot, thread);
                    let builder = std::thread::Builder::new().name(format!("tebench-{thread}"));
                    let spawned = builder.spawn_scoped(scope, body);
                    spawned.map_err(|source| {
                        gate.give_up();
                        ThreadError::NotStarted { number: thread + 1, threads: case.threads, source }
                    })
                })
                .collect();
            let join = |thread: Result<std::thread::ScopedJoinHandle<'_, Result<_, ThreadError>>, ThreadError>| {
                thread?.join().unwrap_or(Err(ThreadError::Panicked))
            };
            threads.into_iter().map(join).collect()
        });
        let (done, failed): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
        // The cause is reported before its consequences.
        let failures = failed.into_iter().filter_map(Result::err);
        if let Some(why) = failures.min_by_key(|why| matches!(why, ThreadError::Abandoned)) {
            return Err(why.into());
        }
        let mut threads = Vec::new();
        for (samples, total_ns, metrics) in done.into_iter().flatten() {
            threads.push((samples, total_ns));
            if let Some(metrics) = metrics {
                self.add_counts(&metrics);
                self.zero_copy.add(&metrics.zero_copy);
            }
        }
        // CPU time covers the warm-up too; its share is the warm-up's share of the time.
        let share = load.duration / start.elapsed().as_secs_f64().max(1e-9);
        Ok((threads, (cpu::process_cpu_ns() - before_ns) as f64 / 1e9 * share.min(1.0)))
    }

    /// Builds the report of the classes; `bytes` are those of a batch of each thread.
    fn report(&self, case: Case, threads: &[(Samples, u64)], bytes: &[u64], classes: &[Class]) -> Report {
        let samples = classes.iter().zip(classes::ranges(classes)).map(|(class, range)| {
            let (own, bytes) = (&threads[range.clone()], bytes[range.start]);
            let stats = CaseStats::new(case, own, None);
            let duration_ns: u64 = own.iter().map(|(_, total_ns)| total_ns).sum();
            let sample = Sample {
                operations: stats.batches,
                transferred_bytes: stats.batches * bytes,
                duration_s: duration_ns as f64 / own.len().max(1) as f64 / 1e9,
                p99_us: stats.p99_transfer_us,
                within_slo: own.iter().map(|(samples, _)| samples.kept().slo).sum(),
            };
            (class.clone(), sample)
        });
        let samples: Vec<_> = samples.collect();
        Report::new(case.block_bytes, case.batch, &samples, self.options.load.qos_link_capacity_gbps)
    }

    /// Adds the counters of an engine or a session to those of the transports, and its slow transfers to the others.
    fn add_counts(&mut self, metrics: &Metrics) {
        for rail in metrics.rails.iter().filter(|rail| rail.operations + rail.retries + rail.failovers > 0) {
            let counts = Counted {
                transport: rail.transport.name(),
                operations: rail.operations,
                bytes: rail.bytes,
                retries: rail.retries,
                failovers: rail.failovers,
                queue: rail.queue.clone(),
                service: rail.service.clone(),
            };
            counts.add(&mut self.beside.transports);
            Device::add(rail, &mut self.beside.devices);
        }
        self.beside.slow.extend(metrics.slow.iter().map(Slow::of));
    }

    fn hand_out(&self) -> Result<(), Failure> {
        let options = self.options;
        let label = format!("kvplane tebench {:?} to {}", options.load.op_type, options.target_seg_name);
        let json = || table::to_json(&label, &self.rows, &self.beside);
        match options.json.as_deref() {
            Some("-") => println!("{:#}", json()),
            Some(path) => {
                std::fs::write(path, format!("{:#}\n", json())).map_err(|error| format!("{path}: {error}"))?;
            }
            None => {}
        }
        if let Some(path) = &options.plot {
            plot::write_html(&label, &self.rows, path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }

    /// Fails if a run over one transport moved bytes over another, as happens if a peer does not offer it.
    fn check_way(&self) -> Result<(), Failure> {
        let wanted = match self.options.engine.transport()? {
            Transport::Tcp if !self.options.engine.is_stock() => "tcp",
            Transport::Rdma => "rdma",
            Transport::Shm => "shm",
            Transport::Cma => "cma",
            Transport::Uring => "file",
            Transport::Local => "local",
            Transport::Tcp | Transport::Any => return Ok(()),
        };
        let other = self.beside.transports.iter().find(|one| one.bytes > 0 && one.transport != wanted);
        match other {
            // A stock target has no transport but that of its own protocol.
            Some(other) if (wanted, other.transport) != ("tcp", "mooncake") => {
                Err(format!("{} bytes were moved over {}, not over {wanted}", other.bytes, other.transport).into())
            }
            _ => Ok(()),
        }
    }
}

/// Runs a thread of a case; returns its samples, its duration in nanoseconds, and the counters of its session.
fn thread_of(
    ground: &Ground<'_>,
    gate: &Gate,
    lot: Lot,
    thread: u64,
) -> Result<(Samples, u64, Option<Metrics>), ThreadError> {
    let (load, promises) = (ground.load, lot.promises);
    let way_in = gate.enter();
    let worker = Worker::new(ground, lot, thread).and_then(|mut worker| {
        worker.run_for(Duration::from_secs_f64(load.warm_up), None)?;
        Ok(worker)
    });
    let all_there = way_in.pass(worker.is_ok());
    let mut worker = worker?;
    if !all_there {
        return Err(ThreadError::Abandoned);
    }
    let mut samples = Samples::new(stats::DEFAULT_SAMPLES, 1, thread).with_promises(promises);
    let total_ns = worker.run_for(Duration::from_secs_f64(load.duration), Some(&mut samples))?;
    Ok((samples, total_ns, worker.metrics()))
}
