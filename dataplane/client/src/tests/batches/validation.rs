//! Rejected batches, and those that complete without a request.

use kvplane_proto::ids::SegmentId;
use kvplane_proto::limits::Limits;
use kvplane_proto::status::Status;

use crate::tests::rig::{Rig, SECOND_NS, digest, local, map, push_name, stream_config};
use crate::{Client, PeerId, PutBook, Request, SegmentTarget, SubmitError, SubmitOptions, check_requests};

fn refused(requests: &[Request]) -> SubmitError {
    let mut rig = Rig::new(stream_config(), 1);
    let peer = rig.segment_peer(false);
    assert_eq!(peer, PeerId(0));
    let error = rig.client.submit(requests, SECOND_NS, 0).expect_err("a batch to refuse");
    assert!(!error.to_string().is_empty());
    rig.assert_empty();
    error
}

fn target(peer: u32, offset: u64) -> SegmentTarget {
    SegmentTarget {
        peer: PeerId(peer),
        segment: SegmentId { index: 1, generation: 1 },
        offset,
        shareable: false,
        place: crate::Place::UNKNOWN,
    }
}

#[test]
fn malformed_batches_are_refused_with_the_number_of_the_request() {
    let good = Request::Get(digest(1), local(0, 0, 10));
    assert_eq!(refused(&[]), SubmitError::Empty);
    assert_eq!(refused(&[good, Request::Put(digest(2), local(1, 0, 0))]), SubmitError::ZeroBytes { index: 1 });
    let limit = Limits::PAYLOAD_BYTES;
    let bytes = limit + 1;
    assert_eq!(
        refused(&[good, good, Request::Put(digest(2), local(1, 0, bytes))]),
        SubmitError::TooLarge { index: 2, bytes, limit }
    );
    assert_eq!(refused(&[Request::Read(target(1, 0), local(0, 0, 1))]), SubmitError::UnknownPeer { index: 0 });
    assert_eq!(refused(&[Request::OpenSegment(PeerId(9))]), SubmitError::UnknownPeer { index: 0 });
}

#[test]
fn a_peer_named_by_the_map_only_is_unknown_to_callers() {
    let mut rig = Rig::new(stream_config(), 1);
    let batch = rig.submit(&[Request::Exists(digest(1))]);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::NotFound, 0, 0)]);
    let error = rig.client.submit(&[Request::OpenSegment(PeerId(0))], SECOND_NS, 0);
    assert_eq!(error, Err(SubmitError::UnknownPeer { index: 0 }));
}

#[test]
fn ranges_that_wrap_around_are_refused() {
    let end = u64::MAX - 5;
    let expected = SubmitError::OutOfRange { index: 0 };
    assert_eq!(refused(&[Request::Get(digest(1), local(0, end, 10))]), expected);
    assert_eq!(refused(&[Request::Put(digest(1), local(0, end, 10))]), expected);
    assert_eq!(refused(&[Request::Read(target(0, end), local(0, 0, 10))]), expected);
    assert_eq!(refused(&[Request::Write(target(0, end), local(0, 0, 10))]), expected);
}

#[test]
fn overlapping_destinations_are_refused_and_touching_ones_are_not() {
    let get = |number, offset, bytes| Request::Get(digest(number), local(3, offset, bytes));
    assert_eq!(
        refused(&[get(1, 100, 50), get(2, 0, 10), get(3, 149, 1)]),
        SubmitError::Overlap { first: 0, second: 2 }
    );
    let read = Request::Read(target(0, 0), local(3, 5, 10));
    assert_eq!(refused(&[read, get(2, 0, 6)]), SubmitError::Overlap { first: 0, second: 1 });

    let mut rig = Rig::new(stream_config(), 1).with_objects(&[(1, 50), (2, 50)]);
    let same_source = Request::Put(digest(7), local(3, 0, 100));
    let batch = rig.submit(&[get(1, 0, 50), get(2, 50, 50), same_source]);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, 50, 2), (Status::Ok, 50, 3), (Status::Ok, 100, 77)]);
    rig.assert_empty();
}

#[test]
fn the_number_of_requests_and_of_open_slices_is_limited() {
    let one = Request::Exists(digest(1));
    let requests = Limits::BATCH_REQUESTS + 1;
    let limit = Limits::BATCH_REQUESTS;
    assert_eq!(refused(&vec![one; requests]), SubmitError::TooMany { requests, limit });

    let mut config = stream_config();
    config.slice_bytes = 0;
    let mut rig = Rig::new(config, 1);
    let peer = rig.segment_peer(false);
    let each = (Limits::PAYLOAD_BYTES / Limits::SLICE_BYTES_LEAST) as usize;
    let write = Request::Write(target(peer.0, 0), local(0, 0, Limits::PAYLOAD_BYTES));
    let error = rig.client.submit(&[write; 5], SECOND_NS, 0);
    assert_eq!(error, Err(SubmitError::Busy { open: 0, slices: 5 * each, limit: Limits::OPEN_SLICES }));
    rig.assert_empty();
}

#[test]
fn without_a_map_or_an_owner_requests_fail_at_once() {
    let mut client = Client::new(stream_config());
    let batch = client.submit(&[Request::Exists(digest(1))], SECOND_NS, 0).expect("a valid batch");
    assert_eq!(client.batches().results(batch)[0].status, Status::NoOwner);
    client.set_map(map(1, 0, 1), 0);
    let batch = client.submit(&[Request::Exists(digest(1))], SECOND_NS, 0).expect("a valid batch");
    assert_eq!(client.batches().results(batch)[0].status, Status::NoOwner);
}

#[test]
fn a_batch_whose_deadline_has_passed_sends_nothing() {
    let mut rig = Rig::new(stream_config(), 1);
    let batch = rig.client.submit(&[Request::Exists(digest(1)); 3], 5, 5).expect("a valid batch");
    assert!(rig.frames().is_empty() && rig.addresses.is_empty(), "nothing is connected for it either");
    assert_eq!(rig.finish(batch), [(Status::DeadlineExceeded, 0, 0); 3]);
    rig.assert_empty();
}

#[test]
fn deadlines_of_completed_batches_are_dropped() {
    let mut rig = Rig::new(stream_config(), 1);
    for _ in 0..1000 {
        let batch = rig.submit(&[Request::Exists(digest(1))]);
        rig.run();
        rig.finish(batch);
        rig.done.clear();
    }
    let deadlines = rig.client.network().host.timers.counts()[0];
    assert!(deadlines <= 66, "{deadlines} deadlines");
    rig.assert_empty();
}

#[test]
#[should_panic(expected = "released before it was complete")]
fn an_open_batch_cannot_be_released() {
    let mut rig = Rig::new(stream_config(), 1);
    let batch = rig.submit(&[Request::Exists(digest(1))]);
    rig.client.release(batch);
}

#[test]
fn a_put_without_its_entry_is_refused() {
    let mut rig = Rig::new(stream_config(), 1);
    let mut book = PutBook::new();
    let number = push_name(&mut book, 1, 0);
    let options = SubmitOptions::until(SECOND_NS);
    let puts = [Request::PutAs(digest(1), local(1, 0, 10), number), Request::PutAs(digest(2), local(1, 0, 10), 1)];
    let refused = rig.client.submit_puts(&puts, &book, &options, 1);
    assert_eq!(refused, Err(SubmitError::UnknownPut { index: 1 }));
    rig.client.submit_puts(&puts[..1], &book, &options, 1).expect("a valid batch");
}

#[test]
fn requests_that_go_in_several_batches_are_validated_together() {
    let mut rig = Rig::new(stream_config(), 1);
    assert_eq!(rig.segment_peer(false), PeerId(0));
    let mut book = PutBook::new();
    push_name(&mut book, 1, 0);
    let good = [
        Request::Write(target(0, 0), local(1, 0, 10)),
        Request::PutAs(digest(1), local(1, 0, 10), 0),
        Request::Read(target(0, 0), local(1, 10, 10)),
    ];
    assert_eq!(check_requests(&rig.client, &good, &book), Ok(()));
    let last = |request| check_requests(&rig.client, &[good[0], good[1], good[2], request], &book);
    assert_eq!(last(Request::PutAs(digest(2), local(1, 0, 10), 1)), Err(SubmitError::UnknownPut { index: 3 }));
    assert_eq!(last(Request::Get(digest(2), local(1, 0, 0))), Err(SubmitError::ZeroBytes { index: 3 }));
    assert_eq!(last(Request::Read(target(77, 0), local(1, 20, 1))), Err(SubmitError::UnknownPeer { index: 3 }));
    assert_eq!(last(Request::Write(target(0, u64::MAX), local(1, 0, 2))), Err(SubmitError::OutOfRange { index: 3 }));
    assert_eq!(last(Request::Get(digest(2), local(1, 15, 9))), Err(SubmitError::Overlap { first: 2, second: 3 }));
    assert_eq!(check_requests(&rig.client, &[], &book), Err(SubmitError::Empty));
}
