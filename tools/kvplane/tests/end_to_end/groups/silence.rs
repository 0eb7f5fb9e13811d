//! Ranks that die or fall silent: the time of the all-reduce that each of them interrupts, until the survivors have
//! their sum. `cargo x silence` repeats the tests and shows the longest.

use std::fmt::Write as _;

use super::{PATIENCE, RANKS, control_with, names_of, started};
use crate::support::{Process, Workplace, wait_until};

/// Deadline of an operation, in seconds: a silent rank is waited for until then.
const DEADLINE: &str = "2";

/// Returns the rounds to measure; none if the test only checks that the survivors go on.
fn rounds() -> Option<usize> {
    std::env::var("KVPLANE_SILENCE_ROUNDS").ok().map(|count| count.parse().expect("a number"))
}

/// Returns the time of the first operation of exactly these ranks, in milliseconds.
fn first_of(process: &Process, ranks: &str) -> f64 {
    let ending = format!("ranks {ranks}");
    let line = wait_until(|| process.said().into_iter().find(|line| line.ends_with(&ending)));
    let line = line.unwrap_or_else(|| panic!("no operation of ranks {ranks} in: {:?}", process.said()));
    let time = line.split("the last in ").nth(1).and_then(|rest| rest.split(' ').next());
    time.and_then(|time| time.parse().ok()).unwrap_or_else(|| panic!("{line:?} has no time"))
}

/// Sends a signal to each rank in turn, and shows the longest time of the interrupted operation of each round.
fn interrupted_by(signal: &str) {
    let mut all = Vec::new();
    let patience = if rounds().is_some() { &[] } else { PATIENCE };
    for round in 0..rounds().unwrap_or(1) {
        let (place, world) = (Workplace::new("groups"), format!("silent-{round}"));
        let _control = control_with(&place, patience);
        let words = ["--sizes", "1M", "--deadline", DEADLINE];
        let ranks = started(&place, &world, &words);
        let victim = round % RANKS;
        ranks[victim].signal(signal);
        let survivors: Vec<_> = ranks.iter().enumerate().filter(|(number, _)| *number != victim).collect();
        let names = names_of(&survivors);
        all.push(survivors.iter().map(|(_, process)| first_of(process, &names)).fold(0.0, f64::max));
    }
    all.sort_unstable_by(f64::total_cmp);
    let mut shown = String::new();
    all.iter().for_each(|ms| write!(shown, " {ms:.0}").expect("a string"));
    println!("{signal}, a deadline of {DEADLINE} s: the interrupted operation took, in ms:{shown}");
}

#[test]
fn an_operation_ends_soon_after_a_rank_is_killed() {
    interrupted_by("KILL");
}

#[test]
fn an_operation_ends_soon_after_the_deadline_where_a_rank_is_stopped() {
    interrupted_by("STOP");
}
