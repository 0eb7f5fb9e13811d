//! `kvplane replay --conductor`: the Conductor's policies decide for live instances, and what is measured is the time
//! to the first token.
//!
//! Instances are processes ([`engine`]) that wait as long as the cost model says and move real bytes through the
//! store, each byte checked. Requests come when the trace says. One policy after the other gets the same requests,
//! fresh instances, and a store without their blocks. Nobody decodes, so only prefills are placed.

pub(crate) mod engine;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use kvplane::rpc::Role;
use kvplane::rpc::conductor::{PromptContext, RequestStep, Schedule, ScheduleMode};
use kvplane::rpc::placement::{SetPlacement, ShowPlacement};
use kvplane::{Client, ClientConfig, ControlLink, Decision, Scheduler};
use kvplane_tools::trace::{BLOCK_TOKENS, Request, Trace};
use serde::Serialize;

use super::Plan;
use crate::command::Failure;
use crate::command::ctl::conductor::PolicyChoice;
use engine::{EngineReport, Prompt, hash_of, model};

/// How long instances may take to register.
const REGISTER: Duration = Duration::from_secs(20);
/// What a call to the Conductor may take before the client decides by itself.
const BUDGET: Duration = Duration::from_secs(2);
/// How long a request may wait and be computed.
const PATIENCE: Duration = Duration::from_secs(600);

/// How live instances are placed on.
#[derive(Args)]
pub(crate) struct LiveFlags {
    /// Let the Conductor place the requests on instances that prefill as long as its cost model says, and measure the
    /// time to the first token. Needs `--conductor` at the control plane.
    #[arg(long, conflicts_with_all = ["tier", "html", "clients", "ahead", "pause", "server_pid"])]
    pub(super) conductor: bool,
    /// Policies, one run each.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kvplane", requires = "conductor")]
    policies: Vec<PolicyChoice>,
    /// Instances.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64), requires = "conductor")]
    engines: u32,
    /// Blocks that an instance has room for; 5859 are the 3 million tokens of the paper.
    #[arg(long, default_value_t = 5859, value_parser = clap::value_parser!(u32).range(1..), requires = "conductor")]
    engine_blocks: u32,
}

/// What came of one policy.
#[derive(Serialize)]
struct PolicyRun {
    policy: String,
    requests: usize,
    refused: usize,
    /// Placed by the client, as the Conductor could not be asked.
    unasked: usize,
    mean_ttft_s: f64,
    p50_ttft_s: f64,
    p90_ttft_s: f64,
    p99_ttft_s: f64,
    /// Of all blocks of prompts, those that the instance had, and that it brought from the store.
    local: f64,
    fetched: f64,
    bytes_wrong: u64,
}

/// What came of one request.
enum Fate {
    Served { ttft: Duration, local: u64, fetched: u64, wrong: u64, asked: bool },
    Refused,
}

/// An instance as its router sees it.
struct Instance {
    child: Mutex<Child>,
    input: Mutex<Option<ChildStdin>>,
    /// By request: who waits for what is said of it.
    waiting: Mutex<HashMap<u64, mpsc::Sender<EngineReport>>>,
    ended: AtomicBool,
}

/// Runs each policy and shows what came of it.
pub(super) fn replay(plan: &Plan, trace: &Trace, flags: &LiveFlags, json: Option<&str>) -> Result<(), Failure> {
    let admin = ControlLink::to(&plan.control(), Role::Admin)?;
    let before = admin.call(ShowPlacement)?.set;
    let mut runs = Vec::new();
    let mut outcome = Ok(());
    for policy in &flags.policies {
        eprintln!("{}: {} requests on {} instances", policy.label(), trace.requests.len(), flags.engines);
        admin.call(SetPlacement { policy: policy.on_the_wire(), ttft_ns: 0, tbt_ns: 0 })?;
        match one(plan, trace, flags, *policy) {
            Ok(run) => runs.push(run),
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    // As it was, also after a failure: others may place requests here.
    admin.call(before)?;
    show(&runs, trace, flags, plan, json)?;
    outcome?;
    let wrong: u64 = runs.iter().map(|run| run.bytes_wrong).sum();
    if wrong > 0 { Err(format!("{wrong} bytes read were wrong").into()) } else { Ok(()) }
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
        "{:<14} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>7} {:>8} {:>8} {:>6}",
        "policy", "requests", "mean", "p50", "p90", "p99", "local", "fetched", "refused", "unasked", "wrong"
    );
    for run in runs {
        println!(
            "{:<14} {:>8} {:>8.3} {:>8.3} {:>8.3} {:>8.3} {:>7.3} {:>7.3} {:>8} {:>8} {:>6}",
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
            run.bytes_wrong
        );
    }
    Ok(())
}

/// One policy.
fn one(plan: &Plan, trace: &Trace, flags: &LiveFlags, policy: PolicyChoice) -> Result<PolicyRun, Failure> {
    let control = plan.control();
    let block_bytes = usize::try_from(plan.block_bytes)?;
    let config = ClientConfig { control: control.clone(), ..ClientConfig::local(&plan.cluster) };
    let mut client = Client::connect(&config)?;
    client.remove_matching(&format!("^{}@", model(block_bytes)))?;
    let scheduler = Arc::new(Scheduler::connect(&control, BUDGET)?);
    let mut instances = HashMap::new();
    for number in 0..flags.engines {
        let name = format!("{}-{number}", model(block_bytes));
        instances.insert(name.clone(), start(plan, flags, &name)?);
    }
    let model_name = model(block_bytes);
    let registered = scheduler.wait_for_table(REGISTER, |table| {
        table.instances.iter().filter(|row| row.model == model_name && !row.doubted).count() >= flags.engines as usize
    });
    if !registered {
        return Err(format!("the instances did not register within {REGISTER:?}: see what they said above").into());
    }
    let instances = Arc::new(instances);
    let (start, first_ms) = (Instant::now(), trace.requests.first().map_or(0, |first| first.timestamp_ms));
    let mut threads = Vec::new();
    for (at, request) in trace.requests.iter().enumerate() {
        let due =
            Duration::from_millis(request.timestamp_ms.saturating_sub(first_ms)).div_f64(plan.speed.unwrap_or(1.0));
        std::thread::sleep(due.saturating_sub(start.elapsed()));
        let (scheduler, instances) = (Arc::clone(&scheduler), Arc::clone(&instances));
        let (request, model) = (request.clone(), model_name.clone());
        let serve =
            move || serve(&scheduler, &instances, at as u64, &request, &model).map_err(|error| error.to_string());
        threads.push(std::thread::Builder::new().stack_size(256 << 10).spawn(serve)?);
    }
    let mut fates = Vec::with_capacity(threads.len());
    for (at, thread) in threads.into_iter().enumerate() {
        let fate = thread.join().map_err(|_| format!("the thread of request {} panicked", at + 1))?;
        fates.push(fate.map_err(|error| format!("request {}: {error}", at + 1))?);
    }
    let instances = Arc::into_inner(instances).ok_or("a request is still under way")?;
    for (name, instance) in instances {
        end(&name, &instance)?;
    }
    let blocks: usize = trace.requests.iter().map(|request| request.blocks.len()).sum();
    Ok(PolicyRun::of(policy.label(), &fates, blocks))
}

/// Starts an instance, and listens to it.
fn start(plan: &Plan, flags: &LiveFlags, name: &str) -> Result<Arc<Instance>, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["replay-engine", "--name", name, "--cluster", &plan.cluster]);
    command.args(["--block-bytes", &plan.block_bytes.to_string(), "--blocks", &flags.engine_blocks.to_string()]);
    let transport = plan.way.to_possible_value().ok_or("a transport without a name")?;
    command.args(["--transport", transport.get_name()]);
    if let Some(directory) = &plan.runtime_directory {
        command.arg("--runtime-directory").arg(directory);
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
            // Whoever has given up does not listen.
            let _ = waiting.get(&id).map(|waiter| waiter.send(said));
        }
        if let Some(instance) = listening.upgrade() {
            instance.ended.store(true, Ordering::Release);
            // Those who wait hear that nothing comes any more.
            instance.waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    });
    Ok(instance)
}

impl Instance {
    /// Gives it a prompt; what it says of that is heard from what this returns.
    fn give(&self, prompt: &Prompt) -> Result<mpsc::Receiver<EngineReport>, Failure> {
        let (tell, told) = mpsc::channel();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(prompt.id, tell);
        if self.ended.load(Ordering::Acquire) {
            // Nobody may hear of this any more.
            self.forget(prompt.id);
            return Err("the instance has ended".into());
        }
        let mut input = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        let input = input.as_mut().ok_or("the instance is being ended")?;
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
        // Both are harmless when it has ended.
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Ends an instance in order.
fn end(name: &str, instance: &Instance) -> Result<(), Failure> {
    drop(instance.input.lock().unwrap_or_else(PoisonError::into_inner).take());
    let until = Instant::now() + REGISTER;
    while !instance.ended.load(Ordering::Acquire) {
        if Instant::now() > until {
            return Err(format!("instance {name} does not end").into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = instance.child.lock().unwrap_or_else(PoisonError::into_inner).wait()?;
    if status.success() { Ok(()) } else { Err(format!("instance {name} ended with {status}").into()) }
}

/// One request: asks who prefills, and waits for the first token.
fn serve(
    scheduler: &Scheduler,
    instances: &HashMap<String, Arc<Instance>>,
    id: u64,
    request: &Request,
    model: &str,
) -> Result<Fate, Failure> {
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
    let decision = scheduler.schedule(asked, PATIENCE)?;
    let (name, reuse, booked) = match &decision {
        Decision::Booked(place) => {
            (&place.prefill, (place.reuse_tokens / BLOCK_TOKENS) as usize, Some(place.reservation))
        }
        // What nobody has said to be there is not looked for.
        Decision::Local { prefill, .. } => (prefill, 0, None),
        Decision::Refused { .. } => return Ok(Fate::Refused),
    };
    let update = |step: RequestStep| {
        // The Conductor being away costs it what it would learn.
        let told = booked.map(|reservation| scheduler.update(reservation, step));
        told.and_then(Result::err).into_iter().for_each(|error| tracing::debug!(%error, "an update was not taken"));
    };
    let instance = instances.get(name).ok_or_else(|| format!("{name} is none of our instances"))?;
    let told = instance.give(&Prompt { id, tokens: request.input_tokens, reuse, hashes })?;
    let fate = loop {
        match told.recv_timeout(PATIENCE) {
            Ok(EngineReport::Started { .. }) => update(RequestStep::PrefillStarted),
            Ok(EngineReport::Done { reused_tokens, took_ns, local, fetched, wrong, .. }) => {
                let ttft = arrived.elapsed();
                update(RequestStep::PrefillDone { reused_tokens, took_ns });
                break Ok(Fate::Served { ttft, local, fetched, wrong, asked: booked.is_some() });
            }
            Err(_) => break Err(format!("instance {name} ended, or said nothing for {PATIENCE:?}")),
        }
    };
    instance.forget(id);
    update(RequestStep::Ended);
    scheduler.ended(&decision);
    Ok(fate?)
}

impl PolicyRun {
    fn of(policy: String, fates: &[Fate], blocks: usize) -> Self {
        let mut ttfts: Vec<f64> = Vec::with_capacity(fates.len());
        let (mut local, mut fetched, mut wrong, mut unasked) = (0, 0, 0, 0);
        for fate in fates {
            let Fate::Served { ttft, local: own, fetched: brought, wrong: bytes, asked } = fate else { continue };
            ttfts.push(ttft.as_secs_f64());
            (local, fetched, wrong) = (local + own, fetched + brought, wrong + bytes);
            unasked += usize::from(!asked);
        }
        ttfts.sort_by(f64::total_cmp);
        let at = |part: f64| ttfts.get((ttfts.len() as f64 * part) as usize).or(ttfts.last()).copied().unwrap_or(0.0);
        let share = |count: u64| count as f64 / (blocks.max(1)) as f64;
        Self {
            policy,
            requests: fates.len(),
            refused: fates.len() - ttfts.len(),
            unasked,
            mean_ttft_s: ttfts.iter().sum::<f64>() / ttfts.len().max(1) as f64,
            p50_ttft_s: at(0.5),
            p90_ttft_s: at(0.9),
            p99_ttft_s: at(0.99),
            local: share(local),
            fetched: share(fetched),
            bytes_wrong: wrong,
        }
    }
}
