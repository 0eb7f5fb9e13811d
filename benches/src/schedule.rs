//! Conductor over QUIC on loopback: latency of placements at a given rate of requests.
//!
//! The control plane, Conductor included, is one thread; the client is another, which sends a request when it is due,
//! without waiting for earlier replies. Each request is booked behind others and ends as soon as it is answered: by a
//! call of its own, so that the server has twice as many calls, or, in every second round, with the next request.
//! Prompts are as long as those of Mooncake's conversation trace, 24 blocks of 512 tokens, and half of each is in the
//! prefix index.
//!
//! Each side has a core of its own. The kernel's scheduling statistics of both are printed too, because a control plane
//! that is kept off its core for three milliseconds has thirty requests queued, and its p99 is then that of the
//! machine's other programs.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvplane::rpc::conductor::{
    BlockChange, BlockTier, CacheBatch, CacheReport, InstancePart, PromptContext, RegisterInstance, ReportCache,
    RequestStep, RequestTerms, Schedule, ScheduleMode, ScheduleOnTerms, ScheduleReply, UpdateRequest,
};
use kvplane::rpc::{Client, ClientConfig, Limits, Role};
use kvplane_proto::rng::{Rng, mix64};
use kvplane_server::{ConductorConfig, ControlConfig, ControlServer};
use kvplane_sys::cpu;

use crate::Failure;

/// Name of the control plane's thread.
const SERVER: &str = "kvplane-control";
/// Requests per second.
const RATE: u64 = 10_000;
const SECONDS: u64 = 3;
const PREFILLS: u64 = 8;
const DECODES: u64 = 8;
const BLOCKS: u64 = 24;
const BLOCK_TOKENS: u32 = 512;
/// Number of prompts whose prefixes instances have.
const KNOWN: u64 = 10_000;

fn context() -> PromptContext {
    PromptContext { model: "m".to_owned(), block_tokens: BLOCK_TOKENS, ..PromptContext::default() }
}

fn prompt(seed: u64) -> Vec<u64> {
    // The second half is unique to each request.
    let known = (0..BLOCKS / 2).map(|at| mix64((seed % KNOWN) << 8 | at));
    known.chain((BLOCKS / 2..BLOCKS).map(|at| mix64(seed << 40 | at))).collect()
}

fn ask(seed: u64) -> Schedule {
    Schedule {
        client: 1,
        request: format!("request-{seed}"),
        context: context(),
        tokens: BLOCKS as u32 * BLOCK_TOKENS,
        hashes: prompt(seed),
        wait_ns: 0,
        mode: ScheduleMode::Now,
        barred: Vec::new(),
    }
}

/// Sends requests in turns at [`RATE`].
pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!(
        "schedule: Schedule over QUIC on loopback, {RATE} requests a second for {SECONDS} s, {PREFILLS} instances"
    );
    let mut config = ControlConfig::new("bench");
    config.conductor = Some(ConductorConfig::default());
    config.limits = Limits { calls_per_connection: 4_096, ..config.limits };
    // The client never sleeps: on the same core, the control plane would wait for it.
    let cores = cpu::allowed_cores();
    let (Some(&ours), Some(&theirs)) = (cores.first(), cores.last()) else { return Err("no core".into()) };
    cpu::pin_current_thread(theirs)?;
    let control = ControlServer::start(config)?;
    cpu::pin_current_thread(ours)?;
    let local = ClientConfig::local(control.local(), Role::Scheduler, "bench").ok_or("no identity")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (client, _) = Client::connect(&local, Rng::new(1, "bench")).await?;
        prepare(&client).await?;
        for round in 0..rounds as u64 {
            for piggybacks in [false, true] {
                measure(&client, (2 * round + u64::from(piggybacks) + 1) << 24, piggybacks).await?;
            }
        }
        Ok(())
    })
}

fn locked(ended: &Mutex<Vec<u64>>) -> MutexGuard<'_, Vec<u64>> {
    ended.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn prepare(client: &Client) -> Result<(), Failure> {
    for at in 0..PREFILLS + DECODES {
        let part = if at < PREFILLS { InstancePart::Prefill } else { InstancePart::Decode };
        let register = RegisterInstance {
            capacity_tokens: 1 << 30,
            ..RegisterInstance::new(format!("i{at}"), "m", BLOCK_TOKENS, part)
        };
        client.call(&register).await?;
    }
    for seed in 0..KNOWN {
        let (lora, salt) = (String::new(), String::new());
        let hashes = prompt(seed)[..BLOCKS as usize / 2].to_vec();
        let changes = vec![BlockChange::Stored { lora, salt, tier: BlockTier::Dram, parent: None, hashes }];
        let (instance, seq) = (format!("i{}", seed % PREFILLS), seed / PREFILLS);
        let kind = CacheReport::Goes;
        client
            .call(&ReportCache {
                tenant: String::new(),
                instance,
                incarnation: 1,
                batch: CacheBatch { seq, kind, changes },
            })
            .await?;
    }
    Ok(())
}

/// Scheduling statistics of a thread, if the kernel counts them: time on a core, and time waiting for a core.
#[derive(Clone, Copy, Default)]
struct ThreadTimes {
    on_core_ns: u64,
    kept_off_ns: u64,
}

impl ThreadTimes {
    /// Reads those of the calling thread.
    fn here() -> Self {
        Self::read(Path::new("/proc/thread-self")).unwrap_or_default()
    }

    /// Reads those of the control plane's thread.
    fn server() -> Self {
        let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let named = |thread: &std::fs::DirEntry| {
            std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|comm| comm.trim() == SERVER)
        };
        threads.filter(named).find_map(|thread| Self::read(&thread.path())).unwrap_or_default()
    }

    fn read(thread: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(thread.join("schedstat")).ok()?;
        let mut words = text.split_whitespace().map_while(|word| word.parse().ok());
        Some(Self { on_core_ns: words.next()?, kept_off_ns: words.next()? })
    }

    fn since(self, before: Self) -> String {
        let ms = |now: u64, before: u64| now.saturating_sub(before) as f64 / 1e6;
        let (on_core, kept_off) = (ms(self.on_core_ns, before.on_core_ns), ms(self.kept_off_ns, before.kept_off_ns));
        format!("{on_core:.0} ms on its core, {kept_off:.1} ms kept off it")
    }
}

/// Returns the datagrams that this machine's sockets dropped for lack of buffer space.
fn dropped() -> u64 {
    let text = std::fs::read_to_string("/proc/net/snmp").unwrap_or_default();
    let mut lines = text.lines().filter(|line| line.starts_with("Udp:")).map(|line| line.split_whitespace());
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return 0 };
    let found = names.zip(values).find(|(name, _)| *name == "RcvbufErrors");
    found.and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
}

/// Measures one round of requests, numbered from `first`. Each ends with a call of its own, or, if `piggybacks`, with
/// the next request.
async fn measure(client: &Client, first: u64, piggybacks: bool) -> Result<(), Failure> {
    let failed = Arc::new(AtomicU64::new(0));
    let ended: Arc<Mutex<Vec<u64>>> = Arc::default();
    let (before, dropped_before) = ([ThreadTimes::server(), ThreadTimes::here()], dropped());
    let (count, start) = (RATE * SECONDS, Instant::now());
    let mut asked = tokio::task::JoinSet::new();
    let mut times_ns = Vec::with_capacity(count as usize);
    let mut late_ns = Vec::with_capacity(count as usize);
    for at in 0..count {
        let due = start + Duration::from_nanos(at * 1_000_000_000 / RATE);
        while Instant::now() < due {
            // Replies are read meanwhile.
            tokio::task::yield_now().await;
        }
        late_ns.push(due.elapsed().as_nanos() as u64);
        let (client, failed, ended) = (client.clone(), Arc::clone(&failed), Arc::clone(&ended));
        asked.spawn(async move {
            let (schedule, gone) = (ask(first + at), std::mem::take(&mut *locked(&ended)));
            let answer = if piggybacks {
                let (terms, finished) = (RequestTerms::default(), Vec::new());
                client.call(&ScheduleOnTerms { schedule, terms, ended: gone, finished }).await
            } else {
                client.call(&schedule).await
            };
            let took_ns = due.elapsed().as_nanos() as u64;
            match answer {
                Ok(ScheduleReply::Assigned(assignment)) if piggybacks => locked(&ended).push(assignment.reservation),
                Ok(ScheduleReply::Assigned(assignment)) => {
                    let update = UpdateRequest { reservation: assignment.reservation, step: RequestStep::Ended };
                    failed.fetch_add(u64::from(client.call(&update).await.is_err()), Ordering::Relaxed);
                }
                _ => {
                    failed.fetch_add(1, Ordering::Relaxed);
                }
            }
            took_ns
        });
        while let Some(done) = asked.try_join_next() {
            times_ns.push(done?);
        }
    }
    while let Some(done) = asked.join_next().await {
        times_ns.push(done?);
    }
    let took = start.elapsed().as_secs_f64();
    let rest = std::mem::take(&mut *locked(&ended));
    for reservation in rest {
        client.call(&UpdateRequest { reservation, step: RequestStep::Ended }).await?;
    }
    let (after, dropped) = ([ThreadTimes::server(), ThreadTimes::here()], dropped() - dropped_before);
    times_ns.sort_unstable();
    late_ns.sort_unstable();
    let at = |times: &[u64], part: f64| times[((times.len() - 1) as f64 * part) as usize] as f64 / 1e3;
    println!("  {}", if piggybacks { "the end of a request is sent with the next one" } else { "two calls a request" });
    println!(
        "  p50 {:7.1} us   p99 {:7.1} us   p99.9 {:7.1} us   {:6.0} requests/s   {} failed   (wanted: 100, 500 us)",
        at(&times_ns, 0.5),
        at(&times_ns, 0.99),
        at(&times_ns, 0.999),
        times_ns.len() as f64 / took,
        failed.load(Ordering::Relaxed),
    );
    println!(
        "    sent late: p99 {:.1} us, p99.9 {:.1} us; control plane: {}; asker: {}; {dropped} datagrams dropped",
        at(&late_ns, 0.99),
        at(&late_ns, 0.999),
        after[0].since(before[0]),
        after[1].since(before[1]),
    );
    Ok(())
}
