//! Tests of segments: rights to read and write ranges, and the return of memory.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{RequestId, SegmentId};
use kvplane_proto::message::{Kind, Operation, ReadItem, SegmentDescriptor, WriteItem};
use kvplane_proto::{FrameFlags, Limits, Status};

use super::rig::{Answer, CHECKSUM, Rig, ServiceOutput, body_of, segment_info};
use crate::service::{CloseReason, Hold, Memory, MemoryExtent, Path, PayloadTo, PeerKey, RegisterError, SegmentInfo};

const BYTES: u64 = 4096;

fn segment(rig: &mut Rig) -> SegmentId {
    rig.service.segments_mut().register(segment_info(0x10000, BYTES)).expect("there is room")
}

fn read(rig: &mut Rig, peer: PeerKey, segment: SegmentId, offset: u64, bytes: u64) -> Answer {
    let item = ReadItem { request: rig.next_request(), segment, offset, bytes };
    rig.ask(peer, Operation::Read, &body_of([item]), 1);
    let answer = rig.answer();
    assert_eq!(answer.header.request, item.request);
    answer
}

fn begin_write(rig: &mut Rig, peer: PeerKey, segment: SegmentId, offset: u64, bytes: u64) -> PayloadTo {
    rig.offer(peer, Operation::Write, &body_of([WriteItem { segment, offset }]), bytes)
}

fn write(rig: &mut Rig, peer: PeerKey, segment: SegmentId, offset: u64, bytes: u64) -> Status {
    begin_write(rig, peer, segment, offset, bytes);
    rig.assert_quiet();
    rig.done(peer);
    rig.answer().status()
}

fn hold_of(answer: &Answer) -> Hold {
    answer.payload.expect("the answer has a payload").1
}

/// Returns the segments reported as unused.
fn unregistered(rig: &mut Rig) -> Vec<SegmentId> {
    let id = |said| match said {
        ServiceOutput::Unregistered(segment) => segment,
        other => panic!("{other:?}"),
    };
    rig.drain().into_iter().map(id).collect()
}

#[test]
fn ranges_are_read_and_written_in_place() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let segment = segment(&mut rig);
    let extent = MemoryExtent { memory: Memory::Segment(segment), offset: 96, bytes: 4000 };
    assert_eq!(begin_write(&mut rig, peer, segment, 96, 4000), PayloadTo::Extent(extent));
    rig.assert_quiet();
    rig.done(peer);
    assert_eq!(rig.answer().status(), Status::Ok);
    let answer = read(&mut rig, peer, segment, 96, 4000);
    assert_eq!((answer.status(), answer.payload.unwrap().0), (Status::Ok, extent));
    assert_eq!(answer.header.checksum(), None, "no checksum was requested");
    rig.service.sent(hold_of(&answer));
    assert_eq!(
        (rig.service.inspect().counters().read_bytes, rig.service.inspect().counters().write_bytes),
        (4000, 4000)
    );
    rig.assert_idle();
}

#[test]
fn a_read_requests_a_checksum_from_the_host_on_request() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let segment = segment(&mut rig);
    let body = body_of([ReadItem { request: RequestId::default(), segment, offset: 0, bytes: 1 }]);
    let mut header = Header::request(Kind::Request(Operation::Read), RequestId::default()).with_body(&body, 1);
    header.flags |= FrameFlags::SUM_REPLIES;
    rig.service.request(peer, &header, &body, rig.now_ns);
    assert_eq!(rig.answer().header.checksum(), Some(0));
}

#[test]
fn a_write_is_checked_if_its_checksum_is_stated() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let segment = segment(&mut rig);
    for computed in [Some(CHECKSUM + 1), None] {
        begin_write(&mut rig, peer, segment, 0, 10);
        rig.service.payload_done(peer, computed, rig.now_ns);
        assert_eq!(rig.answer().status(), Status::Corrupt);
    }
    let body = body_of([WriteItem { segment, offset: 0 }]);
    let header = Header::request(Kind::Request(Operation::Write), RequestId::default())
        .with_body(&body, 1)
        .with_payload(10, None);
    rig.service.request(peer, &header, &body, rig.now_ns);
    rig.service.payload_done(peer, None, rig.now_ns);
    assert_eq!(rig.answer().status(), Status::Ok);
    assert_eq!(rig.service.inspect().counters().corrupt, 2);
    rig.assert_idle();
}

#[test]
fn ranges_outside_the_segment_are_refused() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let segment = segment(&mut rig);
    for (offset, bytes) in [(0, BYTES + 1), (1, BYTES), (BYTES, 1), (u64::MAX, 1), (u64::MAX - 9, 10), (u64::MAX, 4)] {
        assert_eq!(write(&mut rig, peer, segment, offset, bytes), Status::OutOfRange, "{bytes} at {offset}");
        assert_eq!(read(&mut rig, peer, segment, offset, bytes).status(), Status::OutOfRange, "{bytes} at {offset}");
    }
    assert_eq!(read(&mut rig, peer, segment, 1, u64::MAX).status(), Status::OutOfRange);
    assert_eq!(read(&mut rig, peer, segment, 0, 0).status(), Status::OutOfRange);
    rig.ask(peer, Operation::Write, &body_of([WriteItem { segment, offset: 0 }]), 1);
    assert_eq!(rig.answer().status(), Status::Empty);
    rig.assert_idle();
    assert_eq!(write(&mut rig, peer, segment, BYTES - 1, 1), Status::Ok);
}

#[test]
fn no_read_is_longer_than_a_payload() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let limit = Limits::PAYLOAD_BYTES;
    let segment = rig.service.segments_mut().register(segment_info(0, limit * 2)).unwrap();
    assert_eq!(read(&mut rig, peer, segment, 0, limit + 1).status(), Status::BadRequest);
    assert_eq!(read(&mut rig, peer, segment, 1, limit).status(), Status::Ok);
}

#[test]
fn read_only_memory_is_not_written() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let info = SegmentInfo { writable: false, ..segment_info(0, BYTES) };
    let segment = rig.service.segments_mut().register(info).unwrap();
    assert_eq!(write(&mut rig, peer, segment, 0, 10), Status::Unauthorized);
    assert_eq!(read(&mut rig, peer, segment, 0, 10).status(), Status::Ok);
}

#[test]
fn inaccessible_memory_is_neither_listed_nor_used() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let info = SegmentInfo { remote_accessible: false, ..segment_info(0, BYTES) };
    let kept = rig.service.segments_mut().register(info).unwrap();
    let open =
        rig.service.segments_mut().register(SegmentInfo { writable: false, ..segment_info(BYTES, BYTES) }).unwrap();
    let listed = rig.service.inspect().segments().descriptor().regions;
    assert_eq!(listed.iter().map(|region| (region.segment, region.writable)).collect::<Vec<_>>(), [(open, false)]);
    assert_eq!(write(&mut rig, peer, kept, 0, 10), Status::Unauthorized);
    assert_eq!(read(&mut rig, peer, kept, 0, 10).status(), Status::Unauthorized);
    assert!(
        !rig.service.inspect().segments().is_accessible(kept) && rig.service.inspect().segments().info(kept).is_some()
    );
}

#[test]
fn a_write_of_not_one_range_ends_the_connection() {
    let mut rig = Rig::new();
    let segment = segment(&mut rig);
    for items in [0, 2] {
        let peer = rig.join(Path::Stream);
        let body = body_of((0..items).map(|_| WriteItem { segment, offset: 0 }));
        let header = Header::request(Kind::Request(Operation::Write), RequestId::default())
            .with_body(&body, items)
            .with_payload(10, None);
        assert_eq!(rig.service.request(peer, &header, &body, rig.now_ns), PayloadTo::Discard);
        rig.assert_malformed(peer);
    }
    rig.assert_idle();
}

#[test]
fn registered_ranges_do_not_overlap() {
    let mut rig = Rig::new();
    assert_eq!(rig.service.segments_mut().register(segment_info(1000, 0)), Err(RegisterError::Empty));
    rig.service.segments_mut().register(segment_info(1000, 100)).unwrap();
    for (address, bytes) in [(1000, 100), (1099, 1), (999, 2), (0, 5000), (1050, 10), (0, u64::MAX)] {
        let overlap = RegisterError::Overlap { address: 1000, bytes: 100 };
        assert_eq!(
            rig.service.segments_mut().register(segment_info(address, bytes)),
            Err(overlap),
            "{bytes} at {address}"
        );
    }
    rig.service.segments_mut().register(segment_info(900, 100)).unwrap();
    rig.service.segments_mut().register(segment_info(1100, 100)).unwrap();
    // At the end of the address space, and beyond it.
    rig.service.segments_mut().register(segment_info(u64::MAX - 9, 100)).unwrap();
    assert!(rig.service.segments_mut().register(segment_info(u64::MAX, 1)).is_err());
    assert!(rig.service.segments_mut().register(segment_info(5000, u64::MAX)).is_err());
    rig.service.segments_mut().register(segment_info(u64::MAX - 10, 1)).unwrap();
}

#[test]
fn registrations_have_a_limit() {
    let mut rig = Rig::new();
    let limit = Limits::REGIONS_PER_SEGMENT;
    let all: Vec<SegmentId> = (0..limit as u64)
        .map(|at| rig.service.segments_mut().register(segment_info(at * BYTES, BYTES)).unwrap())
        .collect();
    let one_more = segment_info(limit as u64 * BYTES, BYTES);
    assert_eq!(rig.service.segments_mut().register(one_more), Err(RegisterError::TooMany { limit }));
    // All of them fit into the description for a peer.
    let peer = rig.join(Path::Stream);
    rig.ask(peer, Operation::OpenSegment, b"", 0);
    assert_eq!(SegmentDescriptor::decode(&rig.answer().body).unwrap().regions.len(), limit);
    rig.service.unregister(all[7]);
    assert_eq!(unregistered(&mut rig), [all[7]]);
    rig.service.segments_mut().register(one_more).unwrap();
}

#[test]
fn a_segment_is_opened_by_its_name_or_by_none() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let id = segment(&mut rig);
    for name in ["here", ""] {
        rig.ask(peer, Operation::OpenSegment, name.as_bytes(), 1);
        let descriptor = SegmentDescriptor::decode(&rig.answer().body).unwrap();
        assert_eq!((descriptor.name.as_str(), descriptor.regions.len()), ("here", 1));
        let region = descriptor.regions[0];
        assert_eq!((region.segment, region.address, region.bytes), (id, 0x10000, BYTES));
    }
    rig.ask(peer, Operation::OpenSegment, b"there", 1);
    assert_eq!(rig.answer().status(), Status::NotFound);
}

#[test]
fn a_segment_in_use_is_unregistered_with_its_last_user() {
    let mut rig = Rig::new();
    let (one, two) = (rig.join(Path::Stream), rig.join(Path::Stream));
    let segment = segment(&mut rig);
    begin_write(&mut rig, one, segment, 0, 10);
    let reads = [read(&mut rig, two, segment, 0, 10), read(&mut rig, two, segment, 5, 10)];
    rig.service.unregister(segment);
    rig.assert_quiet();
    assert!(!rig.service.inspect().segments().is_accessible(segment));
    assert!(rig.service.inspect().segments().descriptor().regions.is_empty());
    assert_eq!(read(&mut rig, two, segment, 0, 10).status(), Status::Stale, "it takes no new users");
    assert!(rig.service.segments_mut().register(segment_info(0x10000, 1)).is_err(), "its memory is still in use");
    rig.service.sent(hold_of(&reads[1]));
    rig.done(one);
    assert_eq!(rig.answer().status(), Status::Ok);
    rig.service.sent(hold_of(&reads[0]));
    assert_eq!(unregistered(&mut rig), [segment]);
    rig.assert_idle();
}

#[test]
fn the_use_of_a_segment_ends_with_its_writers_connection() {
    let mut rig = Rig::new();
    let segment = segment(&mut rig);
    let honest = rig.join(Path::Stream);
    begin_write(&mut rig, honest, segment, 0, 10);
    rig.gone(honest);
    rig.assert_idle();
    let closed = rig.join(Path::Stream);
    begin_write(&mut rig, closed, segment, 0, 10);
    rig.service.unregister(segment);
    rig.ask(closed, Operation::Exists, &[], 0);
    rig.assert_malformed(closed);
    rig.done(closed);
    rig.assert_quiet();
    rig.gone(closed);
    assert_eq!(unregistered(&mut rig), [segment]);
    rig.assert_idle();
}

#[test]
fn memory_that_is_gone_is_refused_without_closing_the_connection() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let segment = segment(&mut rig);
    begin_write(&mut rig, peer, segment, 0, 10);
    rig.service.writes().refuse(peer, Status::OutOfRange);
    rig.assert_quiet();
    rig.done(peer);
    assert_eq!(rig.answer().status(), Status::OutOfRange);
    let answer = read(&mut rig, peer, segment, 0, 10);
    rig.service.refuse_read(peer, &answer.header, hold_of(&answer), Status::OutOfRange);
    let instead = rig.answer();
    assert_eq!((instead.header.request, instead.status()), (answer.header.request, Status::OutOfRange));
    assert!(instead.payload.is_none());
    rig.service.writes().refuse(peer, Status::OutOfRange);
    rig.assert_quiet();
    assert_eq!(write(&mut rig, peer, segment, 0, 10), Status::Ok);
    // No use is left.
    rig.service.unregister(segment);
    assert_eq!(unregistered(&mut rig), [segment]);
    rig.assert_idle();
}

#[test]
fn a_stale_segment_id_does_not_name_its_successor() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let old = segment(&mut rig);
    rig.service.unregister(old);
    let new = segment(&mut rig);
    assert_eq!((old.index, unregistered(&mut rig)), (new.index, vec![old]));
    assert_eq!(write(&mut rig, peer, old, 0, 10), Status::Stale);
    assert_eq!(read(&mut rig, peer, old, 0, 10).status(), Status::Stale);
    let unknown = SegmentId { index: 77, generation: new.generation };
    assert_eq!(read(&mut rig, peer, unknown, 0, 10).status(), Status::Stale);
    rig.service.unregister(old);
    assert_eq!(unregistered(&mut rig), [old], "a second unregistration is reported at once");
    assert!(
        rig.service.inspect().segments().is_accessible(new) && !rig.service.inspect().segments().is_accessible(old)
    );
    assert_eq!(write(&mut rig, peer, new, 0, 10), Status::Ok);
}

#[test]
fn only_connections_that_use_the_segment_are_closed() {
    let mut rig = Rig::new();
    let [writer, reader, elsewhere, idle] = [(); 4].map(|()| rig.join(Path::Stream));
    let leaving = segment(&mut rig);
    let staying = rig.service.segments_mut().register(segment_info(0x20000, BYTES)).unwrap();
    begin_write(&mut rig, writer, leaving, 0, 10);
    let stuck = [read(&mut rig, reader, leaving, 0, 10), read(&mut rig, reader, leaving, 0, 10)];
    begin_write(&mut rig, elsewhere, staying, 0, 10);
    let over = read(&mut rig, idle, leaving, 0, 10);
    rig.service.sent(hold_of(&over));
    rig.service.unregister(leaving);
    rig.service.evict_users(leaving);
    let closed: Vec<(PeerKey, CloseReason)> = rig
        .drain()
        .into_iter()
        .map(|said| match said {
            ServiceOutput::Close(peer, reason) => (peer, reason),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(closed, [(writer, CloseReason::SegmentGone), (reader, CloseReason::SegmentGone)]);
    rig.gone(writer);
    stuck.iter().for_each(|answer| rig.service.sent(hold_of(answer)));
    rig.gone(reader);
    assert_eq!(unregistered(&mut rig), [leaving]);
    rig.done(elsewhere);
    assert_eq!(rig.answer().status(), Status::Ok);
    rig.assert_idle();
}

#[test]
#[should_panic(expected = "released twice")]
fn a_read_cannot_end_twice() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let segment = segment(&mut rig);
    let holds = [hold_of(&read(&mut rig, peer, segment, 0, 1)), hold_of(&read(&mut rig, peer, segment, 0, 1))];
    rig.service.sent(holds[0]);
    rig.service.sent(holds[0]);
}

/// The ranges with which a foreign engine's address check is tested: inside, outside, over either end, empty, beyond
/// the end of the address space, and over two adjacent regions.
#[test]
fn addresses_are_checked_against_one_region_each() {
    let mut rig = Rig::new();
    let first = rig.service.segments_mut().register(segment_info(0x10000, BYTES)).unwrap();
    let second = rig.service.segments_mut().register(segment_info(0x10000 + BYTES, BYTES)).unwrap();
    let last = rig.service.segments_mut().register(segment_info(u64::MAX - BYTES + 1, BYTES)).unwrap();
    let (start, end) = (0x10000, 0x10000 + 2 * BYTES);
    for (segment, address, bytes, offset) in [
        (first, start, 1, 0),
        (first, start, BYTES, 0),
        (first, start + BYTES - 1, 1, BYTES - 1),
        (second, start + BYTES, BYTES, 0),
        (second, end - 1, 1, BYTES - 1),
        (last, u64::MAX, 1, BYTES - 1),
        (last, u64::MAX - BYTES + 1, BYTES, 0),
    ] {
        let extent = MemoryExtent { memory: Memory::Segment(segment), offset, bytes };
        for write in [false, true] {
            let found = rig.service.segments_mut().acquire_by_address(address, bytes, write);
            assert_eq!(found, Ok((segment, extent)), "{bytes} at {address:#x}");
            rig.service.release_by_address(segment);
        }
    }
    for (address, bytes) in [
        (start, 0),
        (0, 0),
        (0, 1),
        (start - 1, 1),
        (start - 1, 2),
        (start - 1, BYTES),
        (start, BYTES + 1),
        (start + BYTES - 1, 2),
        (start, 2 * BYTES),
        (end - 1, 2),
        (end, 1),
        (start, u64::MAX),
        (start + 1, u64::MAX - start),
        (u64::MAX, 2),
        (u64::MAX, u64::MAX),
        (u64::MAX - BYTES + 1, BYTES + 1),
    ] {
        let found = rig.service.segments_mut().acquire_by_address(address, bytes, false);
        assert_eq!(found, Err(Status::OutOfRange), "{bytes} at {address:#x}");
    }
    rig.assert_idle();
}

#[test]
fn a_use_by_address_is_waited_for() {
    let mut rig = Rig::new();
    let read_only = SegmentInfo { writable: false, ..segment_info(0x10000, BYTES) };
    let segment = rig.service.segments_mut().register(read_only).unwrap();
    assert_eq!(rig.service.segments_mut().acquire_by_address(0x10000, 1, true), Err(Status::Unauthorized));
    let own = SegmentInfo { remote_accessible: false, ..segment_info(0x20000, BYTES) };
    rig.service.segments_mut().register(own).unwrap();
    assert_eq!(rig.service.segments_mut().acquire_by_address(0x20000, 1, false), Err(Status::Unauthorized));
    let (found, _) = rig.service.segments_mut().acquire_by_address(0x10000, 1, false).unwrap();
    rig.service.unregister(segment);
    assert_eq!(unregistered(&mut rig), []);
    assert_eq!(
        rig.service.segments_mut().acquire_by_address(0x10000, 1, false),
        Err(Status::OutOfRange),
        "it is leaving"
    );
    rig.service.release_by_address(found);
    assert_eq!(unregistered(&mut rig), [segment]);
    // The range is free for another region, whose users are counted there.
    let next = rig.service.segments_mut().register(segment_info(0x10000 - 1, BYTES)).unwrap();
    assert_ne!(next, segment);
    let extent = MemoryExtent { memory: Memory::Segment(next), offset: 1, bytes: 1 };
    assert_eq!(rig.service.segments_mut().acquire_by_address(0x10000, 1, true), Ok((next, extent)));
    rig.service.release_by_address(next);
}
