//! Tests of fences: clients fence connections of their own.

use kvplane_proto::Status;
use kvplane_proto::ids::SegmentId;
use kvplane_proto::message::{IdItem, Operation, RunItem, WriteItem};
use proptest::prelude::*;

use crate::service::tests::rig::{Rig, ServiceOutput, body_of, pool_place, segment_info};
use crate::service::{CloseReason, Path, PayloadTo, PeerKey};

fn fence(rig: &mut Rig, peer: PeerKey, connections: &[u64]) {
    let body = body_of(connections.iter().map(|&id| IdItem { id }));
    rig.ask(peer, Operation::Fence, &body, connections.len());
}

/// Fences connections; returns those that were closed before the fence was answered.
fn fenced(rig: &mut Rig, peer: PeerKey, connections: &[u64]) -> Vec<PeerKey> {
    fence(rig, peer, connections);
    let mut said = rig.drain();
    let Some(ServiceOutput::Answer(answer)) = said.pop() else { panic!("{said:?}") };
    assert_eq!((answer.peer, answer.status(), answer.body.len()), (peer, Status::Ok, 0));
    let closed = said.into_iter().map(|said| match said {
        ServiceOutput::Close(peer, CloseReason::Fenced) => peer,
        other => panic!("{other:?}"),
    });
    closed.collect()
}

fn segment(rig: &mut Rig) -> SegmentId {
    rig.service.segments_mut().register(segment_info(0x10000, 4096)).expect("there is room")
}

#[test]
fn only_the_clients_own_connections_of_these_numbers_are_closed() {
    let mut rig = Rig::new();
    let asks = rig.join_as(Path::Stream, 1, 10);
    let stream = rig.join_as(Path::Stream, 1, 11);
    let shared = rig.join_as(Path::Shared, 1, 12);
    let others = [rig.join_as(Path::Stream, 1, 13), rig.join_as(Path::Stream, 2, 11), rig.join_as(Path::Shared, 2, 12)];
    let silent = rig.connect(Path::Stream);
    assert_eq!(fenced(&mut rig, asks, &[12, 11, 99, 0, 11]), [stream, shared]);
    assert!(fenced(&mut rig, asks, &[11, 12]).is_empty(), "they are over already");
    for peer in others.into_iter().chain([asks]) {
        assert!(!rig.exists(peer, 1));
    }
    for peer in [stream, shared] {
        rig.ask(peer, Operation::Exists, &crate::service::tests::rig::digests([1]), 1);
        rig.assert_quiet();
        rig.gone(peer);
    }
    assert!(fenced(&mut rig, asks, &[11, 12]).is_empty());
    // Its index may be reused, and its number too, but only by another client, or this client's next incarnation.
    rig.join_as(Path::Stream, 3, 11);
    assert!(fenced(&mut rig, asks, &[11]).is_empty());
    rig.gone(silent);
    rig.assert_idle();
}

#[test]
fn a_fence_of_its_own_connection_is_malformed_and_one_before_the_hello_too() {
    let mut rig = Rig::new();
    let asks = rig.join_as(Path::Stream, 1, 10);
    let other = rig.join_as(Path::Stream, 1, 11);
    fence(&mut rig, asks, &[11, 10]);
    rig.assert_malformed(asks);
    assert!(!rig.exists(other, 1), "nothing was done");
    let silent = rig.connect(Path::Stream);
    fence(&mut rig, silent, &[11]);
    assert_eq!(rig.closed(silent), CloseReason::NotGreeted);
}

#[test]
fn requests_in_flight_are_dropped_and_their_handles_released() {
    let mut rig = Rig::new();
    let segment = segment(&mut rig);
    let asks = rig.join_as(Path::Stream, 1, 1);
    let (write, many, put) =
        (rig.join_as(Path::Stream, 1, 2), rig.join_as(Path::Stream, 1, 3), rig.join_as(Path::Stream, 1, 4));
    let to = rig.offer(write, Operation::Write, &body_of([WriteItem { segment, offset: 0 }]), 100);
    assert!(matches!(to, PayloadTo::Extent(_)));
    let run = RunItem { segment, offset: 0, stride_bytes: 200, bytes: 100, ranges: 2 };
    let to = rig.offer(many, Operation::WriteMany, &body_of([run]), 200);
    assert!(matches!(to, PayloadTo::Extents(_)));
    pool_place(rig.begin_put(put, 1, 10));
    assert_eq!(fenced(&mut rig, asks, &[2, 3, 4]), [write, many, put]);
    for peer in [write, many, put] {
        // The host may just have received the whole payload.
        rig.done(peer);
        rig.assert_quiet();
        let to = rig.offer(peer, Operation::Write, &body_of([WriteItem { segment, offset: 0 }]), 100);
        assert_eq!(to, PayloadTo::Discard);
        rig.assert_quiet();
        rig.gone(peer);
    }
    assert!(!rig.exists(asks, 1), "a put that was not complete");
    rig.assert_idle();
}

#[test]
fn shared_memory_handles_are_released_when_the_process_is_gone() {
    let mut rig = Rig::new();
    let asks = rig.join_as(Path::Stream, 1, 1);
    let shared = rig.join_as(Path::Shared, 1, 2);
    let reserved = rig.reserve(shared, 1, 10);
    assert_eq!(fenced(&mut rig, asks, &[2]), [shared]);
    rig.send_commit(shared, reserved.reservation);
    rig.assert_quiet();
    assert_eq!(rig.pins_and_reservations(), (0, 1), "its process may still write there");
    assert!(!rig.exists(asks, 1));
    rig.gone(shared);
    rig.assert_idle();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_fence_closes_the_named_connections_only(
        joined in prop::collection::vec((0u64..3, 0u64..6, any::<bool>()), 1..20),
        named in prop::collection::vec(0u64..6, 1..8),
    ) {
        let mut rig = Rig::new();
        let asks = rig.join_as(Path::Stream, 1, 100);
        let peers: Vec<(PeerKey, bool)> = joined
            .iter()
            .map(|&(client, connection, shared)| {
                let path = if shared { Path::Shared } else { Path::Stream };
                (rig.join_as(path, client, connection), client == 1 && named.contains(&connection))
            })
            .collect();
        let wanted: Vec<PeerKey> = peers.iter().filter(|peer| peer.1).map(|peer| peer.0).collect();
        prop_assert_eq!(fenced(&mut rig, asks, &named), wanted);
        for &(peer, over) in &peers {
            rig.ask(peer, Operation::Exists, &crate::service::tests::rig::digests([1]), 1);
            prop_assert_eq!(rig.drain().is_empty(), over);
        }
    }
}
