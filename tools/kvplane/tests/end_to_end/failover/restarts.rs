//! Tests of restarts of the control plane: the data path is not affected, and the cluster is the same afterwards.

use std::time::{Duration, Instant};

use crate::support::{Process, Way, Workplace, health, http_get, text, wait_until};

fn control(place: &Workplace, listen: &str) -> Process {
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state), "--listen", listen]));
    control.wait_for("metrics on");
    control
}

/// Waits until a node reports to this very control plane: its load is in memory only, unlike its membership.
fn heard_of(control: &Process, node: u64) -> Option<()> {
    let name = format!("kvplane_node_objects{{node=\"{node}\"}} ");
    wait_until(|| {
        let metrics = http_get(control.http(), "/metrics").1;
        let objects: f64 = metrics.lines().find_map(|line| line.strip_prefix(&name))?.parse().unwrap();
        (objects > 0.0).then_some(())
    })
}

fn put_and_get(client: &mut kvplane::Client, round: &str) {
    for at in 0..50 {
        let (key, value) = (format!("{round}-{at}"), vec![at as u8; 1000 + at]);
        client.put(key.as_bytes(), &value).unwrap();
        assert_eq!(client.get(key.as_bytes()).unwrap().as_deref(), Some(&value[..]), "{key}");
    }
}

#[test]
fn puts_and_gets_go_on_without_a_control_plane_and_the_cluster_comes_back() {
    let place = Workplace::new("stable");
    let mut first = control(&place, "127.0.0.1:0");
    let address = first.quic().to_string();
    let mut node = Process::start(place.command(&["node", "--pool", "32M", "--node-id", "7"]));
    let member = |control: &Process| wait_until(|| (health(control.http())["members"] == 1).then_some(()));
    assert_eq!(member(&first), Some(()));
    let mut clients = Way::BOTH.map(|way| place.client(way));
    for (client, way) in clients.iter_mut().zip(Way::BOTH) {
        put_and_get(client, &format!("before-{way:?}"));
    }
    let epoch = health(first.http())["epoch"].as_u64().unwrap();

    first.kill();
    for (client, way) in clients.iter_mut().zip(Way::BOTH) {
        put_and_get(client, &format!("without-{way:?}"));
        // A new connection does not need the control plane either.
        assert_eq!(client.get(b"before-Shm-7").unwrap().as_deref(), Some(&[7u8; 1007][..]));
    }
    // A new client gets an error that names the problem and the file.
    place.run(&["ctl", "get", "before-Shm-7"]).failed(1, &["stable.local", "gone"]);

    let mut second = control(&place, &address);
    assert_eq!(member(&second), Some(()), "the node is a member again: {:?}", node.said());
    let after = health(second.http())["epoch"].as_u64().unwrap();
    assert!(after >= epoch, "epoch {after} after {epoch}");
    assert_eq!(heard_of(&second, 7), Some(()), "{:?}", node.said());
    let status = place.run(&["ctl", "status"]).text();
    assert!(status.lines().any(|line| line.contains(" 7  active ")), "{status}");
    for (client, way) in clients.iter_mut().zip(Way::BOTH) {
        assert_eq!(client.get(b"without-Tcp-9").unwrap().as_deref(), Some(&[9u8; 1009][..]), "nothing was dropped");
        put_and_get(client, &format!("after-{way:?}"));
    }
    assert_eq!(place.run(&["ctl", "size", "before-Tcp-11"]).text(), "1011\n");

    // The node leaves: it owns nothing any more, and the epoch continues to grow.
    assert!(node.stop().success());
    assert!(place.left_over(".shm").is_empty());
    let gone = wait_until(|| (health(second.http())["members"] == 0).then_some(()));
    assert_eq!(gone, Some(()));
    assert!(health(second.http())["epoch"].as_u64().unwrap() > after);
    place.run(&["ctl", "get", "before-Shm-7"]).failed(1, &["no member owns the key"]);
    assert!(second.stop().success());
}

/// Puts and gets for this time, each of which must succeed; returns their number.
fn work(clients: &mut [kvplane::Client; 2], round: &str, seconds: u64) -> usize {
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut rounds = 0;
    while Instant::now() < until {
        clients.iter_mut().for_each(|client| put_and_get(client, &format!("{round}-{}", rounds % 7)));
        rounds += 1;
    }
    rounds * 100
}

/// `KVPLANE_AWAY_SECONDS` sets the time; it is longer than the deadline for heartbeats, 6 s.
#[test]
fn a_halted_or_dead_control_plane_expels_no_member_and_fails_no_operation() {
    let seconds = std::env::var("KVPLANE_AWAY_SECONDS").map_or(8, |text| text.parse().expect("seconds"));
    let place = Workplace::new("still");
    let mut plane = control(&place, "127.0.0.1:0");
    let address = plane.quic().to_string();
    let nodes = ["3", "4"].map(|id| {
        let node = Process::start(place.command(&["node", "--pool", "16M", "--shards", "1", "--node-id", id]));
        node.wait_for("shard 0");
        node
    });
    let members = |plane: &Process| wait_until(|| (health(plane.http())["members"] == 2).then_some(()));
    assert_eq!(members(&plane), Some(()));
    let mut clients = Way::BOTH.map(|way| place.client(way));
    clients.iter_mut().for_each(|client| put_and_get(client, "before"));
    let epoch = health(plane.http())["epoch"].as_u64().unwrap();

    plane.signal("STOP");
    let still = work(&mut clients, "still", seconds);
    plane.signal("CONT");
    assert_eq!(members(&plane), Some(()));
    assert_eq!([heard_of(&plane, 3), heard_of(&plane, 4)], [Some(()); 2]);
    assert_eq!(health(plane.http())["epoch"].as_u64(), Some(epoch), "nothing changed hands: {:?}", plane.said());

    plane.kill();
    let gone = work(&mut clients, "gone", seconds);
    let plane = control(&place, &address);
    assert_eq!([heard_of(&plane, 3), heard_of(&plane, 4)], [Some(()); 2]);
    println!("{seconds} s stopped: {still} puts and gets each; {seconds} s gone: {gone}");
    for client in &mut clients {
        assert_eq!(client.get(b"before-31").unwrap().as_deref(), Some(&[31u8; 1031][..]), "nothing was dropped");
    }
    drop(nodes);
}

#[test]
fn a_control_plane_that_comes_back_elsewhere_is_found() {
    let place = Workplace::new("moved");
    let mut first = control(&place, "127.0.0.1:0");
    let node = Process::start(place.command(&["node", "--pool", "8M", "--node-id", "9"]));
    // A member is on the map shortly after it has joined.
    node.wait_for("node 9 with");
    let member = |control: &Process| wait_until(|| (health(control.http())["members"] == 1).then_some(()));
    assert_eq!(member(&first), Some(()));
    let mut client = place.client(Way::Tcp);
    put_and_get(&mut client, "before");
    let taken = first.quic();
    first.kill();
    // Another process has taken its port by now.
    let _port = std::net::UdpSocket::bind(taken).unwrap();
    let second = control(&place, "127.0.0.1:0");
    assert_ne!(second.quic(), taken);
    assert_eq!(heard_of(&second, 9), Some(()), "{:?}", node.said());
    put_and_get(&mut client, "after");
}

#[test]
fn a_node_killed_and_started_again_serves_the_same_clients() {
    let place = Workplace::new("node-again");
    let control = control(&place, "127.0.0.1:0");
    let start = || {
        let node = place.node(5, &["--pool", "8M"]);
        node.wait_for("shard 0");
        node
    };
    let members = || wait_until(|| (health(control.http())["members"] == 1).then_some(()));
    let mut node = start();
    assert_eq!(members(), Some(()));
    let mut clients = Way::BOTH.map(|way| place.client(way));
    clients.iter_mut().for_each(|client| put_and_get(client, "before"));
    node.kill();
    let mut node = start();
    // Its memory was lost; objects that are put now are found again.
    for client in &mut clients {
        let stored = wait_until(|| {
            let put = client.put(b"again", b"value").is_ok();
            (put && client.get(b"again").is_ok_and(|value| value.is_some())).then_some(())
        });
        assert_eq!(stored, Some(()));
        assert_eq!(client.get(b"before-3").unwrap(), None);
    }
    assert!(node.stop().success());
}

#[test]
fn a_server_whose_output_cannot_be_written_serves() {
    let place = Workplace::new("full-log");
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut dev = place.command(&["dev", "--pool", "8M", "--shards", "1"]).stdout(full).spawn().unwrap();
    let client = wait_until(|| kvplane::Client::connect(&place.client_config(Way::Tcp)).ok());
    let stored = client.map(|mut client| wait_until(|| client.put(b"key", b"value").ok()).is_some());
    let ended = dev.try_wait().unwrap();
    dev.kill().unwrap();
    dev.wait().unwrap();
    assert_eq!((stored, ended), (Some(true), None));
}

/// If the authority is older than the state, the state may have been lost, and its members report within seconds.
#[test]
fn a_client_that_connects_before_a_lost_state_is_adopted_waits_for_the_map() {
    let place = Workplace::new("early-client");
    let mut plane = control(&place, "127.0.0.1:0");
    let _node = place.node(7, &["--pool", "16M", "--shards", "1"]);
    let mut client = place.client(Way::Tcp);
    put_and_get(&mut client, "before");
    plane.kill();
    for entry in std::fs::read_dir(place.path("state")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "redb") {
            std::fs::remove_file(path).unwrap();
        }
    }
    let plane = control(&place, "127.0.0.1:0");
    let early = place.client(Way::Tcp).get(b"before-1").unwrap();
    assert_eq!(early.as_deref(), Some(&[1; 1001][..]));
    let (_, metrics) = http_get(plane.http(), "/metrics");
    assert!(metrics.contains("kvplane_control_adoptions_total 1\n"), "{metrics}");
}

#[test]
fn a_client_that_connects_while_the_control_plane_restarts_waits_for_it() {
    let place = Workplace::new("opens");
    let mut plane = control(&place, "127.0.0.1:0");
    let _node = place.node(7, &["--pool", "16M", "--shards", "1"]);
    put_and_get(&mut place.client(Way::Tcp), "before");
    plane.kill();
    let config = place.client_config(Way::Tcp);
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| kvplane::Client::connect(&config));
        let asking = scope.spawn(|| place.run(&["ctl", "status"]));
        let placing = scope.spawn(|| kvplane::Scheduler::connect(&config.control, Duration::from_secs(5)).map(drop));
        let _plane = control(&place, "127.0.0.1:0");
        let got = opening.join().unwrap().unwrap().get(b"before-1").unwrap();
        assert_eq!(got.as_deref(), Some(&[1; 1001][..]));
        asking.join().unwrap().well();
        placing.join().unwrap().unwrap();
    });
}

/// Objects of members are valid under the new state too, and so are later ones, on an SSD too.
#[test]
fn a_control_plane_that_lost_its_state_goes_on_with_what_members_have() {
    let place = Workplace::new("lost-state");
    let mut plane = control(&place, "127.0.0.1:0");
    let ssd = format!("{}:64M", text(&place.path("ssd")));
    let words = ["node", "--pool", "16M", "--node-id", "7", "--shards", "1", "--ssd", &ssd, "--ssd-ack", "durable"];
    let start = || {
        let node = Process::start(place.command(&words));
        node.wait_for("node 7 with");
        node
    };
    let mut node = start();
    let mut other = Process::start(place.command(&["node", "--pool", "16M", "--node-id", "8", "--shards", "1"]));
    other.wait_for("node 8 with");
    let members = |plane: &Process, count: u64| wait_until(|| (health(plane.http())["members"] == count).then_some(()));
    assert_eq!(members(&plane, 2), Some(()));
    let mut clients = Way::BOTH.map(|way| place.client(way));
    // Epochs of the first state grow for a while.
    for _ in 0..3 {
        assert!(other.stop().success());
        other = Process::start(place.command(&["node", "--pool", "16M", "--node-id", "8", "--shards", "1"]));
        other.wait_for("node 8 with");
    }
    clients.iter_mut().for_each(|client| put_and_get(client, "before"));
    let before = health(plane.http())["epoch"].as_u64().unwrap();
    plane.kill();
    std::fs::remove_dir_all(place.path("state")).unwrap();
    let plane = control(&place, "127.0.0.1:0");
    assert_eq!(members(&plane, 2), Some(()));
    let after = health(plane.http())["epoch"].as_u64().unwrap();
    assert!(after > before, "epochs go on: {after} after {before}");
    // Old clients and new ones, over both transports.
    let mut all: Vec<kvplane::Client> = clients.into_iter().chain(Way::BOTH.map(|way| place.client(way))).collect();
    for (which, client) in all.iter_mut().enumerate() {
        let put = wait_until(|| client.put(format!("settled-{which}").as_bytes(), b"yes").ok());
        assert!(put.is_some());
        for at in 0..50 {
            let value = vec![at as u8; 1000 + at];
            assert_eq!(
                client.get(format!("before-{at}").as_bytes()).unwrap().as_deref(),
                Some(&value[..]),
                "before-{at}"
            );
        }
        put_and_get(client, &format!("after-{which}"));
    }
    // The note on the SSD is of the same state: a restart keeps its objects. The other node has no SSD.
    assert!(other.stop().success());
    assert_eq!(members(&plane, 1), Some(()));
    put_and_get(&mut all[0], "kept");
    node.kill();
    let _node = wait_until(|| {
        let mut node = Process::start(place.command(&words));
        let line = node.wait_for("node");
        if line.starts_with("node 7 with") {
            return Some(node);
        }
        node.ended();
        None
    });
    for at in 0..50 {
        let kept = wait_until(|| all[1].get(format!("kept-{at}").as_bytes()).ok().flatten());
        assert_eq!(kept.as_deref(), Some(&vec![at as u8; 1000 + at][..]), "kept-{at}");
    }
}

/// A node dies while its control plane is away: its objects are misses soon after the control plane is back, and new
/// puts have an owner, long before the grace of a restart is over.
#[test]
fn objects_of_a_node_that_died_without_a_control_plane_are_soon_misses() {
    let place = Workplace::new("died-meanwhile");
    let mut first = control(&place, "127.0.0.1:0");
    let address = first.quic().to_string();
    let mut nodes: Vec<Process> = (1..=2).map(|number| place.node(number, &["--pool", "32M"])).collect();
    let members = |control: &Process, count: u64| {
        let there = wait_until(|| (health(control.http())["members"] == count).then_some(()));
        assert_eq!(there, Some(()), "{count} members");
    };
    members(&first, 2);
    let config = kvplane::ClientConfig { deadline: Duration::from_secs(8), ..place.client_config(Way::Tcp) };
    let mut client = kvplane::Client::connect(&config).unwrap();
    put_and_get(&mut client, "before");
    first.kill();
    nodes[0].kill();
    let second = control(&place, &address);
    let begun = Instant::now();
    // The deadline of each call is shorter than the grace of 10 s.
    let mut missed = 0;
    for at in 0..50 {
        let key = format!("before-{at}");
        match client.get(key.as_bytes()).unwrap_or_else(|error| panic!("get of {key}: {error}")) {
            Some(value) => assert_eq!(value, vec![at as u8; 1000 + at], "{key}"),
            None => missed += 1,
        }
    }
    println!("{missed} of 50 were the dead node's; all are answered after {} ms", begun.elapsed().as_millis());
    assert!(missed > 0, "the dead node had some");
    members(&second, 1);
    put_and_get(&mut client, "after");
}
