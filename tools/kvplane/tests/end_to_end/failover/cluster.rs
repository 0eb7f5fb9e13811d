//! Five nodes, each in a network namespace of its own, one of which is killed under load: no byte is wrong, no object
//! with two replicas is lost, and errors end soon.
//!
//! The load is this test program, started again beside the control plane: it knows the expected bytes of each object,
//! the start and end of each of its operations, and the owners of their keys. `cargo x cluster` kills every node in
//! turn. A machine without namespaces skips the test.

use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvplane::{Client, ClientConfig, Control, Error, PutOptions, Remote};
use kvplane_proto::map::OwnerTable;
use kvplane_proto::rng::Rng;

use crate::namespaces::Space;
use crate::security::certificates::{authority, cert, issue};
use crate::support::{Process, Workplace, finish, test_of, text, wait_until};

pub(crate) const NODES: u64 = 5;
/// Objects of a round that two nodes have before it begins, the same number that are put repeatedly, and their length.
const OBJECTS: u64 = 300;
const BYTES: usize = 8192;
/// Time of load before the kill, and after it.
const BEFORE: Duration = Duration::from_secs(3);
const AFTER: Duration = Duration::from_secs(5);
/// Time after a kill of which the operations on other nodes are shown apart. On an idle machine errors end within it.
const WINDOW: Duration = Duration::from_millis(1500);
/// Deadline of an operation.
const DEADLINE: Duration = Duration::from_millis(250);
pub(crate) const PLANE: &str = "10.78.0.1";
/// Environment variable that makes this program the load: the cluster, the identity, and the round.
const ROLE: &str = "KVPLANE_TEST_LOAD";

/// Creates the namespace with the bridge.
pub(crate) fn hub() -> Option<Space> {
    let bridge = format!("ip link add hub type bridge && ip addr add {PLANE}/24 dev hub && ip link set hub up");
    Space::fresh(&format!("ip link set lo up && {bridge}"))
}

/// Creates a namespace that is connected to the bridge.
pub(crate) fn leaf(hub: &Space, number: u64) -> Option<Space> {
    let mut command = hub.enter();
    command.args(["unshare", "--net"]);
    let leaf = Space::new(command, "ip link set lo up")?;
    let pid = leaf.pid().to_string();
    let run = |mut at: Command, script: &str| at.args(["sh", "-c", script]).status().is_ok_and(|end| end.success());
    let wire =
        format!("ip link add v{number} type veth peer name eth0 netns {pid} && ip link set v{number} master hub up");
    let up = format!("ip addr add {}/24 dev eth0 && ip link set eth0 up", address(number));
    (run(hub.enter(), &wire) && run(leaf.enter(), &up)).then_some(leaf)
}

pub(crate) fn address(number: u64) -> String {
    format!("10.78.0.{}", 10 + number)
}

pub(crate) struct Cluster {
    place: Workplace,
    hub: Space,
    leaves: Vec<Space>,
    plane: Process,
    nodes: Vec<Process>,
}

impl Cluster {
    pub(crate) fn start() -> Option<Self> {
        Self::start_with(2)
    }

    /// Starts a cluster whose slots have this number of owners.
    pub(crate) fn start_with(replicas: u8) -> Option<Self> {
        let hub = hub();
        let leaves: Option<Vec<Space>> =
            hub.as_ref().and_then(|hub| (1..=NODES).map(|number| leaf(hub, number)).collect());
        let (Some(hub), Some(leaves)) = (hub, leaves) else {
            println!(
                "skipped: no network namespaces with cables here (unshare --map-root-user --net, ip, bridge, veth)"
            );
            return None;
        };
        Some(Self::connected(Workplace::new("five"), hub, leaves, replicas))
    }

    /// Starts the processes in namespaces that are connected.
    pub(crate) fn connected(place: Workplace, hub: Space, leaves: Vec<Space>, replicas: u8) -> Self {
        cert(&place, &["init", "--authority", &authority(&place)]).well();
        issue(&place, "plane", "control", &[]);
        issue(&place, "people", "client", &[]);
        let (identity, run, listen) = (place.path("plane"), place.runtime(), format!("{PLANE}:7400"));
        let (state, cluster, replicas) = (place.path("state"), place.cluster.clone(), replicas.to_string());
        let arguments = ["control", "--cluster", &cluster, "--listen", &listen, "--replicas", &replicas];
        let more = ["--state", text(&state), "--identity", text(&identity), "--runtime-directory", text(&run)];
        let plane = Process::start(hub.inside(&place.bare(&[&arguments[..], &more].concat())));
        plane.wait_for("(QUIC)");
        let mut cluster = Self { place, hub, leaves, plane, nodes: Vec::new() };
        for number in 1..=NODES {
            issue(&cluster.place, &number.to_string(), "node", &["--node-id", &number.to_string()]);
            let node = cluster.node(number);
            cluster.nodes.push(node);
        }
        cluster.whole(0);
        cluster
    }

    fn node(&self, number: u64) -> Process {
        let (name, at, place) = (number.to_string(), address(number), &self.place);
        let (identity, run) = (place.path(&name), place.path(&format!("run-{name}")));
        let who = ["node", "--cluster", &place.cluster, "--node-id", &name, "--identity", text(&identity)];
        let (control, domain) = (format!("{PLANE}:7400"), format!("rack-{name}"));
        // Room for all objects of the longest load: what is evicted is taken for lost.
        let pool = if std::env::var_os("KVPLANE_SILENCE_ROUNDS").is_some() { "512M" } else { "96M" };
        let how = ["--control", &control, "--listen", &at, "--pool", pool, "--shards", "1"];
        // On a busy machine the first attempt may exceed its time limit.
        let more = ["--failure-domain", &domain, "--runtime-directory", text(&run), "--wait-control", "60"];
        let command = place.bare(&[&who[..], &how, &more].concat());
        let node = Process::start(self.leaves[number as usize - 1].inside(&command));
        node.wait_for(&format!("node {name} with"));
        node
    }

    /// Requests a path of the control plane's HTTP server, which only its own host may do.
    fn asked(&self, path: &str) -> serde_json::Value {
        let at = self.plane.http().to_string().replace(':', "/");
        let script = format!(
            "exec 3<>/dev/tcp/{at}; printf 'GET {path} HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n' >&3; cat <&3"
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script]);
        let answer = finish(self.hub.inside(&command), &[]).text();
        let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{path}: {answer}"));
        serde_json::from_str(body).unwrap_or_else(|error| panic!("{path}: {error}: {body}"))
    }

    /// Waits until all nodes are members and objects have this number of replicas beside their first, for longer than
    /// the interval of reports.
    pub(crate) fn whole(&self, further: u64) {
        let mut good = 0;
        let there = wait_until(|| {
            std::thread::sleep(Duration::from_millis(100));
            let shown = self.asked("/debug/shards");
            let nodes = shown["nodes"].as_array().expect("nodes");
            let shards = nodes.iter().flat_map(|node| node["shards"].as_array().expect("shards"));
            let copies: u64 = shards.map(|shard| shard["copies"]["elsewhere"].as_u64().expect("a number")).sum();
            good = if self.asked("/health")["members"] == NODES && copies >= further { good + 1 } else { 0 };
            (good == 30).then_some(())
        });
        assert_eq!(there, Some(()), "{NODES} nodes, {further} further replicas");
    }

    fn load(&self, round: u64) -> Process {
        self.beside(&test_of(module_path!(), "load"), ROLE, &format!(" {round}"))
    }

    /// Starts a function of this program beside the control plane, in a role: the cluster, the identity, and more
    /// arguments.
    pub(crate) fn beside(&self, function: &str, role: &str, said: &str) -> Process {
        let said = format!("{} {}{said}", self.place.cluster, text(&self.place.path("people")));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([function, "--exact", "--nocapture", "--test-threads=1"]).env(role, said);
        Process::start(self.hub.inside(&command))
    }

    /// Disconnects a node: no packet comes back from it, not even a reset.
    pub(crate) fn cut(&self, number: u64) {
        set_cable(&self.hub, number, "down");
    }

    /// Connects a node again that was cut.
    pub(crate) fn mend(&self, number: u64) {
        set_cable(&self.hub, number, "up");
    }

    /// Loses all packets that a node sends: they go to a hardware address that nobody has.
    pub(crate) fn lose_sent(&self, number: u64) {
        let others = (1..=NODES).filter(|other| *other != number).map(address).chain([PLANE.to_owned()]);
        let script: Vec<String> = others.map(|other| misdirect(&other, "eth0")).collect();
        configure(self.leaf(number), &script.join(" && "));
    }

    /// Loses all packets that are sent to a node.
    pub(crate) fn lose_received(&self, number: u64) {
        configure(&self.hub, &misdirect(&address(number), "hub"));
        for other in (1..=NODES).filter(|other| *other != number) {
            configure(self.leaf(other), &misdirect(&address(number), "eth0"));
        }
    }

    /// Ends the loss of packets in one direction.
    pub(crate) fn find_all(&self) {
        configure(&self.hub, "ip neigh flush dev hub nud permanent");
        (1..=NODES).for_each(|number| configure(self.leaf(number), "ip neigh flush dev eth0 nud permanent"));
    }

    pub(crate) fn kill(&mut self, number: u64) {
        self.nodes[number as usize - 1].kill();
    }

    pub(crate) fn signal(&self, number: u64, name: &str) {
        self.nodes[number as usize - 1].signal(name);
    }

    /// Starts a node again that was killed.
    pub(crate) fn restart(&mut self, number: u64) {
        self.nodes[number as usize - 1] = self.node(number);
    }

    fn leaf(&self, number: u64) -> &Space {
        &self.leaves[number as usize - 1]
    }
}

/// Sets the cable between the bridge and a leaf `up` or `down`.
pub(crate) fn set_cable(hub: &Space, number: u64, state: &str) {
    configure(hub, &format!("ip link set v{number} {state}"));
}

/// Returns the command after which packets to an address go to a hardware address that nobody has.
fn misdirect(address: &str, device: &str) -> String {
    format!("ip neigh replace {address} lladdr 02:00:00:00:00:66 dev {device} nud permanent")
}

/// Runs a command inside a namespace.
fn configure(space: &Space, script: &str) {
    let status = space.enter().args(["sh", "-c", script]).status();
    assert!(status.is_ok_and(|end| end.success()), "{script}");
}

pub(crate) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// Returns an object's bytes, which follow from its name.
fn value(name: &str) -> Vec<u8> {
    let seed = kvplane_proto::Digest::of(b"", name.as_bytes()).0 as u64;
    (0..BYTES as u64).map(|at| (seed.wrapping_mul(at | 1) >> 32 ^ at) as u8).collect()
}

/// Operation of the load: its end, duration, outcome, and the owners of its key.
struct LoadRecord {
    put: bool,
    at_ms: u64,
    took_us: u64,
    well: bool,
    owners: Vec<u64>,
}

/// Entry point of the load, not a test: without the role it does nothing.
#[test]
fn load() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let [cluster, identity, round] = words[..] else { panic!("{role:?} is no role") };
    let round: u64 = round.parse().unwrap();
    let addresses = vec![format!("{PLANE}:7400").parse().unwrap()];
    let control = Control::Remote(Remote { cluster: cluster.to_owned(), addresses, identity: identity.into() });
    let config = ClientConfig { control, shared_memory: false, deadline: DEADLINE, ..ClientConfig::local(cluster) };
    let mut client = Client::connect(&config).unwrap();
    let twice = PutOptions { replicas: 2, replace: true, ..PutOptions::default() };
    let kept = (0..OBJECTS).map(|number| format!("kept-{round}-{number}"));
    for name in kept.chain((0..OBJECTS).map(changed)) {
        let done = wait_until(|| {
            // Objects that exist already are put again, until both owners have them.
            let (_, replicas) = client.replicas().put(name.as_bytes(), &value(&name), &twice).ok()?;
            (replicas == 2).then_some(())
        });
        assert_eq!(done, Some(()), "{name} has two owners");
    }
    println!("loads");
    let begun = Instant::now();
    let out: Vec<String> = std::thread::scope(|scope| {
        let all: Vec<_> = (1..=NODES)
            .map(|spared| {
                scope.spawn({
                    let config = &config;
                    move || operate(config, spared, round, begun)
                })
            })
            .collect();
        all.into_iter().flat_map(|one| one.join().unwrap()).collect()
    });
    // All objects with two replicas, of this round and before, still exist.
    for round in 0..=round {
        for number in 0..OBJECTS {
            let name = format!("kept-{round}-{number}");
            assert!(wait_until(|| check(&name, client.get(name.as_bytes())).then_some(())).is_some(), "{name}");
        }
    }
    std::io::stdout().lock().write_all((out.join("\n") + "\nlisted\n").as_bytes()).unwrap();
}

/// Runs the operations of one caller that avoids the keys of the node to be killed: its operations must fare like those
/// on other nodes, undisturbed by the death. Other callers wait for the dead node meanwhile.
fn operate(config: &ClientConfig, spared: u64, round: u64, begun: Instant) -> Vec<String> {
    let mut client = Client::connect(config).unwrap();
    let twice = PutOptions { replicas: 2, replace: true, ..PutOptions::default() };
    let (mut rng, mut puts, mut out) = (Rng::new(round * NODES + spared, "load"), spared, Vec::new());
    while begun.elapsed() < BEFORE + AFTER {
        let put = rng.chance(0.2);
        let name = if put { changed(puts % OBJECTS) } else { any_kept(&mut rng, round) };
        // Each caller changes objects of its own.
        puts += if put { NODES } else { 0 };
        let owners = owners_of(&mut client, &name);
        if owners.contains(&spared) {
            continue;
        }
        let started = Instant::now();
        let well = match put {
            true => client.replicas().put(name.as_bytes(), &value(&name), &twice).is_ok(),
            false => check(&name, client.get(name.as_bytes())),
        };
        let owners: Vec<String> = owners.iter().map(u64::to_string).collect();
        let (took_us, what) = (started.elapsed().as_micros(), if put { "put" } else { "get" });
        out.push(format!("op {what} {} {took_us} {well} {}", unix_ms(), owners.join(" ")));
    }
    out
}

fn changed(number: u64) -> String {
    format!("changed-{number}")
}

fn any_kept(rng: &mut Rng, round: u64) -> String {
    format!("kept-{}-{}", rng.below(round + 1), rng.below(OBJECTS))
}

/// Returns true if an object was read. It must never have other bytes, and never be missing.
fn check(name: &str, got: Result<Option<Vec<u8>>, Error>) -> bool {
    match got {
        Ok(Some(bytes)) => assert!(bytes == value(name), "{name} has other bytes"),
        Ok(None) => panic!("{name} had two owners and is lost"),
        Err(_) => return false,
    }
    true
}

/// Returns the nodes that own a key, by the map of the client.
pub(crate) fn owners_of(client: &mut Client, name: &str) -> Vec<u64> {
    type KeyState = std::cell::RefCell<Option<(u64, OwnerTable)>>;
    thread_local!(static TABLE: KeyState = const { KeyState::new(None) });
    let digest = client.digest(name.as_bytes()).unwrap();
    let map = client.link().map().expect("a client has a map");
    TABLE.with_borrow_mut(|known| {
        if known.as_ref().is_none_or(|(epoch, _)| *epoch != map.epoch.0) {
            *known = Some((map.epoch.0, OwnerTable::compute(&map)));
        }
        let (_, table) = known.as_ref().expect("it was just made");
        table.owners(digest.slot()).iter().map(|owner| map.members[usize::from(owner.member)].node.0).collect()
    })
}

fn told(load: &Process) -> Vec<LoadRecord> {
    load.wait_for("listed");
    let parse = |line: String| {
        let mut words = line.strip_prefix("op ")?.split(' ');
        let put = words.next()? == "put";
        let (at_ms, took_us) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let well = words.next()? == "true";
        Some(LoadRecord { put, at_ms, took_us, well, owners: words.filter_map(|word| word.parse().ok()).collect() })
    };
    load.said().into_iter().filter_map(parse).collect()
}

fn p99(of: &[&LoadRecord]) -> u64 {
    let mut times: Vec<u64> = of.iter().map(|one| one.took_us).collect();
    times.sort_unstable();
    times.get(times.len() * 99 / 100).copied().unwrap_or(0)
}

#[test]
fn any_node_may_be_killed_under_load() {
    let count = std::env::var("KVPLANE_CLUSTER_KILLS").map_or(1, |count| count.parse().expect("a number"));
    let Some(mut cluster) = Cluster::start() else { return };
    for round in 0..count {
        let victim = 1 + (round + 1) % NODES;
        let mut load = cluster.load(round);
        load.wait_for("loads");
        std::thread::sleep(BEFORE);
        // Before the kill, which takes until the process is gone.
        let killed_ms = unix_ms();
        cluster.kill(victim);
        let all = told(&load);
        assert!(load.ended().success(), "{:?}", load.said());
        let began = |one: &LoadRecord| one.at_ms - one.took_us / 1000;
        let failed: Vec<u64> = all.iter().filter(|one| !one.well).map(|one| one.at_ms).collect();
        let last = failed.iter().max().map_or(0, |at| at.saturating_sub(killed_ms));
        let window = killed_ms..killed_ms + WINDOW.as_millis() as u64;
        let others = |during: bool| -> Vec<&LoadRecord> {
            let of = |one: &&LoadRecord| !one.owners.contains(&victim) && window.contains(&began(one)) == during;
            all.iter().filter(of).collect()
        };
        let (calm, during) = (others(false), others(true));
        println!(
            "node {victim} of {NODES} killed: {} operations, {} errors, the last after {last} ms; p99 of {} operations \
             on others {} us, of {} in the {} ms from the kill on {} us",
            all.len(),
            failed.len(),
            calm.len(),
            p99(&calm),
            during.len(),
            WINDOW.as_millis(),
            p99(&during)
        );
        for one in during.iter().filter(|one| one.took_us > 20 * p99(&calm)) {
            let (what, after) = (if one.put { "put" } else { "get" }, began(one).saturating_sub(killed_ms));
            println!("  slow: a {what} of nodes {:?}, {after} ms after the kill: {} us", one.owners, one.took_us);
        }
        // When they begin and end is a figure: on a busy machine, operations reach their short deadline at any time.
        assert!(failed.len() * 20 < all.len(), "{} of {} operations failed", failed.len(), all.len());
        assert!(all.len() > 500, "only {} operations", all.len());
        if round + 1 < count {
            cluster.restart(victim);
            cluster.whole((round + 2) * OBJECTS);
        }
    }
}
