//! Tests of put sessions and their numbers: a number of another shard or incarnation names no put session here.

use kvplane_proto::Status;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, ReservationId, ShardId, Version};
use kvplane_proto::message::{CommitReply, FillItem, IdItem, Operation, PutItem, ReserveReply};

use super::rig::{CHECKSUM, POOL_BYTES, Rig, body_of, config, digest, hello, identity, pool_place};
use crate::Store;
use crate::service::{Identity, Path, PayloadTo, PeerKey, Service};

const BYTES: u64 = 64;

impl Rig {
    fn begin(&mut self, peer: PeerKey, key: u8) -> u64 {
        self.ask(peer, Operation::Begin, &body_of([PutItem::plain(digest(key), BYTES)]), 1);
        let begun: ReserveReply = self.answer().items()[0];
        assert_eq!(begun.status, Status::Ok);
        begun.reservation.to_bits()
    }

    fn fill(&mut self, peer: PeerKey, put_session: u64, offset: u64, bytes: u64) -> Status {
        let to = self.offer(peer, Operation::Fill, &body_of([FillItem { session: put_session, offset, bytes }]), bytes);
        if to != PayloadTo::Discard {
            pool_place(to);
        }
        self.done(peer);
        self.answer().status()
    }

    fn fill_shared(&mut self, peer: PeerKey, put_session: u64) -> ReserveReply {
        self.ask(peer, Operation::Fill, &body_of([FillItem { session: put_session, offset: 0, bytes: BYTES }]), 1);
        self.answer().items()[0]
    }

    fn seal(&mut self, peer: PeerKey, put_session: u64) -> Status {
        self.ask(peer, Operation::Seal, &body_of([IdItem { id: put_session }]), 1);
        let sealed: CommitReply = self.answer().items()[0];
        sealed.status
    }

    fn discard(&mut self, peer: PeerKey, put_session: u64) -> bool {
        self.ask(peer, Operation::Discard, &body_of([IdItem { id: put_session }]), 1);
        self.answer().bits()[0]
    }

    /// Returns a shard with the identity of another node, incarnation or shard, and a welcomed connection of the one
    /// client of these tests.
    fn of(identity: Identity) -> (Self, PeerKey) {
        let mut rig = Self::new();
        let hello = kvplane_proto::message::Hello {
            node: identity.node,
            incarnation: identity.incarnation,
            shard: identity.shard,
            ..hello()
        };
        let store = Store::new(config(POOL_BYTES), Version(1)).expect("the test's limits are valid");
        rig.service = Service::new(identity, store);
        rig.service.set_owned(Epoch(5), |_| true);
        let peer = rig.connect(Path::Stream);
        rig.ask(peer, Operation::Hello, &hello.encode(), 1);
        assert_eq!(rig.answer().status(), Status::Ok);
        (rig, peer)
    }
}

/// Checks that requests with the put session numbers of one shard have no effect at another.
fn assert_strangers(theirs: &[u64], (rig, peer): &mut (Rig, PeerKey)) {
    let ours: Vec<u64> = (0..theirs.len()).map(|key| rig.begin(*peer, key as u8)).collect();
    for put_session in theirs {
        assert!(!ours.contains(put_session), "put session {put_session:x} of two shards");
        assert_eq!(rig.fill(*peer, *put_session, 0, BYTES), Status::Stale);
        assert_eq!(rig.seal(*peer, *put_session), Status::Stale);
        assert!(!rig.discard(*peer, *put_session));
    }
    for put_session in ours {
        assert_eq!(rig.fill(*peer, put_session, 0, BYTES), Status::Ok, "nobody else has written there");
        assert_eq!(rig.seal(*peer, put_session), Status::Ok);
        assert_eq!(rig.seal(*peer, put_session), Status::Ok, "as before");
        assert_eq!(rig.fill(*peer, put_session, 0, BYTES), Status::Stale);
    }
}

#[test]
fn put_session_numbers_of_another_incarnation_node_or_shard_name_nothing() {
    let begun = |identity: Identity| {
        let (mut rig, peer) = Rig::of(identity);
        (0..8).map(|key| rig.begin(peer, key)).collect::<Vec<u64>>()
    };
    let theirs = begun(identity());
    for other in [
        Identity { incarnation: Incarnation(4), ..identity() },
        Identity { node: NodeId(8), ..identity() },
        Identity { shard: ShardId(3), ..identity() },
    ] {
        assert_strangers(&theirs, &mut Rig::of(other));
    }
}

#[test]
fn put_session_numbers_of_a_dead_incarnation_name_nothing_in_the_next() {
    let (mut rig, peer) = Rig::of(identity());
    let put_session = rig.begin(peer, 1);
    assert_eq!(rig.fill(peer, put_session, 0, 8), Status::Ok);
    rig.service.begin_incarnation(Incarnation(4));
    rig.drain();
    rig.gone(peer);
    rig.service.set_owned(Epoch(6), |_| true);
    let peer = rig.connect(Path::Shared);
    let hello = kvplane_proto::message::Hello { incarnation: Incarnation(4), ..hello() };
    rig.ask(peer, Operation::Hello, &hello.encode(), 1);
    assert_eq!(rig.answer().status(), Status::Ok);
    let other = rig.begin(peer, 2);
    let refused = rig.fill_shared(peer, put_session);
    assert_eq!((refused.status, refused.reservation), (Status::Stale, ReservationId::default()));
    assert_eq!(rig.seal(peer, put_session), Status::Stale);
    assert!(!rig.discard(peer, put_session));
    let extent = rig.fill_shared(peer, other);
    assert_eq!(extent.status, Status::Ok);
    assert_eq!(rig.commit(peer, extent.reservation).status, Status::Ok);
    assert_eq!(rig.seal(peer, other), Status::Ok);
    let found = rig.lookup(peer, 2);
    assert_eq!((found.bytes, found.checksum), (BYTES, CHECKSUM));
    rig.release(peer, found.pin);
    rig.assert_idle();
}
