//! Tests of upgrades: a new process of a node takes the memory and the ports of the running one over, whether the
//! memory is in a directory or ends with its processes. Nothing that was acknowledged is lost; whichever process is
//! killed at whatever moment, the node serves right bytes or starts empty and says why; and what does not fit is
//! refused, and leaves the node as it is.

use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Command;
use std::time::Duration;

use kvplane::{Client, PutOptions};
use serde_json::{Value, json};

use super::kept_memory::{COUNTERS, Memory, OBJECTS, arguments, control, found, node, put_all, value, with_objects};
use crate::support::{Outcome, PATIENCE, Process, Way, Workplace, health, http_get, signal, text, wait_until};

/// Process that took over, which is no child of this test.
pub(super) struct Successor(u32);

impl Successor {
    /// Reads its number from the output of `kvplane ctl upgrade`.
    pub(super) fn of(said: &str) -> Self {
        let number = said.split("process ").nth(1).and_then(|rest| rest.split(':').next());
        Self(number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no process in {said:?}")))
    }

    fn is_running(&self) -> bool {
        is_running(self.0)
    }

    /// Stops it in order.
    #[track_caller]
    pub(super) fn stop(&self) {
        signal(self.0, "TERM");
        wait_until(|| (!self.is_running()).then_some(())).expect("it ends");
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        kill(self.0);
    }
}

/// Kills a process, which may have ended.
fn kill(pid: u32) {
    if is_running(pid) {
        let _ = Command::new("sh").args(["-c", &format!("kill -9 {pid} 2>/dev/null")]).status();
    }
}

/// Returns true for a process that exists and has not ended.
fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // An orphan may stay as a zombie until its new parent asks for its status.
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Returns memory of both kinds.
fn both_kinds(place: &Workplace) -> [Memory; 2] {
    [Memory::new(place), Memory::of_processes()]
}

fn upgrade(place: &Workplace) -> Outcome {
    place.run(&["ctl", "upgrade", "7"])
}

/// Returns the latest value of a counter of a process, over all shards. The process may be a successor of that one:
/// they share their output.
pub(super) fn latest(first: &Process, name: &str) -> u64 {
    let line = first.said().into_iter().rfind(|line| line.contains(COUNTERS)).expect("an address");
    let address = line[line.find("http://").unwrap() + 7..].trim_end_matches("/metrics");
    let metrics = http_get(address.parse().unwrap(), "/metrics").1;
    let name = format!("{name}{{shard=");
    let values = metrics.lines().filter(|line| line.starts_with(&name)).filter_map(|line| line.split(' ').next_back());
    values.map(|value| value.parse::<u64>().unwrap()).sum()
}

#[test]
fn upgrades_keep_every_object() {
    let place = Workplace::new("upgrade");
    every_object_is_kept(&place, &Memory::new(&place));
}

#[test]
fn upgrades_keep_every_object_in_memory_that_ends_with_its_processes() {
    every_object_is_kept(&Workplace::new("upgrade-memfds"), &Memory::of_processes());
}

fn every_object_is_kept(place: &Workplace, memory: &Memory) {
    let (_control, mut first, mut clients) = with_objects(place, memory);
    let objects = latest(&first, "kvplane_shard_objects");
    let address = first.data();
    let mut last: Option<Successor> = None;
    for round in 0..3 {
        let said = upgrade(place).text();
        assert!(said.contains(&format!("{objects} objects kept")) && !said.contains("dropped"), "{said}");
        let successor = Successor::of(&said);
        match &last {
            None => assert!(first.exited().success(), "{:?}", first.said()),
            Some(last) => wait_until(|| (!last.is_running()).then_some(())).expect("it ends"),
        }
        // Another process claims the memory meanwhile, or the ports of peers on this host.
        assert!(successor.is_running());
        let (number, why) = match memory.is_kept() {
            true => ("8", "another process uses the memory"),
            false => ("7", "is in use by another process"),
        };
        let other = [&["node", "--node-id", number], &arguments(memory, &[])[..]].concat();
        place.run(&other).failed(1, &[why]);
        let mut new = Way::BOTH.map(|way| place.client(way));
        for client in clients.iter_mut().chain(&mut new) {
            assert_eq!((found(client, "shm", OBJECTS), found(client, "tcp", OBJECTS)), (OBJECTS, OBJECTS), "{round}");
        }
        let places = place.run(&["ctl", "segments"]).text();
        assert!(places.contains(&address.to_string()), "the ports are those of before: {places}");
        last = Some(successor);
    }
    // A successor leaves an image in order, too, where memory outlives it.
    last.unwrap().stop();
    let server = node(place, memory, &[]);
    let kept = if memory.is_kept() { objects } else { 0 };
    assert_eq!(latest(&server, "kvplane_kept_memory_objects"), kept);
    assert_eq!(found(&mut clients[0], "shm", OBJECTS), if memory.is_kept() { OBJECTS } else { 0 });
    assert!(memory.is_kept() || is_empty_and_says_why(&server), "{:?}", server.said());
}

/// Returns true if the log of a node has the reason why its memory is empty.
fn is_empty_and_says_why(node: &Process) -> bool {
    let reasons = ["memory is empty, nothing of it was kept", "memory is empty: without --keep-memory"];
    node.said().iter().any(|line| reasons.iter().any(|reason| line.contains(reason)))
}

/// Whichever process is killed, at whatever moment of an upgrade: the node serves right bytes, at once or after its
/// next start, or that start says why memory is empty. `KVPLANE_UPGRADE_KILLS` sets the number of rounds.
#[test]
fn a_kill_at_any_moment_of_an_upgrade_leaves_right_bytes_or_a_reason() {
    let place = Workplace::new("upgrade-kill");
    kills_leave_right_bytes_or_a_reason(&place, &Memory::new(&place));
}

#[test]
fn a_kill_at_any_moment_of_an_upgrade_of_memory_that_ends_with_its_processes_leaves_right_bytes_or_a_reason() {
    kills_leave_right_bytes_or_a_reason(&Workplace::new("upgrade-kill-memfds"), &Memory::of_processes());
}

fn kills_leave_right_bytes_or_a_reason(place: &Workplace, memory: &Memory) {
    let rounds = std::env::var("KVPLANE_UPGRADE_KILLS").map_or(6, |text| text.parse().expect("a number"));
    let _control = control(place);
    let (mut kept, mut empty) = (0, 0);
    let mut first = node(place, memory, &[]);
    let mut client = place.client(Way::Tcp);
    for round in 0..rounds {
        // A drawn moment, early in a start or late, and each of the two processes in turn.
        let moment = Duration::from_millis(round as u64 * 7919 % 600);
        put_all(&mut client, "object", 200);
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| upgrade(place));
            let started = wait_until(|| successor_of(&first)).expect("a successor");
            std::thread::sleep(moment);
            let victim = if round % 2 == 0 { started.0 } else { first.id() };
            kill(victim);
            // The command ends in any case, with the outcome or the reason.
            let outcome = asked.join().unwrap();
            assert!(outcome.status.success() || !outcome.stderr.is_empty(), "{outcome:?}");
            wait_until(|| (!is_running(victim)).then_some(())).expect("it is dead");
            let survivor = if victim == first.id() { started.0 } else { first.id() };
            // A successor that was not given the memory ends, and a process that gave it away does.
            let serves = wait_until(|| match is_running(survivor) {
                false => Some(false),
                true => serves(place).then_some(true),
            });
            match serves {
                Some(true) => {
                    let there = found(&mut client, "object", 200);
                    assert!(there == 200, "round {round}: {there} of 200: {:?}", first.said());
                    kept += 1;
                    // The next round begins with a process that this test has started.
                    signal(survivor, "TERM");
                    wait_until(|| (!is_running(survivor)).then_some(())).expect("it ends");
                }
                Some(false) => {}
                None => panic!("round {round}: {:?}", first.said()),
            }
            drop(started);
            first = node(place, memory, &[]);
            let there = found(&mut client, "object", 200);
            let says_why = is_empty_and_says_why(&first);
            let is_right = there == 200 && memory.is_kept() || there == 0 && says_why;
            assert!(is_right, "round {round}: {there} of 200: {:?}", first.said());
            empty += usize::from(there == 0);
        });
    }
    println!(
        "{rounds} kills: {kept} times the other process served, {empty} times the next start was empty and said why"
    );
}

/// Returns the process that this one has started to take over.
fn successor_of(first: &Process) -> Option<Successor> {
    let line = first.said().into_iter().rfind(|line| line.contains("was started to take over"))?;
    line.split(' ').nth(1)?.parse().ok().map(Successor)
}

/// Returns true if a node serves: it is active, and answers.
fn serves(place: &Workplace) -> bool {
    let mut client = place.client(Way::Tcp);
    client.get(b"nothing").is_ok()
}

#[test]
fn a_successor_that_does_not_fit_is_refused_and_the_node_goes_on() {
    let place = Workplace::new("upgrade-refused");
    let (memory, _control) = (Memory::new(&place), control(&place));
    upgrade(&place).failed(1, &["node 7 does not run on this host"]);
    let mut first = node(&place, &memory, &[]);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", 50);
    let with = |program: &str| place.run(&["ctl", "upgrade", "7", "--program", program]);
    with("/nowhere/kvplane").failed(1, &["/nowhere/kvplane cannot be started"]);
    with("/bin/false").failed(1, &["the new process ended", "the log of the node has its error"]);
    // A new process with other settings, of another node, and with other memory.
    let take = ["node", "--take-over", "--node-id", "7", "--shards", "1", "--keep-memory", text(memory.path())];
    place.run(&[&take[..], &["--pool", "40M"]].concat()).failed(1, &["the pool of a shard", "with the same setting"]);
    place.run(&[&take[..], &["--pool", "32M", "--port", "9"]].concat()).failed(1, &["--port", "9 in the new one"]);
    let other = ["node", "--take-over", "--node-id", "8", "--keep-memory", text(memory.path())];
    place.run(&other).failed(1, &["node 8 does not run on this host"]);
    place.run(&["node", "--take-over", "--shards", "1"]).failed(2, &["--node-id"]);
    let elsewhere = ["node", "--take-over", "--node-id", "7", "--shards", "1", "--pool", "32M"];
    place.run(&elsewhere).failed(1, &["--keep-memory", "not set in the new one"]);
    assert_eq!(found(&mut client, "before", 50), 50);
    first.assert_alive();
    // A node with far memory, and one whose memory ends with it.
    let mut far = place.node(9, &["--pool", "32M", "--shards", "1", "--pool-tier", "numa:0:32M"]);
    place.run(&["ctl", "upgrade", "9"]).failed(1, &["far memory", "kvplane ctl drain"]);
    assert!(far.stop().success());
    assert_eq!(place.left_over("9.handover"), Vec::<String>::new());
    let mut plain = place.node(9, &["--pool", "32M", "--shards", "1"]);
    let take = ["node", "--take-over", "--node-id", "9", "--shards", "1"];
    let refused = |more: &[&str], why: &str| place.run(&[&take[..], more].concat()).failed(1, &[why]);
    refused(&["--pool", "40M"], "the pool of a shard is 33554432 in this process and 41943040 in the new one");
    refused(&["--pool", "32M", "--keep-memory", text(memory.path())], "--keep-memory is not set in this process");
    refused(&["--pool", "32M", "--pool-tier", "numa:0:32M"], "--pool-tier is not set in this process");
    plain.assert_alive();
    assert!(plain.stop().success());
}

/// A node without a number of its own draws one, which its successors have, too.
#[test]
fn a_node_that_has_drawn_its_number_is_upgraded_by_it() {
    let place = Workplace::new("upgrade-drawn");
    let _control = control(&place);
    let mut command = place.command(&["node", "--pool", "32M", "--shards", "1", "--metrics-port", "0"]);
    command.env_remove("NOTIFY_SOCKET");
    let mut first = Process::start(command);
    let line = first.wait_for("for objects");
    let number = line.split("node ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a number").to_owned();
    first.wait_for(COUNTERS);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", 100);
    let mut last: Option<Successor> = None;
    for _ in 0..2 {
        let said = place.run(&["ctl", "upgrade", &number]).text();
        assert!(said.contains("100 objects kept"), "{said}");
        assert_eq!(found(&mut client, "before", 100), 100);
        last = Some(Successor::of(&said));
    }
    assert!(first.exited().success());
    last.expect("a successor").stop();
}

/// Where a new process does not fit, `--or-drain` has other nodes fetch all objects, and the process ends for its
/// supervisor to start the next one; the only node of a cluster goes on.
#[test]
fn a_node_whose_successor_does_not_fit_is_drained_instead() {
    let place = Workplace::new("upgrade-or-drain");
    let _control = control(&place);
    let config = place.file("node.toml", b"pool = \"32M\"\n");
    let arguments = ["--config", text(&config), "--shards", "1", "--metrics-port", "0"];
    let mut first = place.node(7, &arguments);
    first.wait_for(COUNTERS);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", 100);
    place.file("node.toml", b"pool = \"40M\"\n");
    let or_drain = || place.run(&["ctl", "upgrade", "7", "--or-drain", "60"]);
    or_drain().failed(1, &["the pool of a shard is 33554432", "the drain failed", "the node goes on"]);
    first.assert_alive();
    assert_eq!(found(&mut client, "before", 100), 100);
    let other = place.node(8, &["--pool", "64M", "--shards", "1", "--metrics-port", "0"]);
    other.wait_for(COUNTERS);
    upgrade(&place).failed(1, &["the pool of a shard is 33554432"]);
    let said = or_drain().text();
    assert!(said.contains("node 7 is drained") && said.contains("the pool of a shard is 33554432"), "{said}");
    assert_eq!(first.exited().code(), Some(1), "{:?}", first.said());
    assert_eq!(found(&mut client, "before", 100), 100);
    let next = place.node(7, &arguments);
    next.wait_for(COUNTERS);
    assert_eq!(found(&mut client, "before", 100), 100);
}

/// Successor that this test plays, message by message.
struct PlayedSuccessor(UnixStream);

impl PlayedSuccessor {
    fn connect(place: &Workplace) -> Self {
        let path = place.runtime().join(format!("{}.7.handover", place.cluster));
        let stream = wait_until(|| UnixStream::connect(&path).ok()).expect("a socket");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(stream)
    }

    fn say(&mut self, message: &Value) {
        let body = message.to_string();
        self.0.write_all(b"KVPH").unwrap();
        self.0.write_all(&(body.len() as u32).to_le_bytes()).unwrap();
        self.0.write_all(body.as_bytes()).unwrap();
    }

    /// Returns the next message; descriptors beside it are closed. `None` if the node has hung up.
    fn hear(&mut self) -> Option<Value> {
        let mut header = [0; 8];
        self.0.read_exact(&mut header).ok()?;
        let mut body = vec![0; u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize];
        self.0.read_exact(&mut body).ok()?;
        serde_json::from_slice(&body).ok()
    }
}

fn hello(place: &Workplace, memory: &Memory) -> Value {
    json!({
        "kind": "hello", "protocol": 1, "software": "kvplane/9.9.9", "image_formats": [2], "cluster": place.cluster,
        "node": 7, "shards": 1, "pool_bytes": 32 << 20, "max_objects": 8192, "listen": "127.0.0.1", "port": 0,
        "directory": memory.is_kept().then(|| text(memory.path())), "ssds": [],
    })
}

/// Another version's process whose images have another format is refused with what to do; one that ends, or says
/// nonsense, in the middle of a handover costs the node nothing.
#[test]
fn successors_of_other_formats_and_broken_ones_leave_the_node_as_it_was() {
    let place = Workplace::new("upgrade-broken");
    let _control = control(&place);
    for memory in both_kinds(&place) {
        broken_successors_leave_the_node_as_it_was(&place, &memory);
    }
}

fn broken_successors_leave_the_node_as_it_was(place: &Workplace, memory: &Memory) {
    let mut first = node(place, memory, &[]);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", 100);
    let good = hello(place, memory);
    let refused = |name: &str, value: Value| {
        let (mut message, mut played) = (good.clone(), PlayedSuccessor::connect(place));
        message[name] = value;
        played.say(&message);
        played.hear().expect("an answer")["refused"].as_str().expect("a refusal").to_owned()
    };
    let why = refused("image_formats", json!([3, 4]));
    assert!(why.contains("format 2, the new one reads [3, 4]") && why.contains("kvplane ctl drain"), "{why}");
    assert!(refused("protocol", json!(2)).contains("restart the node"));
    let mut played = PlayedSuccessor::connect(place);
    played.say(&json!({ "kind": "whatever" }));
    assert!(played.hear().expect("an answer")["refused"].is_string());
    PlayedSuccessor::connect(place).0.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // While one prepares, another is refused; when it is gone, the next one is not.
    let mut one = PlayedSuccessor::connect(place);
    one.say(&good);
    assert_eq!(one.hear().expect("an answer")["kind"], "offer");
    let mut two = PlayedSuccessor::connect(place);
    two.say(&good);
    assert!(two.hear().expect("an answer")["refused"].as_str().expect("a refusal").contains("about to take over"));
    drop(one);
    // One that ends after each of its messages: the node has given its memory up in between, and serves again.
    let begin = || {
        let begun = wait_until(|| {
            let mut played = PlayedSuccessor::connect(place);
            played.say(&good);
            (played.hear()?["kind"] == "offer").then_some(played)
        });
        let mut played = begun.expect("an offer");
        assert_eq!(played.hear().expect("memory")["kind"], "memory");
        played
    };
    for round in 0..3 {
        let mut played = begin();
        played.say(&json!({ "kind": "hand over" }));
        if round > 0 {
            assert_eq!(played.hear().expect("a claim")["kind"], "claim");
        }
        if round > 1 {
            assert_eq!(played.hear().expect("listeners")["kind"], "listeners");
            played.say(&json!({ "kind": "nonsense" }));
        }
        drop(played);
        assert_eq!(found(&mut client, "before", 100), 100, "{round}: {:?}", first.said());
        put_all(&mut client, &format!("after-{round}"), 50);
    }
    first.assert_alive();
    let resumed = first.said().iter().filter(|line| line.contains("this process serves again")).count();
    assert!(resumed >= 2, "{:?}", first.said());
    // A real one takes over after all of these.
    let said = upgrade(place).text();
    let successor = Successor::of(&said);
    assert!(said.contains("250 objects kept"), "{said}");
    assert!(first.exited().success());
    assert_eq!(found(&mut client, "before", 100) + found(&mut client, "after-2", 50), 150);
    successor.stop();
}

/// A control plane that stops answering after the successor has prepared: the node does not stop, because nobody could
/// serve its memory until the successor has joined.
#[test]
fn a_node_hands_nothing_over_while_the_control_plane_does_not_answer() {
    let place = Workplace::new("upgrade-silent-control");
    let control = control(&place);
    for memory in both_kinds(&place) {
        let first = node(&place, &memory, &[]);
        let mut client = place.client(Way::Tcp);
        put_all(&mut client, "before", 100);
        let mut played = PlayedSuccessor::connect(&place);
        played.say(&hello(&place, &memory));
        assert_eq!(played.hear().expect("an offer")["kind"], "offer");
        assert_eq!(played.hear().expect("memory")["kind"], "memory");
        control.signal("STOP");
        played.say(&json!({ "kind": "hand over" }));
        let said = played.hear().expect("an answer");
        let why = said["refused"].as_str().unwrap_or_else(|| panic!("{said}: {:?}", first.said()));
        assert!(why.contains("the control plane does not answer"), "{why}");
        assert_eq!(found(&mut client, "before", 100), 100, "{:?}", first.said());
        control.signal("CONT");
        drop(played);
        let successor = Successor::of(&upgrade(&place).text());
        assert_eq!(found(&mut client, "before", 100), 100);
        successor.stop();
    }
}

/// An operator that has hung up has reported a failure, so no upgrade follows.
#[test]
fn an_upgrade_whose_operator_has_hung_up_does_not_take_place() {
    let place = Workplace::new("upgrade-hung-up");
    let (_control, memory) = (control(&place), Memory::of_processes());
    let first = node(&place, &memory, &[]);
    first.signal("STOP");
    let mut operator = PlayedSuccessor::connect(&place);
    operator.say(&json!({ "kind": "upgrade", "program": null, "or_drain_s": null }));
    drop(operator);
    first.signal("CONT");
    first.wait_for("no upgrade: the operator has hung up");
    assert!(first.said().iter().all(|line| !line.contains("was started to take over")), "{:?}", first.said());
    Successor::of(&upgrade(&place).text()).stop();
}

/// An upgrade of one of two nodes changes no owner, expels nobody, and keeps the node's objects and what it has as a
/// replica owner, so that the other one may die afterwards. Its port for metrics passes on, too.
#[test]
fn an_upgrade_of_one_of_two_nodes_moves_nothing_and_keeps_replicas() {
    let place = Workplace::new("upgrade-two");
    nothing_moves(&place, &Memory::new(&place));
}

#[test]
fn an_upgrade_of_memory_that_ends_with_its_processes_moves_nothing_and_keeps_replicas() {
    nothing_moves(&Workplace::new("upgrade-two-memfds"), &Memory::of_processes());
}

fn nothing_moves(place: &Workplace, memory: &Memory) {
    let (state, metrics) = (place.path("state"), free_port().to_string());
    let plane = Process::start(place.command(&["control", "--state", text(&state), "--replicas", "2"]));
    plane.wait_for("metrics on");
    let keeps = [&["--pool", "64M", "--shards", "2", "--metrics-port", &metrics], &memory.flags()[..]].concat();
    let mut first = place.node(7, &[&keeps[..], &["--failure-domain", "one"]].concat());
    first.wait_for(COUNTERS);
    let mut other = place.node(8, &["--pool", "64M", "--shards", "2", "--failure-domain", "two"]);
    let settled = wait_until(|| (health(plane.http())["members"] == 2).then_some(()));
    assert_eq!(settled, Some(()));
    let mut client = place.client(Way::Tcp);
    let twice = PutOptions { replicas: 2, replace: true, ..PutOptions::default() };
    // The first puts may come before the nodes know each other.
    let twice_put = |client: &mut Client, at: usize| {
        client.replicas().put(format!("twice-{at}").as_bytes(), &value(at), &twice).is_ok_and(|(_, made)| made == 2)
    };
    for at in 0..OBJECTS {
        wait_until(|| twice_put(&mut client, at).then_some(())).expect("two replicas");
    }
    let own = latest(&first, "kvplane_shard_objects");
    assert!(own > 0 && latest(&first, "kvplane_shard_replicas") > 0);
    let said = upgrade(place).text();
    let successor = Successor::of(&said);
    assert!(first.exited().success());
    assert!(!said.contains("dropped") && !said.contains("empty"), "{said}");
    let plane_counter = |name: &str| {
        let metrics = http_get(plane.http(), "/metrics").1;
        metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok()).unwrap_or(0u64)
    };
    assert_eq!(plane_counter("kvplane_cluster_expulsions_total"), 0);
    assert_eq!(plane_counter("kvplane_cluster_joins_total"), 3, "the successor is another incarnation");
    assert_eq!(found(&mut client, "twice", OBJECTS), OBJECTS);
    let replicated = || {
        let [objects, replicas] = ["kvplane_shard_objects", "kvplane_shard_replicas"].map(|name| latest(&first, name));
        (objects == OBJECTS as u64 || objects + replicas == OBJECTS as u64).then_some(())
    };
    assert_eq!(wait_until(replicated), Some(()), "each object has a replica on the node");
    other.kill();
    assert_eq!(found(&mut client, "twice", OBJECTS), OBJECTS, "{:?}", first.said());
    successor.stop();
}

/// With an SSD besides: its device passes to the successor, and nothing that either has is lost.
#[test]
fn an_upgrade_keeps_memory_and_the_ssd() {
    let place = Workplace::new("upgrade-ssd");
    memory_and_the_ssd_are_kept(&place, &Memory::new(&place));
}

#[test]
fn an_upgrade_keeps_the_ssd_and_memory_that_ends_with_its_processes() {
    memory_and_the_ssd_are_kept(&Workplace::new("upgrade-ssd-memfds"), &Memory::of_processes());
}

fn memory_and_the_ssd_are_kept(place: &Workplace, memory: &Memory) {
    let _control = control(place);
    let ssd = format!("{}:512M", text(&place.path("ssd")));
    let mut first = node(place, memory, &["--ssd", &ssd, "--ssd-ack", "buffered"]);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", 4000);
    assert!(latest(&first, "kvplane_shard_objects") < 4000, "some are on the SSD only");
    let said = upgrade(place).text();
    let successor = Successor::of(&said);
    assert!(!said.contains("empty"), "{said}");
    assert!(first.exited().success());
    wait_until(|| (latest(&first, "kvplane_tier_recovered") == 1).then_some(())).expect("it is recovered");
    assert_eq!(found(&mut client, "before", 4000), 4000);
    successor.stop();
}

/// systemd learns which process is its unit's main one: the first, then the one that took over.
#[test]
fn the_service_manager_learns_the_main_process() {
    let place = Workplace::new("upgrade-notify");
    let (memory, _control) = (Memory::new(&place), control(&place));
    let path = place.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = place.command(&[&["node", "--node-id", "7"], &arguments(&memory, &[])[..]].concat());
    command.env("NOTIFY_SOCKET", &path);
    let mut first = Process::start(command);
    let hear = || {
        let mut message = [0; 256];
        let bytes = socket.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..bytes]).into_owned()
    };
    assert_eq!(hear(), format!("MAINPID={}\nREADY=1\n", first.id()));
    let successor = Successor::of(&upgrade(&place).text());
    assert_eq!(hear(), format!("MAINPID={}\nREADY=1\n", successor.0));
    assert!(first.exited().success());
    successor.stop();
}
