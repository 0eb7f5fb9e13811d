//! Tests of upgrades of nodes that drain: the successor goes on with the drain, and has its slots back only when an
//! operator cancels it.

use serde_json::Value;

use super::kept_memory::{Memory, OBJECTS, control, found, node, put_all};
use super::upgrades::{Successor, latest};
use crate::support::{Process, Way, Workplace, health, http_ask, text, wait_until};

/// Path of Mooncake's drain jobs, whose numbers name incarnations.
const JOBS: &str = "/api/v1/drain_jobs";

/// Starts another node, and waits until both are members.
fn other(place: &Workplace, control: &Process, more: &[&str]) -> Process {
    let other = place.node(8, &[&["--pool", "64M", "--shards", "1"], more].concat());
    let settled = wait_until(|| (health(control.http())["members"] == 2).then_some(()));
    assert_eq!(settled, Some(()), "{}", health(control.http()));
    other
}

#[track_caller]
fn await_drained(place: &Workplace) {
    let said = place.run(&["ctl", "drain", "7", "--wait", "100"]).text();
    assert!(said.contains("node 7 is drained: it has no objects left"), "{said}");
}

#[test]
fn a_drained_node_stays_drained_over_upgrades() {
    for kind in ["upgrade-drained", "upgrade-drained-memfds"] {
        let place = Workplace::new(kind);
        let memory = if kind.ends_with("memfds") { Memory::of_processes() } else { Memory::new(&place) };
        let control = control(&place);
        let first = node(&place, &memory, &[]);
        let _other = other(&place, &control, &[]);
        let mut client = place.client(Way::Tcp);
        put_all(&mut client, "before", OBJECTS);
        await_drained(&place);
        let ask = |method: &str, path: &str| -> Value {
            serde_json::from_str(&http_ask(control.http(), method, &format!("{JOBS}{path}"), "").1).expect("JSON")
        };
        let job = ask("GET", "")["jobs"][0]["job_id"].as_str().expect("a job").to_owned();
        let mut last = None;
        for round in 0..2 {
            let said = place.run(&["ctl", "upgrade", "7"]).text();
            last = Some(Successor::of(&said));
            assert!(said.contains(": 0 objects kept"), "{said}");
            await_drained(&place);
            assert_eq!(ask("GET", &format!("/query?job_id={job}"))["status_name"], "SUCCEEDED");
            put_all(&mut client, &format!("after-{round}"), OBJECTS);
            assert_eq!(latest(&first, "kvplane_shard_objects"), 0, "{:?}", first.said());
        }
        assert_eq!(found(&mut client, "before", OBJECTS), OBJECTS);
        // The successor takes its share back when an operator says so, and hands it over as any node does.
        assert_eq!(ask("POST", &format!("/cancel?job_id={job}"))["status_name"], "CANCELED");
        let has_share = || (latest(&first, "kvplane_shard_objects") > 0).then_some(());
        assert_eq!(wait_until(has_share), Some(()), "{:?}", first.said());
        let upgraded = wait_until(|| Some(place.run(&["ctl", "upgrade", "7"])).filter(|said| said.status.success()));
        let said = upgraded.expect("no slot migrates any more").text();
        let successor = Successor::of(&said);
        assert!(!said.contains(": 0 objects kept") && !said.contains("empty"), "{said}");
        for name in ["before", "after-0", "after-1"] {
            assert_eq!(found(&mut client, name, OBJECTS), OBJECTS, "{name}: {:?}", first.said());
        }
        // And the node that was drained is stopped without a loss.
        await_drained(&place);
        successor.stop();
        drop(last);
        assert_eq!(found(&mut client, "before", OBJECTS), OBJECTS);
    }
}

#[test]
fn an_operator_who_waits_for_a_drain_waits_on_over_an_upgrade() {
    let place = Workplace::new("upgrade-draining");
    let (control, memory) = (control(&place), Memory::of_processes());
    let first = node(&place, &memory, &[]);
    let _other = other(&place, &control, &["--migration-rate", "512K"]);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", OBJECTS);
    let successor = std::thread::scope(|scope| {
        let drain = scope.spawn(|| await_drained(&place));
        // It is refused while slots take long to migrate.
        let upgraded = wait_until(|| Some(place.run(&["ctl", "upgrade", "7"])).filter(|said| said.status.success()));
        drain.join().expect("it is drained");
        Successor::of(&upgraded.expect("an upgrade").text())
    });
    await_drained(&place);
    successor.stop();
    assert_eq!(found(&mut client, "before", OBJECTS), OBJECTS, "{:?}", first.said());
}

/// The successor of a node with SSDs begins a new line of incarnations, as after a restart.
#[test]
fn an_upgrade_of_a_draining_node_with_an_ssd_is_refused() {
    let place = Workplace::new("upgrade-drained-ssd");
    let (control, memory) = (control(&place), Memory::of_processes());
    let ssd = format!("{}:256M", text(&place.path("ssd")));
    let mut first = node(&place, &memory, &["--ssd", &ssd]);
    let _other = other(&place, &control, &[]);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", OBJECTS);
    await_drained(&place);
    place.run(&["ctl", "upgrade", "7"]).failed(1, &["the node is draining", "kvplane ctl drain 7 --cancel"]);
    await_drained(&place);
    first.assert_alive();
    place.run(&["ctl", "drain", "7", "--cancel"]).well();
    let upgraded = wait_until(|| Some(place.run(&["ctl", "upgrade", "7"])).filter(|said| said.status.success()));
    let successor = Successor::of(&upgraded.expect("no slot migrates any more").text());
    assert!(first.exited().success());
    assert_eq!(found(&mut client, "before", OBJECTS), OBJECTS);
    successor.stop();
}
