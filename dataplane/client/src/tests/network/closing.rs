//! Peers that the caller closes: all their requests end, and no state is left behind.

use kvplane_proto::ids::{Incarnation, NodeId, SegmentId};
use kvplane_proto::status::Status;

use crate::tests::answers::bare;
use crate::tests::rig::{ClientOutput, Rig, SECOND_NS, local, shared_config, stream_config};
use crate::{Config, Path, PeerAddress, PeerId, Request, SegmentTarget, SubmitError};

const PIECE_BYTES: u64 = 64 << 10;

fn address(incarnation: u64) -> PeerAddress {
    let tcp = ([127, 0, 0, 1], 50).into();
    PeerAddress {
        node: NodeId(50),
        incarnation: Incarnation(incarnation),
        ..PeerAddress::native(tcp, Some("/run/50.sock".into()))
    }
}

/// Returns reads of ranges that are apart, so that each is a slice of its own.
fn reads(peer: PeerId, count: u64) -> Vec<Request> {
    let target = |number: u64| SegmentTarget {
        peer,
        segment: SegmentId { index: 0, generation: 1 },
        offset: 2 * number * PIECE_BYTES,
        shareable: true,
        place: crate::Place::UNKNOWN,
    };
    (0..count).map(|number| Request::Read(target(number), local(0, 2 * number * PIECE_BYTES, PIECE_BYTES))).collect()
}

/// Closes each incarnation of a peer with requests on its lanes, queued, or parked.
fn incarnations(config: Config) {
    let mut rig = Rig::new(config, 0);
    let mut ids = std::collections::BTreeSet::new();
    for incarnation in 1..60u64 {
        let peer = rig.client.open_peer(address(incarnation));
        ids.insert(peer);
        let batch = rig.submit(&reads(peer, 40));
        match incarnation % 4 {
            // Closed before it is connected.
            0 => {}
            1 => drop(rig.frames()),
            2 => rig.run(),
            _ => {
                for sent in rig.frames() {
                    rig.place(&bare(sent.lane, sent.operation(), sent.header.request, Status::Busy));
                }
            }
        }
        assert!(rig.client.close_peer(peer, rig.now_ns));
        assert!(!rig.client.close_peer(peer, rig.now_ns), "it is closed already");
        let refused = rig.client.submit(&reads(peer, 1), rig.now_ns + SECOND_NS, rig.now_ns);
        assert_eq!(refused, Err(SubmitError::UnknownPeer { index: 0 }));
        rig.run();
        for (status, ..) in rig.finish(batch) {
            let expected: &[Status] = if incarnation % 4 == 2 { &[Status::Ok] } else { &[Status::Stale, Status::Ok] };
            assert!(expected.contains(&status), "incarnation {incarnation}: {status:?}");
        }
        rig.done.clear();
        rig.assert_empty();
    }
    assert!(ids.len() <= 2 && rig.client.network().peers.len() <= 2, "{} peers", rig.client.network().peers.len());
    assert!(rig.client.network().lanes.len() <= 12, "{} lanes", rig.client.network().lanes.len());
    assert!(rig.client.network().peers.addresses() == 0 && rig.client.network().host.timers.counts()[1..3] == [0, 0]);
    assert_eq!(rig.client.metrics().rail_metrics().count(), 0);
    assert_eq!(rig.client.metrics().slow_operations().count(), 0, "they would be ascribed to another peer");
}

#[test]
fn closed_peers_leave_nothing_behind() {
    incarnations(stream_config());
    incarnations(shared_config());
    incarnations(Config { slow_ns: 0, ..shared_config() });
}

#[test]
fn requests_to_a_closed_peer_end_when_its_lanes_are_gone() {
    let mut rig = Rig::new(stream_config(), 0);
    let peer = rig.client.open_peer(address(1));
    let batch = rig.submit(&reads(peer, 1));
    assert_eq!(rig.frames().len(), 1);
    assert!(rig.client.close_peer(peer, rig.now_ns));
    let resets = rig.drain();
    assert!(!rig.client.batches().is_complete(batch), "the peer may still write to its memory");
    for seen in resets {
        let ClientOutput::Reset(lane) = seen else { panic!("{seen:?}") };
        rig.client.lane_gone(lane, rig.now_ns);
    }
    assert!(rig.client.batches().is_complete(batch));
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Stale, 0, 0)]);
    rig.assert_empty();
}

#[test]
fn a_peer_reopened_or_named_by_the_map_continues_to_serve() {
    let mut rig = Rig::new(stream_config(), 1);
    let named = rig.client.router.placement.map().map(|map| map.members[0].clone()).expect("a map");
    let shard = &named.shards[0];
    let of_map =
        PeerAddress { node: named.node, incarnation: named.incarnation, ..PeerAddress::native(shard.tcp, None) };
    let batch = rig.submit(&[Request::Exists(crate::tests::rig::digest(1))]);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::NotFound, 0, 0)]);
    let connected = rig.addresses.len();
    let peer = rig.client.open_peer(of_map);
    assert!(rig.client.close_peer(peer, rig.now_ns));
    let batch = rig.submit(&[Request::Exists(crate::tests::rig::digest(1))]);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::NotFound, 0, 0)]);
    assert_eq!(rig.addresses.len(), connected, "the map's peer kept its lanes");
    for _ in 0..3 {
        let again = rig.client.open_peer(address(7));
        let batch = rig.submit(&reads(again, 3));
        rig.run();
        assert_eq!(rig.finish(batch).iter().filter(|result| result.0 == Status::Ok).count(), 3);
        assert!(rig.client.close_peer(again, rig.now_ns));
        rig.run();
    }
    rig.assert_empty();
}

#[test]
fn files_are_closed_like_peers() {
    let mut rig = Rig::new(stream_config(), 0);
    for group in 0..20 {
        let peer = rig.client.open_peer(PeerAddress::file(group));
        let batch = rig.submit(&reads(peer, 5));
        let seen = rig.drain();
        assert!(seen.iter().all(|seen| matches!(seen, ClientOutput::Connect { path: Path::File, .. })), "{seen:?}");
        assert!(rig.client.close_peer(peer, rig.now_ns));
        seen.into_iter().for_each(|seen| rig.act(seen));
        rig.run();
        assert_eq!(rig.finish(batch), [(Status::Stale, 0, 0); 5]);
        rig.done.clear();
    }
    assert_eq!(rig.client.network().peers.len(), 1);
    rig.assert_empty();
}
