//! Scheduling: order, shared slices, failover to other paths, and counters.

use kvplane_proto::ids::{BatchId, SegmentId};
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{Operation, ReadItem, WriteItem};
use kvplane_proto::status::Status;

use crate::PutBook;
use crate::sched::{Health, Priority};
use crate::tests::answers::bare;
use crate::tests::rig::{ClientOutput, Rig, SECOND_NS, SentFrame, digest, local, shared_config, stream_config};
use crate::{Config, Intent, Path, Request, SegmentTarget, SubmitOptions, Transport};

fn target(rig: &mut Rig, offset: u64) -> SegmentTarget {
    let peer = rig.segment_peer(false);
    SegmentTarget {
        peer,
        segment: SegmentId { index: 1, generation: 1 },
        offset,
        shareable: false,
        place: crate::Place::UNKNOWN,
    }
}

fn ranges(frames: &[SentFrame]) -> Vec<(u64, u64)> {
    let reads = frames.iter().filter(|sent| sent.operation() == Operation::Read);
    reads.flat_map(SentFrame::items::<ReadItem>).map(|item| (item.offset, item.bytes)).collect()
}

/// Four adjacent reads in one buffer, and one that is apart.
fn touching(rig: &mut Rig) -> Vec<Request> {
    let mut requests: Vec<Request> =
        (0..4).map(|number| Request::Read(target(rig, 100 + number * 50), local(0, number * 50, 50))).collect();
    requests.push(Request::Read(target(rig, 300), local(1, 200, 50)));
    requests
}

#[test]
fn adjacent_requests_share_slices_and_have_separate_results() {
    let mut rig = Rig::new(Config { lanes: 1, gather_range_bytes: 0, ..stream_config() }, 1);
    let requests = touching(&mut rig);
    let batch = rig.submit(&requests);
    let frames = rig.frames();
    assert_eq!(ranges(&frames), [(100, 200), (300, 50)], "another buffer is another slice");
    frames.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, 50, 0); 5]);
    rig.assert_empty();

    let mut rig = Rig::new(Config { lanes: 1, merge: false, gather_range_bytes: 0, ..stream_config() }, 1);
    let requests = touching(&mut rig);
    let batch = rig.submit(&requests);
    assert_eq!(rig.frames().iter().flat_map(SentFrame::items::<ReadItem>).count(), 5, "not where it is not wanted");
    rig.client.cancel(batch, rig.now_ns);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Cancelled, 0, 0); 5]);
    rig.assert_empty();
}

#[test]
fn a_slice_may_span_requests_and_a_request_slices() {
    let config = Config { lanes: 1, slice_bytes: 4096, align_bytes: 1024, gather_range_bytes: 0, ..stream_config() };
    let mut rig = Rig::new(config, 1);
    let sizes = [3000, 9000, 100, 20];
    let mut at = 0;
    let requests: Vec<Request> = sizes
        .iter()
        .map(|&bytes| {
            at += bytes;
            Request::Write(target(&mut rig, 1000 + at - bytes), local(0, at - bytes, bytes))
        })
        .collect();
    let batch = rig.submit(&requests);
    let frames = rig.frames();
    let cuts: Vec<(u64, u64)> =
        frames.iter().map(|sent| (sent.items::<WriteItem>()[0].offset, sent.header.payload_bytes)).collect();
    assert_eq!(cuts, [(1000, 3096), (4096, 4096), (8192, 4928)]);
    frames.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
    rig.run();
    assert_eq!(rig.finish(batch), sizes.map(|bytes| (Status::Ok, bytes, 0)));
    rig.assert_empty();
}

#[test]
fn one_bad_request_does_not_fail_those_that_share_its_slice() {
    let mut rig = Rig::new(Config { lanes: 1, gather_range_bytes: 0, ..stream_config() }, 1);
    let requests = touching(&mut rig);
    let batch = rig.submit(&requests[..4]);
    let frames = rig.frames();
    let whole = frames[0].items::<ReadItem>()[0];
    rig.deliver(&bare(frames[0].lane, Operation::Read, whole.request, Status::OutOfRange));
    let alone = rig.frames();
    assert_eq!(ranges(&alone), [(100, 50), (150, 50), (200, 50), (250, 50)], "each is sent on its own");
    for item in alone.iter().flat_map(SentFrame::items::<ReadItem>) {
        if item.offset == 200 {
            rig.deliver(&bare(alone[0].lane, Operation::Read, item.request, Status::OutOfRange));
        }
    }
    for reply in rig.answers(&alone[0]).into_iter().filter(|reply| reply.header.status == Status::Ok) {
        // The reply to the bad request is stale by now.
        rig.deliver(&reply);
    }
    rig.run();
    let ok = (Status::Ok, 50, 0);
    assert_eq!(rig.finish(batch), [ok, ok, (Status::OutOfRange, 0, 0), ok]);
    rig.assert_empty();
}

fn submit(rig: &mut Rig, requests: &[Request], options: SubmitOptions) -> BatchId {
    rig.client.submit_puts(requests, &PutBook::new(), &options, rig.now_ns).expect("a valid batch")
}

#[test]
fn urgent_slices_overtake_queued_ones() {
    // One slice is in flight at a time.
    let config = Config { lanes: 1, lane_window_bytes: 1, merge: false, gather_range_bytes: 0, ..stream_config() };
    let mut rig = Rig::new(config, 1);
    let until = SubmitOptions::until(rig.now_ns + SECOND_NS);
    let mut batches = Vec::new();
    let mut ask = |rig: &mut Rig, offset: u64, options: SubmitOptions| {
        let request = Request::Read(target(rig, offset), local(offset as u32, 0, 4096));
        batches.push(submit(rig, &[request], options));
    };
    ask(&mut rig, 1, until);
    let first = rig.frames();
    ask(&mut rig, 2, SubmitOptions { intent: Intent::Checkpoint, ..until });
    ask(&mut rig, 3, until);
    ask(&mut rig, 4, SubmitOptions { due_ns: Some(2000), ..until });
    ask(&mut rig, 5, SubmitOptions { due_ns: Some(1000), ..until });
    ask(&mut rig, 6, SubmitOptions { intent: Intent::ForegroundGet, ..until });
    ask(&mut rig, 7, SubmitOptions { intent: Intent::ForegroundGet, priority: Some(Priority::Low), ..until });
    let mut order = Vec::new();
    let mut frames = first;
    while !frames.is_empty() {
        order.extend(ranges(&frames).into_iter().map(|range| range.0));
        frames.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
        frames = rig.frames();
    }
    assert_eq!(order, [1, 6, 5, 4, 3, 2, 7]);
    for batch in batches {
        assert_eq!(rig.finish(batch), [(Status::Ok, 4096, 0)]);
    }
    rig.assert_empty();
}

#[test]
fn the_first_lane_is_reserved_for_small_requests() {
    let config = Config { lanes: 2, post_ahead_ns: 500_000, gather_range_bytes: 0, ..stream_config() };
    let mut rig = Rig::new(config, 1);
    let bulk = Request::Read(target(&mut rig, 0), local(0, 0, 64 << 20));
    let bulk = rig.submit(&[bulk]);
    // Both lanes are full of bulk, then answered for a while.
    let mut frames = rig.frames();
    for round in 0..20 {
        let small = Request::Read(target(&mut rig, round), local(1 + round as u32, 0, 512));
        let small = rig.submit(&[small]);
        let next = rig.frames();
        let asked = next.iter().find(|sent| ranges(&[(*sent).clone()]).iter().any(|range| range.1 == 512));
        let asked = asked.expect("a small one is sent at once").clone();
        if round > 10 {
            let lane = &rig.client.network().lanes[asked.lane.index];
            assert!(lane.load.bound_bytes < 64 << 10, "nothing large is before it");
        }
        rig.act(ClientOutput::Frame(asked.clone()));
        let others = next.into_iter().filter(|sent| sent.body != asked.body);
        for sent in core::mem::take(&mut frames).into_iter().chain(others) {
            rig.act(ClientOutput::Frame(sent));
        }
        frames = rig.frames();
        assert_eq!(rig.finish(small), [(Status::Ok, 512, 0)]);
        rig.now_ns += 500_000;
    }
    rig.client.cancel(bulk, rig.now_ns);
    rig.run();
    rig.finish(bulk);
}

#[test]
fn another_path_takes_over_and_is_counted() {
    let mut rig = Rig::new(Config { slow_ns: 0, ..shared_config() }, 1).with_objects(&[(1, 500)]);
    let batch = rig.submit(&[Request::Get(digest(1), local(0, 0, 500))]);
    let sent = rig.frames().remove(0);
    assert_eq!(sent.operation(), Operation::Lookup);
    rig.lose(sent.lane);
    let again = rig.frames();
    assert_eq!(again[0].operation(), Operation::Get, "over the stream, at once");
    again.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, 500, 2)]);
    let failovers: Vec<_> = rig.client.metrics().failovers().iter().map(|f| (f.from, f.to, f.slices)).collect();
    assert_eq!(failovers, [(Transport::Shm, Transport::Tcp, 1)]);
    let rails: Vec<_> =
        rig.client.metrics().rail_metrics().map(|r| (r.path, r.health, r.counts.operations, r.counts.bytes)).collect();
    assert_eq!(rails, [(Path::Shared, Health::Paused, 0, 0), (Path::Stream, Health::Healthy, 1, 500)]);
    let shared = rig.client.metrics().rail_metrics().next().expect("a rail").counts;
    assert_eq!((shared.retries, shared.failovers, shared.pauses), (1, 1, 1));
    let slow: Vec<_> =
        rig.client.metrics().slow_operations().map(|slow| (slow.transport, slow.attempts, slow.status)).collect();
    assert_eq!(slow, [(Transport::Tcp, 1, Status::Ok)]);
    rig.assert_empty();
}

#[test]
fn retries_beyond_the_budget_wait_instead_of_storming() {
    let mut rig = Rig::new(Config { lanes: 1, gather_range_bytes: 0, ..stream_config() }, 1);
    let count = u64::from(Limits::RETRY_BURST) + 1000;
    let requests: Vec<Request> = (0..count).map(|number| Request::Exists(digest(number))).collect();
    let batch = rig.submit(&requests);
    let mut sent = 0;
    let frames = rig.frames();
    let lane = frames[0].lane;
    sent += frames.iter().map(|frame| u64::from(frame.header.items)).sum::<u64>();
    assert_eq!(sent, count);
    rig.lose(lane);
    rig.now_ns += 6_000_000;
    rig.client.handle_timeout(rig.now_ns);
    let again: u64 = rig.frames().iter().map(|frame| u64::from(frame.header.items)).sum();
    assert!(again <= u64::from(Limits::RETRY_BURST) && again > 0, "{again} at once");
    rig.client.cancel(batch, rig.now_ns);
    rig.run();
    assert_eq!(rig.finish(batch).len() as u64, count);
    rig.assert_empty();
}
