//! Tests of the device pool: which objects move, who waits for it, and what follows from its loss.

use kvplane_proto::Status;
use kvplane_proto::message::{LookupReply, Operation};

use super::rig::{Rig, config, digest, digests};
use crate::service::types::{Memory, Path, PeerKey};
use crate::service::{MoveId, MoveOutcome};
use crate::{PoolMove, StoreConfig};

const KIB: u64 = 1024;

/// Returns a service with room for four objects of 8 KiB in memory, and for two on the device; and a peer.
fn rig() -> (Rig, PeerKey) {
    let config = StoreConfig { device_pool_bytes: 16 * KIB, protected_percent: 80, ..config(32 * KIB) };
    let mut rig = Rig::with(config);
    let peer = rig.join(Path::Stream);
    (rig, peer)
}

/// Gets an object; returns the memory that its bytes are in.
fn get(rig: &mut Rig, peer: PeerKey, key: u8) -> Memory {
    let (extent, hold) = rig.get(peer, key).payload.expect("the object's bytes");
    rig.service.sent(hold);
    extent.memory
}

/// Returns the next move.
fn next(rig: &mut Rig) -> (MoveId, PoolMove) {
    rig.service.device_moves().poll(rig.now_ns).expect("a move")
}

fn assert_no_move(rig: &mut Rig) {
    assert_eq!(rig.service.device_moves().poll(rig.now_ns), None);
}

/// Finishes the next move, of this object.
fn relocate(rig: &mut Rig, key: u8, is_promotion: bool) {
    let (id, one) = next(rig);
    assert_eq!((one.digest, one.is_promotion), (digest(key), is_promotion));
    rig.service.device_moves().finish(id, MoveOutcome::Copied, rig.now_ns);
}

/// Puts an object and gets it until it is in the device pool.
fn promote(rig: &mut Rig, peer: PeerKey, key: u8) {
    rig.put(peer, key, 8 * KIB);
    get(rig, peer, key);
    assert_no_move(rig);
    get(rig, peer, key);
    relocate(rig, key, true);
}

#[test]
fn an_object_that_is_read_again_moves_and_is_read_there() {
    let (mut rig, peer) = rig();
    promote(&mut rig, peer, 1);
    assert_no_move(&mut rig);
    assert_eq!(get(&mut rig, peer, 1), Memory::DevicePool);
    assert_eq!((rig.store().stats().used_bytes, rig.store().stats().device.used_bytes), (0, 8 * KIB));
    assert!(rig.exists(peer, 1));
    rig.put(peer, 2, 8 * KIB);
    assert_eq!(get(&mut rig, peer, 2), Memory::Pool);
    rig.ask(peer, Operation::Remove, &digests([1]), 1);
    assert!(rig.answer().bits()[0]);
    assert_eq!((rig.exists(peer, 1), rig.store().stats().device.used_bytes), (false, 0));
    assert_eq!(rig.service.inspect().counters().device_gets, 1);
    rig.assert_idle();
}

#[test]
fn gets_during_a_move_are_answered_from_where_the_object_is() {
    let (mut rig, peer) = rig();
    rig.put(peer, 1, 8 * KIB);
    get(&mut rig, peer, 1);
    get(&mut rig, peer, 1);
    let (id, _) = next(&mut rig);
    let (extent, hold) = rig.get(peer, 1).payload.expect("the bytes");
    assert_eq!(extent.memory, Memory::Pool);
    rig.service.device_moves().finish(id, MoveOutcome::Copied, rig.now_ns);
    assert_eq!(get(&mut rig, peer, 1), Memory::DevicePool);
    assert_eq!(rig.store().stats().used_bytes, 8 * KIB, "its former place is being sent");
    rig.service.sent(hold);
    assert_eq!(rig.store().stats().used_bytes, 0);
    rig.assert_idle();
}

#[test]
fn short_objects_stay_in_memory() {
    let (mut rig, peer) = rig();
    rig.put(peer, 1, 4095);
    for _ in 0..3 {
        get(&mut rig, peer, 1);
    }
    assert_no_move(&mut rig);
}

#[test]
fn a_full_device_pool_moves_its_coldest_object_back_first() {
    let (mut rig, peer) = rig();
    promote(&mut rig, peer, 1);
    promote(&mut rig, peer, 2);
    get(&mut rig, peer, 1);
    rig.put(peer, 3, 8 * KIB);
    get(&mut rig, peer, 3);
    get(&mut rig, peer, 3);
    let (id, demoted) = next(&mut rig);
    assert_eq!((demoted.digest, demoted.is_promotion), (digest(2), false));
    assert_no_move(&mut rig);
    rig.service.device_moves().finish(id, MoveOutcome::Copied, rig.now_ns);
    relocate(&mut rig, 3, true);
    let extents = [1, 2, 3].map(|key| get(&mut rig, peer, key));
    assert_eq!(extents, [Memory::DevicePool, Memory::Pool, Memory::DevicePool]);
    assert_eq!(rig.store().stats().evictions, 0, "nothing is lost as long as memory has room");
}

#[test]
fn a_peer_that_maps_memory_gets_the_object_when_it_is_back() {
    let (mut rig, peer) = rig();
    let mapper = rig.join(Path::Shared);
    promote(&mut rig, peer, 1);
    rig.ask(mapper, Operation::Lookup, &digests([1, 9]), 2);
    rig.assert_quiet();
    relocate(&mut rig, 1, false);
    let found: Vec<LookupReply> = rig.answer().items();
    assert_eq!((found[0].status, found[0].bytes, found[1].status), (Status::Ok, 8 * KIB, Status::NotFound));
    rig.release(mapper, found[0].pin);
    // Look-ups do not move it there again.
    for _ in 0..3 {
        let found = rig.lookup(mapper, 1);
        rig.release(mapper, found.pin);
    }
    assert_no_move(&mut rig);
    assert_eq!(rig.service.inspect().counters().recalls, 1);
    rig.assert_idle();
}

#[test]
fn a_recall_without_room_in_memory_is_busy() {
    let (mut rig, peer) = rig();
    let mapper = rig.join(Path::Shared);
    promote(&mut rig, peer, 1);
    let holds: Vec<_> = (2..6)
        .map(|key| {
            rig.put(peer, key, 8 * KIB);
            rig.get(peer, key).payload.expect("the bytes").1
        })
        .collect();
    rig.ask(mapper, Operation::Lookup, &digests([1]), 1);
    assert_no_move(&mut rig);
    assert_eq!(rig.answer().items::<LookupReply>()[0].status, Status::Busy);
    holds.into_iter().for_each(|hold| rig.service.sent(hold));
    assert_eq!(get(&mut rig, peer, 1), Memory::DevicePool, "it stays where it is");
    rig.assert_idle();
}

#[test]
fn bytes_that_come_back_damaged_are_a_miss() {
    let (mut rig, peer) = rig();
    let mapper = rig.join(Path::Shared);
    promote(&mut rig, peer, 1);
    rig.ask(mapper, Operation::Lookup, &digests([1]), 1);
    let (id, _) = next(&mut rig);
    rig.service.device_moves().finish(id, MoveOutcome::Corrupt, rig.now_ns);
    assert_eq!(rig.answer().items::<LookupReply>()[0].status, Status::NotFound);
    assert_eq!((rig.service.inspect().counters().corrupt, rig.exists(peer, 1)), (1, false));
    rig.assert_idle();
}

#[test]
fn a_lost_device_costs_its_objects_and_nothing_else() {
    let (mut rig, peer) = rig();
    let mapper = rig.join(Path::Shared);
    promote(&mut rig, peer, 1);
    promote(&mut rig, peer, 2);
    rig.put(peer, 3, 8 * KIB);
    get(&mut rig, peer, 3);
    // One waits to come back, one is on its way back, and one waits to go.
    rig.ask(mapper, Operation::Lookup, &digests([1]), 1);
    let (id, one) = next(&mut rig);
    get(&mut rig, peer, 3);
    rig.ask(mapper, Operation::Lookup, &digests([2]), 1);
    assert_eq!(one.digest, digest(1));
    rig.service.device_moves().lose();
    assert_eq!(rig.answer().items::<LookupReply>()[0].status, Status::NotFound, "the second");
    rig.service.device_moves().finish(id, MoveOutcome::Lost, rig.now_ns);
    assert_eq!(rig.answer().items::<LookupReply>()[0].status, Status::NotFound, "the first");
    assert_no_move(&mut rig);
    assert_eq!([1, 2, 3].map(|key| rig.exists(peer, key)), [false, false, true]);
    for _ in 0..3 {
        assert_eq!(get(&mut rig, peer, 3), Memory::Pool);
    }
    assert_no_move(&mut rig);
    let stats = rig.store().stats();
    assert_eq!((stats.device.pool_bytes, stats.device.lost, stats.quarantined_bytes), (0, 2, 8 * KIB));
    rig.store().check();
    // What the device may still write to is not used again: room for two is left beside the third.
    for key in 4..8 {
        assert_eq!(rig.put(peer, key, 8 * KIB).status(), Status::Ok);
    }
    assert_eq!(rig.store().stats().quarantined_bytes, 8 * KIB);
}

#[test]
fn a_promotion_that_ends_after_the_loss_leaves_its_object_in_memory() {
    let (mut rig, peer) = rig();
    rig.put(peer, 1, 8 * KIB);
    get(&mut rig, peer, 1);
    get(&mut rig, peer, 1);
    let (id, _) = next(&mut rig);
    // A get found the device lost, after the copy was done and before the host looked for its end.
    rig.service.device_moves().lose();
    rig.service.device_moves().finish(id, MoveOutcome::Copied, rig.now_ns);
    assert_eq!(get(&mut rig, peer, 1), Memory::Pool);
    let stats = rig.store().stats();
    assert_eq!((stats.device.objects, stats.device.promotions, stats.quarantined_bytes), (0, 0, 0));
    rig.store().check();
    rig.assert_idle();
}

#[test]
fn a_get_that_a_lost_device_fails_is_a_miss_unless_its_object_is_in_memory() {
    let (mut rig, peer) = rig();
    let mapper = rig.join(Path::Shared);
    promote(&mut rig, peer, 1);
    promote(&mut rig, peer, 2);
    let (_, gone) = rig.get(peer, 1).payload.expect("the bytes");
    let (_, back) = rig.get(peer, 2).payload.expect("the bytes");
    rig.ask(mapper, Operation::Lookup, &digests([2]), 1);
    relocate(&mut rig, 2, false);
    let found: Vec<LookupReply> = rig.answer().items();
    rig.release(mapper, found[0].pin);
    assert_eq!(rig.service.device_moves().lose_read(back), Status::Busy, "it has moved back since");
    assert_eq!(rig.service.device_moves().lose_read(gone), Status::NotFound);
    [gone, back].into_iter().for_each(|hold| rig.service.sent(hold));
    assert_eq!((rig.exists(peer, 1), get(&mut rig, peer, 2)), (false, Memory::Pool));
    rig.assert_idle();
}

#[test]
fn an_object_that_is_removed_during_its_recall_is_a_miss() {
    let (mut rig, peer) = rig();
    let mapper = rig.join(Path::Shared);
    promote(&mut rig, peer, 1);
    rig.ask(mapper, Operation::Lookup, &digests([1]), 1);
    let (id, _) = next(&mut rig);
    rig.ask(peer, Operation::Remove, &digests([1]), 1);
    rig.answer();
    rig.service.device_moves().finish(id, MoveOutcome::Copied, rig.now_ns);
    assert_eq!(rig.answer().items::<LookupReply>()[0].status, Status::NotFound);
    assert_eq!((rig.store().stats().used_bytes, rig.store().stats().device.used_bytes), (0, 0));
    rig.assert_idle();
}
