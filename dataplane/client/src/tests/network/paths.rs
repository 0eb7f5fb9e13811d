//! Frames that an honest peer receives, over streams and over shared memory.

use kvplane_proto::flags::FrameFlags;
use kvplane_proto::frame::VERSION;
use kvplane_proto::ids::SegmentId;
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{DigestItem, GetItem, Hello, Operation, ReadItem, SegmentDescriptor};
use kvplane_proto::status::Status;

use crate::tests::rig::{ClientOutput, Rig, SECOND_NS, digest, local, shared_config, stream_config};
use crate::{Config, Path, Request, SegmentTarget};

fn every_object_request() -> Vec<Request> {
    vec![
        Request::Exists(digest(1)),
        Request::Exists(digest(9)),
        Request::Prefetch(digest(1)),
        Request::Prefetch(digest(9)),
        Request::Size(digest(1)),
        Request::Size(digest(9)),
        Request::Get(digest(1), local(0, 0, 5000)),
        Request::Get(digest(9), local(0, 5000, 100)),
        Request::Get(digest(2), local(0, 6000, 19)),
        Request::Put(digest(3), local(1, 0, 300)),
        Request::Put(digest(2), local(1, 0, 300)),
        Request::Remove(digest(4)),
        Request::Remove(digest(9)),
    ]
}

fn check_every_object_request(config: Config) {
    let mut rig = Rig::new(config, 1).with_objects(&[(1, 4096), (2, 20), (4, 1)]);
    let batch = rig.submit(&every_object_request());
    assert!(!rig.client.batches().is_complete(batch));
    rig.run();
    let put_version = rig.objects[&digest(3)].version;
    let expected = [
        (Status::Ok, 0, 0),
        (Status::NotFound, 0, 0),
        (Status::Ok, 0, 0),
        (Status::NotFound, 0, 0),
        (Status::Ok, 4096, 0),
        (Status::NotFound, 0, 0),
        (Status::Ok, 4096, 2),
        (Status::NotFound, 0, 0),
        (Status::BufferTooSmall, 20, 0),
        (Status::Ok, 300, put_version),
        (Status::Exists, 0, 0),
        (Status::Ok, 0, 0),
        (Status::NotFound, 0, 0),
    ];
    assert_eq!(rig.finish(batch), expected);
    assert!(!rig.objects.contains_key(&digest(4)));
    rig.assert_empty();
    assert_eq!(rig.client.counters().stale_frames, 0);
}

#[test]
fn requests_of_another_kind_begin_a_new_frame() {
    let mut rig = Rig::new(Config { lanes: 1, ..stream_config() }, 1);
    let asked = [1, 2, 3, 4].map(|number| match number {
        2 | 3 => Request::Prefetch(digest(number)),
        _ => Request::Exists(digest(number)),
    });
    rig.submit(&asked);
    let frames = rig.frames();
    let shapes: Vec<_> = frames.iter().map(|sent| (sent.operation(), sent.header.items, sent.header.flags)).collect();
    let (exists, none) = (Operation::Exists, FrameFlags::NONE);
    assert_eq!(shapes, [(exists, 1, none), (exists, 2, FrameFlags::PREFETCH), (exists, 1, none)]);
}

#[test]
fn every_object_request_over_streams() {
    check_every_object_request(stream_config());
}

#[test]
fn every_object_request_over_shared_memory() {
    check_every_object_request(shared_config());
}

#[test]
fn a_lane_is_connected_after_a_handshake_and_used() {
    let mut rig = Rig::new(stream_config(), 1);
    let batch = rig.submit(&[Request::Exists(digest(1))]);
    let seen = rig.drain();
    let [ClientOutput::Connect { lane, path: Path::Stream }] = seen[..] else { panic!("{seen:?}") };
    rig.client.connected(lane, 1);
    let seen = rig.drain();
    let [ClientOutput::Frame(hello)] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!((hello.operation(), hello.lane), (Operation::Hello, lane));
    let said = Hello::decode(&hello.body).expect("a hello");
    let address = rig.addresses[&lane].clone();
    assert_eq!((said.version_min, said.version_max, said.client, said.lane), (VERSION, VERSION, 7, 0));
    assert_eq!((said.node, said.incarnation, said.shard), (address.node, address.incarnation, address.shard));
    assert_eq!(said.cluster, "test");
    for reply in rig.answers(&hello.clone()) {
        rig.deliver(&reply);
    }
    let seen = rig.drain();
    let [ClientOutput::Frame(exists)] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!((exists.operation(), exists.header.argument), (Operation::Exists, 1), "the map's epoch travels along");
    assert_eq!(exists.header.deadline_us, 9_999_999 + 1);
    rig.act(seen[0].clone());
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::NotFound, 0, 0)]);
    rig.assert_empty();
}

#[test]
fn small_requests_of_one_kind_share_frames_up_to_the_limit() {
    let mut rig = Rig::new(stream_config(), 1);
    let requests: Vec<Request> = (0..10_000).map(|number| Request::Exists(digest(number))).collect();
    let batch = rig.submit(&requests);
    let frames = rig.frames();
    // All lanes together send no more frames than needed, none over the limit, and no key twice.
    assert!(frames.iter().all(|sent| sent.header.items as usize <= Limits::QUESTIONS_PER_FRAME));
    assert!(frames.len() <= 4, "{} frames", frames.len());
    let mut asked: Vec<_> = frames.iter().flat_map(|sent| sent.items::<DigestItem>()).map(|item| item.digest).collect();
    asked.sort_unstable();
    asked.dedup();
    assert_eq!(asked.len(), 10_000);
    frames.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
    rig.run();
    assert_eq!(rig.finish(batch).len(), 10_000);
    rig.assert_empty();
}

#[test]
fn gets_are_answered_one_by_one_in_any_order() {
    let mut rig = Rig::new(Config { lanes: 1, ..stream_config() }, 1).with_objects(&[(1, 11), (2, 22), (3, 33)]);
    let get = |number: u64| Request::Get(digest(number), local(0, number * 100, 100));
    let batch = rig.submit(&[get(1), get(2), get(3)]);
    let frames = rig.frames();
    assert_eq!(frames.len(), 1);
    assert_eq!(frames[0].items::<GetItem>().len(), 3);
    let mut replies = rig.answers(&frames[0]);
    replies.reverse();
    replies.iter().for_each(|reply| rig.deliver(reply));
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, 11, 2), (Status::Ok, 22, 3), (Status::Ok, 33, 4)]);
    rig.assert_empty();
}

#[test]
fn the_window_limits_what_is_outstanding_and_reopens() {
    for shared in [false, true] {
        let base = if shared { shared_config() } else { stream_config() };
        let config = Config { lanes: 1, lane_window_bytes: 1000, ..base };
        let objects: Vec<(u64, u64)> = (0..20).map(|number| (number, 400)).collect();
        let mut rig = Rig::new(config, 1).with_objects(&objects);
        let gets = (0..10).map(|number| Request::Get(digest(number), local(0, number * 400, 400)));
        let puts = (30..40).map(|number| Request::Put(digest(number), local(1, 0, 400)));
        let batch = rig.submit(&gets.chain(puts).collect::<Vec<_>>());
        let mut sent = rig.frames();
        let mut rounds = 0;
        while !sent.is_empty() {
            let asked: usize = sent.iter().filter(|s| s.operation() != Operation::Release).count();
            assert!(
                asked <= 3 && rig.client.network().lanes.iter().all(|lane| lane.load.sent_bytes <= 1200),
                "{asked} at once"
            );
            sent.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
            sent = rig.frames();
            rounds += 1;
        }
        assert!(rounds >= 6, "{rounds} rounds");
        assert_eq!(rig.finish(batch).iter().filter(|result| result.0 == Status::Ok).count(), 20);
        rig.assert_empty();
    }
}

#[test]
fn a_payload_that_ends_after_the_flush_opens_the_window() {
    let mut rig =
        Rig::new(Config { lanes: 1, lane_window_bytes: 1, ..stream_config() }, 1).with_objects(&[(1, 400), (2, 400)]);
    let get = |number: u64| Request::Get(digest(number), local(0, number * 400, 400));
    let batch = rig.submit(&[get(1), get(2)]);
    let first = rig.frames();
    assert_eq!(first.len(), 1);
    let reply = rig.answers(&first[0]).remove(0);
    let crate::PayloadTo::Local { slice, .. } = rig.place(&reply) else { panic!("a payload is wanted") };
    assert!(rig.frames().is_empty(), "the window is full while the payload arrives");
    rig.client.payload_done(slice, Some(reply.sum), 2);
    let second = rig.frames();
    assert_eq!(second.len(), 1, "the second get is sent without another input");
    second.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
    rig.run();
    rig.finish(batch);
    rig.assert_empty();
}

fn target(rig: &mut Rig, shm: bool, offset: u64) -> SegmentTarget {
    let peer = rig.segment_peer(shm);
    SegmentTarget {
        peer,
        segment: SegmentId { index: 1, generation: 1 },
        offset,
        shareable: shm,
        place: crate::Place::UNKNOWN,
    }
}

#[test]
fn large_ranges_are_sliced_and_spread_over_the_lanes() {
    let mut rig = Rig::new(Config { slice_bytes: 1 << 20, post_ahead_ns: SECOND_NS, ..stream_config() }, 1);
    let from = target(&mut rig, false, 10);
    let bytes = (8 << 20) + 1;
    let batch = rig.submit(&[Request::Read(from, local(0, 7, bytes)), Request::Write(from, local(1, 0, bytes))]);
    let frames = rig.frames();
    let reads: Vec<(u32, ReadItem)> = frames
        .iter()
        .filter(|sent| sent.operation() == Operation::Read)
        .flat_map(|sent| sent.items::<ReadItem>().into_iter().map(|item| (sent.lane.index, item)))
        .collect();
    assert_eq!(reads.len(), 8);
    let mut ranges: Vec<(u64, u64)> = reads.iter().map(|(_, item)| (item.offset, item.bytes)).collect();
    ranges.sort_unstable();
    assert_eq!(ranges[0], (10, (1 << 20) - 10), "cut where the target is aligned");
    assert_eq!(ranges[7], (7 << 20, (1 << 20) + 11), "a short rest goes along");
    assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 == pair[1].0));
    let on_first = reads.iter().filter(|(lane, _)| *lane == reads[0].0).count();
    assert_eq!(on_first, 4, "half on each lane");
    let sums = |operation| if operation == Operation::Read { FrameFlags::SUM_REPLIES } else { FrameFlags::CHECKSUM };
    assert!(frames.iter().all(|sent| sent.header.flags == sums(sent.operation())));
    frames.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, bytes, 0), (Status::Ok, bytes, 0)]);
    rig.assert_empty();
}

#[test]
fn segments_are_copied_where_they_can_be_mapped() {
    let mut rig = Rig::new(Config { slice_bytes: 1 << 20, ..shared_config() }, 1);
    let to = target(&mut rig, true, 0);
    let batch = rig.submit(&[Request::Write(to, local(0, 0, 3 << 20))]);
    assert!(rig.frames().is_empty(), "no frame is needed");
    assert_eq!(rig.finish(batch), [(Status::Ok, 3 << 20, 0)]);

    let unshareable = SegmentTarget { shareable: false, ..to };
    let batch = rig.submit(&[Request::Write(unshareable, local(0, 0, 100))]);
    let frames = rig.frames();
    assert_eq!(frames.iter().map(crate::tests::rig::SentFrame::operation).collect::<Vec<_>>(), [Operation::Write]);
    frames.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, 100, 0)]);
    rig.assert_empty();

    let mut rig = Rig::new(Config { stream: false, ..shared_config() }, 1);
    let to = SegmentTarget { shareable: false, ..target(&mut rig, true, 0) };
    let batch = rig.submit(&[Request::Write(to, local(0, 0, 100))]);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Unsupported, 0, 0)], "never another path than the requested one");
    rig.assert_empty();
}

#[test]
fn a_segment_is_opened() {
    let mut rig = Rig::new(stream_config(), 1);
    let peer = rig.segment_peer(false);
    assert_eq!(rig.segment_peer(false), peer, "one address is one peer");
    let batch = rig.submit(&[Request::OpenSegment(peer)]);
    rig.run();
    let description = rig.client.take_description(batch).expect("a description");
    assert_eq!(SegmentDescriptor::decode(&description), Ok(crate::tests::answers::descriptor()));
    assert_eq!(rig.finish(batch), [(Status::Ok, 0, 0)]);
    rig.assert_empty();
}

#[test]
fn a_failed_copy_releases_its_pin_or_reservation() {
    let mut rig = Rig::new(shared_config(), 1).with_objects(&[(1, 100)]);
    let requests = [Request::Get(digest(1), local(0, 0, 100)), Request::Put(digest(2), local(1, 0, 9_000))];
    let batch = rig.submit(&requests);
    assert_eq!(rig.fail_copies(Status::OutOfRange), 2);
    assert_eq!(rig.finish(batch), [(Status::OutOfRange, 0, 0); 2]);
    rig.assert_empty();
}

#[test]
fn a_small_put_alone_is_one_frame_over_shared_memory() {
    for (bytes, along) in [(1, true), (8_192, true), (8_193, false)] {
        let mut rig = Rig::new(shared_config(), 1);
        let batch = rig.submit(&[Request::Put(digest(2), local(1, 0, bytes))]);
        let frames = rig.frames();
        let payload_bytes = frames[0].header.payload_bytes;
        assert_eq!(frames[0].operation(), if along { Operation::Put } else { Operation::Reserve });
        assert_eq!(payload_bytes, if along { bytes } else { 0 });
        frames.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
        rig.run();
        assert_eq!(rig.finish(batch)[0].0, Status::Ok);
        rig.assert_empty();
    }

    // Several puts share their round trips.
    let mut rig = Rig::new(shared_config(), 1);
    let batch = rig.submit(&[Request::Put(digest(2), local(1, 0, 9)), Request::Put(digest(3), local(1, 9, 9))]);
    let frames = rig.frames();
    assert!(matches!(&frames[..], [one] if one.operation() == Operation::Reserve));
    frames.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
    rig.run();
    assert!(rig.finish(batch).iter().all(|result| result.0 == Status::Ok));
    rig.assert_empty();
}
