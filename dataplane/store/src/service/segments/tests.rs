//! Tests of segments alone: their users, and the time at which their memory is free.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::message::{Item, Kind, Operation, ReadItem, WriteItem};
use kvplane_proto::{SegmentId, Status};

use super::Segments;
use crate::service::shard::answers::Answers;
use crate::service::shard::sessions::PendingPayload;
use crate::service::types::{CloseReason, Hold, Output, PayloadTo, PeerKey, SegmentInfo};

const PEER: PeerKey = PeerKey { index: 1, generation: 1 };
const INFO: SegmentInfo =
    SegmentInfo { address: 0x10000, bytes: 4096, shareable: false, remote_accessible: true, writable: true };

fn segments() -> (Segments, Answers, SegmentId) {
    let mut segments = Segments::new("name".to_owned(), 7);
    let segment = segments.register(INFO).expect("there is room");
    (segments, Answers::new(), segment)
}

fn request(operation: Operation, item: &impl Item) -> (Header, Vec<u8>) {
    let mut body = Vec::new();
    item.encode(&mut body);
    (Header::request(Kind::Request(operation), RequestId { index: 5, generation: 1 }).with_body(&body, 1), body)
}

fn outputs(answers: &mut Answers) -> Vec<Output> {
    std::iter::from_fn(|| answers.poll(0)).collect()
}

#[test]
fn memory_is_unregistered_when_its_last_read_was_sent() {
    let (mut segments, mut answers, segment) = segments();
    let item = ReadItem { request: RequestId { index: 5, generation: 1 }, segment, offset: 96, bytes: 4000 };
    let (header, body) = request(Operation::Read, &item);
    segments.read(&mut answers, PEER, &header, &body).expect("a good frame");
    let read = outputs(&mut answers);
    let [Output::Frame { payload: Some((_, Hold::Segment { segment: held, read })), .. }] = read[..] else {
        panic!("{read:?}")
    };
    assert_eq!((held, segments.bytes()), (segment, (4000, 0)));
    assert_eq!(segments.readers(segment).collect::<Vec<_>>(), [PEER]);
    segments.unregister(segment, &mut answers.outputs);
    assert!(outputs(&mut answers).is_empty() && segments.info(segment).is_none());
    segments.finish_read(held, read, &mut answers.outputs);
    assert!(matches!(outputs(&mut answers)[..], [Output::Unregistered { segment: gone }] if gone == segment));
}

#[test]
fn a_write_is_answered_by_its_checksum_after_its_payload() {
    for (computed, status) in [(Some(9), Status::Ok), (Some(8), Status::Corrupt), (None, Status::Corrupt)] {
        let (mut segments, mut answers, segment) = segments();
        let (header, body) = request(Operation::Write, &WriteItem { segment, offset: 0 });
        let header = header.with_payload(100, Some(9));
        let write = segments.write(&header, &body).expect("a good frame");
        assert!(matches!(write.to, PayloadTo::Extent(extent) if extent.bytes == 100));
        let is_good = segments.finish_write(&mut answers, PEER, write.pending, computed);
        assert_eq!(is_good, status == Status::Ok);
        let answer = outputs(&mut answers);
        assert!(matches!(&answer[..], [Output::Frame { header, .. }] if header.status == status), "{answer:?}");
        assert_eq!(segments.users(), 0);
    }
}

#[test]
fn a_write_outside_a_segment_is_refused_after_its_payload() {
    let (mut segments, _, segment) = segments();
    let (header, body) = request(Operation::Write, &WriteItem { segment, offset: 4000 });
    let write = segments.write(&header.with_payload(97, None), &body).expect("a good frame");
    assert!(matches!(write.pending, PendingPayload::Refused { status: Status::OutOfRange, .. }));
    assert_eq!((write.to, segments.users()), (PayloadTo::Discard, 0));
    let torn = segments.write(&header, &body[1..]);
    assert!(matches!(torn, Err(CloseReason::Malformed(_))));
}
