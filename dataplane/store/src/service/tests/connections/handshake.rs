//! Tests of handshakes.

use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, RequestId, ShardId};
use kvplane_proto::message::{Hello, Kind, Operation, Welcome};
use kvplane_proto::{Limits, Status};

use crate::service::tests::rig::{POOL_BYTES, Rig, ServiceOutput, digests, hello, identity};
use crate::service::{CloseReason, Identity, Path, PayloadTo, Service};
use crate::store::Store;

#[test]
fn a_hello_is_welcomed_with_the_shards_identity() {
    for path in [Path::Stream, Path::Shared] {
        let mut rig = Rig::new();
        let peer = rig.connect(path);
        rig.ask(peer, Operation::Hello, &hello().encode(), 1);
        let answer = rig.answer();
        assert_eq!((answer.peer, answer.header.kind), (peer, Kind::Reply(Operation::Hello)));
        let welcome = Welcome {
            version: VERSION,
            node: NodeId(7),
            incarnation: Incarnation(3),
            shard: ShardId(2),
            epoch: Epoch(5),
            pool_bytes: POOL_BYTES,
        };
        assert_eq!(Welcome::decode(&answer.body), Ok(welcome));
        assert_eq!(rig.service.inspect().counters().greeted, 1);
    }
}

#[test]
fn a_hello_to_any_node_is_welcomed() {
    let mut rig = Rig::new();
    let peer = rig.connect(Path::Stream);
    let any = Hello { node: NodeId(0), incarnation: Incarnation(0), shard: ShardId(9), ..hello() };
    rig.ask(peer, Operation::Hello, &any.encode(), 1);
    assert_eq!(rig.answer().status(), Status::Ok);
}

#[test]
fn a_hello_to_another_shard_is_answered_and_closed() {
    let wrong = [
        (Hello { cluster: "other".to_owned(), ..hello() }, Status::Incompatible),
        (Hello { version_min: VERSION + 1, version_max: VERSION + 1, ..hello() }, Status::Incompatible),
        (Hello { version_min: 0, version_max: VERSION - 1, ..hello() }, Status::Incompatible),
        (Hello { node: NodeId(8), ..hello() }, Status::WrongOwner),
        (Hello { incarnation: Incarnation(2), ..hello() }, Status::WrongOwner),
        (Hello { shard: ShardId(1), ..hello() }, Status::WrongOwner),
    ];
    for (hello, status) in wrong {
        let mut rig = Rig::new();
        let peer = rig.connect(Path::Stream);
        rig.ask(peer, Operation::Hello, &hello.encode(), 1);
        match &rig.drain()[..] {
            [ServiceOutput::Answer(answer), ServiceOutput::Close(closed, reason)] => {
                assert_eq!((answer.status(), *closed, *reason), (status, peer, CloseReason::Refused(status)));
            }
            other => panic!("{hello:?}: {other:?}"),
        }
        assert_eq!(rig.service.poll_timeout(), None, "nobody waits for its hello");
        rig.ask(peer, Operation::Exists, &digests([1]), 1);
        rig.assert_quiet();
    }
}

#[test]
fn a_request_before_hello_ends_the_connection() {
    let mut rig = Rig::new();
    let peer = rig.connect(Path::Stream);
    rig.ask(peer, Operation::Exists, &digests([1]), 1);
    assert_eq!(rig.closed(peer), CloseReason::NotGreeted);
}

#[test]
fn a_second_or_malformed_hello_or_one_with_a_payload_ends_the_connection() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    rig.ask(peer, Operation::Hello, &hello().encode(), 1);
    rig.assert_malformed(peer);

    let peer = rig.connect(Path::Stream);
    let mut torn = hello().encode();
    torn.pop();
    rig.ask(peer, Operation::Hello, &torn, 1);
    rig.assert_malformed(peer);

    let peer = rig.connect(Path::Stream);
    assert_eq!(rig.offer(peer, Operation::Hello, &hello().encode(), 1), PayloadTo::Discard);
    rig.assert_malformed(peer);
}

#[test]
fn a_reply_from_a_peer_ends_the_connection() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    let header = Header::reply(Kind::Reply(Operation::Exists), RequestId::default(), Status::Ok);
    rig.service.request(peer, &header, &[], rig.now_ns);
    rig.assert_malformed(peer);
}

#[test]
fn a_silent_connection_is_closed_at_the_deadline_and_not_before() {
    let mut rig = Rig::new();
    let silent = rig.connect(Path::Stream);
    rig.now_ns += 10;
    rig.join(Path::Stream);
    let left = rig.connect(Path::Stream);
    rig.gone(left);
    assert_eq!(rig.service.poll_timeout(), Some(1_000 + Limits::HELLO_NS));
    rig.pass(Limits::HELLO_NS - 11);
    rig.assert_quiet();
    rig.pass(1);
    assert_eq!(rig.closed(silent), CloseReason::NotGreeted);
    // Neither the welcomed connection nor the one that left has a deadline.
    assert_eq!(rig.service.poll_timeout(), None);
    rig.pass(Limits::HELLO_NS);
    rig.assert_quiet();
}

#[test]
fn the_index_of_a_closed_connection_is_reused() {
    let mut rig = Rig::new();
    let mut peer = rig.connect(Path::Stream);
    rig.ask(peer, Operation::Exists, &digests([1]), 1);
    rig.closed(peer);
    let before = peer;
    rig.gone(peer);
    peer.generation += 1;
    rig.service.peer_joined(peer, Path::Shared, rig.now_ns);
    // Events of the former connection at this index do not affect the new one.
    rig.gone(before);
    rig.ask(before, Operation::Exists, &digests([1]), 1);
    rig.assert_quiet();
    rig.ask(peer, Operation::Hello, &hello().encode(), 1);
    assert_eq!(rig.answer().status(), Status::Ok);
    assert_eq!(rig.service.poll_timeout(), None);
}

#[test]
#[should_panic(expected = "joined twice")]
fn an_index_in_use_cannot_be_joined() {
    let mut rig = Rig::new();
    let peer = rig.connect(Path::Stream);
    rig.service.peer_joined(peer, Path::Stream, 0);
}

#[test]
#[should_panic(expected = "over the limit of 255")]
fn a_name_over_the_limit_is_noticed_at_start() {
    let _ = Service::new(Identity { segment_name: "n".repeat(256), ..identity() }, Store::empty());
}

#[test]
fn a_service_without_store_owns_nothing() {
    let mut service = Service::new(identity(), Store::empty());
    service.set_owned(Epoch(5), |_| true);
    let mut rig = Rig::new();
    rig.service = service;
    let peer = rig.join(Path::Stream);
    rig.ask(peer, Operation::Exists, &digests([1]), 1);
    assert_eq!(rig.answer().status(), Status::WrongOwner);
    assert_eq!(rig.put(peer, 1, 10).status(), Status::WrongOwner);
    assert_eq!(rig.get(peer, 1).status(), Status::WrongOwner);
    rig.gone(peer);
}
