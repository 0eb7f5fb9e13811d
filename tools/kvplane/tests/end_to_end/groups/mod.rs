//! Process groups of real processes: ranks run and verify collectives without end, and are killed, stopped and cut off.

use crate::support::{Process, Workplace, text, wait_until};

const RANKS: usize = 4;
/// Operations beside all-reduce, without the broadcast: its root is the rank that is killed.
const OTHERS: [&str; 4] = ["all-gather", "reduce-scatter", "all-to-all", "barrier"];

/// Starts a control plane with a state of its own.
fn control(place: &Workplace) -> Process {
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state)]));
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

/// Asserts that the ranks complete operations with exactly these ranks from now on.
fn go_on(ranks: &[(usize, &Process)], why: &str) {
    let names: Vec<_> = ranks.iter().map(|(number, _)| number.to_string()).collect();
    for (number, process) in ranks {
        let from = process.said().len();
        await_ranks(process, &names.join(","), from);
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
