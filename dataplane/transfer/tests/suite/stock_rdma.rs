//! Engines that connect like stock Mooncake engines over RDMA: descriptors with keys, handshakes in JSON, and one-sided
//! requests, on software devices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_mooncake::{Caller, RdmaHandshake};
use kvplane_transfer::{
    BatchStatus, Opcode, RailSnapshot, RdmaConfig, RdmaUse, RegisterOptions, SegmentHandle, SubmitOptions, TaskState,
    TransferEngine, TransferEngineConfig,
};

use crate::network;
use crate::rig::{PATIENCE, Side, Way, check, fill, region};

const BYTES: usize = 4 << 20;

/// Creates an engine that treats its peers as stock ones, and is one for them.
fn stock() -> Side {
    let side = Side::new(TransferEngineConfig { native: false, ..Way::Rdma.config() }, BYTES);
    side.engine.announce_rdma(None).unwrap();
    side
}

/// Returns the names of an engine's devices, in a stock engine's order.
fn device_names(engine: &TransferEngine) -> Vec<String> {
    let descriptor = Caller::default().descriptor(engine.name(), "{}").unwrap();
    descriptor.rdma().unwrap().devices.into_iter().map(|device| device.name).collect()
}

fn open(from: &Side, to: &Side) -> SegmentHandle {
    from.engine.open_segment(to.engine.name()).unwrap()
}

fn run(from: &Side, to: &Side, handle: SegmentHandle, ranges: &[(Opcode, usize, usize, usize)]) -> BatchStatus {
    let there = to.region.address();
    let request = |&(opcode, here, at, bytes): &(Opcode, usize, usize, usize)| {
        from.request(opcode, here, (handle, there + at as u64), bytes)
    };
    let requests: Vec<_> = ranges.iter().map(request).collect();
    from.engine.submit(&requests, &SubmitOptions::default()).unwrap().wait()
}

/// Returns lengths and positions from a seed: each in a slot of its own, so that none disturbs another.
fn ranges(seed: u64, opcode: Opcode) -> Vec<(Opcode, usize, usize, usize)> {
    const SLOT: usize = 128 << 10;
    (0..BYTES / SLOT)
        .map(|slot| {
            let mixed = (seed ^ slot as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
            let bytes = 1 + mixed as usize % (SLOT / 2);
            let (here, there) = ((mixed >> 16) as usize % (SLOT / 2), (mixed >> 8) as usize % (SLOT / 2));
            (opcode, slot * SLOT + here, slot * SLOT + there, bytes)
        })
        .collect()
}

/// Writes, and reads back, with every byte verified on both sides.
fn to_and_fro(from: &Side, to: &Side, handle: SegmentHandle, seed: u64) {
    let writes = ranges(seed, Opcode::Write);
    fill(&to.region, 0, BYTES, !seed);
    for &(_, here, _, bytes) in &writes {
        fill(&from.region, here, bytes, seed ^ here as u64);
    }
    assert_eq!(run(from, to, handle, &writes).state, TaskState::Completed);
    for &(_, here, there, bytes) in &writes {
        check(&to.region, there, bytes, seed ^ here as u64);
        fill(&to.region, there, bytes, seed ^ there as u64);
    }
    let reads = ranges(seed, Opcode::Read);
    assert_eq!(run(from, to, handle, &reads).state, TaskState::Completed);
    for &(_, here, there, bytes) in &reads {
        check(&from.region, here, bytes, seed ^ there as u64);
    }
}

#[test]
fn both_directions_at_random_places() {
    let (a, b) = (stock(), stock());
    let (to_b, to_a) = (open(&a, &b), open(&b, &a));
    for seed in 1..4 {
        to_and_fro(&a, &b, to_b, seed);
        to_and_fro(&b, &a, to_a, seed << 8);
    }
    let rails = a.engine.metrics().rails;
    let used: Vec<_> = rails.iter().filter(|rail| rail.bytes > 0).map(|rail| rail.transport.name()).collect();
    assert!(!used.is_empty() && used.iter().all(|name| *name == "mooncake-rdma"), "{used:?}");
    let why = a.engine.explain(b.engine.name()).unwrap();
    assert_eq!(why.for_pointers(), Some("mooncake-rdma"), "{why:?}");
}

#[test]
fn unregistered_memory_is_unreachable_and_its_replacement_is_found() {
    let (a, b) = (stock(), stock());
    let handle = open(&a, &b);
    assert_eq!(run(&a, &b, handle, &[(Opcode::Write, 0, 0, 4096)]).state, TaskState::Completed);
    b.engine.unregister(b.region.address()).unwrap();
    fill(&b.region, 0, BYTES, 7);
    let failed = run(&a, &b, handle, &[(Opcode::Write, 0, 0, 4096)]);
    assert_eq!(failed.state, TaskState::Failed, "{failed:?}");
    check(&b.region, 0, BYTES, 7);
    // Under another key: an initiator with a stale key requests the descriptor again.
    b.engine.register(b.region.clone(), &RegisterOptions::default()).unwrap();
    to_and_fro(&a, &b, handle, 9);
    // Memory for its owner only has no key.
    let hidden = region(4096);
    let options = RegisterOptions { remote_accessible: false, ..RegisterOptions::default() };
    b.engine.register(Arc::clone(&hidden), &options).unwrap();
    let request = a.request(Opcode::Read, 0, (handle, hidden.address()), 64);
    assert!(a.engine.submit(&[request], &SubmitOptions::default()).is_err());
}

#[test]
fn native_engines_keep_their_protocol_and_those_without_devices_use_tcp() {
    let b = stock();
    let ours = Side::new(Way::Rdma.config(), BYTES);
    assert_eq!(ours.engine.explain(b.engine.name()).unwrap().for_pointers(), Some("rdma"));
    let plain = Side::new(TransferEngineConfig { native: false, ..Way::Tcp.config() }, BYTES);
    assert_eq!(plain.engine.explain(b.engine.name()).unwrap().for_pointers(), Some("mooncake"));
    to_and_fro(&plain, &b, open(&plain, &b), 3);
}

#[test]
fn announcements_that_fail_give_the_reason() {
    let said = |engine: &TransferEngine, matrix| engine.announce_rdma(matrix).unwrap_err().to_string();
    let never = TransferEngineConfig { rdma: RdmaConfig::of(RdmaUse::Never), ..Way::Tcp.config() };
    let error = said(&TransferEngine::start(never).unwrap(), None);
    assert!(error.contains("RDMA cannot be used") && error.contains("switched off"), "{error}");
    let engine = TransferEngine::start(Way::Rdma.config()).unwrap();
    engine.announce_rdma(None).unwrap();
    let names = device_names(&engine);
    let [first, second] = &names[..] else { panic!("two devices, not {names:?}") };
    let unknown = format!(r#"{{"cpu:0":[["{second}"],["mlx5_7"]]}}"#);
    let error = said(&engine, Some(&unknown));
    assert!(error.contains("mlx5_7") && error.contains(&names.join(", ")), "{error}");
    let error = said(&engine, Some("{\"cpu:0\":[]}"));
    assert!(error.contains("preferred"), "{error}");
    let deaf = TransferEngineConfig { stock_peers: false, ..Way::Rdma.config() };
    let error = said(&TransferEngine::start(deaf).unwrap(), None);
    assert!(error.contains("stock_peers"), "{error}");
    engine.announce_rdma(Some(&format!(r#"{{"cpu:0":[["{second}"],["{first}"]]}}"#))).unwrap();
    assert_eq!(device_names(&engine), [second.clone(), first.clone()]);
}

#[test]
fn handshakes_that_fail_are_answered_with_the_reason() {
    let side = stock();
    let name = side.engine.name();
    let device = device_names(&side.engine).swap_remove(0);
    // A reachable address, because a real device resolves a route to it.
    let gid = Caller::default().descriptor(name, "{}").unwrap().rdma().unwrap().devices[1].gid;
    let good = RdmaHandshake {
        local_path: "10.0.0.1:1@m0".to_owned(),
        local_lid: 0,
        local_gid: Some(gid),
        peer_path: format!("{name}@{device}"),
        queue_pairs: vec![1 << 20, 1 << 21],
        ready: Some(false),
        refusal: String::new(),
    };
    let refusal = |half: RdmaHandshake| Caller::default().connect(name, &half).unwrap_err().to_string();
    for (half, part) in [
        (RdmaHandshake { peer_path: device.clone(), ..good.clone() }, "not segment@device"),
        (RdmaHandshake { peer_path: format!("1.2.3.4:5@{device}"), ..good.clone() }, "not 1.2.3.4:5"),
        (RdmaHandshake { peer_path: format!("{name}@mlx5_7"), ..good.clone() }, "no RDMA device mlx5_7"),
        (RdmaHandshake { local_gid: None, ..good.clone() }, "local_gid"),
        (RdmaHandshake { queue_pairs: Vec::new(), ..good.clone() }, "0 queue pairs"),
        (RdmaHandshake { queue_pairs: vec![7; 17], ..good.clone() }, "17 queue pairs"),
        (RdmaHandshake { ready: Some(true), ..good.clone() }, "no connection"),
    ] {
        let error = refusal(half);
        assert!(error.contains(part), "{part}: {error}");
    }
    let answer = Caller::default().connect(name, &good).unwrap();
    assert_eq!((answer.queue_pairs.len(), answer.ready, &answer.local_path), (2, Some(false), &good.peer_path));
    let ready = RdmaHandshake { ready: Some(true), ..good };
    assert!(Caller::default().connect(name, &ready).is_ok(), "the third message");
    let plain = Side::new(Way::Tcp.config(), 4096);
    let error = Caller::default().connect(plain.engine.name(), &ready).unwrap_err().to_string();
    assert!(error.contains("no RDMA transport"), "{error}");
}

#[test]
fn threads_with_connections_of_their_own_do_not_end_each_others() {
    let (given_up, counted) = (network::connections_given_up(), network::device_counters());
    let (b, threads) = (stock(), 6);
    let config = TransferEngineConfig { native: false, initiators: 3, ..Way::Rdma.config() };
    let a = Side::new(config, BYTES);
    let handle = open(&a, &b);
    let part = BYTES / threads;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (a, b) = (&a, &b);
            scope.spawn(move || {
                for round in 0..20 {
                    let (at, bytes, seed) = (thread * part, part / 2 - round, (thread * 100 + round) as u64);
                    fill(&a.region, at, bytes, seed);
                    assert_eq!(run(a, b, handle, &[(Opcode::Write, at, at + 7, bytes)]).state, TaskState::Completed);
                    fill(&a.region, at, bytes, !seed);
                    assert_eq!(run(a, b, handle, &[(Opcode::Read, at, at + 7, bytes)]).state, TaskState::Completed);
                    check(&a.region, at, bytes, seed);
                }
            });
        }
    });
    let rails = a.engine.metrics().rails;
    let given_up = network::connections_given_up() - given_up;
    let retries: u64 = rails.iter().map(|rail| rail.retries).sum();
    // An emulated machine that stalls looks like an unresponsive peer. A connection that another thread closed would be
    // neither silent nor closed by its device.
    let silent = |rail: &RailSnapshot| network::on_emulated_devices() && rail.stalls > 0;
    let unexplained: u64 = rails.iter().filter(|rail| !silent(rail)).map(|rail| rail.retries).sum();
    let stalls: u64 = rails.iter().map(|rail| rail.stalls).sum();
    println!("{retries} retries, {stalls} stalls, {given_up} connections given up by devices");
    // A device closes a connection for other reasons, too: its counters show which.
    for (name, count) in network::device_counters() {
        let before = counted.get(&name).copied().unwrap_or(0);
        if retries > 0 && count > before && !name.ends_with("pkts") {
            println!("{name}: {}", count - before);
        }
    }
    assert!(unexplained == 0 || given_up > 0, "{unexplained} retries and no device failed: {rails:?}");
}

#[test]
fn requests_to_a_stopped_peer_fail_and_a_restarted_one_is_reached() {
    let (a, b) = (stock(), stock());
    let handle = open(&a, &b);
    let address = b.engine.directory().address();
    let there = b.region.address();
    let requests: Vec<_> = (0..BYTES / 65_536)
        .map(|slot| a.request(Opcode::Write, slot * 65_536, (handle, there + slot as u64 * 65_536), 65_536))
        .collect();
    let options = SubmitOptions { deadline: Some(Duration::from_secs(3)), ..SubmitOptions::default() };
    let start = Instant::now();
    let gone = std::thread::spawn(move || drop(b));
    let last = loop {
        match a.engine.submit(&requests, &options).map(|batch| batch.wait().state) {
            Ok(TaskState::Completed) => assert!(start.elapsed() < PATIENCE, "it is gone"),
            other => break other,
        }
    };
    gone.join().unwrap();
    assert!(!matches!(last, Ok(TaskState::Pending)), "{last:?}");
    // Nothing of it is in flight any more: the memory can be freed at once.
    a.engine.unregister(a.region.address()).unwrap();
    a.engine.register(a.region.clone(), &RegisterOptions::default()).unwrap();
    let again = TransferEngineConfig { native: false, listen: address, ..Way::Rdma.config() };
    let b = Side::new(again, BYTES);
    b.engine.announce_rdma(None).unwrap();
    let handle = a.engine.segments().open_no_cache(b.engine.name()).unwrap();
    to_and_fro(&a, &b, handle, 5);
}
