//! Benchmarks with the figures of docs/performance.md.
//!
//! Each compares kvplane with a yardstick in the same run, in turns: ours, theirs, ours, theirs. The median of the
//! rounds' ratios counts; the machines are shared and noisy, so absolute figures are for orientation. Spinning is
//! compared with spinning, parked with parked.

#![forbid(unsafe_code)]

mod bed;
mod idle;
mod mesh;
mod objects;
mod peer;
mod peers;
mod rounds;
mod schedule;
mod shared;
mod stores;
mod tier;
mod transports;
mod verbs;

use std::process::ExitCode;

use objects::{ahead, asked, hedged, keys, killed, tails};
use transports::{data_tls, handshakes, latency, many_peers, perftest, same_host, shm, staging, tcp};

const USAGE: &str =
    "usage: kvplane-bench [tcp-stream | tcp-latency | shm-stream | shm-latency | same-host | many-peers | \
    handshakes | idle | killed-client | keys | verbs | perftest | perftest-bandwidth | perftest-latency | \
    read-ahead | put-latency | exists | data-tls | get-tails | hedged-gets | schedule | staging | mesh | all] \
                     [--rounds N]
       kvplane-bench tier [--path FILE] [--size BYTES] [--rounds N] [--seconds S] [--only TEXT]
       kvplane-bench [tier-puts | tier-recovery] [--path FILE] [--rounds N] [--keys N] ...
       kvplane-bench shared-tier [--path DIRECTORY] [--size BYTES] [--rounds N]
       kvplane-bench [peers | stores] [...]: see `cargo x help`";

/// Benchmarks that run by default: all that need only this machine.
const ALL: [&str; 19] = [
    "tcp-stream",
    "tcp-latency",
    "shm-stream",
    "shm-latency",
    "same-host",
    "many-peers",
    "handshakes",
    "idle",
    "killed-client",
    "keys",
    "verbs",
    "read-ahead",
    "put-latency",
    "exists",
    "data-tls",
    "get-tails",
    "hedged-gets",
    "schedule",
    "staging",
];

/// Error of a benchmark that cannot continue.
type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().map(String::as_str) == Some(peer::ROLE) {
        return finish(peer::run(&words[1..]));
    }
    if words.first().map(String::as_str) == Some(mesh::ROLE) {
        return finish(mesh::peer(&words[1..]));
    }
    if words.first().map(String::as_str) == Some(verbs::ROLE) {
        return finish(verbs::counted(&words[1..]));
    }
    if words.first().map(String::as_str) == Some("peers") {
        return finish(peers::run(&words[1..]));
    }
    if words.first().map(String::as_str) == Some("stores") {
        return finish(stores::run(&words[1..]));
    }
    match words.first().map(String::as_str) {
        Some("tier") => return finish(tier::run(&words[1..])),
        Some("tier-recovery") => return finish(tier::recovery(&words[1..])),
        Some("shared-tier") => return finish(shared::run(&words[1..])),
        Some(shared::ROLE) => return finish(shared::bucket(&words[1..])),
        Some("tier-puts") => return finish(tier::saturated(&words[1..])),
        _ => {}
    }
    let mut rounds = 7;
    let mut names = Vec::new();
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        match (word.as_str(), word.starts_with("--")) {
            ("--rounds", _) => match rest.next().and_then(|count| count.parse().ok()) {
                Some(count) if count > 0 => rounds = count,
                _ => return usage("--rounds takes a number above 0"),
            },
            (_, true) => return usage(&format!("unknown flag {word}")),
            (name, false) => names.push(name.to_owned()),
        }
    }
    if names.is_empty() || names == ["all"] {
        names = ALL.map(String::from).into();
    }
    for name in &names {
        let outcome = match name.as_str() {
            "tcp-stream" => tcp::run(rounds),
            "tcp-latency" => latency::tcp(rounds),
            "shm-stream" => shm::run(rounds),
            "shm-latency" => latency::shm(rounds),
            "same-host" => same_host::run(rounds),
            "many-peers" => many_peers::run(rounds),
            "handshakes" => handshakes::run(rounds),
            "idle" => idle::run(),
            "killed-client" => killed::run(rounds),
            "keys" => keys::run(rounds),
            "verbs" => verbs::run(rounds),
            "perftest" => perftest::run(rounds, perftest::Part::All),
            "perftest-bandwidth" => perftest::run(rounds, perftest::Part::Bandwidth),
            "perftest-latency" => perftest::run(rounds, perftest::Part::Latency),
            "read-ahead" => ahead::run(rounds),
            "put-latency" => asked::put_latency(rounds),
            "exists" => asked::exists(rounds),
            "data-tls" => data_tls::run(rounds),
            "get-tails" => tails::run(rounds),
            "hedged-gets" => hedged::run(rounds),
            "schedule" => schedule::run(rounds),
            "staging" => staging::run(rounds),
            "mesh" => mesh::run(rounds),
            _ => return usage(&format!("unknown benchmark {name}")),
        };
        if let Err(error) = outcome {
            eprintln!("kvplane-bench {name}: {error}");
            return ExitCode::FAILURE;
        }
        println!();
    }
    ExitCode::SUCCESS
}

fn usage(why: &str) -> ExitCode {
    eprintln!("kvplane-bench: {why}\n{USAGE}");
    ExitCode::from(2)
}

fn finish(outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvplane-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
