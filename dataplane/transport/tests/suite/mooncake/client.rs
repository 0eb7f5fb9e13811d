//! Our lanes against a raw peer.

use std::net::TcpListener;
use std::time::Duration;

use kvplane_proto::frame::Header;
use kvplane_proto::message::{DigestItem, Item, Kind, Operation, WriteItem};
use kvplane_proto::rng::Rng;
use kvplane_proto::{Digest, SegmentId, Status};
use kvplane_transport::CloseCause;
use kvplane_transport::mooncake::wire::{Dialect, Request};

use super::bed::{BYTES, Bed, REMOTE, peer, serve};
use super::raw::{OK, PATIENCE, REJECTED, Raw, byte_at, bytes_at, content};

fn v2(write: bool, offset: u64, bytes: u64) -> Request {
    Request { address: REMOTE + offset, bytes, write, dialect: Dialect::V2 }
}

#[test]
fn a_write_is_done_when_the_peer_says_so() {
    let (address, script) = peer(|peer| {
        let mut peer = peer.accept();
        // The first write to an unknown peer is preceded by a probe.
        assert_eq!(peer.take_request(), v2(false, 4096, 8));
        peer.send(&OK);
        peer.send(&[1; 8]);
        assert_eq!(peer.take_request(), v2(true, 4096, 5 << 20));
        assert!(peer.take(5 << 20) == bytes_at(1, REMOTE + 4096, 5 << 20));
        // One byte at a time, to test the reassembly of a status.
        OK.iter().for_each(|&byte| peer.send(&[byte]));
        // No further probe; a payload shorter than a status never needed one.
        assert_eq!(serve(&mut peer, 2, 1), [v2(true, 0, 3), v2(true, 9, 1)]);
    });
    let mut bed = Bed::new();
    bed.fill(1, 0, 6 << 20);
    let lane = bed.connect(address, Dialect::V2);
    let first = bed.write(lane, 4096, 5 << 20);
    assert_eq!(bed.outcome(first), Status::Ok);
    let (second, third) = (bed.write(lane, 0, 3), bed.write(lane, 9, 1));
    assert_eq!((bed.outcome(second), bed.outcome(third)), (Status::Ok, Status::Ok));
    script.join().expect("the script was followed");
    assert!(bed.lent.is_empty());
}

#[test]
fn a_rejected_write_fails_and_what_is_behind_it_goes_over_a_new_connection() {
    let (address, script) = peer(|listening| {
        let mut peer = listening.accept();
        serve(&mut peer, 1, 2);
        assert_eq!(peer.take_request(), v2(true, 100, 10));
        peer.send(&REJECTED);
        drop(peer);
        let mut peer = listening.accept();
        // It may be another process by now: the first write is preceded by a probe again.
        let wanted = [v2(false, 200, 8), v2(true, 200, 20), v2(false, 300, 30), v2(true, 400, 40)];
        assert_eq!(serve(&mut peer, 4, 2), wanted);
        assert!(peer.ends());
    });
    let mut bed = Bed::new();
    bed.fill(2, 0, 4096);
    let lane = bed.connect(address, Dialect::V2);
    let all = [
        bed.read(lane, 0, 10),
        bed.write(lane, 100, 10),
        bed.write(lane, 200, 20),
        bed.read(lane, 300, 30),
        bed.write(lane, 400, 40),
    ];
    let statuses = all.map(|request| bed.outcome(request));
    assert_eq!(statuses, [Status::Ok, Status::OutOfRange, Status::Ok, Status::Ok, Status::Ok]);
    assert!(bed.gone.is_empty() && bed.lent.is_empty(), "the client saw one lane: {:?}", bed.gone);
    assert_eq!((bed.lanes.counters().rejected, bed.lanes.counters().reconnects), (1, 1));
    drop(bed);
    script.join().expect("the script was followed");
}

/// The peer does not read the payload, which does not fit into any socket buffer. When the failure is reported, no
/// further byte is sent: the bed checks that the memory was returned before.
#[test]
fn a_large_rejected_write_stops() {
    let (address, script) = peer(|listening| {
        let mut peer = listening.accept();
        serve(&mut peer, 1, 3);
        assert_eq!(peer.take_request(), v2(true, 0, BYTES as u64));
        peer.send(&REJECTED);
        // Until its end, which comes before the payload's.
        let mut rest = Vec::new();
        let _ = std::io::Read::read_to_end(&mut peer.0, &mut rest);
        assert!(rest.len() < BYTES, "all {} bytes arrived", rest.len());
        serve(&mut listening.accept(), 2, 3);
    });
    let mut bed = Bed::new();
    bed.fill(3, 0, BYTES);
    let lane = bed.connect(address, Dialect::V2);
    let first = bed.write(lane, 0, BYTES);
    assert_eq!(bed.outcome(first), Status::OutOfRange);
    let next = bed.write(lane, 5, 5);
    assert_eq!(bed.outcome(next), Status::Ok);
    script.join().expect("the script was followed");
}

#[test]
fn reads_come_to_their_place_or_are_rejected() {
    let (address, script) = peer(|listening| {
        let mut peer = listening.accept();
        serve(&mut peer, 50, 4);
        peer.take_request();
        peer.send(&REJECTED);
        drop(peer);
        serve(&mut listening.accept(), 1, 4);
    });
    let mut bed = Bed::new();
    let lane = bed.connect(address, Dialect::V2);
    let mut rng = Rng::new(8, "mooncake");
    for _ in 0..50 {
        let bytes = 1 + rng.below(300_000) as usize;
        let offset = rng.below((BYTES - bytes) as u64) as usize;
        let request = bed.read(lane, offset, bytes);
        assert_eq!(bed.outcome(request), Status::Ok);
        assert!(content(&bed.region, offset, bytes) == bytes_at(4, REMOTE + offset as u64, bytes));
    }
    let (bad, good) = (bed.read(lane, 0, 77), bed.read(lane, 99, 9));
    assert_eq!((bed.outcome(bad), bed.outcome(good)), (Status::OutOfRange, Status::Ok));
    script.join().expect("the script was followed");
}

#[test]
fn answers_are_taken_in_order_and_few_requests_are_ahead_of_them() {
    let (address, script) = peer(|listening| {
        let mut peer = listening.accept();
        serve(&mut peer, 1, 5);
        // Requests that arrive without an answer; then the answers.
        peer.0.set_read_timeout(Some(Duration::from_millis(200))).expect("an option");
        let mut early = Vec::new();
        let _ = std::io::Read::read_to_end(&mut peer.0, &mut early);
        assert_eq!(early.len(), 16 * 24, "requests ahead of their answers");
        peer.0.set_read_timeout(Some(PATIENCE)).expect("an option");
        for head in early.chunks(24) {
            let request = Request::decode(head.try_into().expect("24 bytes")).expect("a request");
            peer.send(&OK);
            peer.send(&bytes_at(5, request.address, request.bytes as usize));
        }
        serve(&mut peer, 500 - 17, 5);
    });
    let mut bed = Bed::new();
    let lane = bed.connect(address, Dialect::V2);
    let all: Vec<u32> = (0..500).map(|i| bed.read(lane, i * 1000, 1 + i)).collect();
    bed.until("all", |bed| bed.outcomes.len() == 500);
    assert!(bed.outcomes.iter().map(|outcome| outcome.0).eq(all), "in order");
    for i in 0..500 {
        assert!(content(&bed.region, i * 1000, 1 + i) == bytes_at(5, REMOTE + i as u64 * 1000, 1 + i));
    }
    script.join().expect("the script was followed");
}

/// Version 1 does not answer a write, so its first byte is read back: the server handles requests in order.
#[test]
fn version_1_writes_are_confirmed_by_a_read() {
    let (address, script) = peer(|listening| {
        let mut peer = listening.accept();
        let v1 = |write, offset: u64, bytes| Request { address: REMOTE + offset, bytes, write, dialect: Dialect::V1 };
        let wanted = [v1(true, 50, 3 << 20), v1(false, 50, 1), v1(false, 60, 5000), v1(true, 1, 1), v1(false, 1, 1)];
        assert_eq!(serve(&mut peer, 5, 6), wanted);
    });
    let mut bed = Bed::new();
    bed.fill(6, 0, 4 << 20);
    let lane = bed.connect(address, Dialect::V1);
    let all = [bed.write(lane, 50, 3 << 20), bed.read(lane, 60, 5000), bed.write(lane, 1, 1)];
    assert_eq!(all.map(|request| bed.outcome(request)), [Status::Ok; 3]);
    assert!(content(&bed.region, 60, 5000) == bytes_at(6, REMOTE + 60, 5000));
    script.join().expect("the script was followed");
}

#[test]
fn a_version_1_server_that_closes_twice_over_a_request_has_refused_it() {
    let (address, script) = peer(|listening| {
        let mut peer = listening.accept();
        serve(&mut peer, 1, 7);
        for _ in 0..2 {
            let request = peer.take_request();
            assert_eq!((request.address, request.write), (REMOTE + 100, true));
            drop(peer);
            peer = listening.accept();
        }
        serve(&mut peer, 2, 7);
        // A read: a single close is not a rejection yet.
        peer.take_request();
        drop(peer);
        serve(&mut listening.accept(), 1, 7);
    });
    let mut bed = Bed::new();
    bed.fill(7, 0, 4096);
    let lane = bed.connect(address, Dialect::V1);
    let all = [bed.read(lane, 0, 9), bed.write(lane, 100, 100), bed.write(lane, 300, 1), bed.read(lane, 400, 1)];
    let statuses = all.map(|request| bed.outcome(request));
    assert_eq!(statuses, [Status::Ok, Status::OutOfRange, Status::Ok, Status::Ok]);
    script.join().expect("the script was followed");
}

/// Serves like a stock server of version 1: everything but a write of version 1 is a read.
fn serve_version_1(peer: &mut Raw, requests: usize, seed: u64) {
    for _ in 0..requests {
        let head = peer.take(24);
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
        let bytes = bytes_at(seed, word(8), word(0) as usize);
        if head[16] == 1 {
            assert!(peer.take(bytes.len()) == bytes);
        } else {
            peer.send(&bytes);
        }
    }
}

#[test]
fn version_1_server_announced_as_version_2_is_detected_before_a_write() {
    let (address, script) = peer(|listening| {
        for _ in 0..2 {
            let mut peer = listening.accept();
            serve_version_1(&mut peer, 1, 8);
            assert!(peer.ends(), "no payload follows");
        }
        // The address is remembered now, whatever version is announced.
        let mut peer = listening.accept();
        serve_version_1(&mut peer, 3, 8);
    });
    let mut bed = Bed::new();
    bed.fill(8, 0, 4096);
    let lane = bed.connect(address, Dialect::V2);
    // Its first byte is not that of a status.
    let short = (0..).find(|&at| byte_at(8, REMOTE + at) > 1).expect("any") as usize;
    bed.write(lane, short, 1);
    bed.until("gone", |bed| bed.gone.len() == 1);
    assert!(bed.gone[0].to_string().contains("version 1"), "{:?}", bed.gone);
    assert!(bed.lent.is_empty() && bed.outcomes.is_empty(), "the client tries again");
    // Detected by a read.
    let mut fresh = Bed::new();
    fresh.fill(8, 0, 4096);
    let lane = fresh.connect(address, Dialect::V2);
    fresh.read(lane, 0, 4096);
    fresh.until("gone", |bed| bed.gone.len() == 1);
    let lane = fresh.connect(address, Dialect::V2);
    let all = [fresh.write(lane, 0, 1000), fresh.read(lane, 50, 500)];
    assert_eq!(all.map(|request| fresh.outcome(request)), [Status::Ok; 2]);
    assert_eq!(fresh.lanes.counters().downgrades, 1);
    script.join().expect("the script was followed");
}

/// The bytes of a version 1 server may look like the beginning of a status and be too few to decide: a timeout decides.
#[test]
fn a_version_1_servers_zeros_are_found_out_too() {
    let (address, script) = peer(|listening| {
        let mut peer = listening.accept();
        assert_eq!(peer.take_request(), v2(false, 0, 3));
        peer.send(&[0; 3]);
        assert!(peer.ends());
    });
    let mut bed = Bed::new();
    let lane = bed.connect(address, Dialect::V2);
    bed.write(lane, 0, 3);
    // The timeout counts only from the arrival of the three bytes, which the test cannot observe: so repeat.
    while bed.gone.is_empty() {
        bed.round();
        bed.ahead_ns += 100_000_000;
        assert!(bed.ahead_ns < 1 << 50, "never");
    }
    assert!(bed.gone[0].to_string().contains("version 1") && bed.lent.is_empty(), "{:?}", bed.gone);
    script.join().expect("the script was followed");
}

/// Misbehavior of a broken or hostile peer. Each case ends the lane, without further effects.
#[test]
fn nonsense_ends_the_lane() {
    type Script = fn(&mut Raw);
    let scripts: [(&str, Script); 5] = [
        ("bytes that answer no request", |peer| peer.send(&[0; 9])),
        ("an answer before the payload", |peer| {
            serve(peer, 1, 9);
            peer.send(&OK);
        }),
        ("an end within a status", |peer| {
            peer.take_request();
            peer.send(&OK[..5]);
        }),
        ("an end within a payload", |peer| {
            peer.take_request();
            peer.send(&OK);
            peer.send(&[1; 3]);
        }),
        ("no status after one", |peer| {
            serve(peer, 1, 9);
            peer.send(&[9; 8]);
        }),
    ];
    for (what, script) in scripts {
        let (address, thread) = peer(move |listening| {
            let mut peer = listening.accept();
            script(&mut peer);
            let _ = peer.0.shutdown(std::net::Shutdown::Write);
            let mut rest = Vec::new();
            let _ = std::io::Read::read_to_end(&mut peer.0, &mut rest);
        });
        let mut bed = Bed::new();
        bed.fill(9, 0, BYTES);
        let lane = bed.connect(address, Dialect::V2);
        if !what.starts_with("bytes") {
            bed.write(lane, 0, BYTES);
            bed.read(lane, 0, 10);
        }
        bed.until(what, |bed| bed.gone.len() == 1);
        assert!(bed.lent.is_empty() && bed.outcomes.is_empty(), "{what}: {:?}", bed.outcomes);
        drop(bed);
        thread.join().expect("the script was followed");
    }
}

#[test]
fn connection_to_a_closed_port_is_refused() {
    let address = {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("bound")
    };
    let mut bed = Bed::new();
    let lane = bed.connect(address, Dialect::V2);
    assert_eq!((bed.connected, bed.gone.len()), (0, 1), "refused");
    // Too late for this one; its memory is returned.
    bed.write(lane, 0, 10);
    bed.round();
    assert!(bed.lent.is_empty());
}

#[test]
fn closing_ends_everything_once() {
    for rounds in 0..4 {
        let (address, script) = peer(move |listening| {
            let mut peer = listening.accept();
            if rounds > 0 {
                serve(&mut peer, 1, 10);
            }
            let mut rest = Vec::new();
            let _ = std::io::Read::read_to_end(&mut peer.0, &mut rest);
        });
        let mut bed = Bed::new();
        bed.fill(10, 0, BYTES);
        let lane = bed.connect(address, Dialect::V2);
        let first = bed.read(lane, 0, 10);
        for i in 0..20 {
            bed.write(lane, i << 20, 1 << 20);
        }
        if rounds > 0 {
            bed.outcome(first);
        }
        // In the middle of one of the payloads.
        (0..rounds).for_each(|_| bed.round());
        let Bed { lanes, poller, .. } = &mut bed;
        lanes.close(poller, lane, CloseCause::Closed);
        lanes.close(poller, lane, CloseCause::Closed);
        bed.round();
        assert_eq!(bed.gone, [CloseCause::Closed]);
        assert!(bed.lent.is_empty(), "the bed checks that none is returned twice");
        assert_eq!(bed.lanes.open(), 0);
        script.join().expect("the script was followed");
    }
}

#[test]
fn unsupported_operations_are_rejected() {
    let (address, script) = peer(|listening| {
        serve(&mut listening.accept(), 1, 11);
    });
    let mut bed = Bed::new();
    let lane = bed.connect(address, Dialect::V2);
    let request = bed.id();
    let mut body = Vec::new();
    DigestItem { digest: Digest(7) }.encode(&mut body);
    let header = Header::request(Kind::Request(Operation::Exists), request).with_body(&body, 1);
    bed.lanes.send(lane, &header, &body, None);
    assert_eq!(bed.outcome(request.index), Status::Unsupported);
    let empty = bed.read(lane, 0, 0);
    assert_eq!(bed.outcome(empty), Status::BadRequest);
    // A write without its payload.
    let request = bed.id();
    let mut body = Vec::new();
    WriteItem { segment: SegmentId::default(), offset: REMOTE }.encode(&mut body);
    let header = Header::request(Kind::Request(Operation::Write), request).with_body(&body, 1);
    bed.lanes.send(lane, &header, &body, None);
    assert_eq!(bed.outcome(request.index), Status::BadRequest);
    let read = bed.read(lane, 0, 10);
    assert_eq!(bed.outcome(read), Status::Ok);
    script.join().expect("the script was followed");
}
