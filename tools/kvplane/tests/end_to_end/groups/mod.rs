//! Process groups of real processes: ranks run and verify collectives without end, and are killed, stopped and cut off.

mod silence;

use crate::failover::cluster::{PLANE, address, hub, leaf, set_cable};
use crate::namespaces::Space;
use crate::security::certificates::{authority, cert, issue};
use crate::support::{Process, Workplace, text, wait_until};

const RANKS: usize = 4;
/// Operations beside all-reduce, without the broadcast: its root is the rank that is killed.
const OTHERS: [&str; 4] = ["all-gather", "reduce-scatter", "all-to-all", "barrier"];

/// Silence after which a process is dead that a collective waited for, in milliseconds: a machine that runs other tests
/// may keep a live one from its core for longer than the default allows. Where times are measured, it is the default.
const PATIENCE: &[&str] = &["--group-overdue-ms", "3000"];

/// Starts a control plane with a state of its own.
fn control(place: &Workplace) -> Process {
    control_with(place, PATIENCE)
}

fn control_with(place: &Workplace, more: &[&str]) -> Process {
    let state = place.path("state");
    let control = Process::start(place.command(&[&["control", "--state", text(&state)], more].concat()));
    control.wait_for("metrics on");
    control
}

fn rank(place: &Workplace, world: &str, number: usize, more: &[&str]) -> Process {
    let number = number.to_string();
    let ranks = RANKS.to_string();
    let words = ["collectives", "--world", world, "--rank", &number, "--ranks", &ranks, "--until-killed"];
    Process::start(place.command(&[&words, more].concat()))
}

/// Starts all ranks, and waits until they run operations together.
fn started(place: &Workplace, world: &str, more: &[&str]) -> Vec<Process> {
    let ranks: Vec<_> = (0..RANKS).map(|number| rank(place, world, number, more)).collect();
    for rank in &ranks {
        await_ranks(rank, "0,1,2,3", 0);
    }
    ranks
}

/// Waits until a rank has completed operations with exactly these ranks, after the first `from` lines.
fn await_ranks(process: &Process, ranks: &str, from: usize) {
    let ending = format!("ranks {ranks}");
    let found = wait_until(|| process.said().iter().skip(from).any(|line| line.ends_with(&ending)).then_some(()));
    assert!(found.is_some(), "no operation of ranks {ranks} in: {:?}", process.said());
}

/// Returns these ranks as operations name them.
fn names_of(ranks: &[(usize, &Process)]) -> String {
    let names: Vec<_> = ranks.iter().map(|(number, _)| number.to_string()).collect();
    names.join(",")
}

/// Asserts that the ranks complete operations with exactly these ranks from now on.
fn go_on(ranks: &[(usize, &Process)], why: &str) {
    for (number, process) in ranks {
        let from = process.said().len();
        await_ranks(process, &names_of(ranks), from);
        let wrong = process.said().into_iter().find(|line| line.contains("wrong"));
        assert_eq!(wrong, None, "rank {number} {why}");
    }
}

/// Kills one rank and stops another one in the middle of operations of this kind, and lets both come back.
fn survive(operation: &str, world: &str, more: &[&str]) {
    let place = Workplace::new("groups");
    let _control = control(&place);
    // The deadline decides how soon a silent rank is missed.
    let words = [&["--operation", operation, "--deadline", "1"], more].concat();
    let mut ranks = started(&place, world, &words);
    ranks[0].signal("KILL");
    go_on(&[(1, &ranks[1]), (2, &ranks[2]), (3, &ranks[3])], "after rank 0 was killed");
    ranks[2].signal("STOP");
    go_on(&[(1, &ranks[1]), (3, &ranks[3])], "while rank 2 is stopped");
    ranks[2].signal("CONT");
    let status = ranks[2].ended();
    assert!(!status.success(), "a process that was declared dead runs on");
    for number in [0, 2] {
        ranks[number] = rank(&place, world, number, &[&words[..], &["--joining"]].concat());
    }
    let all: Vec<_> = ranks.iter().enumerate().collect();
    go_on(&all, "after both came back");
}

#[test]
fn all_reduces_survive_ranks() {
    survive("all-reduce", "small", &["--sizes", "4K"]);
    survive("all-reduce", "long", &["--sizes", "4M"]);
}

#[test]
fn all_reduces_over_tcp_survive_ranks() {
    survive("all-reduce", "tcp", &["--sizes", "256K", "--no-shared-memory"]);
}

#[test]
fn other_collectives_survive_ranks() {
    for operation in OTHERS {
        survive(operation, operation, &["--sizes", "64K"]);
    }
}

/// Four hosts, one of which is disconnected: no packet comes back from it. The others go on without it, and it does not
/// come back as the process that it was.
#[test]
fn collectives_survive_a_partition() {
    let hub = hub();
    let leaves: Option<Vec<Space>> =
        hub.as_ref().and_then(|hub| (0..RANKS as u64).map(|number| leaf(hub, number)).collect());
    let (Some(hub), Some(leaves)) = (hub, leaves) else {
        return println!("skipped: no network namespaces with cables here");
    };
    let place = Workplace::new("groups");
    cert(&place, &["init", "--authority", &authority(&place)]).well();
    issue(&place, "plane", "control", &[]);
    issue(&place, "people", "client", &[]);
    let (identity, state, run, listen) =
        (place.path("plane"), place.path("state"), place.runtime(), format!("{PLANE}:7400"));
    let words = ["control", "--cluster", &place.cluster, "--listen", &listen, "--state", text(&state)];
    let more = ["--identity", text(&identity), "--runtime-directory", text(&run)];
    let plane = Process::start(hub.inside(&place.bare(&[&words[..], &more, PATIENCE].concat())));
    plane.wait_for("(QUIC)");
    let people = place.path("people");
    let start = |number: usize, more: &[&str]| {
        let (name, ranks, host) = (number.to_string(), RANKS.to_string(), address(number as u64));
        let who = ["collectives", "--cluster", &place.cluster, "--control", &listen, "--identity", text(&people)];
        let how = ["--world", "parts", "--rank", &name, "--ranks", &ranks, "--host", &host, "--no-shared-memory"];
        let what = ["--until-killed", "--sizes", "64K", "--deadline", "1"];
        Process::start(leaves[number].inside(&place.bare(&[&who[..], &how, &what, more].concat())))
    };
    let mut ranks: Vec<_> = (0..RANKS).map(|number| start(number, &[])).collect();
    for rank in &ranks {
        await_ranks(rank, "0,1,2,3", 0);
    }
    set_cable(&hub, 2, "down");
    go_on(&[(0, &ranks[0]), (1, &ranks[1]), (3, &ranks[3])], "while rank 2 is disconnected");
    set_cable(&hub, 2, "up");
    assert!(!ranks[2].ended().success(), "a process that was declared dead runs on");
    ranks[2] = start(2, &["--joining"]);
    let all: Vec<_> = ranks.iter().enumerate().collect();
    go_on(&all, "after rank 2 came back");
}

#[test]
fn collectives_go_on_while_the_control_plane_is_away() {
    let place = Workplace::new("groups");
    let first = control(&place);
    let ranks = started(&place, "away", &["--sizes", "64K", "--deadline", "5"]);
    first.signal("KILL");
    drop(first);
    let all: Vec<_> = ranks.iter().enumerate().collect();
    go_on(&all, "without a control plane");
    // A member that dies meanwhile is excluded by the next one.
    ranks[3].signal("KILL");
    let _second = control(&place);
    go_on(&[(0, &ranks[0]), (1, &ranks[1]), (2, &ranks[2])], "after the control plane came back");
}

/// Three of four ranks have attached when the control plane is killed: the group has no view yet.
#[test]
fn founding_members_are_attached_again_after_the_control_plane_was_killed() {
    let place = Workplace::new("groups");
    let first = control(&place);
    let words = ["--sizes", "4K", "--deadline", "5"];
    let mut ranks: Vec<_> = (0..3).map(|number| rank(&place, "early", number, &words)).collect();
    let are_attached = wait_until(|| {
        let shown = place.run(&["ctl", "groups", "early", "--json"]).stdout;
        let shown: serde_json::Value = serde_json::from_slice(&shown).ok()?;
        let members = shown["groups"][0]["members"].as_array()?;
        (members.iter().filter(|state| *state != "absent").count() == 3).then_some(())
    });
    assert_eq!(are_attached, Some(()), "three members");
    first.signal("KILL");
    drop(first);
    let _second = control(&place);
    ranks.push(rank(&place, "early", 3, &words));
    for rank in &ranks {
        await_ranks(rank, "0,1,2,3", 0);
    }
}

#[test]
fn ranks_that_differ_are_named() {
    let place = Workplace::new("groups");
    let _control = control(&place);
    let sums = rank(&place, "differ", 0, &["--sizes", "4K"]);
    let others = ["all-reduce", "all-gather", "all-reduce"];
    let rest: Vec<_> = (1..RANKS)
        .map(|number| rank(&place, "differ", number, &["--sizes", "4K", "--operation", others[number - 1]]))
        .collect();
    for mut process in rest.into_iter().chain([sums]) {
        assert!(!process.ended().success());
        let said = process.said().join("\n");
        assert!(said.contains("the ranks call different operations: rank "), "{said}");
    }
    let mut twice = rank(&place, "twice", 0, &[]);
    let mut again = rank(&place, "twice", 0, &[]);
    let refused = wait_until(|| {
        let said = [twice.said(), again.said()].concat();
        said.iter().any(|line| line.contains("rank 0")).then_some(())
    });
    assert!(refused.is_some(), "{:?} and {:?}", twice.said(), again.said());
    twice.kill();
    again.kill();
}
