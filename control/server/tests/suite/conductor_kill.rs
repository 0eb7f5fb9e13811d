//! `kill -9` in the middle of ten thousand events: no registration is lost, and no answer that is not degraded differs
//! from what the engines hold.

use crate::conductor_restart::{Plane, counter, post, services, spawn_with_snapshots};
use crate::support::{Scratch, client, pack};
use crate::zeromq::{greet, read_frame, send};

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvplane_proto::rng::Rng;
use kvplane_rpc::conductor::*;
use kvplane_rpc::{Client, Role};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

const EVENTS: u64 = 10_000;
/// Blocks of an engine: hashes from 1 on.
const BLOCKS: u64 = 8;
/// Number of degraded answers after which an engine clears its cache, so that everything is known again.
const PATIENCE: usize = 100;

/// Batches that an engine has published, and blocks that it holds.
#[derive(Default)]
struct EngineState {
    batches: Vec<Vec<u8>>,
    held: BTreeSet<u64>,
    /// Time in its batches, which differs between incarnations.
    time: u64,
}

/// An engine with a ZeroMQ publisher that retains all batches.
struct Engine {
    published: Arc<Mutex<EngineState>>,
    count: watch::Sender<u64>,
    source: Value,
}

impl Engine {
    async fn new() -> Self {
        let bind = async || TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let (publisher, replay) = (bind().await, bind().await);
        let url = |listener: &TcpListener| format!("tcp://{}", listener.local_addr().expect("bound"));
        let source = json!({
            "type": "vLLM", "instance_id": "e0", "modelname": "m", "block_size": 4,
            "endpoint": url(&publisher), "replay_endpoint": url(&replay),
        });
        let published: Arc<Mutex<EngineState>> = Arc::default();
        let count = watch::channel(0).0;
        let (live, counted) = (Arc::clone(&published), count.subscribe());
        tokio::spawn(async move {
            while let Ok((stream, _)) = publisher.accept().await {
                tokio::spawn(publish_live(stream, Arc::clone(&live), counted.clone()));
            }
        });
        let past = Arc::clone(&published);
        tokio::spawn(async move {
            while let Ok((stream, _)) = replay.accept().await {
                tokio::spawn(answer_replay(stream, Arc::clone(&past)));
            }
        });
        Self { published, count, source }
    }

    /// Changes its cache, and publishes the batch.
    fn change(&self, hash: u64, stores: bool) {
        let mut published = self.published.lock().expect("no panic");
        published.time += 1;
        let event = match stores {
            true => json!(["BlockStored", [hash], null, [], 4, null]),
            false => json!(["BlockRemoved", [hash]]),
        };
        let batch = pack(&json!([published.time, [event]]));
        published.batches.push(batch);
        if stores {
            published.held.insert(hash)
        } else {
            published.held.remove(&hash)
        };
        self.count.send_modify(|count| *count += 1);
    }

    fn clear(&self) {
        let mut published = self.published.lock().expect("no panic");
        published.time += 1;
        let batch = pack(&json!([published.time, [["AllBlocksCleared"]]]));
        published.batches.push(batch);
        published.held.clear();
        self.count.send_modify(|count| *count += 1);
    }

    /// Restarts while nobody follows it: it holds nothing, and its numbers start over.
    fn restart(&self) {
        let mut published = self.published.lock().expect("no panic");
        *published = EngineState { time: published.time + 1_000_000, ..EngineState::default() };
        self.count.send_replace(0);
    }

    fn held(&self) -> BTreeSet<u64> {
        self.published.lock().expect("no panic").held.clone()
    }
}

/// Sends what is published from the subscription on. A broken connection ends the task.
async fn publish_live(stream: TcpStream, published: Arc<Mutex<EngineState>>, mut counted: watch::Receiver<u64>) {
    let mut stream = greet(stream, "PUB").await;
    read_frame(&mut stream).await;
    let mut sent = published.lock().expect("no panic").batches.len();
    loop {
        let more: Vec<Vec<u8>> = published.lock().expect("no panic").batches.get(sent..).unwrap_or_default().to_vec();
        for batch in more {
            send(&mut stream, &[b"", &(sent as u64).to_be_bytes(), &batch]).await;
            sent += 1;
        }
        if counted.changed().await.is_err() {
            return;
        }
    }
}

async fn answer_replay(stream: TcpStream, published: Arc<Mutex<EngineState>>) {
    let mut stream = greet(stream, "ROUTER").await;
    read_frame(&mut stream).await;
    let from = u64::from_be_bytes(read_frame(&mut stream).await.try_into().expect("a number"));
    let all: Vec<Vec<u8>> =
        published.lock().expect("no panic").batches.get(from as usize..).unwrap_or_default().to_vec();
    for (at, batch) in all.iter().enumerate() {
        send(&mut stream, &[b"", &(from + at as u64).to_be_bytes(), batch]).await;
    }
    send(&mut stream, &[b"", &(-1i64).to_be_bytes(), b""]).await;
}

/// An instance that reports over QUIC, and retains all batches.
#[derive(Default)]
struct Reporter {
    batches: Vec<(CacheReport, Vec<BlockChange>)>,
    held: BTreeSet<u64>,
}

impl Reporter {
    fn change(&mut self, hash: u64, stores: bool) {
        let (lora, salt, hashes) = (String::new(), String::new(), vec![hash]);
        let change = match stores {
            true => BlockChange::Stored { lora, salt, tier: BlockTier::Gpu, parent: None, hashes },
            false => BlockChange::Removed { lora, salt, tier: None, hashes },
        };
        self.batches.push((CacheReport::Goes, vec![change]));
        if stores {
            self.held.insert(hash)
        } else {
            self.held.remove(&hash)
        };
    }

    async fn send(&self, client: &Client, seq: u64) -> Option<CacheTaken> {
        let (kind, changes) = self.batches[seq as usize].clone();
        let batch = CacheBatch { seq, kind, changes };
        let (tenant, instance) = (String::new(), "q0".to_owned());
        client.call(&ReportCache { tenant, instance, incarnation: 3, batch }).await.ok()
    }

    /// Sends the last batch, and what the Conductor requests then. A control plane that is away gets it later.
    async fn deliver(&mut self, client: &Client) {
        let Some(last) = self.batches.len().checked_sub(1) else { return };
        let mut taken = self.send(client, last as u64).await;
        while let Some(CacheTaken { next, wanted }) = taken {
            taken = match wanted {
                CacheWanted::Replay if (next as usize) < self.batches.len() => self.send(client, next).await,
                CacheWanted::Snapshot => {
                    let (lora, salt, hashes) = (String::new(), String::new(), self.held.iter().copied());
                    let stored = hashes.map(|hash| {
                        let (lora, salt, tier) = (lora.clone(), salt.clone(), BlockTier::Gpu);
                        BlockChange::Stored { lora, salt, tier, parent: None, hashes: vec![hash] }
                    });
                    self.batches.push((CacheReport::Snapshot, stored.collect()));
                    self.send(client, self.batches.len() as u64 - 1).await
                }
                _ => None,
            };
        }
    }
}

fn reporter() -> RegisterInstance {
    RegisterInstance { incarnation: 3, ..RegisterInstance::new("q0", "q", 4, InstancePart::Prefill) }
}

/// Returns the blocks that the Conductor answers for a model's only instance; none if an answer is degraded.
fn answered(http: SocketAddr, model: &str) -> Option<BTreeSet<u64>> {
    let mut found = BTreeSet::new();
    for hash in 1..=BLOCKS {
        let asked = json!({ "model": model, "block_size": 4, "seq_hashes": [hash] });
        let answer = post(http, "/query_by_hash", &asked).expect("answered");
        if answer["degraded"] == json!(true) {
            return None;
        }
        let instances = answer["instances"].as_object().expect("a map");
        if instances.values().any(|held| held["gpu"].as_u64() > Some(0)) {
            found.insert(hash);
        }
    }
    Some(found)
}

/// Asks until an answer is not degraded, which must be the truth. Nothing is published meanwhile but a clear.
async fn check(plane: &Plane, model: &str, truth: impl Fn() -> BTreeSet<u64>, clear: impl Fn()) {
    for asked in 0.. {
        if let Some(found) = answered(plane.http, model) {
            assert_eq!(found, truth(), "blocks of {model:?} as answered, and as they are");
            return;
        }
        if asked == PATIENCE {
            clear();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until a snapshot of both models is there.
async fn wait_for_snapshots(state: &Path) {
    let files = || {
        std::fs::read_dir(state.join("index")).map_or(0, |files| {
            files.flatten().filter(|file| file.path().extension().is_some_and(|ending| ending == "index")).count()
        })
    };
    while files() < 2 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn round(seed: u64, snapshot_ms: u64) -> u64 {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    let mut rng = Rng::new(seed, "kills");
    let engine = Engine::new().await;
    let mut reports = Reporter::default();
    let mut registered = BTreeSet::from(["e0".to_owned(), "q0".to_owned()]);
    let mut plane = spawn_with_snapshots(&state, snapshot_ms);
    post(plane.http, "/register", &engine.source).expect("registered");
    let mut reporting = client(&plane.local, Role::Client).await;
    reporting.call(&reporter()).await.expect("room");
    let kills: BTreeSet<u64> = (0..3).map(|_| 500 + rng.below(EVENTS - 500)).collect();
    let mut confirmed = 0;
    for event in 0..EVENTS {
        let (hash, stores) = (1 + rng.below(BLOCKS), rng.chance(0.5));
        engine.change(hash, stores);
        if event % 8 == 0 {
            reports.change(1 + rng.below(BLOCKS), rng.chance(0.5));
            reports.deliver(&reporting).await;
        }
        if event % 400 == 0 {
            let name = format!("x{event}");
            let other = json!({ "type": "SGLang", "instance_id": name, "modelname": "x", "block_size": 4,
                "endpoint": "tcp://127.0.0.1:9" });
            post(plane.http, "/register", &other).expect("registered");
            registered.insert(name);
        }
        if !kills.contains(&event) {
            continue;
        }
        if snapshot_ms > 0 {
            wait_for_snapshots(&state).await;
        }
        // The last registration before the kill may be answered or not.
        drop(plane);
        let restarts = kills.iter().nth(1) == Some(&event);
        if restarts {
            // It publishes more than its predecessor had, so that the numbers look as if it continued, and never has
            // some of the former blocks.
            engine.restart();
            (0..event + 10_000).for_each(|_| engine.change(1, rng.chance(0.3)));
        }
        let blocks = if restarts { 1 } else { BLOCKS };
        for _ in 0..rng.below(200) {
            engine.change(1 + rng.below(blocks), rng.chance(0.2));
            reports.change(1 + rng.below(BLOCKS), rng.chance(0.2));
        }
        plane = spawn_with_snapshots(&state, snapshot_ms);
        let known: BTreeSet<String> =
            services(plane.http).iter().filter_map(|row| row["instance_id"].as_str().map(str::to_owned)).collect();
        assert_eq!(known, registered, "registrations after a kill at event {event}");
        // The reporter is silent: nothing of it may count.
        assert_eq!(answered(plane.http, "q"), None);
        check(&plane, "m", || engine.held(), || engine.clear()).await;
        reporting = client(&plane.local, Role::Client).await;
        reports.change(1 + rng.below(BLOCKS), rng.chance(0.2));
        reports.deliver(&reporting).await;
        check(&plane, "q", || reports.held.clone(), || ()).await;
        confirmed += counter(plane.http, "kvplane_conductor_restored_caches_confirmed_total");
        if snapshot_ms > 0 {
            let expected = if restarts { 1 } else { 2 };
            assert!(confirmed >= expected, "the snapshots were of use after the kill at event {event}");
        }
    }
    confirmed
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        tokio::time::timeout(Duration::from_secs(100), test).await.expect("the test hangs");
    });
}

#[test]
fn kills_among_events_lose_no_registration_and_leave_nothing_stale() {
    run(async {
        for seed in 0..3 {
            assert!(round(seed, 5).await > 0);
        }
    });
}

#[test]
fn kills_without_snapshots_leave_nothing_stale_either() {
    run(async {
        assert_eq!(round(9, 0).await, 0);
    });
}
