//! Tests of the Conductor after `kill -9`: registrations and settings persist, and answers are marked degraded until
//! engines have reported their caches again.

use crate::support;
use crate::zeromq;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvplane_rpc::conductor::*;
use kvplane_rpc::placement::*;
use kvplane_rpc::{Authority, ClusterName, LocalCluster, Role};
use kvplane_server::{ConductorConfig, ControlConfig, ControlServer};
use serde_json::{Value, json};
use support::{Scratch, client, get, pack, run};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use zeromq::{accept, message, read_frame, send};

const STATE: &str = "KVPLANE_TEST_CONDUCTOR_STATE";
/// Least time between snapshots of the index, in milliseconds.
const SNAPSHOT_MS: &str = "KVPLANE_TEST_SNAPSHOT_MS";

/// Not a test: the child process of the tests below. Without its variable it does nothing.
#[test]
fn child_control_plane() {
    let Some(state) = std::env::var_os(STATE) else { return };
    let mut config = ControlConfig::new("test");
    config.state_directory = Some(state.into());
    config.http_listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    config.conductor = Some(ConductorConfig::default());
    let every = std::env::var(SNAPSHOT_MS).expect("the parent sets it").parse().expect("a number");
    config.conductor_snapshots.every = Duration::from_millis(every);
    let control = ControlServer::start(config).expect("a control plane");
    println!("\nlistens {} {}", control.address(), control.http_address().expect("it listens"));
    // The parent kills this process; if the parent has died, the pipe closes.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// A control plane that is killed with SIGKILL when it is dropped.
pub(crate) struct Plane {
    child: Child,
    pub(crate) local: LocalCluster,
    pub(crate) http: SocketAddr,
}

impl Drop for Plane {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a control plane without snapshots of the index.
fn spawn(state: &Path) -> Plane {
    spawn_with_snapshots(state, 0)
}

/// Starts a control plane that writes a snapshot of the index after each change, at this interval; 0 for none.
pub(crate) fn spawn_with_snapshots(state: &Path, every_ms: u64) -> Plane {
    let mut child = Command::new(std::env::current_exe().expect("our own path"))
        .args(["--exact", "conductor_restart::child_control_plane", "--nocapture"])
        .env(STATE, state)
        .env(SNAPSHOT_MS, every_ms.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child");
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let found = output.lines().map_while(Result::ok).find_map(|line| {
        let (quic, http) = line.strip_prefix("listens ")?.split_once(' ')?;
        Some((quic.parse().ok()?, http.parse().ok()?))
    });
    let (address, http) = found.expect("it says where it listens");
    let name = ClusterName::new("test").expect("a good name");
    let authority = Authority::load_or_generate(state, &name).expect("it is there");
    let roles = [Role::Client, Role::Admin, Role::Scheduler];
    let identities = roles.map(|role| (role, authority.issue(role).expect("an identity"))).to_vec();
    Plane { child, local: LocalCluster::new(name, address, authority.trust().clone(), identities), http }
}

/// Returns the answer with status 200; none if the call was refused, or the server was killed before the answer was
/// complete.
pub(crate) fn post(http: SocketAddr, path: &str, body: &Value) -> Option<Value> {
    let body = body.to_string();
    let mut stream = std::net::TcpStream::connect(http).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let head = format!("POST {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: {}", body.len());
    write!(stream, "{head}\r\n\r\n{body}").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    if head.starts_with("HTTP/1.1 200") { serde_json::from_str(body).ok() } else { None }
}

pub(crate) fn services(http: SocketAddr) -> Vec<Value> {
    let found: Value = serde_json::from_str(&get(http, "/services").1).expect("JSON");
    found["services"].as_array().expect("a list").clone()
}

/// Sockets of an engine.
struct Engine {
    publisher: TcpListener,
    replay: TcpListener,
}

impl Engine {
    async fn new() -> Self {
        let bind = async || TcpListener::bind("127.0.0.1:0").await.expect("a port");
        Self { publisher: bind().await, replay: bind().await }
    }

    fn registration(&self, name: &str, model: &str, seed: &str) -> Value {
        let url = |listener: &TcpListener| format!("tcp://{}", listener.local_addr().expect("bound"));
        json!({
            "type": "vLLM", "instance_id": name, "modelname": model, "block_size": 4,
            "endpoint": url(&self.publisher), "replay_endpoint": url(&self.replay),
            "hash_profile": { "algorithm": "sha256_cbor", "python_hash_seed": seed },
        })
    }

    /// Accepts a follower, and replays the retained batches, by their numbers.
    async fn followed(&self, batches: &[(u64, Vec<u8>)]) -> TcpStream {
        let mut live = accept(&self.publisher, "PUB").await;
        read_frame(&mut live).await;
        self.replay_once(batches).await;
        live
    }

    /// Replays the retained batches once, by their numbers.
    async fn replay_once(&self, batches: &[(u64, Vec<u8>)]) {
        let mut past = accept(&self.replay, "ROUTER").await;
        assert_eq!(read_frame(&mut past).await, b"");
        let from = read_frame(&mut past).await;
        let from = u64::from_be_bytes(from.try_into().expect("a number"));
        for (number, batch) in batches.iter().filter(|(number, _)| *number >= from) {
            send(&mut past, &[b"", &number.to_be_bytes(), batch]).await;
        }
        send(&mut past, &[b"", &(-1i64).to_be_bytes(), b""]).await;
    }
}

fn stored(hashes: &[u64]) -> Vec<u8> {
    pack(&json!([0.5, [["BlockStored", hashes, null, [], 4, null]]]))
}

/// Returns the number of an engine's indexed blocks 1, 2, 3 and so on, and whether the answer is `degraded`.
fn held(http: SocketAddr, model: &str, name: &str) -> (u64, bool) {
    let body = json!({ "model": model, "block_size": 4, "seq_hashes": [1, 2, 3, 4, 5, 6, 7, 8] });
    let found = post(http, "/query_by_hash", &body).expect("answered");
    let gpu = found["instances"][name]["gpu"].as_u64().unwrap_or(0);
    (gpu / 4, found["degraded"] == json!(true))
}

async fn until(http: SocketAddr, model: &str, name: &str, expected: (u64, bool)) {
    while held(http, model, name) != expected {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn engines_are_known_after_a_kill_and_their_blocks_are_degraded_until_they_were_replayed() {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    run(async {
        let plane = spawn(&state);
        let (whole, cut) = (Engine::new().await, Engine::new().await);
        post(plane.http, "/register", &whole.registration("e0", "m", "7")).expect("registered");
        post(plane.http, "/register", &cut.registration("e1", "n", "0")).expect("registered");
        let mut batches = vec![(0, stored(&[1, 2])), (1, stored(&[3]))];
        let mut live = whole.followed(&batches).await;
        let _cut = cut.followed(&[(0, stored(&[1]))]).await;
        batches.push((2, stored(&[4])));
        send(&mut live, &[b"", &2u64.to_be_bytes(), &batches[2].1]).await;
        until(plane.http, "m", "e0", (4, false)).await;
        until(plane.http, "n", "e1", (1, false)).await;
        // In the middle of a batch.
        drop(plane);

        let plane = spawn(&state);
        let known: Vec<Value> = services(plane.http).iter().map(|row| row["instance_id"].clone()).collect();
        assert_eq!(known, [json!("e0"), json!("e1")]);
        // No event has arrived yet: the index is empty, and the answer is degraded.
        assert_eq!(held(plane.http, "m", "e0"), (0, true));
        assert!(services(plane.http).iter().all(|row| row["degraded"] == json!(true)));
        let view: Value = serde_json::from_str(&get(plane.http, "/global_view").1).expect("JSON");
        assert!(view["contexts"].as_array().is_some_and(|all| all.iter().all(|row| row["degraded"] == json!(true))));
        // The same registration again does not create another engine.
        post(plane.http, "/register", &whole.registration("e0", "m", "7")).expect("the same again");
        // The engine published while the control plane was down.
        batches.push((3, stored(&[5])));
        let mut live = whole.followed(&batches).await;
        until(plane.http, "m", "e0", (5, false)).await;
        send(&mut live, &[b"", &4u64.to_be_bytes(), &stored(&[6])]).await;
        until(plane.http, "m", "e0", (6, false)).await;
        // An engine that has dropped its first batches may hold more than is indexed, until it has cleared everything.
        let mut live = cut.followed(&[(8, stored(&[1, 2]))]).await;
        until(plane.http, "n", "e1", (2, true)).await;
        let cleared = pack(&json!([0.5, [["AllBlocksCleared"], ["BlockStored", [1, 2, 3], null, [], 4, null]]]));
        send(&mut live, &[b"", &9u64.to_be_bytes(), &cleared]).await;
        until(plane.http, "n", "e1", (3, false)).await;

        // An unregistered engine stays unregistered.
        let gone = json!({ "type": "vLLM", "instance_id": "e0", "modelname": "m", "block_size": 4 });
        post(plane.http, "/unregister", &gone).expect("known");
        drop(plane);
        let plane = spawn(&state);
        let known: Vec<Value> = services(plane.http).iter().map(|row| row["instance_id"].clone()).collect();
        assert_eq!(known, [json!("e1")]);
    });
}

/// Returns a counter of `/metrics`.
pub(crate) fn counter(http: SocketAddr, name: &str) -> u64 {
    let (_, page) = get(http, "/metrics");
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse::<f64>().ok()).unwrap_or(0.0) as u64
}

#[test]
fn an_engine_continues_at_its_snapshot_and_a_restarted_one_does_not() {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    run(async {
        let plane = spawn_with_snapshots(&state, 1);
        let engine = Engine::new().await;
        post(plane.http, "/register", &engine.registration("e0", "m", "0")).expect("registered");
        let mut batches = vec![(0, stored(&[1])), (1, stored(&[2]))];
        let mut live = engine.followed(&batches).await;
        until(plane.http, "m", "e0", (2, false)).await;
        // The second snapshot from now on is taken after batch 1. Blocks 3 and 4 have to be stored, too.
        let written = || counter(plane.http, "kvplane_conductor_snapshots_written_total");
        let before = written();
        while written() < before + 2 || batches.len() < 4 {
            let number = batches.len() as u64;
            batches.push((number, stored(&[3 + number % 2])));
            send(&mut live, &[b"", &number.to_be_bytes(), &batches[number as usize].1]).await;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        until(plane.http, "m", "e0", (4, false)).await;
        drop(plane);

        // Batch 0 is gone, and a rebuild from the first batch on would be degraded.
        let plane = spawn_with_snapshots(&state, 1);
        assert_eq!(held(plane.http, "m", "e0"), (0, true), "nothing is confirmed");
        let progress = services(plane.http)[0]["progress"].clone();
        assert_eq!(progress["unconfirmed"], json!(true), "{progress}");
        assert!(progress["next"].as_u64().is_some_and(|next| next >= 2), "{progress}");
        let removed = pack(&json!([0.5, [["BlockRemoved", [2]]]]));
        batches.push((batches.len() as u64, removed));
        // A replay that fails, at once or in the middle, proves nothing: it is requested again.
        let mut live = accept(&engine.publisher, "PUB").await;
        read_frame(&mut live).await;
        drop(engine.replay.accept().await);
        let mut cut = accept(&engine.replay, "ROUTER").await;
        read_frame(&mut cut).await;
        let from = u64::from_be_bytes(read_frame(&mut cut).await.try_into().expect("a number"));
        send(&mut cut, &[b"", &from.to_be_bytes(), &batches[from as usize].1]).await;
        drop(cut);
        assert_eq!(held(plane.http, "m", "e0"), (0, true));
        engine.replay_once(&batches[1..]).await;
        until(plane.http, "m", "e0", (1, false)).await;
        assert_eq!(counter(plane.http, "kvplane_conductor_restored_caches_confirmed_total"), 1);
        let before = counter(plane.http, "kvplane_conductor_snapshots_written_total");
        // A batch that was replayed may arrive again.
        let number = batches.len() as u64;
        send(&mut live, &[b"", &(number - 1).to_be_bytes(), &batches[number as usize - 1].1]).await;
        send(&mut live, &[b"", &number.to_be_bytes(), &stored(&[2, 3])]).await;
        until(plane.http, "m", "e0", (4, false)).await;
        while counter(plane.http, "kvplane_conductor_snapshots_written_total") == before {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        drop(plane);

        // The engine restarts, and publishes more than before: its numbers alone look as if it continued.
        let plane = spawn_with_snapshots(&state, 1);
        let anew: Vec<(u64, Vec<u8>)> =
            (0..number + 5).map(|at| (at, pack(&json!([0.25, [["BlockStored", [1], null, [], 4, null]]])))).collect();
        let mut live = accept(&engine.publisher, "PUB").await;
        read_frame(&mut live).await;
        for from in [None, Some(0)] {
            let mut past = accept(&engine.replay, "ROUTER").await;
            read_frame(&mut past).await;
            let asked = u64::from_be_bytes(read_frame(&mut past).await.try_into().expect("a number"));
            assert!(from.is_none_or(|from| from == asked), "{asked}");
            // The Conductor may hang up as soon as it sees that the first batch is another one.
            let mut replayed: Vec<u8> = anew[asked as usize..]
                .iter()
                .flat_map(|(at, batch)| message(&[b"", &at.to_be_bytes(), batch]))
                .collect();
            replayed.extend(message(&[b"", &(-1i64).to_be_bytes(), b""]));
            past.write_all(&replayed).await.expect("sent");
        }
        until(plane.http, "m", "e0", (1, false)).await;
        assert_eq!(counter(plane.http, "kvplane_conductor_restored_caches_dropped_total"), 1);
        drop(plane);

        // A damaged snapshot is ignored, and the index is rebuilt from the first batch on.
        for file in std::fs::read_dir(state.join("index")).expect("a directory") {
            std::fs::write(file.expect("a file").path(), b"KVPS of another version").expect("written");
        }
        let plane = spawn_with_snapshots(&state, 0);
        let _live = engine.followed(&anew).await;
        until(plane.http, "m", "e0", (1, false)).await;
    });
}

#[test]
fn an_engine_without_batches_is_complete_after_its_replay() {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    run(async {
        let engine = Engine::new().await;
        let plane = spawn(&state);
        post(plane.http, "/register", &engine.registration("e0", "m", "0")).expect("registered");
        drop(plane);
        // The first connection may be from the killed process.
        let plane = spawn(&state);
        assert_eq!(held(plane.http, "m", "e0"), (0, true));
        drop(engine.publisher.accept().await);
        let mut live = engine.followed(&[]).await;
        until(plane.http, "m", "e0", (0, false)).await;
        send(&mut live, &[b"", &0u64.to_be_bytes(), &stored(&[1])]).await;
        until(plane.http, "m", "e0", (1, false)).await;
    });
}

fn instance(name: &str) -> RegisterInstance {
    RegisterInstance {
        incarnation: 3,
        capacity_tokens: 1_000_000,
        address: format!("{name}:80"),
        ..RegisterInstance::new(name, "q", 4, InstancePart::Mixed)
    }
}

fn report(seq: u64, kind: CacheReport, hashes: Vec<u64>) -> ReportCache {
    let (lora, salt) = (String::new(), String::new());
    let changes = vec![BlockChange::Stored { lora, salt, tier: BlockTier::Gpu, parent: None, hashes }];
    ReportCache {
        tenant: String::new(),
        instance: "q0".to_owned(),
        incarnation: 3,
        batch: CacheBatch { seq, kind, changes },
    }
}

#[test]
fn instances_holds_the_policy_and_masters_are_known_after_a_kill() {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    run(async {
        let plane = spawn(&state);
        let (engine, admin) = (client(&plane.local, Role::Client).await, client(&plane.local, Role::Admin).await);
        for name in ["q0", "q1"] {
            engine.call(&instance(name)).await.expect("room");
        }
        engine.call(&report(1, CacheReport::Snapshot, vec![1, 2])).await.expect("taken");
        admin.call(&HoldInstance { instance: "q1".to_owned(), held: true }).await.expect("known");
        let set = SetPlacement { policy: PlacementPolicy::Kvplane, ttft_ns: 5_000_000_000, tbt_ns: 0 };
        admin.call(&set).await.expect("an operator");
        let class = SetClass { class: "chat".to_owned(), terms: Some(ClassTerms { priority: 2, ttft_ns: Some(9) }) };
        admin.call(&class).await.expect("an operator");
        let weight = SetWeight { tenant: "t".to_owned(), flow: "bot".to_owned(), weight: Some(50) };
        admin.call(&weight).await.expect("an operator");
        let master = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let endpoint = format!("tcp://{}", master.local_addr().expect("bound"));
        let spec = json!({ "type": "Mooncake", "instance_id": "store", "endpoint": endpoint, "modelname": "q" });
        post(plane.http, "/register", &spec).expect("registered");
        drop(plane);

        let plane = spawn(&state);
        let router = client(&plane.local, Role::Scheduler).await;
        let engine = client(&plane.local, Role::Client).await;
        let shown = router.call(&ShowPlacement).await.expect("hosted");
        assert_eq!(shown, Placement { set, held: vec!["q1".to_owned()] });
        let service = router.call(&ShowService).await.expect("hosted");
        let classes = vec![("chat".to_owned(), class.terms.expect("set"))];
        assert_eq!(service, ServiceShown { classes, weights: vec![weight] });
        let rows = services(plane.http);
        let row = |name: &str| rows.iter().find(|row| row["instance_id"] == json!(name)).expect("known").clone();
        assert_eq!((&row("q0")["degraded"], &row("q1")["degraded"]), (&json!(true), &json!(false)));
        assert_eq!((&row("store")["degraded"], &row("store")["endpoint"]), (&json!(true), &json!(endpoint)));
        // A scheduler that queries over QUIC learns that one of them may hold more than is indexed.
        let context = PromptContext { model: "q".to_owned(), block_tokens: 4, ..PromptContext::default() };
        let query = QueryPrefix { context, hashes: vec![1, 2, 3], most: 8, tier: BlockTier::Ssd };
        let nothing =
            PrefixHolder { instance: "q0".into(), gpu_tokens: 0, dram_tokens: 0, ssd_tokens: 0, degraded: true };
        assert_eq!(router.call(&query).await.expect("served").holders, [nothing]);
        // The engine continues its reports, and a snapshot is requested.
        let taken = engine.call(&report(2, CacheReport::Goes, vec![3])).await.expect("taken");
        assert_eq!(taken.wanted, CacheWanted::Snapshot);
        let taken = engine.call(&report(3, CacheReport::Snapshot, vec![1, 2, 3])).await.expect("taken");
        assert_eq!(taken.wanted, CacheWanted::Nothing);
        let holders = router.call(&query).await.expect("served").holders;
        assert_eq!(holders.len(), 1);
        assert_eq!((holders[0].gpu_tokens, holders[0].degraded), (12, false));
        // The held instance gets no requests.
        let refused = engine.call(&RegisterInstance { incarnation: 2, ..instance("q1") }).await;
        assert!(refused.is_err(), "an earlier incarnation of an instance that is remembered");
    });
}

#[test]
fn answered_registrations_survive_a_kill() {
    let scratch = Scratch::new();
    for round in 0..3u64 {
        let state = scratch.path().join(format!("state-{round}"));
        let mut plane = spawn(&state);
        let http = plane.http;
        let answered = std::sync::atomic::AtomicU64::new(0);
        let registration = |at: u64| {
            json!({ "type": "vLLM", "instance_id": format!("e{at}"), "modelname": "m", "block_size": 4,
                "endpoint": "tcp://127.0.0.1:9" })
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for at in 0..400 {
                    if post(http, "/register", &registration(at)).is_none() {
                        return;
                    }
                    answered.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                }
            });
            while answered.load(std::sync::atomic::Ordering::SeqCst) < 5 + 7 * round {
                std::thread::yield_now();
            }
            plane.child.kill().expect("it runs");
        });
        let answered = answered.into_inner();
        drop(plane);
        let plane = spawn(&state);
        let known = services(plane.http);
        for at in 0..answered {
            let name = json!(format!("e{at}"));
            assert!(known.iter().any(|row| row["instance_id"] == name), "{name} of {answered} was answered");
        }
        assert!(known.len() as u64 <= answered + 1, "at most one was under way");
    }
}
