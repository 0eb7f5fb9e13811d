//! Tests of objects over shared memory.

use kvplane_proto::ids::{PinId, ReservationId, Version};
use kvplane_proto::message::{CommitItem, CommitReply, IdItem, LookupReply, Operation, PutItem, ReserveReply};
use kvplane_proto::{ItemFlags, Limits, Status};

use super::rig::{CHECKSUM, POOL_BYTES, Rig, body_of, digest, digests};
use crate::service::Path;

/// Reserves and commits an object.
fn store_one(rig: &mut Rig, peer: crate::service::PeerKey, key: u8, bytes: u64) -> ReserveReply {
    let reserved = rig.reserve(peer, key, bytes);
    assert_eq!(reserved.status, Status::Ok);
    assert_eq!(rig.commit(peer, reserved.reservation).status, Status::Ok);
    reserved
}

#[test]
fn committed_object_is_found_at_its_reserved_extent() {
    let mut rig = Rig::new();
    let (writer, reader) = (rig.join(Path::Shared), rig.join(Path::Shared));
    let reserved = rig.reserve(writer, 1, 300);
    assert_eq!(reserved.status, Status::Ok);
    assert_eq!(rig.lookup(reader, 1).status, Status::NotFound, "not visible before the commit");
    let commit = rig.commit(writer, reserved.reservation);
    assert_eq!(commit, CommitReply { status: Status::Ok, version: Version(1), flags: ItemFlags::NONE });
    let found = rig.lookup(reader, 1);
    assert_eq!((found.status, found.offset, found.bytes), (Status::Ok, reserved.offset, 300));
    assert_eq!((found.version, found.checksum), (Version(1), CHECKSUM));
    assert_eq!(rig.pins_and_reservations(), (1, 0));
    rig.release(reader, found.pin);
    rig.assert_quiet();
    rig.assert_idle();
    assert_eq!((rig.service.inspect().counters().put_bytes, rig.service.inspect().counters().get_bytes), (300, 300));
}

#[test]
fn batches_are_answered_item_by_item() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Shared);
    store_one(&mut rig, peer, 1, 100);
    let item = |key, bytes| PutItem::plain(digest(key), bytes);
    let reserves = [item(1, 100), item(2, 0), item(3, POOL_BYTES + 1), item(4, u64::MAX), item(5, 10), item(5, 20)];
    rig.ask(peer, Operation::Reserve, &body_of(reserves), 6);
    let replies: Vec<ReserveReply> = rig.answer().items();
    let statuses: Vec<Status> = replies.iter().map(|reply| reply.status).collect();
    let expected = [Status::Exists, Status::Empty, Status::TooLarge, Status::TooLarge, Status::Ok, Status::Ok];
    assert_eq!(statuses, expected);

    let commit = |reply: &ReserveReply| CommitItem { reservation: reply.reservation, checksum: 1 };
    rig.ask(peer, Operation::Commit, &body_of([commit(&replies[5]), commit(&replies[4])]), 2);
    let commits: Vec<CommitReply> = rig.answer().items();
    assert_eq!(commits[0], CommitReply { status: Status::Ok, version: Version(2), flags: ItemFlags::NONE });
    assert_eq!(commits[1], CommitReply { status: Status::Exists, version: Version(0), flags: ItemFlags::NONE });

    rig.ask(peer, Operation::Lookup, &digests([5, 9, 1]), 3);
    let found: Vec<LookupReply> = rig.answer().items();
    assert_eq!((found[0].bytes, found[1].status, found[2].bytes), (20, Status::NotFound, 100));
    rig.ask(peer, Operation::Release, &body_of([2, 0].map(|at: usize| IdItem { id: found[at].pin.to_bits() })), 2);
    rig.assert_quiet();
    rig.assert_idle();
}

#[test]
fn no_object_is_longer_than_a_stream_can_carry() {
    let limit = Limits::PAYLOAD_BYTES;
    let mut rig = Rig::with(super::rig::config(limit * 2));
    let peer = rig.join(Path::Shared);
    assert_eq!(rig.reserve(peer, 1, limit + 1).status, Status::TooLarge);
    assert_eq!(rig.reserve(peer, 1, limit).status, Status::Ok);
}

#[test]
fn an_abort_frees_the_space() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Shared);
    let reserved = rig.reserve(peer, 1, POOL_BYTES);
    assert_eq!(rig.reserve(peer, 2, 10).status, Status::NoSpace);
    rig.abort(peer, reserved.reservation);
    rig.assert_quiet();
    rig.assert_idle();
    assert_eq!(rig.reserve(peer, 2, POOL_BYTES).status, Status::Ok);
}

#[test]
fn pins_and_reservations_of_another_peer_cannot_be_given_back() {
    let mut rig = Rig::new();
    let holder = rig.join(Path::Shared);
    store_one(&mut rig, holder, 1, 100);
    let pin = rig.lookup(holder, 1).pin;
    let reservation = rig.reserve(holder, 2, 100).reservation;
    let tries: [fn(&mut Rig, crate::service::PeerKey, PinId, ReservationId); 3] = [
        |rig, peer, pin, _| rig.release(peer, pin),
        |rig, peer, _, reservation| rig.send_commit(peer, reservation),
        |rig, peer, _, reservation| rig.abort(peer, reservation),
    ];
    for attempt in tries {
        let thief = rig.join(Path::Shared);
        attempt(&mut rig, thief, pin, reservation);
        rig.assert_malformed(thief);
        rig.gone(thief);
        assert_eq!(rig.pins_and_reservations(), (1, 1));
    }
    rig.release(holder, pin);
    assert_eq!(rig.commit(holder, reservation).status, Status::Ok);
    rig.assert_idle();
}

#[test]
fn a_handle_cannot_be_released_twice() {
    let mut rig = Rig::new();
    let writer = rig.join(Path::Shared);
    store_one(&mut rig, writer, 1, 100);
    let pin = rig.lookup(writer, 1).pin;
    rig.ask(writer, Operation::Release, &body_of([IdItem { id: pin.to_bits() }; 2]), 2);
    rig.assert_malformed(writer);

    let committer = rig.join(Path::Shared);
    let reservation = rig.reserve(committer, 2, 100).reservation;
    rig.commit(committer, reservation);
    rig.send_commit(committer, reservation);
    rig.assert_malformed(committer);

    let aborter = rig.join(Path::Shared);
    let reservation = rig.reserve(aborter, 3, 100).reservation;
    rig.abort(aborter, reservation);
    rig.abort(aborter, reservation);
    rig.assert_malformed(aborter);

    let guesser = rig.join(Path::Shared);
    rig.release(guesser, PinId { index: u32::MAX, generation: u32::MAX });
    rig.assert_malformed(guesser);
    rig.assert_idle();
}

#[test]
fn a_peer_that_is_gone_gives_back_what_it_held() {
    let mut rig = Rig::new();
    let (peer, other) = (rig.join(Path::Shared), rig.join(Path::Shared));
    for key in 1..4 {
        store_one(&mut rig, other, key, 100);
        rig.lookup(peer, key);
        rig.lookup(other, key);
        rig.reserve(peer, key + 10, 100);
    }
    let released = rig.lookup(peer, 2).pin;
    rig.release(peer, released);
    assert_eq!(rig.pins_and_reservations(), (6, 3));
    rig.gone(peer);
    assert_eq!(rig.pins_and_reservations(), (3, 0));
    rig.store().check();
    rig.gone(other);
    rig.assert_idle();
    assert_eq!(rig.store().stats().objects, 3);
}

#[test]
fn a_closed_peer_releases_its_handles_when_it_is_gone() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Shared);
    store_one(&mut rig, peer, 1, 100);
    rig.lookup(peer, 1);
    rig.reserve(peer, 2, 100);
    rig.release(peer, PinId::default());
    rig.assert_malformed(peer);
    assert_eq!(rig.pins_and_reservations(), (1, 1), "it may still be reading and writing");
    rig.gone(peer);
    rig.assert_idle();
}

#[test]
fn a_late_put_is_quarantined_until_its_writer_has_stopped() {
    let ends: [fn(&mut Rig, crate::service::PeerKey, ReservationId); 3] = [
        |rig, peer, reservation| {
            let late = rig.commit(peer, reservation);
            assert_eq!(
                late,
                CommitReply { status: Status::DeadlineExceeded, version: Version(0), flags: ItemFlags::NONE }
            );
        },
        |rig, peer, reservation| rig.abort(peer, reservation),
        |rig, peer, _| rig.gone(peer),
    ];
    for end in ends {
        let mut rig = Rig::new();
        let peer = rig.join(Path::Shared);
        let reservation = rig.reserve(peer, 1, POOL_BYTES).reservation;
        assert_eq!(rig.service.poll_timeout(), Some(1_000 + Limits::RESERVATION_NS));
        rig.pass(Limits::RESERVATION_NS);
        rig.assert_quiet();
        assert_eq!(rig.service.poll_timeout(), None);
        let stats = rig.store().stats();
        assert_eq!((stats.quarantined_bytes, stats.expirations), (POOL_BYTES, 1));
        assert_eq!(rig.service.inspect().counters().expired, 1);
        let other = rig.join(Path::Shared);
        assert_eq!(rig.reserve(other, 2, 10).status, Status::NoSpace, "its writer may still be writing");
        end(&mut rig, peer, reservation);
        rig.assert_quiet();
        rig.assert_idle();
        assert_eq!(rig.store().stats().free_bytes, POOL_BYTES);
        assert!(!rig.exists(other, 1));
    }
}

#[test]
fn deadlines_are_those_of_the_puts_in_flight() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Shared);
    let mut held = Vec::new();
    for key in 0..4 {
        held.push(rig.reserve(peer, key, 100).reservation);
        rig.now_ns += 10;
    }
    let at_ns = |after: u64| Some(1_000 + after + Limits::RESERVATION_NS);
    rig.commit(peer, held[1]);
    assert_eq!(rig.service.poll_timeout(), at_ns(0));
    rig.abort(peer, held[0]);
    assert_eq!(rig.service.poll_timeout(), at_ns(20));
    rig.pass(Limits::RESERVATION_NS - 20);
    assert_eq!(rig.service.inspect().counters().expired, 1);
    assert_eq!(rig.service.poll_timeout(), at_ns(30));
    rig.commit(peer, held[3]);
    assert_eq!(rig.service.poll_timeout(), None);
}
