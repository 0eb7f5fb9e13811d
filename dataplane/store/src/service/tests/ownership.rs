//! Tests of ownership: owned slots, and slots that are lost.

use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, Incarnation};
use kvplane_proto::message::{Hello, Kind, Operation};

use super::rig::{POOL_BYTES, Rig, ServiceOutput, digest, digests, hello, pool_place};
use crate::service::{CloseReason, Path, PayloadTo, PeerKey};

const fn all_but_slot_of(key: u8) -> impl Fn(u16) -> bool {
    move |slot| slot != key as u16
}

#[test]
fn the_test_objects_have_slots_of_their_own() {
    assert_eq!(digest(3).slot().0, 3);
}

#[test]
fn keys_of_other_owners_are_answered_with_the_shards_epoch() {
    let mut rig = Rig::new();
    let (stream, shared) = (rig.join(Path::Stream), rig.join(Path::Shared));
    rig.service.set_owned(Epoch(6), all_but_slot_of(2));
    for operation in [Operation::Exists, Operation::Size, Operation::Remove] {
        rig.ask(stream, operation, &digests([1, 2]), 2);
        let answer = rig.answer();
        assert_eq!((answer.status(), answer.header.argument, answer.header.items), (Status::WrongOwner, 6, 0));
    }
    let get = rig.get(stream, 2);
    assert_eq!((get.status(), get.header.argument), (Status::WrongOwner, 6));
    assert_eq!(rig.begin_put(stream, 2, 100), PayloadTo::Discard);
    rig.done(stream);
    let put = rig.answer();
    assert_eq!((put.status(), put.header.argument), (Status::WrongOwner, 6));
    assert_eq!(rig.lookup(shared, 2).status, Status::WrongOwner);
    assert_eq!(rig.reserve(shared, 2, 100).status, Status::WrongOwner);
    assert_eq!(rig.service.inspect().counters().wrong_owner, 7);
    assert_eq!(rig.put(stream, 1, 100).status(), Status::Ok);
    rig.assert_idle();
}

#[test]
fn losing_a_slot_drops_its_objects_and_no_others() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    rig.put(peer, 1, 100);
    rig.put(peer, 2, 100);
    let hold = rig.get(peer, 2).payload.expect("the object's bytes").1;
    rig.service.set_owned(Epoch(6), all_but_slot_of(2));
    rig.service.set_owned(Epoch(7), |_| true);
    assert!(rig.exists(peer, 1));
    assert!(!rig.exists(peer, 2), "what was put elsewhere meanwhile may be newer");
    assert_eq!(rig.store().stats().pins, 1, "the answer under way keeps its bytes");
    rig.service.sent(hold);
    rig.assert_idle();
}

#[test]
fn an_older_map_changes_nothing() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    rig.put(peer, 1, 100);
    rig.service.set_owned(Epoch(4), |_| false);
    assert!(rig.exists(peer, 1));
    rig.service.set_owned(Epoch(5), |_| false);
    rig.ask(peer, Operation::Exists, &digests([1]), 1);
    assert_eq!(rig.answer().status(), Status::WrongOwner);
}

#[test]
fn a_put_in_flight_fails_when_its_slot_is_lost() {
    let mut rig = Rig::new();
    let (stream, shared) = (rig.join(Path::Stream), rig.join(Path::Shared));
    pool_place(rig.begin_put(stream, 1, 100));
    let reserved = rig.reserve(shared, 1, 100);
    rig.service.set_owned(Epoch(6), all_but_slot_of(1));
    rig.done(stream);
    let put = rig.answer();
    assert_eq!((put.status(), put.header.argument), (Status::WrongOwner, 6));
    assert_eq!(rig.commit(shared, reserved.reservation).status, Status::WrongOwner);
    assert_eq!(rig.store().stats().free_bytes, POOL_BYTES);
    rig.service.set_owned(Epoch(7), |_| true);
    assert!(!rig.exists(stream, 1));
    rig.assert_idle();
}

#[test]
fn a_new_incarnation_starts_empty_and_refuses_hellos_to_the_old() {
    let mut rig = Rig::new();
    let (stream, shared, silent) = (rig.join(Path::Stream), rig.join(Path::Shared), rig.connect(Path::Stream));
    rig.put(stream, 1, 100);
    rig.lookup(shared, 1);
    let reserved = rig.reserve(shared, 2, 100);
    pool_place(rig.begin_put(stream, 3, 100));
    rig.service.begin_incarnation(Incarnation(4));
    let closed: Vec<PeerKey> = rig
        .drain()
        .into_iter()
        .map(|said| match said {
            ServiceOutput::Close(peer, CloseReason::Refused(Status::WrongOwner)) => peer,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(closed, [stream, shared, silent]);
    // Late events of the former incarnation change nothing.
    rig.done(stream);
    rig.send_commit(shared, reserved.reservation);
    rig.assert_quiet();
    closed.into_iter().for_each(|peer| rig.gone(peer));
    rig.assert_idle();
    assert_eq!(rig.store().stats().free_bytes, POOL_BYTES);

    // The first map of the new incarnation may be older than the last one of the former.
    rig.service.set_owned(Epoch(2), |_| true);
    let peer = rig.connect(Path::Stream);
    rig.ask(peer, Operation::Hello, &hello().encode(), 1);
    assert_eq!(rig.drain().len(), 2, "a hello to the old incarnation is refused");
    rig.gone(peer);
    let peer = rig.connect(Path::Stream);
    rig.ask(peer, Operation::Hello, &Hello { incarnation: Incarnation(4), ..hello() }.encode(), 1);
    assert_eq!(rig.answer().status(), Status::Ok);
    assert_eq!(rig.put(peer, 1, 100).status(), Status::Ok);
}

#[test]
fn a_client_with_a_newer_map_gets_the_shards_epoch() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    rig.put(peer, 1, 100);
    let body = digests([1]);
    for (epoch, status) in [(4, Status::Ok), (5, Status::Ok), (6, Status::WrongOwner), (5, Status::Ok)] {
        let header = Header::request(Kind::Request(Operation::Exists), rig.next_request());
        let header = header.with_body(&body, 1).with_argument(epoch);
        rig.service.request(peer, &header, &body, rig.now_ns);
        let answer = rig.answer();
        assert_eq!(answer.status(), status, "asked by epoch {epoch}");
        assert_eq!(answer.header.argument, if status == Status::Ok { 0 } else { 5 });
    }
}

#[test]
fn no_object_from_before_a_missed_map_is_trusted() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    rig.put(peer, 1, 100);
    rig.service.set_owned(Epoch(6), |_| true);
    assert!(rig.exists(peer, 1), "no map was missed");
    rig.service.set_owned(Epoch(8), |_| true);
    assert!(!rig.exists(peer, 1), "in epoch 7 it may have been another's");
    assert_eq!(rig.service.inspect().counters().dropped_objects, 1);
    assert_eq!(rig.put(peer, 1, 100).status(), Status::Ok);
    rig.service.set_owned(Epoch(9), all_but_slot_of(1));
    assert_eq!(rig.service.inspect().counters().dropped_objects, 2);
}
