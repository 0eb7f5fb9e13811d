//! `kvplane replay --conductor`: measures the time to first token of live instances under the Conductor's policies.
//!
//! Instances are processes ([`engine`]) that wait as long as the cost model says and move real bytes through the store,
//! each byte verified. Requests arrive at the times of the trace. One policy after the other serves the same requests,
//! with fresh instances and a store without their blocks. There is no decode: only prefills are placed.
//!
//! With `--kill-control` the replay has a control plane and a node of its own ([`plane`]). Each policy serves the
//! requests twice: undisturbed, and with a kill of the control plane in the middle; the two are compared
//! ([`recovery`]).

pub(crate) mod engine;
mod own_cluster;
mod recovery;
mod reporter;
mod stage;

use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum as _};
use kvplane::rpc::Role;
use kvplane::rpc::conductor::{GroupAssignment, PromptContext, RequestStep, RequestTerms, Schedule, ScheduleMode};
use kvplane::rpc::placement::{PlacementPolicy, SetPlacement, ShowPlacement};
use kvplane::{Client, ClientConfig, ControlLink, Decision, Scheduler};
use kvplane_tools::trace::{BLOCK_TOKENS, Request, Trace};
use serde::Serialize;

use super::Plan;
use crate::command::Failure;
use crate::command::ctl::conductor::policies;
use engine::{EngineReport, Prompt, hash_of, model};
use own_cluster::{KillTimes, OwnCluster};
use recovery::{ArrivedRequest, Recovery};
use stage::PromptStage;

/// Time limit for instances to register.
const REGISTER: Duration = Duration::from_secs(20);
/// Time limit of a call to the Conductor, after which the client places the request by itself.
const BUDGET: Duration = Duration::from_secs(2);
/// Limit of a call in a replay that kills the control plane, whose clients are to go on meanwhile.
const SHORT_BUDGET: Duration = Duration::from_millis(300);
/// Least memory of the node of a replay that kills the control plane.
const LEAST_POOL_BYTES: u64 = 64 << 20;
/// Time limit of a request, waiting and computation included.
const PATIENCE: Duration = Duration::from_secs(600);

/// Settings of a replay on live instances.
#[derive(Args)]
pub(crate) struct LiveFlags {
    /// Let the Conductor place the requests on mock instances, whose prefills take as long as its cost model says, and
    /// measure the time to first token. The control plane needs `--conductor`.
    #[arg(long, conflicts_with_all = ["tier", "html", "clients", "ahead", "pause", "server_pid"])]
    pub(super) conductor: bool,
    /// Placement policies to compare, separated by commas; one run each.
    #[arg(long, value_parser = policies(), value_delimiter = ',', default_value = "kvplane", requires = "conductor")]
    policies: Vec<PlacementPolicy>,
    /// Number of instances.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64), requires = "conductor")]
    engines: u32,
    /// Cache of an instance, in blocks of 512 tokens. The default of 5859 is the 3 million tokens of the Mooncake
    /// paper.
    #[arg(long, default_value_t = 5859, value_parser = clap::value_parser!(u32).range(1..), requires = "conductor")]
    engine_blocks: u32,
    /// Start a control plane and a node for this replay, with their state in this directory, and serve the requests
    /// twice: undisturbed, and with SIGKILL to the control plane after half of the requests and a new one on its state.
    /// Report the hit rate in each second, and requests that were lost.
    #[arg(long, value_name = "DIRECTORY", requires = "conductor")]
    #[arg(conflicts_with_all = ["cluster", "runtime_directory"])]
    kill_control: Option<PathBuf>,
    /// Let pipeline groups of so many instances prefill long prompts. Default: none.
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=16), requires = "conductor")]
    groups: Option<u32>,
    /// Maximum length of a chunk that a stage of a group computes at a time, in tokens; whole blocks of 512.
    #[arg(long, default_value_t = 4_096, requires = "groups")]
    #[arg(value_parser = clap::value_parser!(u32).range(1_024..=1_048_576))]
    chunk: u32,
}

/// Results of one policy.
#[derive(Serialize)]
struct PolicyRun {
    policy: String,
    requests: usize,
    refused: usize,
    /// Requests placed by the client because the Conductor was not reachable.
    unasked: usize,
    /// Requests that a pipeline group prefilled.
    by_groups: usize,
    mean_ttft_s: f64,
    p50_ttft_s: f64,
    p90_ttft_s: f64,
    p99_ttft_s: f64,
    /// Parts of all blocks of prompts that were in the instance's cache (`local`) or fetched from the store
    /// (`fetched`).
    local: f64,
    fetched: f64,
    bytes_wrong: u64,
    /// Requests that ended with an error.
    lost: usize,
    /// Effect of a kill of the control plane.
    #[serde(skip_serializing_if = "Option::is_none")]
    recovery: Option<Recovery>,
}

/// End of one request.
enum RequestStatus {
    Served {
        ttft: Duration,
        local: u64,
        fetched: u64,
        wrong: u64,
        asked: bool,
        /// Number of instances that prefilled it.
        stages: usize,
    },
    Refused,
    /// It ended with an error, which concerns this request only in a replay that kills the control plane.
    Lost(String),
}

/// Instance as seen by its router.
struct Instance {
    child: Mutex<Child>,
    input: Mutex<Option<ChildStdin>>,
    /// Receivers of reports, by request.
    waiting: Mutex<HashMap<u64, mpsc::Sender<EngineReport>>>,
    ended: AtomicBool,
}

/// Runs each policy and shows its results.
pub(super) fn replay(plan: &Plan, trace: &Trace, flags: &LiveFlags, json: Option<&str>) -> Result<(), Failure> {
    if flags.groups.is_some() && !flags.chunk.is_multiple_of(BLOCK_TOKENS) {
        return Err(format!("--chunk {} is not a multiple of the block's {BLOCK_TOKENS} tokens", flags.chunk).into());
    }
    if let Some(place) = &flags.kill_control {
        return with_kill(plan, trace, flags, place, json);
    }
    let admin = ControlLink::to(&plan.control(), Role::Admin)?;
    let before = admin.call(ShowPlacement)?.set;
    let mut runs = Vec::new();
    let mut outcome = Ok(());
    for policy in &flags.policies {
        eprintln!("{}: {} requests on {} instances", policy.label(), trace.requests.len(), flags.engines);
        admin.call(SetPlacement { policy: *policy, ttft_ns: 0, tbt_ns: 0 })?;
        match one(plan, trace, flags, *policy, None) {
            Ok(served) => runs.push(served.run),
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    // The former policy is restored, also after a failure: other clients may use this Conductor.
    admin.call(before)?;
    show(&runs, trace, flags, plan, json)?;
    outcome?;
    let wrong: u64 = runs.iter().map(|run| run.bytes_wrong).sum();
    if wrong > 0 { Err(format!("{wrong} bytes read were wrong").into()) } else { Ok(()) }
}

/// Runs each policy undisturbed and with a kill of the control plane.
fn with_kill(plan: &Plan, trace: &Trace, flags: &LiveFlags, place: &Path, json: Option<&str>) -> Result<(), Failure> {
    let blocks = trace.requests.iter().flat_map(|request| &request.blocks).collect::<BTreeSet<_>>().len() as u64;
    let pool = (2 * blocks * plan.block_bytes).max(LEAST_POOL_BYTES).next_multiple_of(1 << 20);
    let mut own = OwnCluster::start(place, pool)?;
    let (cluster, runtime_directory) = (own.cluster.clone(), Some(own.runtime_directory.clone()));
    let plan = Plan { cluster, runtime_directory, ..plan.clone() };
    let mut runs = Vec::new();
    for policy in &flags.policies {
        let admin = ControlLink::to(&plan.control(), Role::Admin)?;
        admin.call(SetPlacement { policy: *policy, ttft_ns: 0, tbt_ns: 0 })?;
        eprintln!("{}: {} requests on {} instances", policy.label(), trace.requests.len(), flags.engines);
        let undisturbed = one(&plan, trace, flags, *policy, None)?;
        eprintln!("{}: the same, with a kill of the control plane", policy.label());
        let mut killed = one(&plan, trace, flags, *policy, Some(&mut own))?;
        let times = killed.times.ok_or("the control plane was not killed: the trace is too short")?;
        killed.run.recovery = Some(Recovery::of(times, &killed.arrived, &undisturbed.arrived));
        killed.run.policy.push_str(", killed");
        runs.extend([undisturbed.run, killed.run]);
    }
    show(&runs, trace, flags, &plan, json)?;
    let (wrong, lost): (u64, usize) =
        runs.iter().fold((0, 0), |(wrong, lost), run| (wrong + run.bytes_wrong, lost + run.lost));
    match (wrong, lost) {
        (0, 0) => Ok(()),
        (0, lost) => Err(format!("{lost} requests were lost").into()),
        (wrong, _) => Err(format!("{wrong} bytes read were wrong").into()),
    }
}

fn show(runs: &[PolicyRun], trace: &Trace, flags: &LiveFlags, plan: &Plan, json: Option<&str>) -> Result<(), Failure> {
    let all = serde_json::json!({
        "trace": trace.label,
        "speed": plan.speed.unwrap_or(1.0),
        "engines": flags.engines,
        "engine_blocks": flags.engine_blocks,
        "block_bytes": plan.block_bytes,
        "runs": runs,
    });
    match json {
        Some("-") => {
            println!("{all:#}");
            return Ok(());
        }
        Some(path) => std::fs::write(path, format!("{all:#}\n")).map_err(|error| format!("{path}: {error}"))?,
        None => {}
    }
    println!(
        "{} at {}x, {} instances of {} blocks of {} bytes: time to the first token in seconds",
        trace.label,
        plan.speed.unwrap_or(1.0),
        flags.engines,
        flags.engine_blocks,
        plan.block_bytes
    );
    println!(
        "{:<14} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>7} {:>8} {:>8} {:>7} {:>6}",
        "policy", "requests", "mean", "p50", "p90", "p99", "local", "fetched", "refused", "unasked", "groups", "wrong"
    );
    for run in runs {
        println!(
            "{:<14} {:>8} {:>8.3} {:>8.3} {:>8.3} {:>8.3} {:>7.3} {:>7.3} {:>8} {:>8} {:>7} {:>6}",
            run.policy,
            run.requests,
            run.mean_ttft_s,
            run.p50_ttft_s,
            run.p90_ttft_s,
            run.p99_ttft_s,
            run.local,
            run.fetched,
            run.refused,
            run.unasked,
            run.by_groups,
            run.bytes_wrong
        );
    }
    for run in runs {
        if let Some(recovery) = &run.recovery {
            println!("{}: {} requests lost", run.policy, run.lost);
            recovery.print();
        }
    }
    Ok(())
}

/// A policy's run, with its requests in the order of their arrival.
struct ServedRun {
    run: PolicyRun,
    arrived: Vec<Option<ArrivedRequest>>,
    times: Option<KillTimes>,
}

/// Runs one policy; the control plane of `own` is killed after half of the requests.
fn one(
    plan: &Plan,
    trace: &Trace,
    flags: &LiveFlags,
    policy: PlacementPolicy,
    own: Option<&mut OwnCluster>,
) -> Result<ServedRun, Failure> {
    let control = plan.control();
    let block_bytes = usize::try_from(plan.block_bytes)?;
    let config = ClientConfig { control: control.clone(), ..ClientConfig::local(&plan.cluster) };
    let mut client = Client::connect(&config)?;
    client.keys().remove_matching(&format!("^{}@", model(block_bytes)))?;
    let budget = if flags.kill_control.is_some() { SHORT_BUDGET } else { BUDGET };
    let scheduler = Arc::new(Scheduler::connect(&control, budget)?);
    let mut instances = HashMap::new();
    for number in 0..flags.engines {
        let name = format!("{}-{number}", model(block_bytes));
        instances.insert(name.clone(), start(plan, flags, &name, number)?);
    }
    let model_name = model(block_bytes);
    let registered = scheduler.wait_for_table(REGISTER, |table| {
        table.instances.iter().filter(|row| row.model == model_name && !row.suspect).count() >= flags.engines as usize
    });
    if !registered {
        return Err(format!("the instances did not register within {REGISTER:?}: see their messages above").into());
    }
    let instances = Arc::new(instances);
    let (start, first_ms) = (Instant::now(), trace.requests.first().map_or(0, |first| first.timestamp_ms));
    let (mut threads, mut arrivals) = (Vec::new(), Vec::new());
    let times = std::thread::scope(|scope| -> Result<Option<KillTimes>, Failure> {
        // The killer ends with this closure, at the latest.
        let (middle, comes) = mpsc::channel();
        let killer = own.map(|own| {
            scope.spawn(move || {
                comes.recv().map_err(|_| "the replay ended before".to_owned())?;
                own.kill_and_restart(start).map_err(|error| error.to_string())
            })
        });
        for (at, request) in trace.requests.iter().enumerate() {
            let due =
                Duration::from_millis(request.timestamp_ms.saturating_sub(first_ms)).div_f64(plan.speed.unwrap_or(1.0));
            std::thread::sleep(due.saturating_sub(start.elapsed()));
            if at == trace.requests.len() / 2 {
                // Without a kill nobody receives this.
                let _ = middle.send(());
            }
            arrivals.push(start.elapsed());
            let (scheduler, instances) = (Arc::clone(&scheduler), Arc::clone(&instances));
            let (request, model, groups) = (request.clone(), model_name.clone(), flags.groups.is_some());
            let serve = move || {
                let served = serve(&scheduler, &instances, at as u64, &request, &model, groups);
                served.map_err(|error| error.to_string())
            };
            threads.push(std::thread::Builder::new().stack_size(256 << 10).spawn(serve)?);
        }
        let Some(killer) = killer else { return Ok(None) };
        let times = killer.join().map_err(|_| "the thread that kills the control plane panicked")?;
        Ok(Some(times.map_err(|error| format!("the control plane did not start again: {error}"))?))
    })?;
    let mut statuses = Vec::with_capacity(threads.len());
    for (at, thread) in threads.into_iter().enumerate() {
        let status = thread.join().map_err(|_| format!("the thread of request {} panicked", at + 1))?;
        let lost = |error| if flags.kill_control.is_some() { Ok(RequestStatus::Lost(error)) } else { Err(error) };
        statuses.push(status.or_else(lost).map_err(|error| format!("request {}: {error}", at + 1))?);
    }
    let instances = Arc::into_inner(instances).ok_or("a request is still in flight")?;
    for (name, instance) in instances {
        end(&name, &instance)?;
    }
    let blocks: usize = trace.requests.iter().map(|request| request.blocks.len()).sum();
    let run = PolicyRun::of(policy.label().to_owned(), &statuses, blocks);
    let arrived = statuses.iter().zip(&trace.requests).zip(arrivals).map(|((status, request), arrived)| match status {
        RequestStatus::Served { local, fetched, asked, .. } => {
            let (blocks, hit_blocks) = (request.blocks.len() as u64, local + fetched);
            Some(ArrivedRequest { arrived, blocks, hit_blocks, asked: *asked })
        }
        RequestStatus::Refused | RequestStatus::Lost(_) => None,
    });
    Ok(ServedRun { run, arrived: arrived.collect(), times })
}

/// Starts an instance and a thread that reads its reports.
fn start(plan: &Plan, flags: &LiveFlags, name: &str, number: u32) -> Result<Arc<Instance>, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["replay-engine", "--name", name, "--cluster", &plan.cluster]);
    command.args(["--block-bytes", &plan.block_bytes.to_string(), "--blocks", &flags.engine_blocks.to_string()]);
    let transport = plan.way.to_possible_value().ok_or("a transport without a name")?;
    command.args(["--transport", transport.get_name()]);
    if let Some(directory) = &plan.runtime_directory {
        command.arg("--runtime-directory").arg(directory);
    }
    if let Some(stages) = flags.groups.filter(|stages| number / stages < flags.engines / stages) {
        let group = format!("{}-g{}", model(usize::try_from(plan.block_bytes)?), number / stages);
        command.args(["--group", &group, "--stage", &(number % stages).to_string()]);
        command.args(["--stages", &stages.to_string(), "--chunk", &flags.chunk.to_string()]);
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let (input, output) = (child.stdin.take(), child.stdout.take().ok_or("its output is piped")?);
    let (waiting, ended) = (Mutex::default(), AtomicBool::new(false));
    let instance = Arc::new(Instance { child: Mutex::new(child), input: Mutex::new(input), waiting, ended });
    let listening = Arc::downgrade(&instance);
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let (Some(instance), Ok(said)) = (listening.upgrade(), serde_json::from_str::<EngineReport>(&line)) else {
                break;
            };
            let (EngineReport::Started { id } | EngineReport::Done { id, .. }) = said;
            let waiting = instance.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            // A request that has timed out has no receiver any more.
            let _ = waiting.get(&id).map(|waiter| waiter.send(said));
        }
        if let Some(instance) = listening.upgrade() {
            instance.ended.store(true, Ordering::Release);
            // Dropping the senders wakes all waiting requests.
            instance.waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    });
    Ok(instance)
}

impl Instance {
    /// Sends a prompt to the instance; returns the receiver of its reports.
    fn give(&self, prompt: &Prompt) -> Result<mpsc::Receiver<EngineReport>, Failure> {
        let (tell, told) = mpsc::channel();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(prompt.id, tell);
        if self.ended.load(Ordering::Acquire) {
            // The reader thread has ended and may not see this entry.
            self.forget(prompt.id);
            return Err("the instance has ended".into());
        }
        let mut input = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        let input = input.as_mut().ok_or("the instance is stopping")?;
        writeln!(input, "{}", serde_json::to_string(prompt)?)?;
        input.flush()?;
        Ok(told)
    }

    fn forget(&self, prompt: u64) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&prompt);
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // Both calls are harmless if the process has ended.
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Stops an instance by closing its input.
fn end(name: &str, instance: &Instance) -> Result<(), Failure> {
    drop(instance.input.lock().unwrap_or_else(PoisonError::into_inner).take());
    let until = Instant::now() + REGISTER;
    while !instance.ended.load(Ordering::Acquire) {
        if Instant::now() > until {
            return Err(format!("instance {name} did not end within {REGISTER:?}").into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = instance.child.lock().unwrap_or_else(PoisonError::into_inner).wait()?;
    if status.success() { Ok(()) } else { Err(format!("instance {name} ended with {status}").into()) }
}

/// Serves one request: has it placed, and waits for its first token.
fn serve(
    scheduler: &Scheduler,
    instances: &HashMap<String, Arc<Instance>>,
    id: u64,
    request: &Request,
    model: &str,
    groups: bool,
) -> Result<RequestStatus, Failure> {
    let arrived = Instant::now();
    let hashes: Vec<u64> = request.blocks.iter().map(|block| hash_of(*block)).collect();
    let context = PromptContext { model: model.to_owned(), block_tokens: BLOCK_TOKENS, ..PromptContext::default() };
    let asked = Schedule {
        client: 0,
        request: format!("{model}-{}-{id}", scheduler.client()),
        context,
        tokens: request.input_tokens,
        hashes: hashes.clone(),
        wait_ns: 0,
        mode: ScheduleMode::Reserve,
        barred: Vec::new(),
    };
    let decision = match groups {
        true => scheduler.schedule_with_groups(asked, RequestTerms::default(), PATIENCE)?,
        false => scheduler.schedule(asked, PATIENCE)?,
    };
    let prompt = Prompt { id, tokens: request.input_tokens, reuse: 0, hashes, stage: None };
    let (name, reuse, booked) = match &decision {
        Decision::BookedGroup(assigned) => {
            let status = serve_by_group(scheduler, instances, &prompt, assigned, arrived);
            scheduler.ended(&decision);
            return status;
        }
        Decision::Booked(place) => {
            (&*place.prefill, (place.reuse_tokens / BLOCK_TOKENS) as usize, Some(place.reservation))
        }
        // Without the Conductor's prefix index, no cached blocks are assumed.
        Decision::Local { prefill, .. } => (prefill.as_str(), 0, None),
        Decision::Refused { .. } => return Ok(RequestStatus::Refused),
    };
    let update = |step: RequestStep| {
        // Updates that fail while the Conductor is away are only logged.
        let told = booked.map(|reservation| scheduler.update(reservation, step));
        told.and_then(Result::err).into_iter().for_each(|error| tracing::debug!(%error, "an update was not taken"));
    };
    let instance = instances.get(name).ok_or_else(|| format!("{name} is not an instance of this replay"))?;
    let told = instance.give(&Prompt { reuse, ..prompt })?;
    let status = loop {
        match told.recv_timeout(PATIENCE) {
            Ok(EngineReport::Started { .. }) => update(RequestStep::PrefillStarted),
            Ok(EngineReport::Done { reused_tokens, took_ns, local, fetched, wrong, .. }) => {
                let ttft = arrived.elapsed();
                update(RequestStep::PrefillDone { reused_tokens, took_ns });
                break Ok(RequestStatus::Served { ttft, local, fetched, wrong, asked: booked.is_some(), stages: 1 });
            }
            Err(_) => break Err(format!("instance {name} ended, or sent no report for {PATIENCE:?}")),
        }
    };
    instance.forget(id);
    scheduler.ended(&decision);
    Ok(status?)
}

/// Serves one request by a pipeline group: each stage gets the prompt, and passes its chunks on to the next one.
fn serve_by_group(
    scheduler: &Scheduler,
    instances: &HashMap<String, Arc<Instance>>,
    prompt: &Prompt,
    assigned: &GroupAssignment,
    arrived: Instant,
) -> Result<RequestStatus, Failure> {
    let GroupAssignment { assignment, group } = assigned;
    let (id, tokens, reuse) = (prompt.id, prompt.tokens, (assignment.reuse_tokens / BLOCK_TOKENS) as usize);
    let all_layers = group.stages.iter().map(|stage| stage.layers).sum();
    let mut told = Vec::with_capacity(group.stages.len());
    for (at, stage) in group.stages.iter().enumerate() {
        let name = &*stage.instance;
        let instance = instances.get(name).ok_or_else(|| format!("{name} is not an instance of this replay"))?;
        let stage = PromptStage {
            stage: at,
            stages: group.stages.len(),
            first_layer: stage.first_layer,
            layers: stage.layers,
            all_layers,
            chunk_tokens: group.chunk_tokens,
            key: format!("{}-{id}", scheduler.client()),
        };
        let hashes = prompt.hashes.clone();
        let own = Prompt { id, tokens, reuse, hashes, stage: Some(stage) };
        told.push((name, instance, instance.give(&own)?));
    }
    let update = |step: RequestStep| {
        // Updates that fail while the Conductor is away are only logged.
        let told = scheduler.update(assignment.reservation, step);
        told.err().into_iter().for_each(|error| tracing::debug!(%error, "an update was not taken"));
    };
    let mut status = Err("a pipeline group without stages".to_owned());
    let (mut began, mut wrong_bytes) = (Instant::now(), 0);
    for (name, _, reports) in &told {
        status = loop {
            match reports.recv_timeout(PATIENCE) {
                Ok(EngineReport::Started { .. }) => {
                    began = Instant::now();
                    update(RequestStep::PrefillStarted);
                }
                Ok(EngineReport::Done { local, fetched, wrong, .. }) => {
                    wrong_bytes += wrong;
                    let (ttft, wrong, asked, stages) = (arrived.elapsed(), wrong_bytes, true, told.len());
                    break Ok(RequestStatus::Served { ttft, local, fetched, wrong, asked, stages });
                }
                Err(_) => break Err(format!("instance {name} ended, or sent no report for {PATIENCE:?}")),
            }
        };
        if status.is_err() {
            break;
        }
    }
    told.iter().for_each(|(_, instance, _)| instance.forget(id));
    if status.is_ok() {
        let took_ns = u64::try_from(began.elapsed().as_nanos())?;
        update(RequestStep::PrefillDone { reused_tokens: assignment.reuse_tokens, took_ns });
    }
    Ok(status?)
}

impl PolicyRun {
    fn of(policy: String, statuses: &[RequestStatus], blocks: usize) -> Self {
        let mut ttfts: Vec<f64> = Vec::with_capacity(statuses.len());
        let (mut local, mut fetched, mut wrong, mut unasked, mut lost) = (0, 0, 0, 0, 0);
        let mut by_groups = 0;
        for status in statuses {
            let (ttft, own, brought, bytes, asked) = match status {
                RequestStatus::Served { ttft, local, fetched, wrong, asked, stages } => {
                    by_groups += usize::from(*stages > 1);
                    (ttft, local, fetched, wrong, asked)
                }
                RequestStatus::Refused => continue,
                RequestStatus::Lost(error) => {
                    if lost == 0 {
                        eprintln!("a request was lost: {error}");
                    }
                    lost += 1;
                    continue;
                }
            };
            ttfts.push(ttft.as_secs_f64());
            (local, fetched, wrong) = (local + own, fetched + brought, wrong + bytes);
            unasked += usize::from(!asked);
        }
        ttfts.sort_by(f64::total_cmp);
        let at = |part: f64| ttfts.get((ttfts.len() as f64 * part) as usize).or(ttfts.last()).copied().unwrap_or(0.0);
        let share = |count: u64| count as f64 / (blocks.max(1)) as f64;
        Self {
            policy,
            requests: statuses.len(),
            refused: statuses.len() - ttfts.len() - lost,
            unasked,
            by_groups,
            mean_ttft_s: ttfts.iter().sum::<f64>() / ttfts.len().max(1) as f64,
            p50_ttft_s: at(0.5),
            p90_ttft_s: at(0.9),
            p99_ttft_s: at(0.99),
            local: share(local),
            fetched: share(fetched),
            bytes_wrong: wrong,
            lost,
            recovery: None,
        }
    }
}
