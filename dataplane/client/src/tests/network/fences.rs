//! Fences: closed lanes with unanswered requests are reported to their peer.

use kvplane_proto::ids::{RequestId, SegmentId};
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{Hello, IdItem, Operation};
use kvplane_proto::status::Status;

use crate::LaneEvent;
use crate::tests::answers::bare;
use crate::tests::rig::{ClientOutput, Rig, SECOND_NS, SentFrame, digest, local, shared_config, stream_config};
use crate::{Config, LaneId, PeerId, Request, SegmentTarget};

/// Two lanes with room for one write each.
fn two_lanes() -> Config {
    Config { lanes: 2, lane_window_bytes: 1, gather_range_bytes: 0, merge: false, ..stream_config() }
}

fn write(peer: PeerId, number: u64) -> Request {
    let segment = SegmentId { index: 1, generation: 1 };
    let target = SegmentTarget { peer, segment, offset: number << 20, shareable: true, place: crate::Place::UNKNOWN };
    Request::Write(target, local(0, number << 20, 200_000))
}

fn operations(sent: &[SentFrame]) -> Vec<(LaneId, Operation)> {
    sent.iter().map(|sent| (sent.lane, sent.operation())).collect()
}

/// Returns the connection numbers that a fence names.
fn named(sent: &SentFrame) -> Vec<u64> {
    sent.items::<IdItem>().iter().map(|item| item.id).collect()
}

fn number(lane: LaneId) -> u64 {
    u64::from(lane.generation) << 32 | u64::from(lane.index)
}

fn serve(rig: &mut Rig, sent: Vec<SentFrame>) {
    sent.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
}

#[test]
fn a_hello_has_the_connection_number_of_its_fence() {
    let mut rig = Rig::new(stream_config(), 1);
    let peer = rig.segment_peer(false);
    rig.submit(&[write(peer, 1)]);
    let seen = rig.drain();
    let ClientOutput::Connect { lane, .. } = seen[0] else { panic!("{seen:?}") };
    rig.client.connected(lane, 1);
    let seen = rig.drain();
    let ClientOutput::Frame(hello) = &seen[0] else { panic!("{seen:?}") };
    assert_eq!(Hello::decode(&hello.body).expect("a hello").connection, number(lane));
}

#[test]
fn each_lane_sends_a_fence_once_before_its_next_request() {
    let mut rig = Rig::new(two_lanes(), 1);
    let peer = rig.segment_peer(false);
    let batch = rig.submit(&[write(peer, 1), write(peer, 2)]);
    let sent = rig.frames();
    let [(first, Operation::Write), (second, Operation::Write)] = operations(&sent)[..] else { panic!("{sent:?}") };
    rig.lose(first);
    // The remaining lane has nothing to send before its window opens.
    assert!(rig.frames().is_empty());
    let next = rig.submit(&[write(peer, 3)]);
    rig.now_ns += SECOND_NS / 10;
    rig.client.handle_timeout(rig.now_ns);
    let told = rig.frames();
    let [(lane, Operation::Fence), (same, Operation::Write)] = operations(&told)[..] else { panic!("{told:?}") };
    assert!(lane == same && lane != second && lane != first, "the lane that was connected anew");
    assert_eq!(named(&told[0]), [number(first)]);
    serve(&mut rig, sent[1..].to_vec());
    // The fence is not acknowledged yet, so the other lane sends it too, once.
    let also = rig.frames();
    let [(lane, Operation::Fence), (same, Operation::Write)] = operations(&also)[..] else { panic!("{also:?}") };
    assert!(lane == second && same == second);
    serve(&mut rig, also);
    serve(&mut rig, told);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, 200_000, 0); 2]);
    assert_eq!(rig.finish(next), [(Status::Ok, 200_000, 0)]);
    assert_eq!(rig.client.counters().fences, 2);
    rig.assert_empty();
}

#[test]
fn acknowledged_fences_are_not_sent_on_other_lanes() {
    let mut rig = Rig::new(two_lanes(), 1);
    let peer = rig.segment_peer(false);
    let batch = rig.submit(&[write(peer, 1)]);
    let lost = rig.frames()[0].lane;
    rig.lose(lost);
    rig.run_until(SECOND_NS);
    assert_eq!(rig.finish(batch), [(Status::Ok, 200_000, 0)]);
    assert_eq!(rig.client.counters().fences, 1);
    let batch = rig.submit(&[write(peer, 1), write(peer, 2), write(peer, 3)]);
    rig.run_until(2 * SECOND_NS);
    assert_eq!(rig.finish(batch).len(), 3);
    assert_eq!(rig.client.counters().fences, 1, "all lanes were in use");
    rig.assert_empty();
}

#[test]
fn lanes_without_changes_are_not_fenced() {
    let requests = |peer| {
        let Request::Write(target, into) = write(peer, 1) else { unreachable!() };
        [
            Request::Read(target, into),
            Request::OpenSegment(peer),
            Request::Get(digest(1), local(0, 0, 10)),
            Request::Exists(digest(1)),
            Request::Size(digest(1)),
        ]
    };
    for which in 0..5 {
        let mut rig = Rig::new(two_lanes(), 1);
        let peer = rig.segment_peer(false);
        let batch = rig.submit(&[write(peer, 7)]);
        rig.run();
        rig.finish(batch);
        let batch = rig.submit(&requests(peer)[which..=which]);
        let lane = rig.frames()[0].lane;
        rig.lose(lane);
        rig.run_until(SECOND_NS);
        rig.finish(batch);
        let batch = rig.submit(&[write(peer, 1), write(peer, 2)]);
        rig.run_until(2 * SECOND_NS);
        rig.finish(batch);
        assert_eq!(rig.client.counters().fences, 0, "request {which}");
        rig.assert_empty();
    }
}

#[test]
fn puts_and_removes_are_fenced_too() {
    for config in [stream_config(), shared_config()] {
        let put = Request::Put(digest(1), local(0, 0, 10));
        for (request, operation) in [(put, Operation::Put), (Request::Remove(digest(1)), Operation::Remove)] {
            let mut rig = Rig::new(config.clone(), 1);
            let batch = rig.submit(&[request]);
            let mut sent = rig.frames();
            if sent[0].operation() == Operation::Reserve {
                // Nothing has changed on the shard yet: it is the commit that may be executed late.
                serve(&mut rig, core::mem::take(&mut sent));
                sent = rig.frames();
            }
            let operation = if sent[0].operation() == Operation::Commit { Operation::Commit } else { operation };
            assert_eq!(sent[0].operation(), operation);
            rig.lose(sent[0].lane);
            rig.run_until(SECOND_NS);
            rig.finish(batch);
            assert_eq!(rig.client.counters().fences, 1, "{operation:?}");
            rig.assert_empty();
        }
    }
}

#[test]
fn a_shared_lane_waits_for_the_acknowledgement_of_a_fence() {
    let mut rig = Rig::new(shared_config(), 1);
    let peer = rig.segment_peer(true);
    // The shared path is unavailable at first, so a write is sent over a stream, and is lost.
    let batch = rig.client.submit(&[write(peer, 1)], SECOND_NS / 2, rig.now_ns).expect("a valid batch");
    for seen in rig.drain() {
        let ClientOutput::Connect { lane, .. } = seen else { panic!("{seen:?}") };
        rig.client.lane_event(lane, LaneEvent::PathUnavailable("not yet"), rig.now_ns);
    }
    let sent = rig.frames();
    assert_eq!(operations(&sent), [(sent[0].lane, Operation::Write)]);
    rig.now_ns = SECOND_NS / 2;
    rig.client.handle_timeout(rig.now_ns);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::DeadlineExceeded, 0, 0)]);
    rig.now_ns += Limits::UNAVAILABLE_NS;
    let batch = rig.submit(&[write(peer, 1)]);
    let told = rig.frames();
    assert_eq!(operations(&told), [(told[0].lane, Operation::Fence)]);
    assert_eq!(named(&told[0]), [number(sent[0].lane)]);
    assert!(rig.ways.is_empty(), "nothing was copied");
    serve(&mut rig, told);
    rig.run();
    assert_eq!(rig.ways.len(), 1);
    assert_eq!(rig.finish(batch), [(Status::Ok, 200_000, 0)]);
    rig.assert_empty();
}

#[test]
fn a_reopened_peer_gets_the_pending_fences() {
    let mut rig = Rig::new(two_lanes(), 1);
    let peer = rig.segment_peer(false);
    let batch = rig.submit(&[write(peer, 1)]);
    let lost = rig.frames()[0].lane;
    assert!(rig.client.close_peer(peer, rig.now_ns));
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Stale, 0, 0)]);
    let peer = rig.segment_peer(false);
    let batch = rig.submit(&[write(peer, 1)]);
    let told = rig.frames();
    assert_eq!((told[0].operation(), named(&told[0])), (Operation::Fence, vec![number(lost)]));
    serve(&mut rig, told);
    rig.run();
    rig.finish(batch);
    rig.assert_empty();
    for _ in 0..2 * Limits::FENCED_PEERS {
        let peer = rig.segment_peer(false);
        rig.submit(&[write(peer, 1)]);
        rig.frames();
        rig.client.close_peer(peer, rig.now_ns);
        rig.run();
        rig.client.router.traffic.network.peers.move_left();
    }
    assert_eq!(rig.client.network().peers.left_fences(), Limits::FENCED_PEERS);
}

#[test]
fn a_peer_that_acknowledges_no_fences_gets_no_further_requests() {
    let mut rig = Rig::new(Config { lanes: 1, ..two_lanes() }, 1);
    let peer = rig.segment_peer(false);
    let mut writes = 0;
    for round in 0..Limits::FENCED + 20 {
        let batch = rig.client.submit(&[write(peer, 1)], rig.now_ns + 1000, rig.now_ns).expect("a valid batch");
        let sent = rig.frames();
        for sent in &sent {
            match sent.operation() {
                // Fences are repeated on each lane, as none was acknowledged.
                Operation::Fence => assert_eq!(named(sent).len(), round),
                Operation::Write => writes += 1,
                other => panic!("{other:?}"),
            }
        }
        rig.now_ns += 1000;
        rig.client.handle_timeout(rig.now_ns);
        rig.run_until(rig.now_ns);
        assert_eq!(rig.finish(batch), [(Status::DeadlineExceeded, 0, 0)]);
        rig.now_ns += SECOND_NS;
    }
    assert_eq!(writes, Limits::FENCED + 1);
    rig.assert_empty();
}

#[test]
fn an_unsolicited_fence_reply_breaks_the_lane() {
    for (count, status) in [(2, Status::Ok), (u64::MAX, Status::Ok), (1, Status::BadRequest)] {
        let mut rig = Rig::new(two_lanes(), 1);
        let peer = rig.segment_peer(false);
        let batch = rig.submit(&[write(peer, 1)]);
        let lost = rig.frames()[0].lane;
        rig.lose(lost);
        rig.now_ns += SECOND_NS / 10;
        rig.client.handle_timeout(rig.now_ns);
        let told = rig.frames();
        assert_eq!((told[0].operation(), told[0].header.request), (Operation::Fence, RequestId::from_bits(1)));
        rig.place(&bare(told[0].lane, Operation::Fence, RequestId::from_bits(count), status));
        let reset =
            rig.drain().into_iter().any(|seen| matches!(seen, ClientOutput::Reset(lane) if lane == told[0].lane));
        assert!(reset);
        rig.lose(told[0].lane);
        rig.run_until(2 * SECOND_NS);
        assert_eq!(rig.finish(batch), [(Status::Ok, 200_000, 0)]);
        rig.assert_empty();
    }
}
