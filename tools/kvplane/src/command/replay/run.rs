//! Run of a replay: clients on threads, a sampler of progress, and the cache models to compare with.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kvplane::rpc::Role;
use kvplane::rpc::message::Status;
use kvplane::{Client, ClientConfig, Control, ControlLink, cpu};
use kvplane_tools::model::{self, ModelRun, Policy};
use kvplane_tools::report::{Operation, OperationReport, ReplayReport, TimelinePoint};
use kvplane_tools::trace::Trace;

use super::Way;
use super::worker::{Tally, Worker};
use crate::command::Failure;

/// Allocation unit of the store, in bytes.
const GRANULE_BYTES: u64 = 256;
/// Approximate number of points of the timeline.
const TIMELINE_POINTS: u64 = 200;
/// Interval at which progress is sampled.
const SAMPLE: Duration = Duration::from_millis(100);

/// Settings of a run.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) cluster: String,
    pub(crate) runtime_directory: Option<PathBuf>,
    pub(crate) way: Way,
    pub(crate) rdma_devices: Vec<String>,
    pub(crate) block_bytes: u64,
    pub(crate) clients: u32,
    pub(crate) speed: Option<f64>,
    pub(crate) server_pid: Option<u32>,
    /// Request a prefetch with the exists.
    pub(crate) ahead: bool,
    /// Pause between exists and get.
    pub(crate) pause: Duration,
}

impl Plan {
    pub(super) fn control(&self) -> Control {
        Control::Local { cluster: self.cluster.clone(), runtime_directory: self.runtime_directory.clone() }
    }
}

/// State shared by the clients.
pub(super) struct ClientsState<'a> {
    pub(super) trace: &'a Trace,
    pub(super) next: AtomicU64,
    pub(super) done: AtomicU64,
    pub(super) blocks: AtomicU64,
    pub(super) hit_blocks: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) failed: AtomicBool,
    /// Start of the run, set when every client is ready.
    pub(super) start: OnceLock<Instant>,
    pub(super) speed: Option<f64>,
    pub(super) ahead: bool,
    pub(super) pause: Duration,
}

impl ClientsState<'_> {
    pub(super) fn elapsed(&self) -> Duration {
        self.start.get_or_init(Instant::now).elapsed()
    }
}

/// Replays a trace against a live cluster.
pub(crate) fn run(plan: &Plan, trace: &Trace) -> Result<ReplayReport, Failure> {
    let longest = trace.requests.iter().map(|request| request.blocks.len()).max().ok_or("the trace has no requests")?;
    let control = plan.control();
    let config = ClientConfig { control: control.clone(), ..ClientConfig::local(&plan.cluster) };
    let config = plan.way.allow(config, &plan.rdma_devices)?;
    let admin = ControlLink::to(&control, Role::Admin)?;
    let pool_bytes: u64 = admin.call(Status)?.members.iter().map(|member| member.capacity_bytes).sum();
    if plan.block_bytes > pool_bytes {
        return Err(format!("blocks of {} bytes do not fit in a pool of {pool_bytes}", plan.block_bytes).into());
    }
    let link = Client::connect(&config)?.link().clone();
    let make = || Worker::new(&config, link.clone(), plan.block_bytes, longest);
    let charge = plan.block_bytes.next_multiple_of(GRANULE_BYTES);
    let segmented = model::simulate(Policy::SegmentedLru, &trace.requests, charge, pool_bytes);
    let lru = model::simulate(Policy::Lru, &trace.requests, charge, pool_bytes);

    let server_before = plan.server_pid.and_then(server_cpu_s);
    let client_before_ns = cpu::process_cpu_ns();
    let shared = ClientsState {
        trace,
        next: AtomicU64::new(0),
        done: AtomicU64::new(0),
        blocks: AtomicU64::new(0),
        hit_blocks: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
        failed: AtomicBool::new(false),
        start: OnceLock::new(),
        speed: plan.speed,
        ahead: plan.ahead,
        pause: plan.pause,
    };
    let (tally, timeline) = drive(&make, plan.clients, &shared, &segmented)?;
    let wall_s = shared.elapsed().as_secs_f64();
    let cpu_s_client = (cpu::process_cpu_ns() - client_before_ns) as f64 / 1e9;
    let cpu_s_server = plan.server_pid.and_then(server_cpu_s).zip(server_before).map(|(after, before)| after - before);
    Ok(ReplayReport {
        title: plan.way.name().to_owned(),
        trace: trace.label.clone(),
        transport: format!("{:?}", plan.way).to_lowercase(),
        carried: tally.carried,
        block_bytes: plan.block_bytes,
        pool_bytes,
        clients: plan.clients,
        wall_s,
        requests: trace.requests.len() as u64,
        hits: tally.hits,
        model_segmented_lru: segmented.counts,
        model_lru: lru.counts,
        bytes_wrong: tally.bytes_wrong,
        evictions: evictions(&admin, tally.stored)?,
        cpu_s_client,
        cpu_s_server,
        operations: vec![
            OperationReport::new(Operation::Exists, &tally.exists, tally.exists_items, 0),
            OperationReport::new(Operation::Get, &tally.get, tally.get_items, tally.get_items * plan.block_bytes),
            OperationReport::new(Operation::Put, &tally.put, tally.stored, tally.stored * plan.block_bytes),
        ],
        timeline,
    })
}

/// Returns the number of stored objects that were evicted. The count of the others comes with the next heartbeat.
fn evictions(admin: &ControlLink, stored: u64) -> Result<u64, Failure> {
    let interval = Duration::from_nanos(admin.welcome().heartbeat_interval_ns);
    std::thread::sleep(interval + Duration::from_millis(200));
    let members = admin.call(Status)?.members;
    let there: u64 = members.iter().filter_map(|member| Some(member.load?.objects)).sum();
    Ok(stored.saturating_sub(there))
}

/// Runs the clients, each created on its own thread.
fn drive(
    make: &(dyn Fn() -> Result<Worker, Failure> + Sync),
    clients: u32,
    shared: &ClientsState<'_>,
    model: &ModelRun,
) -> Result<(Tally, Vec<TimelinePoint>), Failure> {
    let total = shared.trace.requests.len() as u64;
    let bar = ProgressBar::new(total);
    if let Ok(style) = ProgressStyle::with_template("{elapsed:>5} {bar:40} {pos}/{len} requests  {msg}") {
        bar.set_style(style);
    }
    let tallies = Mutex::new(Vec::new());
    let timeline = std::thread::scope(|scope| {
        let ready = Arc::new(Barrier::new(clients as usize + 1));
        for _ in 0..clients {
            let (tallies, ready) = (&tallies, Arc::clone(&ready));
            scope.spawn(move || {
                let worker = make();
                ready.wait();
                shared.elapsed();
                let outcome = worker.and_then(|worker| worker.run(shared));
                if outcome.is_err() {
                    shared.failed.store(true, Ordering::Relaxed);
                }
                tallies.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(outcome);
            });
        }
        ready.wait();
        watch(shared, model, &bar, total)
    });
    bar.finish_and_clear();
    let mut whole = Tally::default();
    for tally in tallies.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        whole.merge(&tally?);
    }
    Ok((whole, timeline))
}

/// Samples the run until its end.
fn watch(shared: &ClientsState<'_>, model: &ModelRun, bar: &ProgressBar, total: u64) -> Vec<TimelinePoint> {
    let mut points = Vec::new();
    let step = (total / TIMELINE_POINTS).max(1);
    let (mut last_t_s, mut last_bytes, mut last_requests) = (0.0, 0, 0);
    loop {
        let requests = shared.done.load(Ordering::Relaxed);
        let over = requests == total || shared.failed.load(Ordering::Relaxed);
        if requests >= last_requests + step || over {
            let t_s = shared.elapsed().as_secs_f64();
            let bytes = shared.bytes.load(Ordering::Relaxed);
            let blocks = shared.blocks.load(Ordering::Relaxed).max(1);
            let point = TimelinePoint {
                t_s,
                requests,
                hit_rate_blocks: shared.hit_blocks.load(Ordering::Relaxed) as f64 / blocks as f64,
                model_hit_rate_blocks: model.after(requests).rate_blocks(),
                gigabytes_per_s: (bytes - last_bytes) as f64 / 1e9 / (t_s - last_t_s).max(1e-9),
            };
            bar.set_position(requests);
            bar.set_message(format!("hit {:.3}, {:.2} GB/s", point.hit_rate_blocks, point.gigabytes_per_s));
            points.push(point);
            (last_t_s, last_bytes, last_requests) = (t_s, bytes, requests);
        }
        if over {
            return points;
        }
        std::thread::sleep(SAMPLE);
    }
}

/// Returns the CPU seconds of another process, from fields 14 and 15 of its stat file, in hundredths; `None` if it has
/// ended.
fn server_cpu_s(pid: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    let mut ticks = fields.split_ascii_whitespace().skip(11);
    let user: f64 = ticks.next()?.parse().ok()?;
    let system: f64 = ticks.next()?.parse().ok()?;
    Some((user + system) / 100.0)
}
