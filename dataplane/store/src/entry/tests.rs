//! Entries keep their values and step through their states as declared.

use kvplane_proto::map::ReplicaSet;

use super::*;
use crate::allocator::Allocator;

fn block() -> Block {
    Allocator::new(256, 1).allocate(1).expect("the pool is empty")
}

#[test]
fn the_lifecycle_is_as_declared() {
    let lines: Vec<_> = LIFECYCLE.iter().map(|(from, on, to)| format!("{from:?} --{on:?}--> {to:?}")).collect();
    assert_eq!(
        lines,
        [
            "Vacant --Reserve--> Reserved",
            "Reserved --Commit--> Live",
            "Reserved --Expire--> Quarantined",
            "Reserved --Release--> Vacant",
            "Quarantined --Release--> Vacant",
            "Live --Doom--> Doomed",
            "Live --Release--> Vacant",
            "Doomed --Release--> Vacant",
        ]
    );
}

#[test]
fn an_entry_keeps_its_values() {
    let mut entries = Entries::new(2);
    let digest = Digest(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
    for head in [false, true] {
        let wanted = Reserve { head, ..Reserve::plain(digest, BYTES_MOST) };
        let id = entries.reserve(&wanted, block());
        entries.commit(id, Version(7), 8);
        let entry = &entries[id];
        assert_eq!((entry.digest(), entry.bytes()), (digest, BYTES_MOST));
        assert_eq!((entry.version(), entry.checksum(), entry.is(Mark::Head)), (Version(7), 8, head));
    }
}

#[test]
fn a_tail_takes_granules_only_where_it_does_not_fit() {
    let granules = |unit_bytes, bytes, tail_bytes| {
        let mut entries = Entries::new(1).in_units(unit_bytes);
        let wanted = Reserve { tail_bytes, has_tail: true, ..Reserve::plain(Digest(1), bytes) };
        let id = entries.reserve(&wanted, block());
        assert!(entries[id].is(Mark::Tail) && !entries[id].is(Mark::Replace) && entries[id].pins() == 0);
        entries[id].granules()
    };
    assert_eq!([granules(256, 256, 0), granules(256, 200, 56), granules(256, 256, 1)], [1, 1, 2]);
    assert_eq!([granules(4096, 4000, 96), granules(4096, 4096, 60)], [16, 32]);
    assert_eq!(granules(256, BYTES_MOST, TAIL_BYTES_MOST), (1 << 27) + 31);
}

#[test]
#[should_panic(expected = "Quarantined met Commit")]
fn an_undeclared_transition_panics() {
    let mut entries = Entries::new(1);
    let id = entries.reserve(&Reserve::plain(Digest(1), 1), block());
    entries.expire(id);
    entries.commit(id, Version(1), 0);
}

#[test]
fn gauges_follow_states_and_marks() {
    let mut entries = Entries::new(3);
    let replica = Reserve { replica: Replica::Second, ..Reserve::plain(Digest(1), 300) };
    let ids = [entries.reserve(&replica, block()), entries.reserve(&Reserve::plain(Digest(2), 100), block())];
    let of = |entries: &Entries| [State::Reserved, State::Quarantined, State::Live].map(|at| entries.granules_in(at));
    assert_eq!((of(&entries), *entries.live()), ([3, 0, 0], LiveUse::default()));
    entries.set_replica_owners(ids[1], ReplicaSet::FIRST);
    assert_eq!(entries.live().copied, 0, "it is not live yet");
    entries.commit(ids[0], Version(1), 0);
    entries.expire(ids[1]);
    assert_eq!(of(&entries), [0, 1, 2]);
    assert_eq!(*entries.live(), LiveUse { payload_bytes: 300, replicas: 1, copied: 0, on_device: 0, far: 0 });
    entries.set(ids[0], Mark::Copy, false);
    entries.set_replica_owners(ids[0], ReplicaSet::FIRST);
    entries.set_replica_owners(ids[0], ReplicaSet::first(3));
    assert_eq!(*entries.live(), LiveUse { payload_bytes: 300, replicas: 0, copied: 3, on_device: 0, far: 0 });
    entries.check();
    entries.pin(ids[0]);
    entries.doom(ids[0]);
    entries.unpin(ids[0]);
    assert_eq!((entries.granules_in(State::Doomed), *entries.live()), (2, LiveUse::default()));
    for id in ids {
        entries.release(id);
    }
    assert_eq!((of(&entries), entries.granules_in(State::Doomed)), ([0; 3], 0));
    entries.check();
}
