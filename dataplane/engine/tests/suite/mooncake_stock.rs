//! Tests of our shard and our initiator against a stock Mooncake engine.
//!
//! They run if `KVPLANE_MOONCAKE_PYTHON` names a Python that can import `mooncake.engine`, and are skipped otherwise.
//! Stock engines listen on all addresses, so run them where only loopback exists.

use crate::{raw, support};

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use kvplane_client::{Config, Local, PeerAddress, Request, SegmentTarget};
use kvplane_engine::{HostConfig, Initiator, Listen, Pacing, Shard, ShardConfig};
use kvplane_proto::Status;
use kvplane_proto::ids::SegmentId;
use kvplane_store::service::SegmentInfo;
use raw::{PATIENCE, content, memory};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/suite/mooncake_stock.py");

/// Process that is killed at the end of the test.
struct Stock(Child);

impl Drop for Stock {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the stock engine; prints a message and returns `None` if there is none.
fn stock(arguments: &[&str], extra: Option<(&str, &str)>) -> Option<Stock> {
    let Ok(python) = std::env::var("KVPLANE_MOONCAKE_PYTHON") else {
        println!("skipped: KVPLANE_MOONCAKE_PYTHON names no Python with the stock Mooncake engine");
        return None;
    };
    let mut command = Command::new(python);
    command.arg(SCRIPT).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.envs(extra);
    Some(Stock(command.spawn().expect("the Python that was named")))
}

/// Returns the next line that is meant for the test; the engine prints lines of its own.
fn line(output: &mut impl BufRead, wanted: impl Fn(&str) -> bool) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        assert!(output.read_line(&mut line).expect("text") > 0, "the stock side ended");
        if wanted(line.trim()) {
            return line.trim().to_owned();
        }
    }
}

fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (seed + i * 7 + (i >> 8) * 3) as u8).collect()
}

#[test]
fn a_stock_engine_uses_our_memory() {
    // Both versions of the protocol, and pooled connections.
    for extra in [None, Some(("MC_TCP_PROTO", "1")), Some(("MC_TCP_ENABLE_CONNECTION_POOL", "1"))] {
        let shard = Shard::start(ShardConfig {
            listen: Listen {
                tcp: ([127, 0, 0, 1], 0).into(),
                shm: None,
                mooncake: Some(([127, 0, 0, 1], 0).into()),
                handed: None,
            },
            ..support::config()
        })
        .expect("a shard on loopback");
        let bytes: u64 = 5 << 20;
        let region = memory(bytes as usize);
        let address = region.address();
        let info = SegmentInfo { address, bytes, writable: true, shareable: false, remote_accessible: true };
        shard.register(info, Arc::clone(&region)).expect("registered");
        let port = shard.mooncake().expect("it listens").port();
        let words = [port.to_string(), address.to_string(), bytes.to_string()];
        let Some(mut stock) = stock(&["initiate", &words[0], &words[1], &words[2]], extra) else { return };
        let mut output = BufReader::new(stock.0.stdout.take().expect("piped"));
        line(&mut output, |line| line == "good");
        let scattered: Vec<u8> = (0..100).map(|i| content(&region, i * 1000, 1)[0]).collect();
        assert_eq!(scattered, pattern(99, 100));
        let counters = shard.snapshot().expect("alive").mooncake;
        // Eight requests are out of range, four of them reads. After some rejections a stock engine has no lane left
        // for another one, and gives requests up on its own.
        assert!((1..=8).contains(&counters.rejected) && counters.torn == 0, "{counters:?}");
    }
}

#[test]
fn we_use_a_stock_engines_memory() {
    let bytes = 5 << 20;
    let Some(mut stock) = stock(&["serve", &bytes.to_string()], None) else { return };
    let mut output = BufReader::new(stock.0.stdout.take().expect("piped"));
    let place = line(&mut output, |line| line.split(' ').filter(|word| word.parse::<u64>().is_ok()).count() == 3);
    let words: Vec<u64> = place.split(' ').map(|word| word.parse().expect("a number")).collect();
    let (port, version, address) = (words[0] as u16, words[1] as u8, words[2]);
    assert_eq!(version, 2);
    for (version, depth) in [(2, 1), (2, 16), (1, 16)] {
        let config = Config { lanes: 2, foreign_depth: depth, ..Config::default() };
        let mut initiator = Initiator::new(config, &HostConfig::default(), Pacing::Park).expect("a poller");
        let region = memory(bytes);
        let buffer = initiator.add_buffer(Arc::clone(&region));
        let peer = initiator.open_peer(PeerAddress::mooncake(([127, 0, 0, 1], port).into(), version));
        let target = |offset: u64| SegmentTarget {
            peer,
            segment: SegmentId::default(),
            offset: address.wrapping_add(offset),
            shareable: false,
            place: kvplane_client::Place::UNKNOWN,
        };
        let local = |offset, bytes| Local { buffer, offset, bytes };
        let mut run = |requests: &[Request]| -> Vec<Status> {
            let batch = initiator.submit(requests, PATIENCE).expect("a valid batch");
            initiator.wait(batch).expect("a working poller");
            let statuses = initiator.results(batch).iter().map(|result| result.status).collect();
            initiator.release(batch);
            statuses
        };
        // The initial contents, then new contents in pieces of all lengths; then the initial ones again, for the next
        // round.
        assert_eq!(run(&[Request::Read(target(0), local(0, bytes as u64))]), [Status::Ok]);
        assert!(content(&region, 0, bytes) == pattern(1, bytes), "version {version}, depth {depth}");
        for seed in [2, 1] {
            region.copy_in(0, &pattern(seed, bytes));
            let (mut at, mut requests) = (0, Vec::new());
            while at < bytes as u64 {
                let part = (1 + (at * 31) % 100_003).min(bytes as u64 - at);
                requests.push(Request::Write(target(at), local(at, part)));
                at += part;
            }
            assert!(run(&requests).iter().all(|&status| status == Status::Ok));
            region.copy_in(0, &vec![0; bytes]);
            assert_eq!(run(&[Request::Read(target(0), local(0, bytes as u64))]), [Status::Ok]);
            assert!(content(&region, 0, bytes) == pattern(seed, bytes), "version {version}, depth {depth}");
        }
        let outside = [
            Request::Write(target(bytes as u64), local(0, 1 << 20)),
            Request::Read(target(10), local(3 << 20, 10)),
            Request::Read(target(u64::MAX), local(2 << 20, 10)),
            Request::Write(target(0), local(4 << 20, 10)),
        ];
        region.copy_in(4 << 20, &pattern(1, 10));
        let wanted = [Status::OutOfRange, Status::Ok, Status::OutOfRange, Status::Ok];
        assert_eq!(run(&outside), wanted, "version {version}, depth {depth}");
        if (version, depth) == (1, 16) {
            region.copy_in(0, &pattern(2, bytes));
            assert_eq!(run(&[Request::Write(target(0), local(0, bytes as u64))]), [Status::Ok]);
        }
    }
    writeln!(stock.0.stdin.take().expect("piped"), "check").expect("it waits");
    line(&mut output, |line| line == "good");
}
