//! RDMA: requests that a device executes alone, fallbacks, and rails between several devices.

use kvplane_proto::ids::SegmentId;
use kvplane_proto::message::Operation;
use kvplane_proto::status::Status;

use crate::LaneEvent;
use crate::tests::rig::{ClientOutput, Rig, SECOND_NS, digest, local, stream_config};
use crate::{Config, LaneId, Near, Nearness, NodeCounts, Path, PeerId, Place, Request, SegmentTarget, Via, may_copy};

const SEGMENT: SegmentId = SegmentId { index: 1, generation: 1 };

fn at(peer: PeerId, offset: u64) -> SegmentTarget {
    SegmentTarget { peer, segment: SEGMENT, offset, shareable: false, place: crate::Place::UNKNOWN }
}

fn config(devices: usize) -> Config {
    Config { rdma: vec![12_500_000_000; devices], lanes: 1, ..stream_config() }
}

/// Serves until no output is left; connections over these paths are lost instead. Returns the operations sent and the
/// paths connected.
fn run(rig: &mut Rig, mut lost: impl FnMut(&mut Rig, LaneId, Path) -> bool) -> (Vec<Operation>, Vec<Path>) {
    let (mut sent, mut connected) = (Vec::new(), Vec::new());
    loop {
        let seen = rig.drain();
        if seen.is_empty() {
            return (sent, connected);
        }
        for seen in seen {
            match seen {
                ClientOutput::Connect { lane, path } => {
                    connected.push(path);
                    if lost(rig, lane, path) {
                        rig.lose(lane);
                        continue;
                    }
                }
                ClientOutput::Frame(ref frame) => sent.push(frame.operation()),
                _ => {}
            }
            rig.act(seen);
        }
    }
}

#[test]
fn the_device_copies_segments_and_objects_travel_as_frames() {
    let mut rig = Rig::new(config(1), 1).with_objects(&[(1, 5000)]);
    let peer = rig.segment_peer(false);
    let batch = rig.submit(&[
        Request::Read(at(peer, 0), local(0, 0, 100)),
        Request::Write(at(peer, 4096), local(1, 0, 100_000)),
        Request::Get(digest(1), local(2, 0, 5000)),
        Request::Put(digest(2), local(3, 0, 77)),
    ]);
    let (sent, connected) = run(&mut rig, |_, _, _| false);
    assert!(rig.finish(batch).iter().all(|result| result.0 == Status::Ok));
    assert_eq!(rig.ways, [Some(Via::Rdma), Some(Via::Rdma)]);
    assert!(sent.contains(&Operation::Get) && sent.contains(&Operation::Put));
    assert!(!sent.contains(&Operation::Read) && !sent.contains(&Operation::WriteMany), "{sent:?}");
    assert!(connected.iter().all(|path| *path == Path::Rdma), "{connected:?}");
    rig.assert_empty();
}

#[test]
fn segments_closed_to_the_device_travel_as_frames_on_the_same_connection() {
    let mut rig = Rig::new(config(1), 1);
    let peer = rig.segment_peer(false);
    let read = Request::Read(at(peer, 0), local(0, 0, 100));
    for round in 0..2 {
        let batch = rig.submit(&[read]);
        let refused = rig.fail_copies(Status::Unsupported);
        assert!(round == 0 || refused == 0, "it is not tried again");
        assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    }
    assert_eq!(rig.ways, [Some(Via::Rdma)]);
}

#[test]
fn device_memory_is_copied_by_devices_or_not_at_all() {
    let mut rig = Rig::new(config(1), 1);
    let peer = rig.segment_peer(true);
    rig.client.set_buffer(7, Place::UNKNOWN, true);
    let requests =
        [Request::Read(at(peer, 0), local(7, 0, 100)), Request::Write(at(peer, 4096), local(7, 4096, 100_000))];
    assert!(requests.iter().all(|request| may_copy(&rig.client, request)));
    assert!(!may_copy(&rig.client, &Request::Get(digest(1), local(7, 0, 100))));
    let batch = rig.submit(&requests);
    let (sent, connected) = run(&mut rig, |_, _, _| false);
    assert!(rig.finish(batch).iter().all(|result| result.0 == Status::Ok));
    assert_eq!((&rig.ways[..], connected), (&[Some(Via::Rdma); 2][..], vec![Path::Rdma]));
    assert!(!sent.contains(&Operation::Read) && !sent.contains(&Operation::WriteMany), "{sent:?}");
    // A segment that is closed to the device, or a device whose connections fail: no frame has the memory.
    let batch = rig.submit(&requests[..1]);
    rig.fail_copies(Status::Unsupported);
    assert_eq!(rig.finish(batch)[0].0, Status::Unsupported);
    assert!(!may_copy(&rig.client, &requests[0]));
    let other = SegmentTarget { segment: SegmentId { index: 2, generation: 1 }, ..at(peer, 0) };
    let other = Request::Read(other, local(7, 500, 100));
    assert!(may_copy(&rig.client, &other));
    let batch = rig.submit(&[requests[0], other]);
    run(&mut rig, |_, _, _| false);
    let results: Vec<Status> = rig.finish(batch).iter().map(|result| result.0).collect();
    assert_eq!(results, [Status::Unsupported, Status::Ok]);
    // Memory of the host takes any path.
    rig.client.set_buffer(7, Place::UNKNOWN, false);
    let batch = rig.submit(&requests[..1]);
    run(&mut rig, |_, _, _| false);
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    rig.assert_empty();
}

#[test]
fn device_memory_does_not_wait_for_devices_that_fail() {
    let mut rig = Rig::new(config(1), 1);
    let peer = rig.segment_peer(false);
    rig.client.set_buffer(7, Place::UNKNOWN, true);
    let read = Request::Read(at(peer, 0), local(7, 0, 100));
    let batch = rig.submit(&[read]);
    run(&mut rig, |rig, lane, path| {
        rig.client.lane_event(lane, LaneEvent::PathRefused("no device"), rig.now_ns);
        path == Path::Rdma
    });
    assert_eq!(rig.finish(batch)[0].0, Status::Unsupported);
    assert!(!may_copy(&rig.client, &read));
}

#[test]
fn a_segment_that_is_closed_to_all_rails_is_reached_by_frames_over_any_of_them() {
    let mut rig = Rig::new(Config { stream: false, lanes: 2, slice_bytes: 4096, ..config(4) }, 1);
    let peer = rig.segment_peer(false);
    let batch = rig.submit(&[Request::Write(at(peer, 0), local(0, 0, 1 << 20))]);
    let refused = rig.fail_copies(Status::Unsupported);
    assert_eq!(rig.finish(batch), [(Status::Ok, 1 << 20, 0)]);
    assert!(refused > 4, "{refused} copies were refused, over more rails than attempts");
    rig.assert_empty();
}

#[test]
fn a_peer_without_rdma_is_reached_by_streams_and_retried_later() {
    let mut rig = Rig::new(config(2), 1);
    let peer = rig.segment_peer(false);
    let read = Request::Read(at(peer, 0), local(0, 0, 100));
    let refuse = |rig: &mut Rig, lane: LaneId, path: Path| {
        if path == Path::Rdma {
            rig.client.lane_event(lane, LaneEvent::PathRefused("no device"), rig.now_ns);
        }
        path == Path::Rdma
    };
    let batch = rig.submit(&[read]);
    let (_, connected) = run(&mut rig, refuse);
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    assert_eq!(connected.last(), Some(&Path::Stream));
    // RDMA is not retried for a while.
    let batch = rig.submit(&[read]);
    let (_, connected) = run(&mut rig, refuse);
    assert_eq!((rig.finish(batch)[0].0, connected), (Status::Ok, Vec::new()));
    rig.now_ns += 61 * SECOND_NS;
    let batch = rig.submit(&[read]);
    let (_, connected) = run(&mut rig, |_, _, _| false);
    assert_eq!((rig.finish(batch)[0].0, connected.first()), (Status::Ok, Some(&Path::Rdma)));
    assert_eq!(rig.ways, [Some(Via::Rdma)]);
    // With streams disabled, the failure is the result.
    let mut rig = Rig::new(Config { stream: false, ..config(1) }, 1);
    let peer = rig.segment_peer(false);
    let batch = rig.submit(&[Request::Read(at(peer, 0), local(0, 0, 100))]);
    run(&mut rig, refuse);
    assert_eq!(rig.finish(batch)[0].0, Status::Unsupported);
}

#[test]
fn each_device_is_a_rail_and_a_failed_one_fails_over_to_the_others() {
    let mut rig = Rig::new(Config { slice_bytes: 4096, ..config(2) }, 1);
    let peer = rig.segment_peer(false);
    let batch = rig.submit(&[Request::Write(at(peer, 0), local(0, 0, 1 << 20))]);
    let mut devices = Vec::new();
    let (_, connected) = run(&mut rig, |rig, lane, path| {
        let rail = rig.client.rail_of(lane).and_then(|rail| rail.rdma).expect("devices");
        assert_eq!((path, rail.own), (Path::Rdma, rail.peer));
        devices.push(rail.own);
        rail.own == 0
    });
    assert_eq!(rig.finish(batch)[0], (Status::Ok, 1 << 20, 0));
    assert!(devices.contains(&0) && devices.contains(&1) && connected.len() == devices.len());
    assert!(rig.ways.iter().all(|way| *way == Some(Via::Rdma)));
}

#[test]
fn reply_destinations_are_known_while_requests_are_in_flight() {
    let mut rig = Rig::new(config(1), 1).with_objects(&[(1, 5000)]);
    let batch = rig.submit(&[Request::Get(digest(1), local(2, 40, 6000))]);
    let frames = rig.frames();
    let request = frames[0].items::<kvplane_proto::message::GetItem>()[0].request;
    assert_eq!(rig.client.answer_memory(request), Some(local(2, 40, 6000)));
    assert_eq!(rig.client.answer_memory(kvplane_proto::ids::RequestId { generation: !0, ..request }), None);
    for reply in rig.answers(&frames[0]) {
        rig.deliver(&reply);
    }
    rig.run();
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    assert_eq!(rig.client.answer_memory(request), None);
}

/// A write posted to a device may still be in the network when its lane ends; a posted read changes nothing on the
/// peer.
#[test]
fn a_lane_that_ends_during_a_device_write_is_fenced() {
    for write in [false, true] {
        let mut rig = Rig::new(config(1), 1);
        let peer = rig.segment_peer(false);
        let (target, memory) = (at(peer, 0), local(0, 0, 100));
        let batch = rig.submit(&[if write { Request::Write(target, memory) } else { Request::Read(target, memory) }]);
        let (mut under_way, mut sent) = (None, Vec::new());
        loop {
            let seen = rig.drain();
            if seen.is_empty() {
                break;
            }
            for seen in seen {
                match seen {
                    ClientOutput::Copy { lane, .. } if under_way.is_none() => {
                        under_way = Some(lane);
                        rig.lose(lane);
                        rig.now_ns += SECOND_NS / 10;
                        rig.client.handle_timeout(rig.now_ns);
                        continue;
                    }
                    ClientOutput::Frame(ref frame) if under_way.is_some() => sent.push(frame.operation()),
                    _ => {}
                }
                rig.act(seen);
            }
        }
        assert_eq!(sent.contains(&Operation::Fence), write, "{sent:?}");
        assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    }
}

/// Returns the distances of two devices on two nodes, at both ends.
fn two_nodes() -> Near {
    let near = |same: bool| Nearness { tier: u8::from(!same), same_node: Some(same) };
    Near::new(vec![vec![near(true), near(false)], vec![near(false), near(true)]])
}

/// Creates a client whose buffer 0 is on node 0 and buffer 1 on node 1, and a peer with two nodes.
fn two_sockets() -> (Rig, PeerId) {
    let mut rig = Rig::new(Config { slice_bytes: 4096, ..config(2) }, 1);
    rig.client.set_rdma(vec![12_500_000_000; 2], two_nodes());
    rig.client.set_buffer(0, Place::at(0), false);
    rig.client.set_buffer(1, Place::at(1), false);
    let address = crate::PeerAddress::native(([127, 0, 0, 1], 1001).into(), None);
    let peer = rig.client.open_peer_near(address, two_nodes());
    (rig, peer)
}

/// Returns the slices completed by the devices of each rail, with the NUMA counts: ours, the peer's.
fn carried(rig: &Rig) -> Vec<((u16, u16), u64, NodeCounts, NodeCounts)> {
    let rails = rig.client.metrics().rail_metrics().filter(|rail| rail.counts.operations > 0);
    let rail = |rail: crate::RailMetrics<'_>| {
        let devices = rail.devices.expect("devices");
        ((devices.own, devices.peer), rail.counts.operations, rail.counts.own_node, rail.counts.peer_node)
    };
    rails.map(rail).collect()
}

#[test]
fn memory_uses_the_devices_of_its_node_at_both_ends() {
    for ours in [0, 1] {
        for theirs in [0, 1] {
            let (mut rig, peer) = two_sockets();
            let target = SegmentTarget { place: Place::at(usize::from(theirs)), ..at(peer, 0) };
            let batch = rig.submit(&[Request::Write(target, local(u32::from(ours), 0, 1 << 20))]);
            let (_, connected) = run(&mut rig, |_, _, _| false);
            assert_eq!(rig.finish(batch)[0].0, Status::Ok);
            let same = NodeCounts { same: 256, ..NodeCounts::default() };
            assert_eq!(carried(&rig), [((ours, theirs), 256, same, same)]);
            assert_eq!(connected, [Path::Rdma], "only the nearest is connected");
        }
    }
}

#[test]
fn farther_devices_help_only_while_the_near_ones_are_unhealthy() {
    let (mut rig, peer) = two_sockets();
    let request = Request::Write(SegmentTarget { place: Place::at(0), ..at(peer, 0) }, local(0, 0, 1 << 20));
    let down = |rig: &mut Rig, lane: LaneId, _| rig.client.rail_of(lane).and_then(|rail| rail.rdma).unwrap().own == 0;
    let batch = rig.submit(&[request]);
    let (_, connected) = run(&mut rig, down);
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    assert!(connected.len() > 1);
    let far: u64 = carried(&rig).iter().map(|(_, _, own, _)| own.other).sum();
    assert_eq!((far, carried(&rig)[0].0), (256, (1, 0)), "near to the peer's memory at least");
    // The device is back: it is retried, and after a while it carries everything.
    for round in 0..20 {
        rig.now_ns += SECOND_NS;
        rig.client.handle_timeout(rig.now_ns);
        let before: u64 = carried(&rig).iter().map(|(_, _, own, _)| own.same).sum();
        let batch = rig.submit(&[request]);
        run(&mut rig, |_, _, _| false);
        assert_eq!(rig.finish(batch)[0].0, Status::Ok);
        let after: u64 = carried(&rig).iter().map(|(_, _, own, _)| own.same).sum();
        if after - before == 256 {
            return;
        }
        assert!(round < 19, "{:?}", carried(&rig));
    }
}

#[test]
fn stall_detection_allows_for_large_objects_on_slow_paths() {
    let mut rig = Rig::new(config(2), 1);
    let batch = rig.submit(&[Request::Put(digest(1), local(0, 0, 16 << 20))]);
    let put = loop {
        let mut seen = rig.drain();
        let put = |seen: &ClientOutput| matches!(seen, ClientOutput::Frame(sent) if sent.operation() == Operation::Put);
        match seen.iter().position(put) {
            Some(at) => break seen.swap_remove(at),
            None => seen.into_iter().for_each(|seen| rig.act(seen)),
        }
    };
    // The peer pulls at a hundredth of the stated speed of the devices.
    for _ in 0..30 {
        rig.now_ns += SECOND_NS / 10;
        rig.client.handle_timeout(rig.now_ns);
        let seen = rig.drain();
        assert!(!seen.iter().any(|seen| matches!(seen, ClientOutput::Reset(_))), "given up {} ns later", rig.now_ns);
    }
    rig.act(put);
    run(&mut rig, |_, _, _| false);
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    // A silent connection is given up, and early if the slices are small.
    let peer = rig.segment_peer(false);
    let batch = rig.submit(&[Request::Write(at(peer, 0), local(0, 0, 4096))]);
    let copy = loop {
        let mut seen = rig.drain();
        match seen.iter().position(|seen| matches!(seen, ClientOutput::Copy { .. })) {
            Some(at) => break seen.swap_remove(at),
            None => seen.into_iter().for_each(|seen| rig.act(seen)),
        }
    };
    let ClientOutput::Copy { lane, .. } = copy else { unreachable!("a copy") };
    rig.now_ns += SECOND_NS;
    rig.client.handle_timeout(rig.now_ns);
    assert!(rig.drain().iter().any(|seen| matches!(seen, ClientOutput::Reset(reset) if *reset == lane)));
    rig.lose(lane);
    rig.run_until(rig.now_ns + SECOND_NS);
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
}

/// Each batch completes before the connection of the near device makes progress, and the host does not poll in between.
#[test]
fn a_device_reconnects_although_its_host_polls_rarely() {
    let (mut rig, peer) = two_sockets();
    let request = Request::Write(SegmentTarget { place: Place::at(0), ..at(peer, 0) }, local(0, 0, 1 << 20));
    let near = |rig: &Rig, lane: LaneId| rig.client.rail_of(lane).and_then(|rail| rail.rdma).unwrap().own == 0;
    let mut batch = rig.submit(&[request]);
    run(&mut rig, |rig, lane, _| near(rig, lane));
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    assert!(!rig.client.metrics().is_connecting());
    let mut late: Vec<ClientOutput> = Vec::new();
    for _ in 0..20 {
        let since_ns = rig.now_ns;
        rig.now_ns += 3 * SECOND_NS;
        rig.client.note_absence(since_ns, rig.now_ns);
        core::mem::take(&mut late).into_iter().for_each(|seen| rig.act(seen));
        rig.client.handle_timeout(rig.now_ns);
        let before: u64 = carried(&rig).iter().map(|(_, _, own, _)| own.same).sum();
        batch = rig.submit(&[request]);
        loop {
            let seen = rig.drain();
            if seen.is_empty() {
                break;
            }
            for seen in seen {
                match seen {
                    ClientOutput::Connect { lane, .. } if near(&rig, lane) => late.push(seen),
                    ClientOutput::Frame(ref sent) if sent.operation() == Operation::Hello && near(&rig, sent.lane) => {
                        late.push(seen);
                    }
                    ClientOutput::Reset(lane) => panic!("{lane:?} had no time"),
                    other => rig.act(other),
                }
            }
        }
        assert_eq!(rig.finish(batch)[0].0, Status::Ok);
        assert_eq!(rig.client.metrics().is_connecting(), !late.is_empty());
        let after: u64 = carried(&rig).iter().map(|(_, _, own, _)| own.same).sum();
        if after - before == 256 {
            return;
        }
    }
    panic!("{:?}", carried(&rig));
}

#[test]
fn slices_queued_for_one_device_do_not_block_memory_of_another_node() {
    let (mut rig, peer) = two_sockets();
    let to = |node: usize| SegmentTarget { place: Place::at(node), ..at(peer, (node as u64) << 24) };
    let bulk = rig.submit(&[Request::Write(to(0), local(0, 0, 64 << 20))]);
    let other = rig.submit(&[Request::Write(to(1), local(1, 0, 1 << 20))]);
    // The first device never completes: its copies stay on it.
    let mut held = Vec::new();
    loop {
        let seen = rig.drain();
        if seen.is_empty() {
            break;
        }
        for seen in seen {
            let device = match &seen {
                ClientOutput::Copy { lane, .. } => rig.client.rail_of(*lane).and_then(|rail| rail.rdma).unwrap().own,
                _ => 1,
            };
            if device == 0 { held.push(seen) } else { rig.act(seen) }
        }
    }
    assert!(rig.client.batches().is_complete(other) && !rig.client.batches().is_complete(bulk));
    held.into_iter().for_each(|seen| rig.act(seen));
    run(&mut rig, |_, _, _| false);
    assert!([bulk, other].iter().all(|batch| rig.finish(*batch)[0].0 == Status::Ok));
    rig.assert_empty();
}
