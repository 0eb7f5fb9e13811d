//! Gathering of small ranges: packing, one reply for all, and the cost of a bad range or a lost lane to the others.

use kvplane_proto::flags::FrameFlags;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::SegmentId;
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{Kind, Operation, ReadItem, RunItem, WriteItem};
use kvplane_proto::status::Status;

use crate::tests::answers::bare;
use crate::tests::rig::{ClientOutput, Reply, Rig, SECOND_NS, SEGMENT_BYTES, SentFrame, local, stream_config};
use crate::{Config, Local, PayloadTo, Request, SegmentTarget};

fn one_lane() -> Config {
    Config { lanes: 1, ..stream_config() }
}

fn target(rig: &mut Rig) -> SegmentTarget {
    let peer = rig.segment_peer(false);
    SegmentTarget {
        peer,
        segment: SegmentId { index: 1, generation: 1 },
        offset: 0,
        shareable: false,
        place: crate::Place::UNKNOWN,
    }
}

fn at(target: SegmentTarget, offset: u64) -> SegmentTarget {
    SegmentTarget { offset, ..target }
}

fn operations(frames: &[SentFrame]) -> Vec<Operation> {
    frames.iter().map(SentFrame::operation).collect()
}

/// Serves these frames honestly, and everything that follows.
fn serve(rig: &mut Rig, frames: Vec<SentFrame>) {
    frames.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
    rig.run();
}

/// Returns the refusal of a gathered request because of one of its ranges.
fn refusal(sent: &SentFrame, status: Status, bad: u64) -> Reply {
    let mut reply = bare(sent.lane, sent.operation(), sent.header.request, status);
    reply.header.argument = bad;
    reply
}

#[test]
fn evenly_spaced_reads_are_one_run_and_one_answer() {
    let mut rig = Rig::new(one_lane(), 1);
    let there = target(&mut rig);
    let reads: Vec<Request> =
        (0..50).map(|n| Request::Read(at(there, 10 + n * 8192), local(3, n * 5000, 4096))).collect();
    let batch = rig.submit(&reads);
    let frames = rig.frames();
    assert_eq!(operations(&frames), [Operation::ReadMany]);
    let run = RunItem { segment: there.segment, offset: 10, stride_bytes: 8192, bytes: 4096, ranges: 50 };
    assert_eq!(frames[0].items::<RunItem>(), [run]);
    assert_eq!((frames[0].header.flags, frames[0].payload.as_slice()), (FrameFlags::SUM_REPLIES, &[][..]));
    let reply = rig.answers(&frames[0]).remove(0);
    let (slice, locals) = rig.receive(&reply).expect("a payload is wanted");
    assert_eq!(locals, (0..50).map(|n| local(3, n * 5000, 4096)).collect::<Vec<_>>());
    assert!(rig.drain().is_empty(), "nothing is done before the payload is there");
    rig.client.payload_done(slice, Some(reply.sum), 2);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, 4096, 0); 50]);
    rig.assert_empty();
}

#[test]
fn writes_of_any_place_and_length_are_packed_in_order() {
    let mut rig = Rig::new(one_lane(), 1);
    let there = target(&mut rig);
    let ranges = [(500u64, 0u64, 10u64), (100, 10, 10), (400, 20, 7), (408, 100, 7), (416, 107, 7)];
    let writes: Vec<Request> = ranges
        .iter()
        .map(|&(remote, offset, bytes)| Request::Write(at(there, remote), local(3, offset, bytes)))
        .collect();
    let batch = rig.submit(&writes);
    let frames = rig.frames();
    assert_eq!(operations(&frames), [Operation::WriteMany]);
    let run =
        |offset, stride_bytes, bytes, ranges| RunItem { segment: there.segment, offset, stride_bytes, bytes, ranges };
    assert_eq!(frames[0].items::<RunItem>(), [run(500, 0, 10, 1), run(100, 0, 10, 1), run(400, 8, 7, 3)]);
    // Adjacent ranges of the caller's memory are sent as one.
    assert_eq!(frames[0].payload, [local(3, 0, 27), local(3, 100, 14)]);
    assert_eq!((frames[0].header.payload_bytes, frames[0].header.flags), (41, FrameFlags::CHECKSUM));
    serve(&mut rig, frames);
    let wanted: Vec<_> = ranges.iter().map(|range| (Status::Ok, range.2, 0)).collect();
    assert_eq!(rig.finish(batch), wanted);
    rig.assert_empty();
}

#[test]
fn large_and_single_ranges_are_not_gathered() {
    let mut rig = Rig::new(Config { gather_range_bytes: 100, ..one_lane() }, 1);
    let there = target(&mut rig);
    let sizes = [100u64, 101, 5, 102, 103, 1, 2, 3];
    let mut offset = 0;
    let requests: Vec<Request> = sizes
        .iter()
        .map(|&bytes| {
            offset += 1000;
            Request::Read(at(there, offset), local(0, offset, bytes))
        })
        .chain([Request::Write(at(there, 0), local(1, 0, 50))])
        .collect();
    let batch = rig.submit(&requests);
    let frames = rig.frames();
    let wanted =
        [Operation::Read, Operation::Read, Operation::Read, Operation::Read, Operation::ReadMany, Operation::Write];
    assert_eq!(operations(&frames), wanted);
    let items: Vec<u64> = frames[..4].iter().flat_map(|sent| sent.items::<ReadItem>()).map(|item| item.bytes).collect();
    assert_eq!(items, sizes[..5]);
    assert_eq!(frames[5].items::<WriteItem>(), [WriteItem { segment: there.segment, offset: 0 }]);
    serve(&mut rig, frames);
    assert!(rig.finish(batch).iter().all(|result| result.0 == Status::Ok));
    rig.assert_empty();

    let mut rig = Rig::new(Config { gather_range_bytes: 0, ..one_lane() }, 1);
    let there = target(&mut rig);
    let batch = rig.submit(&[1, 2, 3].map(|n| Request::Write(at(there, n * 5), local(0, n, 1))));
    let frames = rig.frames();
    assert_eq!(operations(&frames), [Operation::Write; 3]);
    serve(&mut rig, frames);
    rig.finish(batch);
}

#[test]
fn a_frame_gathers_no_more_than_it_may() {
    let mut rig = Rig::new(Config { slice_bytes: 10_000, gather_range_bytes: 4096, ..one_lane() }, 1);
    let there = target(&mut rig);
    let small: Vec<Request> =
        (0..Limits::RANGES_PER_FRAME as u64 + 5).map(|n| Request::Read(at(there, n * 3), local(0, n, 1))).collect();
    let batch = rig.submit(&small);
    let frames = rig.frames();
    let ranges = |sent: &SentFrame| sent.items::<RunItem>().iter().map(|run| run.ranges as usize).sum::<usize>();
    assert_eq!(frames.iter().map(ranges).collect::<Vec<_>>(), [Limits::RANGES_PER_FRAME, 5]);
    serve(&mut rig, frames);
    rig.finish(batch);
    let blocks: Vec<Request> = (0..5).map(|n| Request::Write(at(there, n * 4096), local(0, n * 8192, 4096))).collect();
    let batch = rig.submit(&blocks);
    let frames = rig.frames();
    assert_eq!(frames.iter().map(|sent| sent.header.payload_bytes).collect::<Vec<_>>(), [8192, 8192, 4096]);
    serve(&mut rig, frames);
    rig.finish(batch);
    rig.assert_empty();
}

#[test]
fn a_bad_range_fails_alone_and_the_others_are_retried() {
    for write in [false, true] {
        let mut rig = Rig::new(one_lane(), 1);
        let there = target(&mut rig);
        let request = |n: u64| {
            let offset = if n == 2 || n == 4 { SEGMENT_BYTES - 1 } else { n * 100 };
            let memory = local(0, n * 10, 10);
            if write { Request::Write(at(there, offset), memory) } else { Request::Read(at(there, offset), memory) }
        };
        let batch = rig.submit(&(0..6).map(request).collect::<Vec<_>>());
        let frames = rig.frames();
        assert_eq!(frames.len(), 1);
        let reply = rig.answers(&frames[0]).remove(0);
        assert_eq!((reply.header.status, reply.header.argument), (Status::OutOfRange, 2));
        rig.deliver(&reply);
        let frames = rig.frames();
        let alone = if write { vec![Operation::Write; 5] } else { vec![Operation::Read] };
        assert_eq!(operations(&frames), alone);
        serve(&mut rig, frames);
        let wanted = [0, 1, 2, 3, 4, 5].map(|n| match n {
            2 | 4 => (Status::OutOfRange, 0, 0),
            _ => (Status::Ok, 10, 0),
        });
        assert_eq!(rig.finish(batch), wanted);
        assert_eq!(rig.client.counters().resets, 0);
        rig.assert_empty();
    }
}

#[test]
fn a_refusal_without_a_bad_range_applies_to_all_gathered_ranges() {
    let mut rig = Rig::new(one_lane(), 1);
    let there = target(&mut rig);
    let writes = [0, 1, 2].map(|n| Request::Write(at(there, n * 100), local(0, n * 10, 10)));
    for (status, again) in [(Status::Unsupported, 0), (Status::Corrupt, 1), (Status::Busy, 0)] {
        let batch = rig.submit(&writes);
        let frames = rig.frames();
        rig.deliver(&refusal(&frames[0], status, 0));
        let frames = rig.frames();
        assert_eq!(frames.len(), again, "{status:?}");
        serve(&mut rig, frames);
        rig.run_until(rig.now_ns + SECOND_NS);
        let wanted = if status == Status::Unsupported { (status, 0, 0) } else { (Status::Ok, 10, 0) };
        assert_eq!(rig.finish(batch), [wanted; 3]);
    }
    rig.assert_empty();
}

#[test]
fn replies_that_violate_the_protocol_end_the_connection() {
    let spoils: [fn(&mut Header); 5] = [
        |header| header.payload_bytes -= 1,
        |header| header.payload_bytes = 0,
        |header| header.flags = FrameFlags::NONE,
        |header| *header = Header { argument: 3, payload_bytes: 0, status: Status::Stale, ..*header },
        |header| header.kind = Kind::Reply(Operation::Read),
    ];
    for spoil in spoils {
        let mut rig = Rig::new(one_lane(), 1);
        let there = target(&mut rig);
        let batch = rig.submit(&[0, 1, 2].map(|n| Request::Read(at(there, n * 100), local(0, n * 10, 10))));
        let frames = rig.frames();
        let mut reply = rig.answers(&frames[0]).remove(0);
        spoil(&mut reply.header);
        assert_eq!(rig.place(&reply), PayloadTo::Discard);
        assert_eq!(rig.client.counters().resets, 1);
        rig.run_until(rig.now_ns + SECOND_NS);
        assert_eq!(rig.finish(batch), [(Status::Ok, 10, 0); 3], "sent again on another connection");
        rig.assert_empty();
    }
}

#[test]
fn a_duplicate_reply_to_gathered_reads_ends_the_connection() {
    let mut rig = Rig::new(one_lane(), 1);
    let there = target(&mut rig);
    let batch = rig.submit(&[0, 1].map(|n| Request::Read(at(there, n * 100), local(0, n * 10, 10))));
    let frames = rig.frames();
    let reply = rig.answers(&frames[0]).remove(0);
    assert!(rig.receive(&reply).is_some());
    assert_eq!(rig.place(&reply), PayloadTo::Discard);
    rig.run_until(rig.now_ns + SECOND_NS);
    assert_eq!(rig.finish(batch), [(Status::Ok, 10, 0); 2]);
    rig.assert_empty();
}

#[test]
fn a_wrong_checksum_retries_all_gathered_ranges_within_the_budget() {
    let mut rig = Rig::new(one_lane(), 1);
    let there = target(&mut rig);
    let batch = rig.submit(&[0, 1].map(|n| Request::Read(at(there, n * 100), local(0, n * 10, 10))));
    for _ in 0..Limits::ATTEMPTS {
        let frames = rig.frames();
        assert_eq!(operations(&frames), [Operation::ReadMany]);
        let reply = rig.answers(&frames[0]).remove(0);
        let (slice, _) = rig.receive(&reply).expect("a payload is wanted");
        rig.client.payload_done(slice, Some(reply.sum + 1), rig.now_ns);
    }
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Corrupt, 0, 0); 2]);
    assert_eq!(rig.client.counters().corrupt, u64::from(Limits::ATTEMPTS), "payloads, not ranges");
    rig.assert_empty();
}

#[test]
fn gathered_ranges_of_a_lost_lane_are_retried() {
    for arriving in [false, true] {
        let mut rig = Rig::new(one_lane(), 1);
        let there = target(&mut rig);
        let batch = rig.submit(&[0, 1, 2].map(|n| Request::Read(at(there, n * 100), local(0, n * 10, 10))));
        let frames = rig.frames();
        let reply = rig.answers(&frames[0]).remove(0);
        let receiving = if arriving { rig.receive(&reply) } else { None };
        rig.lose(frames[0].lane);
        if let Some((slice, _)) = receiving {
            rig.client.payload_done(slice, Some(reply.sum), rig.now_ns);
            assert!(rig.client.scatter(slice).is_empty(), "what comes late goes nowhere");
        }
        rig.run_until(rig.now_ns + SECOND_NS);
        assert_eq!(rig.finish(batch), [(Status::Ok, 10, 0); 3]);
        rig.assert_empty();
    }
}

#[test]
fn ending_a_batch_retries_the_ranges_gathered_with_it() {
    let cancel: fn(&mut Rig, kvplane_proto::ids::BatchId) = |rig, batch| rig.client.cancel(batch, rig.now_ns);
    let expire: fn(&mut Rig, kvplane_proto::ids::BatchId) = |rig, _| {
        rig.now_ns += 2 * SECOND_NS;
        rig.client.handle_timeout(rig.now_ns);
    };
    for (end, status) in [(cancel, Status::Cancelled), (expire, Status::DeadlineExceeded)] {
        for arriving in [false, true] {
            let mut rig = Rig::new(one_lane(), 1);
            let there = target(&mut rig);
            let read = |n: u64| Request::Read(at(there, n * 100), Local { offset: n * 10, ..local(0, 0, 10) });
            let ended = rig.client.submit(&[read(0), read(1)], rig.now_ns + SECOND_NS, rig.now_ns).expect("valid");
            let stays = rig.submit(&[read(2), read(3)]);
            let frames = rig.frames();
            assert_eq!(operations(&frames), [Operation::ReadMany], "both batches share a frame");
            if arriving {
                let reply = rig.answers(&frames[0]).remove(0);
                assert!(rig.receive(&reply).is_some());
            }
            end(&mut rig, ended);
            assert!(!rig.client.batches().is_complete(ended), "its memory may still be written");
            rig.run_until(rig.now_ns + SECOND_NS);
            assert_eq!(rig.finish(ended), [(status, 0, 0); 2]);
            assert_eq!(rig.finish(stays), [(Status::Ok, 10, 0); 2]);
            rig.assert_empty();
        }
    }
}
