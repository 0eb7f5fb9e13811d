//! Peers that fail, misbehave or fall silent, and callers that cancel.

use kvplane_proto::flags::FrameFlags;
use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::{Incarnation, RequestId};
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{GetItem, Item, Kind, LookupReply, Operation, ReserveReply, SizeReply, encode_items};
use kvplane_proto::status::Status;

use crate::tests::answers::{bare, single};
use crate::tests::rig::{ClientOutput, Reply, Rig, SECOND_NS, SentFrame, digest, local, shared_config, stream_config};
use crate::{Config, LaneId, PayloadTo, Request};

fn one_lane() -> Config {
    Config { lanes: 1, ..stream_config() }
}

fn get(number: u64) -> Request {
    Request::Get(digest(number), local(0, number * 1000, 1000))
}

fn resets(rig: &mut Rig) -> Vec<LaneId> {
    let lanes =
        rig.drain().into_iter().filter_map(|seen| if let ClientOutput::Reset(lane) = seen { Some(lane) } else { None });
    lanes.collect()
}

/// Loses every connection until this time. Returns the number of attempts to connect.
fn lose_every_connection(rig: &mut Rig, until_ns: u64) -> usize {
    let mut tried = 0;
    for _ in 0..10_000 {
        let seen = rig.drain();
        let quiet = seen.is_empty();
        for seen in seen {
            match seen {
                ClientOutput::Connect { lane, .. } => {
                    tried += 1;
                    rig.lose(lane);
                }
                other => rig.act(other),
            }
        }
        if !quiet {
            continue;
        }
        let Some(at_ns) = rig.client.poll_timeout().filter(|&at_ns| at_ns <= until_ns) else { break };
        rig.now_ns = rig.now_ns.max(at_ns);
        rig.client.handle_timeout(rig.now_ns);
    }
    tried
}

/// An unreachable owner used to be retried within the budget of attempts only: four refused connections took a few
/// milliseconds, so a put failed at once while its owner was being replaced.
#[test]
fn an_unreachable_owner_is_retried_until_the_deadline() {
    let mut rig = Rig::new(stream_config(), 1);
    let batch = rig.submit(&[Request::Exists(digest(1)), get(2), Request::Put(digest(3), local(1, 0, 5))]);
    let tried = lose_every_connection(&mut rig, 11 * SECOND_NS);
    assert!((usize::from(Limits::ATTEMPTS) + 1..=200).contains(&tried), "{tried} connections");
    assert_eq!(rig.finish(batch), [(Status::DeadlineExceeded, 0, 0); 3]);
    assert!(rig.maps_wanted > 1, "newer maps are requested as long as the owner is away");
    rig.assert_empty();
    assert_eq!(rig.client.poll_timeout().filter(|&at_ns| at_ns <= rig.now_ns), None, "no timer is left behind");
}

#[test]
fn an_owner_that_comes_back_late_serves_the_parked_requests() {
    for config in [stream_config(), one_lane(), shared_config()] {
        let mut rig = Rig::new(config, 1).with_objects(&[(1, 500)]);
        let requests = [Request::Exists(digest(1)), get(1), Request::Put(digest(3), local(1, 0, 5))];
        let requests = [&requests[..], &[Request::Size(digest(1)), Request::Remove(digest(1))]].concat();
        let batch = rig.submit(&requests);
        let tried = lose_every_connection(&mut rig, 9 * SECOND_NS);
        assert!(tried > usize::from(Limits::ATTEMPTS), "{tried} connections");
        rig.run_until(10 * SECOND_NS);
        let statuses: Vec<Status> = rig.finish(batch).iter().map(|result| result.0).collect();
        assert_eq!(statuses, [Status::Ok; 5]);
        rig.assert_empty();
    }
}

/// A peer that closes each connection when the request arrives: the request is not resent without backoff.
#[test]
fn a_put_backs_off_from_a_peer_that_closes_its_connections() {
    let mut rig = Rig::new(one_lane(), 1);
    let batch = rig.submit(&[Request::Put(digest(3), local(1, 0, 5))]);
    let mut sent = 0;
    while !rig.client.batches().is_complete(batch) {
        let frames = rig.frames();
        let lanes: Vec<LaneId> = frames.iter().map(|sent| sent.lane).collect();
        sent += frames.iter().filter(|sent| sent.operation() == Operation::Put).count();
        if lanes.is_empty() {
            rig.now_ns = rig.now_ns.max(rig.client.poll_timeout().expect("the deadline at least"));
            rig.client.handle_timeout(rig.now_ns);
        }
        lanes.into_iter().for_each(|lane| rig.lose(lane));
    }
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::DeadlineExceeded, 0, 0)]);
    assert!((usize::from(Limits::ATTEMPTS) + 1..=200).contains(&sent), "{sent} puts");
    rig.assert_empty();
}

#[test]
fn a_timer_without_work_is_not_repeated() {
    let mut rig = Rig::new(one_lane(), 1);
    let batch = rig.client.submit(&[get(1)], 1_000_000, 0).expect("a valid batch");
    let seen = rig.drain();
    let [ClientOutput::Connect { lane, .. }] = seen[..] else { panic!("{seen:?}") };
    rig.lose(lane);
    rig.run();
    assert!(rig.client.poll_timeout().is_some());
    rig.run_until(SECOND_NS);
    assert_eq!(rig.finish(batch), [(Status::DeadlineExceeded, 0, 0)]);
    assert_eq!(rig.client.poll_timeout(), None);
    rig.assert_empty();
}

#[test]
fn a_handshake_timeout_frees_the_lane() {
    let mut rig = Rig::new(one_lane(), 1);
    let batch = rig.client.submit(&[get(1)], 60 * SECOND_NS, 0).expect("a valid batch");
    let seen = rig.drain();
    let [ClientOutput::Connect { lane, .. }] = seen[..] else { panic!("{seen:?}") };
    rig.client.connected(lane, 0);
    rig.drain();
    assert_eq!(rig.client.poll_timeout(), Some(rig.now_ns + Limits::HELLO_NS - 1));
    rig.now_ns = Limits::HELLO_NS;
    rig.client.handle_timeout(rig.now_ns);
    assert_eq!(resets(&mut rig), [lane]);
    rig.lose(lane);
    rig.run_until(10 * SECOND_NS);
    assert_eq!(rig.finish(batch), [(Status::NotFound, 0, 0)]);
    rig.assert_empty();
}

#[test]
fn slices_of_a_lost_lane_are_retried() {
    for config in [stream_config(), shared_config()] {
        let mut rig = Rig::new(config, 1).with_objects(&[(1, 500)]);
        let batch = rig.submit(&[get(1), Request::Put(digest(2), local(1, 0, 100)), Request::Exists(digest(1))]);
        let lanes: Vec<LaneId> = rig.frames().iter().map(|sent| sent.lane).collect();
        for lane in lanes {
            rig.lose(lane);
        }
        rig.run_until(SECOND_NS);
        let results = rig.finish(batch);
        assert_eq!(
            results.iter().map(|r| (r.0, r.1)).collect::<Vec<_>>(),
            [(Status::Ok, 500), (Status::Ok, 100), (Status::Ok, 0)]
        );
        assert!(rig.client.counters().retries >= 3);
        rig.assert_empty();
    }
}

#[test]
fn a_refusal_fails_at_once_with_its_reason() {
    for (status, version) in [(Some(Status::Incompatible), VERSION), (None, VERSION + 1)] {
        let mut rig = Rig::new(one_lane(), 1);
        let batch = rig.submit(&[get(1), Request::Exists(digest(2))]);
        let seen = rig.drain();
        let [ClientOutput::Connect { lane, .. }] = seen[..] else { panic!("{seen:?}") };
        rig.client.connected(lane, 1);
        let mut welcome = rig.welcome(lane);
        welcome.version = version;
        let mut reply = bare(lane, Operation::Hello, RequestId::default(), status.unwrap_or(Status::Ok));
        reply.body = welcome.encode();
        rig.place(&reply);
        rig.run();
        assert_eq!(rig.finish(batch), [(Status::Incompatible, 0, 0); 2]);
        assert_eq!(rig.client.counters().retries, 0);
        rig.assert_empty();
    }
}

#[test]
fn another_incarnation_of_a_node_is_rejected_in_the_handshake() {
    let mut rig = Rig::new(one_lane(), 1);
    let peer = rig.segment_peer(false);
    let batch = rig.submit(&[Request::OpenSegment(peer)]);
    let objects = rig.submit(&[get(1)]);
    for seen in rig.drain() {
        let ClientOutput::Connect { lane, .. } = seen else { panic!("{seen:?}") };
        rig.client.connected(lane, 1);
        let mut reply = bare(lane, Operation::Hello, RequestId::default(), Status::Ok);
        let mut welcome = rig.welcome(lane);
        welcome.incarnation = Incarnation(welcome.incarnation.0 + 1);
        reply.body = welcome.encode();
        rig.place(&reply);
    }
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Stale, 0, 0)], "no other map leads to a segment");
    assert_eq!(rig.maps_wanted, 1, "but one may lead to an object");
    rig.run_until(SECOND_NS);
    assert_eq!(rig.finish(objects), [(Status::NotFound, 0, 0)]);
    rig.assert_empty();
}

#[test]
fn a_deadline_in_flight_completes_only_when_the_lane_is_gone() {
    let requests = [get(1), Request::Put(digest(2), local(1, 0, 9)), Request::Exists(digest(1)), get(3)];
    for (request, receiving) in requests.into_iter().zip([false, false, false, true]) {
        let mut rig = Rig::new(one_lane(), 1).with_objects(&[(3, 5)]);
        let batch = rig.client.submit(&[request], SECOND_NS, 1).expect("a valid batch");
        let sent = rig.frames().remove(0);
        let innocent = rig.submit(&[Request::Size(digest(3))]);
        rig.frames();
        if receiving {
            let reply = rig.answers(&sent).remove(0);
            assert!(matches!(rig.place(&reply), PayloadTo::Local { .. }));
        }
        assert_eq!(rig.client.poll_timeout(), Some(SECOND_NS));
        rig.now_ns = SECOND_NS;
        rig.client.handle_timeout(SECOND_NS);
        assert_eq!(resets(&mut rig), [sent.lane]);
        assert!(!rig.client.batches().is_complete(batch), "the host has not said that its I/O has ended");
        if !receiving {
            for reply in rig.answers(&sent) {
                assert_eq!(rig.place(&reply), PayloadTo::Discard, "what comes late is not let into memory");
            }
        }
        assert!(rig.drain().is_empty());
        rig.lose(sent.lane);
        rig.run_until(2 * SECOND_NS);
        assert_eq!(rig.finish(batch), [(Status::DeadlineExceeded, 0, 0)]);
        assert_eq!(rig.finish(innocent), [(Status::Ok, 5, 0)]);
        rig.assert_empty();
    }
}

#[test]
fn a_deadline_over_shared_memory_waits_for_the_copy_to_end() {
    // Larger than a payload that is sent inside its frame.
    for request in [get(1), Request::Put(digest(2), local(1, 0, 9_000))] {
        let mut rig = Rig::new(shared_config(), 1).with_objects(&[(1, 5)]);
        let batch = rig.client.submit(&[request], SECOND_NS, 1).expect("a valid batch");
        let sent = rig.frames().remove(0);
        rig.act(ClientOutput::Frame(sent.clone()));
        let seen = rig.drain();
        let [ClientOutput::Copy { lane, slice, sum, .. }] = seen[..] else { panic!("{seen:?}") };
        rig.now_ns = SECOND_NS;
        rig.client.handle_timeout(SECOND_NS);
        assert_eq!(resets(&mut rig), [lane]);
        assert!(!rig.client.batches().is_complete(batch));
        rig.client.copied(lane, slice, Ok(sum), SECOND_NS);
        rig.lose(lane);
        rig.run_until(2 * SECOND_NS);
        let status = rig.finish(batch)[0].0;
        assert!(status == Status::DeadlineExceeded || matches!(request, Request::Get(..)) && status == Status::Ok);
        rig.assert_empty();
    }
}

#[test]
fn queued_requests_end_at_their_deadline_without_a_reset() {
    let mut rig = Rig::new(one_lane(), 1);
    let batch = rig.client.submit(&[get(1)], SECOND_NS, 1).expect("a valid batch");
    let seen = rig.drain();
    let [ClientOutput::Connect { lane, .. }] = seen[..] else { panic!("{seen:?}") };
    rig.client.handle_timeout(SECOND_NS);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::DeadlineExceeded, 0, 0)]);
    assert_eq!(rig.client.counters().resets, 0);
    rig.client.connected(lane, SECOND_NS);
    assert_eq!(rig.frames().len(), 0);
    rig.assert_empty();
}

#[test]
fn others_are_not_charged_for_a_deadline_or_a_cancelled_batch() {
    let mut rig = Rig::new(one_lane(), 1).with_objects(&[(2, 5)]);
    let innocent = rig.submit(&[get(2)]);
    for round in 0..2 * u64::from(Limits::ATTEMPTS) {
        let batch = rig.client.submit(&[get(1)], rig.now_ns + 1000, rig.now_ns).expect("a valid batch");
        let frames = rig.frames();
        assert!(!frames.is_empty(), "round {round}");
        if round % 2 == 0 {
            rig.client.cancel(batch, rig.now_ns);
        } else {
            rig.now_ns += 1000;
            rig.client.handle_timeout(rig.now_ns);
        }
        rig.frames();
        let status = if round % 2 == 0 { Status::Cancelled } else { Status::DeadlineExceeded };
        assert_eq!(rig.finish(batch), [(status, 0, 0)]);
        rig.now_ns += SECOND_NS / 10;
        rig.client.handle_timeout(rig.now_ns);
        rig.done.clear();
    }
    rig.run_until(20 * SECOND_NS);
    // Frames that this test drops are retried once their lane is lost.
    let lanes: Vec<LaneId> = rig.addresses.keys().copied().collect();
    lanes.into_iter().for_each(|lane| rig.lose(lane));
    rig.run_until(20 * SECOND_NS);
    assert_eq!(rig.finish(innocent), [(Status::Ok, 5, 3)]);
    rig.assert_empty();
}

#[test]
fn a_cancelled_batch_keeps_its_completed_results() {
    let mut rig = Rig::new(one_lane(), 1).with_objects(&[(1, 5)]);
    let batch = rig.submit(&[Request::Exists(digest(1)), get(2)]);
    let frames = rig.frames();
    rig.act(ClientOutput::Frame(frames[0].clone()));
    rig.client.cancel(batch, 2);
    rig.client.cancel(batch, 2);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, 0, 0), (Status::Cancelled, 0, 0)]);
    rig.client.cancel(batch, 3);
    rig.assert_empty();
}

#[test]
fn stale_answers_are_counted_and_change_nothing() {
    let mut rig = Rig::new(one_lane(), 1).with_objects(&[(1, 5)]);
    let batch = rig.submit(&[get(1), Request::Exists(digest(1))]);
    let frames = rig.frames();
    let replies: Vec<Reply> = frames.iter().flat_map(|sent| rig.answers(sent)).collect();
    replies.iter().for_each(|reply| rig.deliver(reply));
    assert_eq!(rig.client.counters().stale_frames, 0);
    for reply in &replies {
        assert_eq!(rig.place(reply), PayloadTo::Discard);
    }
    let unknown = bare(frames[0].lane, Operation::Get, RequestId { index: 1000, generation: 1 }, Status::Ok);
    rig.place(&unknown);
    let other_lane = LaneId { generation: 77, ..frames[0].lane };
    rig.place(&bare(other_lane, Operation::Get, RequestId::default(), Status::Ok));
    rig.client.lane_gone(other_lane, 1);
    assert_eq!(rig.client.counters().stale_frames, 5);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, 5, 2), (Status::Ok, 0, 0)]);
    rig.assert_empty();
}

#[test]
fn payloads_with_a_wrong_checksum_are_retried_within_the_budget() {
    for good_at in [1, u32::from(Limits::ATTEMPTS)] {
        let mut rig = Rig::new(one_lane(), 1).with_objects(&[(1, 5)]);
        let batch = rig.submit(&[get(1)]);
        let mut asked = 0;
        loop {
            let frames = rig.frames();
            let Some(sent) = frames.first() else { break };
            // The shard is told of the damage, as its memory may be the cause.
            assert_eq!(sent.header.flags.has(FrameFlags::SUM_REPLIES), asked > 0);
            let mut reply = rig.answers(sent).remove(0);
            if asked < good_at {
                reply.sum += 1;
            }
            rig.deliver(&reply);
            asked += 1;
        }
        rig.run();
        let corrupt = good_at == u32::from(Limits::ATTEMPTS);
        assert_eq!(rig.client.counters().corrupt, u64::from(good_at));
        assert_eq!(asked, if corrupt { good_at } else { good_at + 1 });
        assert_eq!(rig.finish(batch), if corrupt { [(Status::Corrupt, 0, 0)] } else { [(Status::Ok, 5, 2)] });
        rig.assert_empty();
    }
}

#[test]
fn no_space_is_reported_and_a_busy_peer_is_retried() {
    let mut rig = Rig::new(one_lane(), 1);
    let batch = rig.submit(&[Request::Put(digest(1), local(0, 0, 5)), Request::Put(digest(2), local(0, 5, 5))]);
    let frames = rig.frames();
    rig.deliver(&single(&frames[0], Status::NoSpace, 0));
    rig.deliver(&single(&frames[1], Status::Busy, 0));
    rig.run();
    assert!(!rig.client.batches().is_complete(batch));
    rig.run_until(SECOND_NS);
    assert_eq!(rig.finish(batch), [(Status::NoSpace, 0, 0), (Status::Ok, 5, 77)]);
    rig.assert_empty();
}

/// A peer may stay busy: the wait is bounded by the deadline only, and the backoff stays short.
#[test]
fn a_busy_peer_is_retried_until_the_deadline() {
    let mut rig = Rig::new(one_lane(), 1);
    let batch = rig.submit(&[Request::Put(digest(1), local(0, 0, 5))]);
    let mut longest_ns = 0;
    for _ in 0..3 * Limits::ATTEMPTS {
        let frames = rig.frames();
        rig.deliver(&single(&frames[0], Status::Busy, 0));
        assert!(!rig.client.batches().is_complete(batch));
        let at_ns = rig.client.poll_timeout().expect("the request is retried");
        longest_ns = longest_ns.max(at_ns - rig.now_ns);
        rig.now_ns = at_ns;
        rig.client.handle_timeout(at_ns);
    }
    assert!(longest_ns <= SECOND_NS / 10, "{longest_ns} ns until the retry");
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, 5, 77)]);
    rig.assert_empty();
}

/// Sends one malformed reply to the first request; the lane must be reset, and the requests retried and answered.
fn check_malformed(config: Config, requests: &[Request], wrong: impl Fn(&mut Rig, &SentFrame) -> Reply) {
    let mut rig = Rig::new(config, 1).with_objects(&[(1, 10), (2, 20)]);
    let batch = rig.submit(requests);
    let frames = rig.frames();
    let reply = wrong(&mut rig, &frames[0]);
    assert_eq!(rig.place(&reply), PayloadTo::Discard);
    let seen = rig.drain();
    assert!(matches!(seen[..], [ClientOutput::Reset(lane)] if lane == reply.lane), "{seen:?}");
    assert!(!rig.client.batches().is_complete(batch));
    rig.lose(reply.lane);
    rig.run_until(SECOND_NS);
    assert!(rig.finish(batch).iter().all(|result| result.0 == Status::Ok));
    rig.assert_empty();
}

fn items<T: Item + Copy>(sent: &SentFrame, item: T, count: usize, stated: usize) -> Reply {
    let mut reply = bare(sent.lane, sent.operation(), sent.header.request, Status::Ok);
    encode_items(core::iter::repeat_n(item, count), &mut reply.body);
    reply.header = reply.header.with_body(&reply.body, stated);
    reply
}

#[test]
fn malformed_answers_reset_the_lane_and_lose_nothing() {
    let size = SizeReply { status: Status::Ok, bytes: 1 };
    let sizes = [Request::Size(digest(1)), Request::Size(digest(2))];
    check_malformed(one_lane(), &sizes, |_, sent| items(sent, size, 1, 1));
    check_malformed(one_lane(), &sizes, |_, sent| items(sent, size, 3, 3));
    check_malformed(one_lane(), &sizes, |_, sent| items(sent, size, 1, 2));
    let exists = [Request::Exists(digest(1)), Request::Exists(digest(2))];
    check_malformed(one_lane(), &exists, |_, sent| items(sent, size, 1, 2));
    check_malformed(one_lane(), &exists, |_, sent| bare(sent.lane, Operation::Remove, sent.header.request, Status::Ok));
    check_malformed(one_lane(), &exists, |_, sent| {
        let header = Header::request(Kind::Request(Operation::Exists), sent.header.request);
        Reply { lane: sent.lane, header, body: Vec::new(), sum: 0 }
    });
    check_malformed(one_lane(), &exists, |rig, sent| {
        let mut again = bare(sent.lane, Operation::Hello, RequestId::default(), Status::Ok);
        again.body = rig.welcome(sent.lane).encode();
        again
    });
}

#[test]
fn payloads_of_a_wrong_kind_reset_the_lane() {
    let payload = |sent: &SentFrame, bytes: u64, sum: Option<u64>| {
        let mut reply = bare(sent.lane, Operation::Get, sent.items::<GetItem>()[0].request, Status::Ok);
        reply.header = reply.header.with_payload(bytes, sum);
        reply
    };
    check_malformed(one_lane(), &[get(1)], |_, sent| payload(sent, 1001, Some(1)));
    check_malformed(one_lane(), &[get(1)], |_, sent| payload(sent, 0, Some(1)));
    check_malformed(one_lane(), &[get(1), get(2)], |_, sent| payload(sent, 10, None));
}

#[test]
fn wrong_answers_over_shared_memory_reset_the_lane() {
    let gets = [get(1), get(2)];
    check_malformed(shared_config(), &gets, |rig, sent| {
        // An object of 0 bytes is invalid; the pin of the other one ends with the connection.
        let mut reply = rig.answers(sent).remove(0);
        let mut answers: Vec<LookupReply> =
            kvplane_proto::message::decode_items(&reply.body, 2).expect("two answers").collect();
        answers[1].bytes = 0;
        // The second item comes first, so that no copy starts before the reset.
        answers.swap(0, 1);
        reply.body.clear();
        encode_items(answers, &mut reply.body);
        reply.header = reply.header.with_body(&reply.body, 2);
        reply
    });
    let puts = [Request::Put(digest(8), local(0, 0, 9_000))];
    check_malformed(shared_config(), &puts, |_, sent| {
        items(sent, ReserveReply { status: Status::Ok, reservation: Default::default(), offset: 0 }, 2, 2)
    });
}
