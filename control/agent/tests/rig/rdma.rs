//! Two engines with two RDMA devices each: requests over both, an unplugged cable, a killed peer.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvplane::{
    Batch, Opcode, RdmaConfig, RdmaUse, SegmentHandle, SubmitOptions, TaskState, TransferEngineConfig, TransferRequest,
    Transport,
};

use crate::bed::{PATIENCE, Side, alone, cable, config, has, region};

/// Request of a length that uses both devices. Eight times as much takes a minute in an emulated machine, and is shared
/// no differently.
const WHOLE: usize = 32 << 20;
/// Bytes that are transferred both ways while something breaks.
const PART: usize = 16 << 20;
const SLICE: usize = 256 << 10;
/// Time within which a rail is used again after its recovery.
const BACK_WITHIN: Duration = Duration::from_secs(5);
const ROLE: &str = "KVPLANE_TEST_SERVES_RDMA";

/// Creates an engine on the address of one NIC, with these devices and no other path to a peer.
fn side(address: &str, devices: [&str; 2], bytes: usize) -> Side {
    let listen: SocketAddr = address.parse().unwrap();
    let devices = devices.map(str::to_owned).to_vec();
    let rdma = RdmaConfig { devices, ..RdmaConfig::of(RdmaUse::Require) };
    // Slices large enough to count as bulk, by which rails are measured.
    let ways = TransferEngineConfig { rdma, tcp: false, shared_memory: false, slice_bytes: SLICE as u64, ..config() };
    Side::new(TransferEngineConfig { listen, open_to_network: true, ..ways }, region(bytes, None))
}

/// Returns the first line with this beginning that a process prints. Kills the process if it does not print one in
/// time.
fn first_line(process: &mut Child, beginning: &'static str) -> String {
    let output = BufReader::new(process.stdout.take().unwrap());
    let (says, said) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut lines = output.lines().map_while(Result::ok);
        let _ = lines.find(|line| line.starts_with(beginning)).map(|line| says.send(line));
        // The process may continue to write.
        lines.for_each(drop);
    });
    said.recv_timeout(PATIENCE).unwrap_or_else(|error| {
        let _ = process.kill();
        panic!("the other process does not say {beginning:?}: {error}")
    })
}

/// Body of the other process, not a test of its own. It serves until its input ends.
#[test]
fn the_other_process() {
    let Ok(bytes) = std::env::var(ROLE) else { return };
    let side = side("10.77.0.3:0", ["rxe2", "rxe3"], bytes.parse().unwrap());
    println!("\nserves {} {}", side.engine.name(), side.region.address());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Engine of this process, one in a process of its own, and the address of the latter's memory.
struct Pair {
    side: Side,
    other: Child,
    peer: SegmentHandle,
    there: u64,
}

impl Pair {
    fn new(bytes: usize) -> Option<Self> {
        if has("RIG_RXE", "RDMA devices")? < 4 {
            println!("skipped: this machine has fewer than four RDMA devices");
            return None;
        }
        let mut other = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rdma::the_other_process", "--nocapture"])
            .env(ROLE, bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let line = first_line(&mut other, "serves ");
        let words: Vec<&str> = line.split(' ').collect();
        let side = side("10.77.0.1:0", ["rxe0", "rxe1"], bytes);
        let peer = side.engine.open_segment(words[1]).unwrap();
        Some(Self { side, other, peer, there: words[2].parse().unwrap() })
    }

    fn request(&self, opcode: Opcode, at: usize, bytes: usize) -> TransferRequest {
        self.side.request(opcode, at as u64, (self.peer, self.there + at as u64), bytes)
    }

    /// Writes bytes that identify their positions, reads them back, and verifies them.
    fn to_and_fro(&self, bytes: usize, seed: u64) {
        self.side.fill(0, 0, bytes, seed);
        self.side.done(&[self.request(Opcode::Write, 0, bytes)]);
        self.side.fill(0, 0, bytes, !seed);
        self.side.done(&[self.request(Opcode::Read, 0, bytes)]);
        self.side.check(0, 0, bytes, seed);
    }

    /// Returns the bytes that each local device carried so far.
    fn moved(&self) -> BTreeMap<String, u64> {
        let rails = self.side.engine.metrics().rails.into_iter();
        rails
            .filter(|rail| rail.transport == Transport::Rdma)
            .map(|rail| (rail.device.expect("its name"), rail.bytes))
            .collect()
    }

    /// Describes the health of each local device.
    fn rails(&self) -> String {
        let rails = self.side.engine.metrics().rails.into_iter().filter(|rail| rail.transport == Transport::Rdma);
        let say = |rail: kvplane::RailSnapshot| {
            let device = rail.device.unwrap_or_default();
            let (rate, latency) = (rail.bytes_per_second >> 20, rail.latency_ns / 1000);
            let (health, failures) = (rail.health, (rail.retries, rail.failovers, rail.pauses));
            format!("{device}: {health:?}, {rate} MiB/s, {latency} us, failures {failures:?}, {} bytes", rail.bytes)
        };
        rails.map(say).collect::<Vec<_>>().join("; ")
    }

    /// Starts batches that together transfer the first `PART` bytes, driven by other threads.
    fn start(&self, opcode: Opcode, deadline: Duration) -> Vec<Batch> {
        let options = SubmitOptions { background: true, deadline: Some(deadline), ..SubmitOptions::default() };
        let request = |at| self.request(opcode, at, PART / 16);
        let starts = (0..PART).step_by(PART / 16);
        starts.map(|at| self.side.engine.submit(&[request(at)], &options).unwrap()).collect()
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.other.kill();
        let _ = self.other.wait();
    }
}

#[test]
fn one_request_uses_both_devices() {
    let _turn = alone();
    let Some(pair) = Pair::new(WHOLE) else { return };
    let start = Instant::now();
    pair.to_and_fro(WHOLE, 1);
    let moved = pair.moved();
    println!("{} MiB there and back in {:?}, filled and checked: {}", WHOLE >> 20, start.elapsed(), pair.rails());
    assert_eq!(moved.keys().collect::<Vec<_>>(), ["rxe0", "rxe1"]);
    assert_eq!(moved.values().sum::<u64>(), 2 * WHOLE as u64);
    assert!(moved.values().all(|&bytes| bytes > 0), "{moved:?}");
    let text = pair.side.engine.metrics_text();
    assert!(text.contains("rail=\"rxe0\"") && text.contains("rail=\"rxe1\""), "{text}");
}

/// Returns true if the devices' shares differ by at most a tenth.
fn shared_evenly(moved: &BTreeMap<String, u64>) -> bool {
    let (least, most) = (moved.values().min().unwrap_or(&0), moved.values().max().unwrap_or(&0));
    *least > 0 && most - least <= most / 10
}

/// Each direction on its own, several times. Emulated devices share the cores that also drive them, so that one may be
/// ahead for a while; the median of the rounds with a large request counts.
#[test]
#[ignore = "moves gigabytes, which takes an emulated machine minutes"]
fn one_large_request_is_shared_evenly() {
    const LARGE: usize = 256 << 20;
    const ROUNDS: u64 = 3;
    let _turn = alone();
    let Some(pair) = Pair::new(LARGE) else { return };
    for opcode in [Opcode::Write, Opcode::Read] {
        let mut even = 0;
        for round in 1..=ROUNDS {
            if opcode == Opcode::Write && round == ROUNDS {
                pair.side.fill(0, 0, LARGE, 1);
            }
            if opcode == Opcode::Read && round == ROUNDS {
                pair.side.fill(0, 0, LARGE, 99);
            }
            let (before, start) = (pair.moved(), Instant::now());
            pair.side.done(&[pair.request(opcode, 0, LARGE)]);
            let took = start.elapsed();
            let now = pair.moved().into_iter();
            let moved: BTreeMap<String, u64> =
                now.map(|(name, bytes)| (name.clone(), bytes - before.get(&name).copied().unwrap_or(0))).collect();
            let apart = moved.values().max().unwrap().abs_diff(*moved.values().min().unwrap()) as f64;
            println!(
                "{opcode:?} of {} MiB, round {round}: {moved:?}, {:.1} % apart, {took:?}; {}",
                LARGE >> 20,
                100.0 * apart / *moved.values().max().unwrap() as f64,
                pair.rails()
            );
            assert_eq!(moved.values().sum::<u64>(), LARGE as u64);
            even += u64::from(shared_evenly(&moved));
        }
        assert!(even > ROUNDS / 2, "{opcode:?}: only {even} of {ROUNDS} rounds were shared within 10 %");
    }
    // The last bytes written were read last.
    pair.side.check(0, 0, LARGE, 1);
}

#[test]
fn an_unplugged_cable_fails_over_to_the_other_device_until_it_is_back() {
    let _turn = alone();
    let Some(pair) = Pair::new(PART) else { return };
    pair.to_and_fro(PART, 1);
    println!("before: {}", pair.rails());
    for (seed, opcode) in [(2, Opcode::Write), (3, Opcode::Read)] {
        let now = if opcode == Opcode::Write { seed } else { !seed };
        if opcode == Opcode::Read {
            pair.side.fill(0, 0, PART, seed);
            pair.side.done(&[pair.request(Opcode::Write, 0, PART)]);
        }
        pair.side.fill(0, 0, PART, now);
        let before = pair.moved();
        let start = Instant::now();
        let batches = pair.start(opcode, PATIENCE);
        while pair.moved() == before {
            assert!(start.elapsed() < PATIENCE, "nothing moves");
            std::thread::yield_now();
        }
        cable("down");
        for batch in &batches {
            let state = batch.wait_for(2 * PATIENCE).expect("an end").state;
            assert_eq!(state, TaskState::Completed, "{opcode:?} without rxe0: {:?}", batch.problem());
        }
        println!("{opcode:?}: the cable pulled in the middle, done after {:?}: {}", start.elapsed(), pair.rails());
        if opcode == Opcode::Write {
            pair.side.fill(0, 0, PART, !seed);
            pair.side.done(&[pair.request(Opcode::Read, 0, PART)]);
        }
        pair.side.check(0, 0, PART, seed);
        let (before, start) = (pair.moved(), Instant::now());
        cable("up");
        // Small batches, so that polling does not dominate the time.
        while pair.moved()["rxe0"] == before["rxe0"] {
            assert!(start.elapsed() < PATIENCE, "rxe0 is not used again: {before:?}, {}", pair.rails());
            let requests: Vec<_> = (0..8).map(|at| pair.request(Opcode::Read, at * SLICE, SLICE)).collect();
            pair.side.done(&requests);
        }
        let away = start.elapsed();
        println!("rxe0 is used again {away:?} after its return");
        assert!(away < BACK_WITHIN, "rxe0 is used again only after {away:?}: {}", pair.rails());
        pair.to_and_fro(PART, seed * 1000);
    }
}

#[test]
fn batches_to_a_killed_peer_end_by_their_deadline_without_late_bytes() {
    let _turn = alone();
    let Some(mut pair) = Pair::new(PART) else { return };
    pair.to_and_fro(PART, 1);
    let before = pair.moved();
    let batches = pair.start(Opcode::Read, Duration::from_secs(5));
    let start = Instant::now();
    while pair.moved() == before {
        assert!(start.elapsed() < PATIENCE, "nothing moves");
        std::thread::yield_now();
    }
    pair.other.kill().unwrap();
    let mut states = BTreeMap::new();
    for batch in &batches {
        let state = batch.wait_for(PATIENCE).expect("an end").state;
        assert!(matches!(state, TaskState::Completed | TaskState::Failed | TaskState::Timeout), "{state:?}");
        *states.entry(format!("{state:?}")).or_insert(0) += 1;
    }
    let took = start.elapsed();
    println!("a killed peer: {states:?} after {took:?}");
    assert!(took < Duration::from_secs(6), "batches with a deadline of 5 s ended after {took:?}");
    pair.side.fill(0, 0, PART, 9);
    std::thread::sleep(Duration::from_secs(1));
    pair.side.check(0, 0, PART, 9);
    let options = SubmitOptions { deadline: Some(Duration::from_secs(2)), ..SubmitOptions::default() };
    // After a failed batch the peer is asked to describe its memory again, as it may have restarted with another: it
    // does not answer.
    match pair.side.engine.submit(&[pair.request(Opcode::Read, 0, PART)], &options) {
        Err(refused) => println!("and now: {refused}"),
        Ok(batch) => {
            let state = batch.wait_for(PATIENCE).expect("an end").state;
            assert!(matches!(state, TaskState::Failed | TaskState::Timeout), "{state:?}");
            println!("and now: {state:?}, {:?}", batch.problem());
        }
    }
}
