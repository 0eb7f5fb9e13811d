//! Tests of replicas: nodes die, and objects with two replicas are still read.

use std::time::{Duration, Instant};

use kvplane::rpc::message::TaskState;
use kvplane::{Client, ClientConfig, PutOptions, Scheduler};

use crate::support::{Process, Way, Workplace, finish, health, http_get, text, wait_until};

/// Number and length of the objects.
const OBJECTS: u64 = 400;
const BYTES: usize = 6000;

fn value(key: u64, turn: u64) -> Vec<u8> {
    (0..BYTES as u64).map(|at| (key.wrapping_mul(0x9e37_79b9) ^ turn.wrapping_mul(77) ^ at ^ at >> 8) as u8).collect()
}

fn name(key: u64) -> String {
    format!("twice-{key}")
}

fn control(place: &Workplace) -> Process {
    control_of(place, "2")
}

fn control_of(place: &Workplace, replicas: &str) -> Process {
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state), "--replicas", replicas]));
    control.wait_for("metrics on");
    control
}

fn node(place: &Workplace, number: u64) -> Process {
    place.node(number, &["--pool", "64M", "--shards", "2"])
}

fn members(control: &Process, count: u64) {
    let there = wait_until(|| (health(control.http())["members"] == count).then_some(()));
    assert_eq!(there, Some(()), "{count} members");
}

fn twice() -> PutOptions {
    PutOptions { replicas: 2, replace: true, ..PutOptions::default() }
}

/// Puts until two nodes have the object: the first puts may come before the nodes know each other.
fn put_twice(client: &mut Client, key: u64, turn: u64) {
    let done = wait_until(|| {
        let (_, replicas) = client.replicas().put(name(key).as_bytes(), &value(key, turn), &twice()).expect("a put");
        (replicas == 2).then_some(())
    });
    assert_eq!(done, Some(()), "{} has two copies", name(key));
}

/// Two of three nodes die within a moment, each by a map of its own: the third keeps all that it has, whichever of the
/// others it had it with.
#[test]
fn a_node_keeps_its_replicas_when_the_others_die_within_a_moment() {
    let place = Workplace::new("replicas-two-deaths");
    let control = control(&place);
    let nodes: Vec<Process> = (1..=3)
        .map(|number| {
            let domain = number.to_string();
            let flags = ["--pool", "64M", "--shards", "1", "--metrics-port", "0", "--failure-domain", &domain];
            place.node(number, &flags)
        })
        .collect();
    members(&control, 3);
    let config = ClientConfig { deadline: Duration::from_secs(60), ..place.client_config(Way::Tcp) };
    let mut client = Client::connect(&config).unwrap();
    (0..OBJECTS).for_each(|key| put_twice(&mut client, key, 0));
    let names: Vec<String> = (0..OBJECTS).map(name).collect();
    let address = nodes[2].data();
    let of_third = |shards: &Vec<std::net::SocketAddr>| shards.contains(&address);
    let kept: Vec<bool> = client.replicas().locate(&names).unwrap().iter().map(of_third).collect();
    assert!(kept.contains(&true) && kept.contains(&false));
    nodes[..2].iter().for_each(|node| node.signal("STOP"));
    members(&control, 1);
    for (key, is_kept) in (0..OBJECTS).zip(kept) {
        let found = client.get(name(key).as_bytes()).unwrap();
        assert!(if is_kept { found == Some(value(key, 0)) } else { found.is_none() }, "{}: {is_kept}", name(key));
    }
}

#[test]
fn objects_with_two_replicas_are_read_after_a_node_is_killed() {
    let place = Workplace::new("replicas");
    let control = control(&place);
    let mut nodes: Vec<Process> = (1..=3).map(|number| node(&place, number)).collect();
    members(&control, 3);
    let config = ClientConfig { deadline: Duration::from_secs(5), ..place.client_config(Way::Tcp) };
    let mut client = Client::connect(&config).unwrap();
    for key in 0..OBJECTS {
        put_twice(&mut client, key, 0);
    }
    client.put(b"alone", &value(7, 7)).unwrap();
    let keys = [name(0), name(1), "alone".to_owned(), "nowhere".to_owned()];
    let places = client.replicas().locate(&keys).unwrap();
    assert_eq!(places.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 1, 0], "{places:?}");
    assert!(places[..2].iter().all(|shards| shards[0] != shards[1]), "{places:?}");
    let mut shared = Client::connect(&place.client_config(Way::Shm)).unwrap();
    assert_eq!(shared.replicas().locate(&keys).unwrap(), places);
    let by_hand = finish(place.command(&["ctl", "put", "--replicas", "2", "by-hand", "-"]), &value(7, 7)).text();
    assert!(by_hand.contains(", 2 replicas"), "{by_hand}");
    // Replaced or removed objects have no replica left that could come back.
    for key in 0..40 {
        put_twice(&mut client, key, 1);
    }
    for key in 40..60 {
        assert!(client.remove(name(key).as_bytes()).unwrap(), "{}", name(key));
    }
    nodes[1].kill();
    let killed = Instant::now();
    let (mut gets, mut slowest) = (0u64, Duration::ZERO);
    let mut sweep = |client: &mut Client| {
        for key in 0..OBJECTS {
            let begun = Instant::now();
            let got = client.get(name(key).as_bytes());
            slowest = slowest.max(begun.elapsed());
            gets += 1;
            match (key, got) {
                // The objects of a dead owner are unknown until the owner is known to be dead.
                (40..60, Ok(found)) => assert_eq!(found, None, "{} was removed", name(key)),
                (40..60, Err(_)) => {}
                (_, Ok(Some(bytes))) => assert_eq!(bytes, value(key, u64::from(key < 40)), "{}", name(key)),
                (_, Ok(None)) => panic!("{} had two copies and is gone", name(key)),
                (_, Err(error)) => panic!("{} is not read: {error}", name(key)),
            }
        }
    };
    sweep(&mut client);
    let gone = wait_until(|| {
        sweep(&mut client);
        (health(control.http())["members"] == 2).then_some(())
    });
    assert_eq!(gone, Some(()), "the dead node leaves the map");
    sweep(&mut client);
    println!("{gets} gets in {:?} since the kill, the slowest {slowest:?}", killed.elapsed());
    // Each object has two replicas again, or will soon: then another node may die.
    let whole = wait_until(|| {
        let mut fresh = Client::connect(&config).ok()?;
        let (_, replicas) = fresh.replicas().put(b"probe", &value(1, 1), &twice()).ok()?;
        (replicas == 2).then_some(())
    });
    assert_eq!(whole, Some(()), "two nodes are enough for two copies");
}

/// Puts an object with three replicas by hand; returns the answer.
fn put_by_hand(place: &Workplace, options: &[&str]) -> String {
    let arguments = [&["ctl", "put", "--replace"], options, &["by-hand", "-"]].concat();
    finish(place.command(&arguments), &value(7, 7)).text()
}

/// Three replicas in different failure domains: the answers say how many there are, and two nodes may die one after the
/// other.
#[test]
fn objects_with_three_replicas_outlive_two_nodes() {
    let place = Workplace::new("replicas-three");
    let control = control_of(&place, "3");
    let start = |number: u64| {
        let domain = format!("rack-{}", number.min(4));
        place.node(number, &["--pool", "64M", "--shards", "2", "--failure-domain", &domain])
    };
    let mut nodes = vec![start(1)];
    members(&control, 1);
    // What cannot be had is said at once, or is refused.
    let alone = wait_until(|| {
        let said = put_by_hand(&place, &["--replicas", "2"]);
        said.contains(", 1 of 2 replicas").then_some(())
    });
    assert_eq!(alone, Some(()), "one node has one replica");
    for (refused, code, why) in [
        (&["--replicas", "9"][..], 2, "9 is not in 1..=8"),
        (&["--replicas", "2", "--wait-replicas", "3"], 1, "a put of 2 replicas cannot wait for 3"),
    ] {
        let arguments = [&["ctl", "put"], refused, &["by-hand", "-"]].concat();
        finish(place.command(&arguments), &value(7, 7)).failed(code, &[why]);
    }
    nodes.extend((2..=4).map(start));
    members(&control, 4);
    let config = ClientConfig { deadline: Duration::from_secs(5), ..place.client_config(Way::Tcp) };
    let mut client = Client::connect(&config).unwrap();
    let thrice = PutOptions { replicas: 3, ..twice() };
    for key in 0..OBJECTS {
        let done = wait_until(|| {
            let (_, replicas) = client.replicas().put(name(key).as_bytes(), &value(key, 0), &thrice).expect("a put");
            (replicas == 3).then_some(())
        });
        assert_eq!(done, Some(()), "{} has three replicas", name(key));
    }
    let said = put_by_hand(&place, &["--replicas", "3"]);
    assert!(said.contains(", 3 replicas"), "{said}");
    let said = put_by_hand(&place, &["--replicas", "8"]);
    assert!(said.contains(", 3 of 8 replicas"), "{said}");
    let places = client.replicas().locate(&[name(0)]).unwrap().remove(0);
    assert!(places.len() == 3 && (1..3).all(|at| !places[..at].contains(&places[at])), "{places:?}");
    let found = |client: &mut Client| {
        for key in 0..OBJECTS {
            let found = wait_until(|| client.get(name(key).as_bytes()).ok().flatten());
            assert_eq!(found, Some(value(key, 0)), "{} had three replicas", name(key));
        }
    };
    for (dead, left) in [(1, 3), (2, 2)] {
        nodes[dead].kill();
        found(&mut client);
        let gone = wait_until(|| (health(control.http())["members"] == left).then_some(()));
        assert_eq!(gone, Some(()), "the dead node leaves the map");
        found(&mut client);
        // With three nodes each object gets its three replicas again, with two nodes two.
        let whole = wait_until(|| (copied(&control, 1).1 >= (left - 1) * OBJECTS).then_some(()));
        assert_eq!(whole, Some(()), "{:?} of {OBJECTS} objects", copied(&control, 1));
    }
}

/// Objects in stripes, put over shared memory: their stripe heads are short, and sent with their bytes.
#[test]
fn long_objects_outlive_their_first_owner_and_keep_their_names() {
    let place = Workplace::new("replicas-long");
    let control = control(&place);
    let mut nodes: Vec<Process> = (1..=2).map(|number| node(&place, number)).collect();
    members(&control, 2);
    let config = ClientConfig { stripe_bytes: 1 << 20, ..place.client_config(Way::Shm) };
    let mut client = Client::connect(&config).unwrap();
    put_twice(&mut client, 0, 0);
    let long = |key: u64| (0..(2 << 20) + 77u64).map(|at| (key ^ at ^ at >> 9) as u8).collect::<Vec<u8>>();
    let options = PutOptions { wait_replicas: 2, ..twice() };
    for key in 0..8 {
        client.put_with(format!("long-{key}").as_bytes(), &long(key), &options).unwrap();
        client.put_with(format!("short-{key}").as_bytes(), b"a few bytes", &options).unwrap();
    }
    nodes[0].kill();
    assert_eq!(wait_until(|| (health(control.http())["members"] == 1).then_some(())), Some(()));
    let mut fresh = Client::connect(&ClientConfig { ..place.client_config(Way::Tcp) }).unwrap();
    for key in 0..8 {
        let (name, value) = (format!("long-{key}"), long(key));
        assert!(fresh.get(name.as_bytes()).unwrap().is_some_and(|got| got == value), "{name}");
        assert_eq!(fresh.size(name.as_bytes()).unwrap(), Some(value.len() as u64), "{name}");
    }
    let listed = place.run(&["ctl", "keys"]).text();
    for name in (0..8).flat_map(|key| [format!("long-{key}"), format!("short-{key}")]) {
        assert!(listed.lines().any(|line| line == name), "{name}: {listed}");
    }
}

/// A put says how many replicas each stripe has.
#[test]
fn a_put_in_stripes_says_how_many_replicas_there_are() {
    let place = Workplace::new("replicas-stripes-said");
    let control = control(&place);
    let _one = node(&place, 1);
    members(&control, 1);
    // More than the pool of a shard.
    let long = vec![7u8; 40 << 20];
    let put = |key: &str| {
        let command = place.command(&["ctl", "put", "--replicas", "2", "--replace", key, "-"]);
        finish(command, &long).text()
    };
    let said = put("long");
    assert!(said.contains(", in stripes with 1 of 2 replicas of each"), "{said}");
    let _other = node(&place, 2);
    members(&control, 2);
    // The first puts may come before the nodes know each other.
    let said = wait_until(|| Some(put("long")).filter(|said| said.contains(", in stripes with 2 replicas of each")));
    assert!(said.is_some(), "{}", put("long"));
}

/// Returns the incarnation of a node's last report, and the number of objects that all shards report as replicated.
fn copied(control: &Process, node: u64) -> (u64, u64) {
    let (_, body) = http_get(control.http(), "/debug/shards");
    let shown: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    let nodes = shown["nodes"].as_array().expect("nodes");
    let incarnation = nodes.iter().find(|one| one["node"] == node).and_then(|one| one["incarnation"].as_u64());
    let shards = nodes.iter().flat_map(|node| node["shards"].as_array().expect("shards"));
    (incarnation.unwrap_or(0), shards.map(|shard| shard["copies"]["elsewhere"].as_u64().expect("a number")).sum())
}

#[test]
fn a_killed_node_that_restarts_gets_its_objects_from_the_others() {
    let place = Workplace::new("replicas-again");
    let control = control(&place);
    let mut nodes: Vec<Process> = (1..=3).map(|number| node(&place, number)).collect();
    members(&control, 3);
    let config = ClientConfig { deadline: Duration::from_secs(5), ..place.client_config(Way::Tcp) };
    let mut client = Client::connect(&config).unwrap();
    for key in 0..OBJECTS {
        put_twice(&mut client, key, 0);
    }
    let found = |client: &mut Client| {
        for key in 0..OBJECTS {
            // The object may be unreachable until all nodes know the new map.
            let found = wait_until(|| client.get(name(key).as_bytes()).ok().flatten());
            assert_eq!(found, Some(value(key, 0)), "{} had two copies", name(key));
        }
    };
    let (incarnation, _) = copied(&control, 2);
    nodes[1].kill();
    nodes[1] = node(&place, 2);
    found(&mut client);
    let whole = wait_until(|| {
        let (now, copies) = copied(&control, 2);
        (now > incarnation && copies >= OBJECTS).then_some(())
    });
    assert_eq!(whole, Some(()), "of {OBJECTS} objects have a copy again: {:?}", copied(&control, 2));
    let shown = place.run(&["ctl", "shards"]).text();
    assert!(shown.contains("replicas: "), "{shown}");
    // Each object has two owners again, so that another node may die.
    nodes[0].kill();
    found(&mut client);
}

/// Returns the entry of `ctl tasks` for these keys.
fn task_of(place: &Workplace, name: &str) -> serde_json::Value {
    let shown = place.run(&["ctl", "tasks", "--json"]).text();
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    let tasks = shown["tasks"].as_array().expect("a list");
    tasks.iter().find(|task| task["name"] == name).expect("the task").clone()
}

/// Objects that were put with one replica get a second by a task, and are read when the node with the first dies.
#[test]
fn objects_replicated_by_a_task_are_read_after_a_node_is_killed() {
    let place = Workplace::new("replicas-tasks");
    let control = control(&place);
    let mut nodes: Vec<Process> = (1..=2).map(|number| node(&place, number)).collect();
    members(&control, 2);
    let config =
        ClientConfig { deadline: Duration::from_secs(5), stripe_bytes: 1 << 20, ..place.client_config(Way::Tcp) };
    let mut client = Client::connect(&config).unwrap();
    for key in 0..100 {
        client.put(name(key).as_bytes(), &value(key, 0)).unwrap();
    }
    // The object is in stripes: all of them are replicated.
    let large: Vec<u8> = (0..(3u32 << 20)).map(|at| (at ^ at >> 9) as u8).collect();
    client.put(b"large", &large).unwrap();
    assert_eq!(copied(&control, 1).1, 0, "no object has a replica before the task");
    let keys: Vec<String> = (0..100).map(name).chain(["large".to_owned()]).collect();
    let (mut command, names) = (vec!["ctl", "copy"], keys.iter().map(String::as_str));
    command.extend(names);
    assert!(place.run(&command).text().contains("104 of 104 objects are replicated"));
    let task = task_of(&place, "101 keys");
    assert_eq!((&task["state"], &task["copied"]), (&"succeeded".into(), &104.into()), "{task}");
    // A scheduler may request that too.
    let scheduler = Scheduler::connect(&config.control, Duration::from_secs(2)).unwrap();
    client.put(b"hot", &value(1, 1)).unwrap();
    let id = scheduler.replicate("", &["hot"]).unwrap();
    let done = wait_until(|| client.replicas().task(id).unwrap().filter(|task| task.state == TaskState::Succeeded));
    assert_eq!(done.map(|task| task.copied), Some(1));
    // A repeated task has nothing to do. A missing object is refused, and so is an unknown segment.
    assert!(place.run(&["ctl", "copy", &keys[0]]).text().contains("1 of 1"));
    let missing = client.replicas().create_task(&["nobody"], &[]).expect_err("there is no such object");
    assert_eq!(missing.status(), Some(kvplane::Status::NotFound));
    let nowhere = client.replicas().create_task(&[&keys[0]], &["nowhere".to_owned()]).expect_err("no such segment");
    assert!(nowhere.to_string().contains("nowhere"), "{nowhere}");
    nodes[0].kill();
    for key in 0..100 {
        let found = wait_until(|| client.get(name(key).as_bytes()).ok().flatten());
        assert_eq!(found, Some(value(key, 0)), "{} was copied", name(key));
    }
    assert_eq!(wait_until(|| client.get(b"large").ok().flatten()).as_deref(), Some(&large[..]));
    // With one node left there is no destination for a replica.
    let gone = wait_until(|| (health(control.http())["members"] == 1).then_some(()));
    assert_eq!(gone, Some(()), "the dead node leaves the map");
    client.put(b"alone", b"value").unwrap();
    let id = client.replicas().create_task(&["alone"], &[]).unwrap();
    let ended =
        wait_until(|| client.replicas().task(id).unwrap().filter(|task| task.message.contains("no second node")));
    assert!(ended.is_some(), "{:?}", client.replicas().task(id));
    assert!(client.replicas().cancel_task(id).is_err(), "it is over");
}

/// Returns the gets that found an object, and those of them that a replica answered, by node.
fn reads(control: &Process) -> Vec<(u64, u64)> {
    let (_, body) = http_get(control.http(), "/debug/shards");
    let shown: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    let of = |node: &serde_json::Value| {
        let shards = node["shards"].as_array().expect("shards").iter();
        let figures = shards.map(|shard| (shard["gets"]["hits"].as_u64(), shard["copies"]["served"].as_u64()));
        figures.fold((0, 0), |sum, (hits, served)| (sum.0 + hits.unwrap_or(0), sum.1 + served.unwrap_or(0)))
    };
    shown["nodes"].as_array().expect("nodes").iter().map(of).collect()
}

/// One object with many readers that a task has replicated: both nodes serve it, over TCP and through shared memory,
/// and no reader gets a replaced version.
#[test]
fn a_hot_object_is_read_from_both_nodes() {
    let place = Workplace::new("replicas-hot");
    let control = control(&place);
    let _nodes: Vec<Process> = (1..=2).map(|number| node(&place, number)).collect();
    members(&control, 2);
    let mut client = Client::connect(&place.client_config(Way::Tcp)).unwrap();
    put_twice(&mut client, 1, 0);
    client.put(b"hot", &value(0, 0)).unwrap();
    assert!(place.run(&["ctl", "copy", "hot"]).text().contains("1 of 1"));
    for (way, spread) in [(Way::Tcp, true), (Way::Shm, true), (Way::Tcp, false)] {
        let before = reads(&control);
        // If gets are not spread, a slow one on a busy machine is not hedged either.
        let hedge = if spread { ClientConfig::HEDGE } else { Duration::ZERO };
        let config = ClientConfig { spread, hedge, ..place.client_config(way) };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut client = Client::connect(&config).unwrap();
                    for _ in 0..500 {
                        assert_eq!(client.get(b"hot").unwrap(), Some(value(0, 0)));
                    }
                });
            }
        });
        let grown = wait_until(|| {
            let after = reads(&control).into_iter().zip(&before);
            let grown: Vec<(u64, u64)> = after.map(|(now, then)| (now.0 - then.0, now.1 - then.1)).collect();
            (grown.iter().map(|node| node.0).sum::<u64>() >= 2000).then_some(grown)
        });
        let grown = grown.expect("all gets are counted");
        println!("{way:?}, spread {spread}: {grown:?}");
        let copies: u64 = grown.iter().map(|node| node.1).sum();
        match spread {
            true => assert!(grown.iter().all(|node| node.0 >= 50) && copies >= 50, "both nodes gave it: {grown:?}"),
            false => assert!(copies == 0 && grown.iter().any(|node| node.0 == 0), "the first gave it: {grown:?}"),
        }
    }
    // A client that replaces the object repeatedly reads its last acknowledged version, whatever others have read.
    let mut reader = Client::connect(&place.client_config(Way::Tcp)).unwrap();
    for turn in 1..100 {
        client.replicas().put(b"hot", &value(0, turn), &twice()).expect("a put");
        for _ in 0..5 {
            assert_eq!(reader.get(b"hot").unwrap(), Some(value(0, turn)), "turn {turn}");
        }
    }
}

/// An object with many readers is replicated automatically by its shard, and then both nodes serve it.
#[test]
fn hot_object_is_replicated_automatically() {
    let place = Workplace::new("replicas-heat");
    let control = control(&place);
    let start = |number| place.node(number, &["--pool", "64M", "--shards", "2", "--replicate-hot", "1M"]);
    let _nodes: Vec<Process> = (1..=2).map(start).collect();
    members(&control, 2);
    let mut client = Client::connect(&place.client_config(Way::Tcp)).unwrap();
    put_twice(&mut client, 0, 0);
    let copies = |wanted| wait_until(|| (copied(&control, 1).1 == wanted).then_some(()));
    assert_eq!(copies(1), Some(()), "what was put twice is reported");
    for key in 1..=20 {
        client.put(name(key).as_bytes(), &value(key, 0)).unwrap();
    }
    // A few gets of each object make none hot; some hundreds of one do, at 14 KB each by the weight of a get.
    for key in (1..=20).chain(1..=20) {
        assert_eq!(client.get(name(key).as_bytes()).unwrap(), Some(value(key, 0)));
    }
    let both = wait_until(|| {
        for _ in 0..500 {
            assert_eq!(client.get(name(1).as_bytes()).unwrap(), Some(value(1, 0)));
        }
        reads(&control).iter().any(|node| node.1 > 0).then_some(())
    });
    assert_eq!(both, Some(()), "a second owner gives it: {:?}", reads(&control));
    assert_eq!(copies(2), Some(()), "and of nothing else there is a copy: {:?}", copied(&control, 1));
    // A removal removes both replicas.
    assert!(client.remove(name(1).as_bytes()).unwrap());
    assert_eq!(client.get(name(1).as_bytes()).unwrap(), None);
}

/// Clearing the replica owner's replica of an object removes only that, and no replica comes back by itself.
#[test]
fn a_copy_that_is_given_up_is_gone_and_its_object_is_not() {
    let place = Workplace::new("replicas-cleared");
    let control = control(&place);
    let _nodes: Vec<Process> = (1..=2).map(|number| node(&place, number)).collect();
    members(&control, 2);
    for way in Way::BOTH {
        let mut client = Client::connect(&place.client_config(way)).unwrap();
        for key in 0..20 {
            put_twice(&mut client, key, 0);
        }
        client.put(b"alone", &value(7, 7)).unwrap();
        // The object has 9 MiB in stripes of 1 MiB.
        let config = ClientConfig { stripe_bytes: 1 << 20, ..place.client_config(way) };
        let mut striping = Client::connect(&config).unwrap();
        let long = vec![7; 9 << 20];
        let there = wait_until(|| {
            striping.put_with(b"long", &long, &twice()).unwrap();
            (client.replicas().locate(&["long"]).unwrap()[0].len() == 2).then_some(())
        });
        assert_eq!(there, Some(()), "the head has two copies");
        let mut keys: Vec<String> = (0..10).map(name).collect();
        keys.extend(["alone", "nowhere", "long"].map(str::to_owned));
        let gone: Vec<bool> = client.replicas().remove(&keys).unwrap().into_iter().map(Result::unwrap).collect();
        assert_eq!(gone, [&[true; 10][..], &[false, false, true]].concat(), "{way:?}");
        let places = client.replicas().locate(&keys).unwrap();
        let count: Vec<usize> = places.iter().map(Vec::len).collect();
        assert_eq!(count, [&[1; 10][..], &[1, 0, 1]].concat(), "{way:?}");
        for key in 0..20 {
            assert_eq!(client.get(name(key).as_bytes()).unwrap(), Some(value(key, 0)), "{}", name(key));
        }
        assert_eq!(striping.get(b"long").unwrap(), Some(long));
        let others: Vec<String> = (10..20).map(name).collect();
        assert!(
            client.replicas().locate(&others).unwrap().iter().all(|shards| shards.len() == 2),
            "others keep theirs"
        );
        // A put with two replicas creates both again.
        put_twice(&mut client, 0, 0);
        assert!(client.remove(b"alone").unwrap() && striping.remove(b"long").unwrap());
    }
}
