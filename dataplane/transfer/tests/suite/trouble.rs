//! Batches that fail: cancelled, timed out, dropped, or without a peer. Whatever the outcome, nothing accesses their
//! memory afterwards, and each ends once.

use std::sync::Arc;
use std::time::Duration;

use kvplane_transfer::{Opcode, RegisterOptions, SubmitOptions, TaskState, TransferEngineConfig};

use crate::rig::{PATIENCE, Side, TestBytes as _, Way, byte, check, fill, on_devices, pair, region};

const BYTES: usize = 2 << 20;

/// Reads that end early in every way: bytes written to their memory afterwards stay.
#[test]
fn memory_of_an_ended_batch_is_not_accessed() {
    for way in Way::all() {
        let (a, b, peer) = pair(way, BYTES);
        fill(&b.region, 0, BYTES, 21);
        for round in 0..40u64 {
            let read = a.request(Opcode::Read, 0, (peer, b.region.address()), BYTES);
            let deadline = (round % 4 == 1).then(|| Duration::from_micros(20 * round));
            let options = SubmitOptions { deadline, background: round % 3 == 0, ..SubmitOptions::default() };
            let batch = a.engine.submit(&[read], &options).unwrap();
            match round % 4 {
                0 => {
                    std::thread::sleep(Duration::from_micros(10 * round));
                    batch.cancel();
                    batch.cancel();
                    let status = batch.wait();
                    assert!(matches!(status.state, TaskState::Canceled | TaskState::Completed), "{status:?}");
                }
                1 => {
                    let status = batch.wait();
                    assert!(matches!(status.state, TaskState::Timeout | TaskState::Completed), "{status:?}");
                }
                2 => drop(batch),
                _ => {
                    let _ = batch.wait_for(Duration::from_micros(round));
                    drop(batch);
                }
            }
            fill(&a.region, 0, BYTES, round);
            std::thread::sleep(Duration::from_millis(1));
            check(&a.region, 0, BYTES, round);
        }
        // The path is as good as before.
        let read = a.request(Opcode::Read, 0, (peer, b.region.address()), BYTES);
        assert_eq!(a.engine.submit(&[read], &SubmitOptions::default()).unwrap().wait().state, TaskState::Completed);
        check(&a.region, 0, BYTES, 21);
    }
}

/// Writes that end early in every way: the peer never gets bytes that their memory holds afterwards.
#[test]
fn a_peer_never_gets_bytes_written_after_the_end() {
    for way in Way::all() {
        let (a, b, peer) = pair(way, BYTES);
        fill(&b.region, 0, BYTES, 41);
        for round in 0..60u64 {
            fill(&a.region, 0, BYTES, 42);
            let write = a.request(Opcode::Write, 0, (peer, b.region.address()), BYTES);
            let deadline = (round % 3 == 1).then(|| Duration::from_micros(20 * round));
            let options = SubmitOptions { deadline, ..SubmitOptions::default() };
            let batch = a.engine.submit(&[write], &options).unwrap();
            if round % 3 == 0 {
                std::thread::sleep(Duration::from_micros(15 * round));
                batch.cancel();
            }
            let state = batch.wait().state;
            fill(&a.region, 0, BYTES, 43);
            if state == TaskState::Completed {
                check(&b.region, 0, BYTES, 42);
                fill(&b.region, 0, BYTES, 41);
                continue;
            }
            std::thread::sleep(Duration::from_millis(2));
            b.region.read_with(0, BYTES, &mut |at, part| {
                for (at, &found) in (at..).zip(part) {
                    assert!(found == byte(41, at) || found == byte(42, at), "byte {at} came after the end");
                }
            });
        }
        let lent = a.engine.metrics().zero_copy;
        assert_eq!(lent.bytes > 0, way == Way::Lent, "{way:?}: {lent:?}");
        assert_eq!(lent.abandoned, 0, "{lent:?}");
    }
}

/// Peers' reads are zero-copy, too, and the segment is left alone when it is unregistered during a read.
#[test]
fn zero_copy_reads_are_released_before_unregistration() {
    let (a, b, peer) = pair(Way::Lent, BYTES);
    for round in 0..20u64 {
        let served = region(BYTES);
        fill(&served, 0, BYTES, 44);
        b.engine.register(Arc::clone(&served), &RegisterOptions::default()).unwrap();
        a.engine.segments().refresh().unwrap();
        fill(&a.region, 0, BYTES, 45);
        let read = a.request(Opcode::Read, 0, (peer, served.address()), BYTES);
        let batch = a.engine.submit(&[read], &SubmitOptions::default()).unwrap();
        std::thread::sleep(Duration::from_micros(30 * round));
        b.engine.unregister(served.address()).unwrap();
        fill(&served, 0, BYTES, 46);
        let state = batch.wait().state;
        assert!(matches!(state, TaskState::Completed | TaskState::Failed), "{state:?}");
        if state == TaskState::Completed {
            check(&a.region, 0, BYTES, 44);
        }
        a.region.read_with(0, BYTES, &mut |at, part| {
            for (at, &found) in (at..).zip(part) {
                assert!(found == byte(44, at) || found == byte(45, at), "byte {at} came after the end");
            }
        });
    }
    let lent = b.engine.snapshot().unwrap().host.zero_copy;
    assert!(lent.bytes > 0 && lent.abandoned == 0, "{lent:?}");
}

/// Unregistering waits for the batches that use the memory, and for peers.
#[test]
fn unregistered_memory_is_not_accessed() {
    for way in Way::all() {
        let (a, b, peer) = pair(way, BYTES);
        for round in 0..10u64 {
            let mine = region(BYTES);
            a.engine.register(Arc::clone(&mine), &RegisterOptions::default()).unwrap();
            let read = kvplane_transfer::TransferRequest {
                opcode: Opcode::Read,
                source: mine.address(),
                target: peer,
                target_offset: b.region.address(),
                length: BYTES as u64,
            };
            let batch = a.engine.submit(&[read], &SubmitOptions::default()).unwrap();
            if round % 2 == 0 {
                batch.cancel();
            }
            a.engine.unregister(mine.address()).unwrap();
            assert!(batch.is_done());
            fill(&mine, 0, BYTES, round);
            check(&mine, 0, BYTES, round);
        }
    }
}

#[test]
fn dropping_an_engine_ends_its_batches() {
    let (a, b, peer) = pair(Way::network(), BYTES);
    let read = a.request(Opcode::Read, 0, (peer, b.region.address()), BYTES);
    let batches: Vec<_> = (0..2).map(|_| a.engine.submit(&[read], &SubmitOptions::default()).unwrap()).collect();
    let region = a.region.clone();
    std::thread::scope(|scope| {
        for batch in &batches {
            scope.spawn(move || assert!(batch.wait().state.is_final()));
        }
        drop(a);
    });
    assert!(batches.iter().all(|batch| batch.is_done()));
    fill(&region, 0, BYTES, 22);
    check(&region, 0, BYTES, 22);
}

/// A peer that restarts at the same address with other memory is not written to by its old description.
#[test]
fn a_restarted_peer_is_described_again() {
    let (a, b, peer) = pair(Way::network(), BYTES);
    let (name, there) = (b.engine.name().to_owned(), b.region.address());
    fill(&a.region, 0, BYTES, 23);
    let write = a.request(Opcode::Write, 0, (peer, there), 4096);
    assert_eq!(a.engine.submit(&[write], &SubmitOptions::default()).unwrap().wait().state, TaskState::Completed);
    drop(b);
    let short = SubmitOptions { deadline: Some(Duration::from_millis(500)), ..SubmitOptions::default() };
    let status = a.engine.submit(&[write], &short).unwrap().wait();
    assert!(matches!(status.state, TaskState::Failed | TaskState::Timeout), "{status:?}");
    let config = TransferEngineConfig { listen: name.parse().unwrap(), ..Way::network().config() };
    let b = Side::new(config, BYTES);
    fill(&b.region, 0, BYTES, 24);
    let mut failures = 0;
    // The new incarnation's memory may be at the old address or elsewhere; the old description leads nowhere.
    let state = loop {
        match a.engine.submit(&[write], &SubmitOptions::default()).map(|batch| batch.wait().state) {
            Ok(TaskState::Failed) if failures < 5 => failures += 1,
            other => break other,
        }
    };
    if b.region.address() == there {
        assert_eq!(state.unwrap(), TaskState::Completed);
        check(&b.region, 0, 4096, 23);
    } else {
        assert_eq!(state.unwrap_err().code(), -3);
        check(&b.region, 0, BYTES, 24);
    }
}

/// Restarts of peers at one address leave nothing in the initiator's tables.
#[test]
fn restarts_of_peers_leave_no_state_behind() {
    for way in Way::all() {
        let a = Side::new(TransferEngineConfig { initiators: 2, ..way.config() }, BYTES);
        let mut listen = way.config().listen;
        let mut opened = None;
        for incarnation in 0..6u64 {
            let b = Side::new(TransferEngineConfig { listen, ..way.config() }, BYTES);
            listen = b.engine.directory().address();
            let handle = a.engine.segments().open_no_cache(b.engine.name()).unwrap();
            assert_eq!(*opened.get_or_insert(handle), handle);
            fill(&b.region, 0, BYTES, 40 + incarnation);
            std::thread::scope(|scope| {
                for half in 0..2 {
                    let (a, b) = (&a, &b);
                    scope.spawn(move || {
                        let (at, there) = (half * BYTES / 2, b.region.address() + (half * BYTES / 2) as u64);
                        let read = a.request(Opcode::Read, at, (handle, there), BYTES / 2);
                        let batch = a.engine.submit(&[read], &SubmitOptions::default()).unwrap();
                        assert_eq!(batch.wait().state, TaskState::Completed, "{:?}", batch.problem());
                    });
                }
            });
            let rails = a.engine.metrics().rails;
            // Of this incarnation in two initiators, and of the former one where a connection is not closed yet.
            // Devices are released slightly later. Memory of devices is staged over TCP beside shared memory.
            let paths = if way == Way::Shm && on_devices() { 2 } else { 1 };
            let most = paths * if way == Way::Rdma { 16 } else { 8 };
            assert!(rails.len() <= most, "incarnation {incarnation}: {} rails", rails.len());
            assert!(rails.iter().filter(|rail| rail.peer == b.engine.name()).count() <= 4 * paths);
        }
    }
}

/// An unresponsive peer does not delay a submission beyond the batch's deadline.
#[test]
fn renewing_a_description_is_bounded_by_the_deadline() {
    let (a, b, peer) = pair(Way::network(), BYTES);
    let address = b.engine.directory().address();
    drop(b);
    let silent = std::net::TcpListener::bind(address).unwrap();
    let elsewhere = a.request(Opcode::Read, 0, (peer, 1), 10);
    let deadline = Duration::from_millis(100);
    let start = std::time::Instant::now();
    let options = SubmitOptions { deadline: Some(deadline), ..SubmitOptions::default() };
    let error = a.engine.submit(&[elsewhere], &options).unwrap_err();
    // Handshakes alone may take five seconds.
    assert!(start.elapsed() < Duration::from_secs(4), "{error}");
    drop(silent);
}

/// Unresponsive peers are asked in parallel, so that many of them cost no more than one.
#[test]
fn descriptions_are_renewed_in_parallel() {
    let a = Side::new(Way::network().config(), BYTES);
    let (requests, silent): (Vec<_>, Vec<_>) = (0..6)
        .map(|number| {
            let b = Side::new(Way::network().config(), 4096);
            let peer = a.engine.open_segment(b.engine.name()).unwrap();
            let address = b.engine.directory().address();
            drop(b);
            // An address outside of its description, so that the description is requested again.
            let request = a.request(Opcode::Read, 10 * number, (peer, 1), 10);
            (request, std::net::TcpListener::bind(address).unwrap())
        })
        .unzip();
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| a.engine.submit(&requests, &SubmitOptions::default()).map(|batch| batch.wait()));
        let mut calls: Vec<_> = silent
            .iter()
            .map(|listener| {
                listener.set_nonblocking(true).unwrap();
                let start = std::time::Instant::now();
                loop {
                    match listener.accept() {
                        Ok((stream, _)) => break stream,
                        Err(_) => assert!(start.elapsed() < PATIENCE, "one was not asked"),
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            })
            .collect();
        for call in &mut calls {
            call.set_nonblocking(true).unwrap();
            let mut bytes = [0; 4096];
            let end = loop {
                match std::io::Read::read(call, &mut bytes) {
                    Ok(1..) => {}
                    other => break other.map_err(|error| error.kind()),
                }
            };
            assert_eq!(end, Err(std::io::ErrorKind::WouldBlock), "given up before the last was asked");
        }
        drop((calls, silent));
        assert!(refused.join().unwrap().is_err());
    });
}

#[test]
fn transfers_over_the_limit_are_rejected() {
    let (a, b, peer) = {
        let a = Side::new(TransferEngineConfig { batches: 2, ..Way::network().config() }, BYTES);
        let b = Side::new(Way::network().config(), BYTES);
        let peer = a.engine.open_segment(b.engine.name()).unwrap();
        (a, b, peer)
    };
    let read = a.request(Opcode::Read, 0, (peer, b.region.address()), BYTES);
    let mut open = Vec::new();
    let error = loop {
        match a.engine.submit(&[read], &SubmitOptions::default()) {
            Ok(batch) => open.push(batch),
            Err(error) => break error,
        }
        if open.len() > 1000 {
            // Each was complete before the next.
            return;
        }
    };
    assert_eq!(error.code(), -2, "{error}");
    open.iter().for_each(|batch| assert_eq!(batch.wait().state, TaskState::Completed));
    a.engine.submit(&[read], &SubmitOptions::default()).unwrap();
    assert!(a.engine.open_segment("127.0.0.1:1").unwrap_err().code() < 0);
    assert_eq!(a.engine.open_segment("no body").unwrap_err().code(), -101);
    assert_eq!(a.engine.close_segment(peer).map_err(|error| error.code()), Ok(()));
    assert_eq!(a.engine.segment_info(peer).unwrap_err().code(), -1);
}
