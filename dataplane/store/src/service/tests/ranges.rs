//! Tests of gathered requests: all or nothing, in order, and in use until the payload was transferred.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{RequestId, SegmentId};
use kvplane_proto::message::{Kind, Operation, RunItem};
use kvplane_proto::{FrameFlags, Limits, Status};
use proptest::prelude::*;

use super::rig::{Answer, CHECKSUM, Rig, ServiceOutput, body_of, segment_info};
use crate::service::{CloseReason, Hold, Memory, MemoryExtent, Path, PayloadTo, PeerKey, SegmentInfo};

const BYTES: u64 = 4096;

fn segment(rig: &mut Rig, at: u64) -> SegmentId {
    rig.service.segments_mut().register(segment_info(at * BYTES, BYTES)).expect("there is room")
}

fn run(segment: SegmentId, offset: u64, stride_bytes: u64, bytes: u32, ranges: u32) -> RunItem {
    RunItem { segment, offset, stride_bytes, bytes, ranges }
}

fn extent(segment: SegmentId, offset: u64, bytes: u64) -> MemoryExtent {
    MemoryExtent { memory: Memory::Segment(segment), offset, bytes }
}

fn sum(runs: &[RunItem]) -> u64 {
    runs.iter().map(|run| u64::from(run.bytes) * u64::from(run.ranges)).sum()
}

fn read(rig: &mut Rig, peer: PeerKey, runs: &[RunItem]) -> Answer {
    rig.ask(peer, Operation::ReadMany, &body_of(runs.iter().copied()), runs.len());
    rig.answer()
}

fn begin_write(rig: &mut Rig, peer: PeerKey, runs: &[RunItem]) -> Vec<MemoryExtent> {
    match rig.offer_many(peer, Operation::WriteMany, &body_of(runs.iter().copied()), runs.len(), sum(runs)) {
        PayloadTo::Discard => Vec::new(),
        PayloadTo::Extent(extent) => panic!("{extent:?} for many ranges"),
        PayloadTo::Extents(range) => rig.service.extents(range).to_vec(),
    }
}

fn write(rig: &mut Rig, peer: PeerKey, runs: &[RunItem]) -> Answer {
    begin_write(rig, peer, runs);
    rig.assert_quiet();
    rig.done(peer);
    rig.answer()
}

fn hold_of(answer: &Answer) -> Hold {
    answer.payload.expect("the answer has a payload").1
}

#[test]
fn ranges_whose_memory_is_gone_are_refused() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let (one, two) = (segment(&mut rig, 0), segment(&mut rig, 1));
    let runs = [run(one, 0, 100, 10, 3), run(two, 8, 8, 8, 10)];
    begin_write(&mut rig, peer, &runs);
    rig.service.writes().refuse(peer, Status::OutOfRange);
    rig.assert_quiet();
    rig.done(peer);
    assert_eq!(rig.answer().status(), Status::OutOfRange);
    let answer = read(&mut rig, peer, &runs);
    rig.service.refuse_read(peer, &answer.header, hold_of(&answer), Status::OutOfRange);
    let instead = rig.answer();
    assert_eq!((instead.header.request, instead.status()), (answer.header.request, Status::OutOfRange));
    assert_eq!(write(&mut rig, peer, &runs).status(), Status::Ok);
    rig.assert_idle();
}

#[test]
fn ranges_are_sent_in_order_and_adjacent_ones_are_merged() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let (one, two) = (segment(&mut rig, 0), segment(&mut rig, 1));
    let runs = [run(one, 0, 100, 10, 3), run(two, 8, 8, 8, 100), run(two, 808, 0, 2, 1), run(one, 0, 0, 5, 1)];
    let extents =
        [extent(one, 0, 10), extent(one, 100, 10), extent(one, 200, 10), extent(two, 8, 802), extent(one, 0, 5)];
    let answer = read(&mut rig, peer, &runs);
    assert_eq!((answer.status(), answer.extents.as_slice()), (Status::Ok, &extents[..]));
    assert_eq!((answer.header.payload_bytes, answer.header.checksum()), (837, None));
    rig.service.sent(hold_of(&answer));
    assert_eq!(begin_write(&mut rig, peer, &runs), extents);
    rig.assert_quiet();
    rig.done(peer);
    let answer = rig.answer();
    assert_eq!((answer.status(), answer.header.argument), (Status::Ok, 0));
    assert_eq!((rig.service.inspect().counters().read_bytes, rig.service.inspect().counters().write_bytes), (837, 837));
    rig.assert_idle();
}

#[test]
fn a_bad_range_refuses_the_frame_and_its_index_is_reported() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let info = SegmentInfo { writable: false, ..segment_info(8 * BYTES, BYTES) };
    let read_only = rig.service.segments_mut().register(info).expect("there is room");
    let (good, gone) = (segment(&mut rig, 0), segment(&mut rig, 1));
    rig.service.unregister(gone);
    rig.drain();
    let first = run(good, 0, 10, 10, 5);
    let cases = [
        (run(gone, 0, 0, 1, 1), Status::Stale, 5),
        (run(SegmentId { index: 999, generation: 1 }, 0, 0, 1, 1), Status::Stale, 5),
        (run(good, BYTES, 0, 1, 1), Status::OutOfRange, 5),
        (run(good, BYTES - 30, 10, 10, 4), Status::OutOfRange, 8),
        (run(good, u64::MAX, u64::MAX, 1, 2), Status::OutOfRange, 5),
        (run(good, 1, u64::MAX, 1, 2), Status::OutOfRange, 6),
    ];
    for (bad, status, index) in cases {
        let runs = [first, bad, first];
        let answer = read(&mut rig, peer, &runs);
        assert_eq!((answer.status(), answer.header.argument), (status, index), "{bad:?}");
        assert_eq!((answer.header.payload_bytes, answer.payload), (0, None));
        assert_eq!(begin_write(&mut rig, peer, &runs), [], "nothing is written");
        rig.assert_quiet();
        rig.done(peer);
        let answer = rig.answer();
        assert_eq!((answer.status(), answer.header.argument), (status, index), "{bad:?}");
        rig.assert_idle();
    }
    let answer = write(&mut rig, peer, &[first, run(read_only, 0, 0, 1, 1)]);
    assert_eq!((answer.status(), answer.header.argument), (Status::Unauthorized, 5));
    let answer = read(&mut rig, peer, &[first, run(read_only, 0, 0, 1, 1)]);
    assert_eq!(answer.status(), Status::Ok);
    rig.service.sent(hold_of(&answer));
    assert_eq!((rig.service.inspect().counters().read_bytes, rig.service.inspect().counters().write_bytes), (51, 0));
    rig.assert_idle();
}

#[test]
fn malformed_gathered_requests_end_the_connection() {
    let mut rig = Rig::new();
    let segment = segment(&mut rig, 0);
    let ranges = Limits::RANGES_PER_FRAME as u32;
    let bytes = Limits::GATHER_BYTES as u32;
    let bodies = [
        vec![run(segment, 0, 0, 0, 1)],
        vec![run(segment, 0, 0, 1, 0)],
        vec![run(segment, 0, 0, 1, ranges), run(segment, 0, 0, 1, 1)],
        vec![run(segment, 0, 0, bytes, 1), run(segment, 0, 0, 1, 1)],
        vec![run(segment, 0, 0, u32::MAX, u32::MAX); 9],
        vec![],
    ];
    for runs in bodies {
        for (operation, payload) in [(Operation::ReadMany, 0), (Operation::WriteMany, sum(&runs[..runs.len().min(1)]))]
        {
            let peer = rig.join(Path::Stream);
            let body = body_of(runs.iter().copied());
            let header = Header::request(Kind::Request(operation), RequestId::default())
                .with_body(&body, runs.len())
                .with_payload(payload, None);
            assert_eq!(rig.service.request(peer, &header, &body, rig.now_ns), PayloadTo::Discard);
            rig.assert_malformed(peer);
            rig.gone(peer);
        }
    }
    for bytes in [0, 99, 101, u64::MAX] {
        let peer = rig.join(Path::Stream);
        rig.offer_many(peer, Operation::WriteMany, &body_of([run(segment, 0, 10, 10, 10)]), 1, bytes);
        rig.assert_malformed(peer);
        rig.gone(peer);
    }
    rig.assert_idle();
}

#[test]
fn the_largest_gathered_request_is_served() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let large = rig.service.segments_mut().register(segment_info(1 << 40, 1 << 30)).expect("there is room");
    let ranges = Limits::RANGES_PER_FRAME as u32;
    let bytes = (Limits::GATHER_BYTES / u64::from(ranges)) as u32;
    let answer = read(&mut rig, peer, &[run(large, 0, 4 * u64::from(bytes), bytes, ranges)]);
    assert_eq!((answer.status(), answer.extents.len()), (Status::Ok, Limits::RANGES_PER_FRAME));
    let alone: Vec<RunItem> = (0..u64::from(ranges)).map(|n| run(large, n * 8192, 0, bytes, 1)).collect();
    assert_eq!(begin_write(&mut rig, peer, &alone).len(), Limits::RANGES_PER_FRAME);
}

#[test]
fn checksums_are_filled_in_and_checked_on_request() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let segment = segment(&mut rig, 0);
    let runs = [run(segment, 0, 20, 10, 2)];
    let body = body_of(runs);
    let mut header = Header::request(Kind::Request(Operation::ReadMany), RequestId::default()).with_body(&body, 1);
    header.flags |= FrameFlags::SUM_REPLIES;
    rig.service.request(peer, &header, &body, rig.now_ns);
    let answer = rig.answer();
    assert_eq!(answer.header.checksum(), Some(0), "the host fills it in");
    rig.service.sent(hold_of(&answer));
    for (computed, status) in
        [(Some(CHECKSUM + 1), Status::Corrupt), (None, Status::Corrupt), (Some(CHECKSUM), Status::Ok)]
    {
        begin_write(&mut rig, peer, &runs);
        rig.service.payload_done(peer, computed, rig.now_ns);
        assert_eq!(rig.answer().status(), status);
    }
    assert_eq!(rig.service.inspect().counters().corrupt, 2);
    rig.assert_idle();
}

#[test]
fn memory_is_unregistered_after_the_last_gathered_payload() {
    let mut rig = Rig::new();
    let (reader, writer) = (rig.join(Path::Stream), rig.join(Path::Stream));
    let (one, two) = (segment(&mut rig, 0), segment(&mut rig, 1));
    let runs = [run(one, 0, 20, 10, 2), run(two, 0, 20, 10, 2), run(one, 100, 0, 1, 1)];
    let answer = read(&mut rig, reader, &runs);
    begin_write(&mut rig, writer, &runs);
    rig.service.unregister(one);
    rig.service.unregister(two);
    rig.assert_quiet();
    let refused = read(&mut rig, reader, &runs[..1]);
    assert_eq!((refused.status(), refused.header.argument), (Status::Stale, 0));
    rig.service.sent(hold_of(&answer));
    rig.assert_quiet();
    rig.gone(writer);
    let mut over: Vec<SegmentId> = rig
        .drain()
        .into_iter()
        .map(|said| match said {
            ServiceOutput::Unregistered(segment) => segment,
            other => panic!("{other:?}"),
        })
        .collect();
    over.sort_unstable();
    assert_eq!(over, [one, two]);
    rig.assert_idle();
}

#[test]
fn slow_gathered_requests_on_an_unregistered_segment_are_closed() {
    let mut rig = Rig::new();
    let (reader, writer, bystander) = (rig.join(Path::Stream), rig.join(Path::Stream), rig.join(Path::Stream));
    let (one, two) = (segment(&mut rig, 0), segment(&mut rig, 1));
    let runs = [run(two, 0, 20, 10, 2), run(one, 0, 20, 10, 2)];
    let answer = read(&mut rig, reader, &runs);
    let other = read(&mut rig, bystander, &runs[..1]);
    begin_write(&mut rig, writer, &runs);
    rig.service.unregister(one);
    rig.service.evict_users(one);
    let mut closed: Vec<PeerKey> = rig
        .drain()
        .into_iter()
        .map(|said| match said {
            ServiceOutput::Close(peer, CloseReason::SegmentGone) => peer,
            other => panic!("{other:?}"),
        })
        .collect();
    closed.sort_unstable();
    assert_eq!(closed, [reader, writer]);
    rig.gone(reader);
    rig.gone(writer);
    rig.assert_quiet();
    rig.service.sent(hold_of(&answer));
    assert!(matches!(rig.drain()[..], [ServiceOutput::Unregistered(segment)] if segment == one));
    rig.service.sent(hold_of(&other));
    rig.assert_idle();
}

fn any_run() -> impl Strategy<Value = RunItem> {
    let word = || prop_oneof![4 => 0u64..5000, 1 => any::<u64>()];
    let short = || prop_oneof![4 => 0u32..600, 1 => any::<u32>()];
    (0u32..3, word(), word(), short(), short()).prop_map(|(index, offset, stride_bytes, bytes, ranges)| RunItem {
        segment: SegmentId { index, generation: index + 1 },
        offset,
        stride_bytes,
        bytes,
        ranges,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_runs_stay_inside_their_segments_and_are_released(
        runs in prop::collection::vec(any_run(), 0..6),
        writes in any::<bool>(),
    ) {
        let mut rig = Rig::new();
        let segments = [segment(&mut rig, 0), segment(&mut rig, 1)];
        let peer = rig.join(Path::Stream);
        let body = body_of(runs.iter().copied());
        let operation = if writes { Operation::WriteMany } else { Operation::ReadMany };
        let bytes = runs.iter().fold(0u64, |sum, run| sum.saturating_add(u64::from(run.bytes) * u64::from(run.ranges)));
        let mut header = Header::request(Kind::Request(operation), RequestId::default()).with_body(&body, runs.len());
        if writes {
            header = header.with_payload(bytes, None);
        }
        let to = rig.service.request(peer, &header, &body, rig.now_ns);
        let mut extents = match to {
            PayloadTo::Extents(range) => rig.service.extents(range).to_vec(),
            _ => Vec::new(),
        };
        rig.service.payload_done(peer, None, rig.now_ns);
        for said in rig.drain() {
            if let ServiceOutput::Answer(answer) = said {
                extents.extend(&answer.extents);
                answer.payload.into_iter().for_each(|(_, hold)| rig.service.sent(hold));
            }
        }
        for extent in &extents {
            prop_assert!(segments.iter().any(|&segment| extent.memory == Memory::Segment(segment)));
            prop_assert!(extent.offset.checked_add(extent.bytes).is_some_and(|end| end <= BYTES));
        }
        prop_assert!(extents.is_empty() || extents.iter().map(|extent| extent.bytes).sum::<u64>() == bytes);
        rig.gone(peer);
        rig.assert_idle();
    }
}
