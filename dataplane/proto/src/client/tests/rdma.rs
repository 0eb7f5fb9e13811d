//! RDMA: which requests a device does alone, what stands in for it, and ways between several devices.

use super::rig::{Rig, SECOND_NS, Seen, digest, local, stream_config};
use crate::client::{Config, LaneId, Path, PeerId, Request, SegmentTarget, Via};
use crate::ids::SegmentId;
use crate::message::Operation;
use crate::status::Status;

const SEGMENT: SegmentId = SegmentId { index: 1, generation: 1 };

fn at(peer: PeerId, offset: u64) -> SegmentTarget {
    SegmentTarget { peer, segment: SEGMENT, offset, shareable: false }
}

fn config(devices: usize) -> Config {
    Config { rdma: vec![12_500_000_000; devices], lanes: 1, ..stream_config() }
}

/// Acts until nothing is left to do; connections over these paths are lost instead. What was sent and connected.
fn run(rig: &mut Rig, mut lost: impl FnMut(&mut Rig, LaneId, Path) -> bool) -> (Vec<Operation>, Vec<Path>) {
    let (mut sent, mut connected) = (Vec::new(), Vec::new());
    loop {
        let seen = rig.drain();
        if seen.is_empty() {
            return (sent, connected);
        }
        for seen in seen {
            match seen {
                Seen::Connect { lane, path } => {
                    connected.push(path);
                    if lost(rig, lane, path) {
                        rig.lose(lane);
                        continue;
                    }
                }
                Seen::Frame(ref frame) => sent.push(frame.operation()),
                _ => {}
            }
            rig.act(seen);
        }
    }
}

#[test]
fn segments_are_the_device_s_and_objects_travel_as_frames() {
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
fn what_the_device_does_not_reach_travels_as_frames_on_the_same_connection() {
    let mut rig = Rig::new(config(1), 1);
    let peer = rig.segment_peer(false);
    let read = Request::Read(at(peer, 0), local(0, 0, 100));
    for round in 0..2 {
        let batch = rig.submit(&[read]);
        loop {
            let seen = rig.drain();
            if seen.is_empty() {
                break;
            }
            for seen in seen {
                match seen {
                    Seen::Copy { lane, slice, .. } => {
                        assert_eq!(round, 0, "it is not tried again");
                        rig.client.copied(lane, slice, Err(Status::Unsupported), rig.now_ns);
                    }
                    other => rig.act(other),
                }
            }
        }
        assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    }
    assert_eq!(rig.ways, [Some(Via::Rdma)]);
}

#[test]
fn a_peer_without_it_is_reached_by_streams_and_asked_again_later() {
    let mut rig = Rig::new(config(2), 1);
    let peer = rig.segment_peer(false);
    let read = Request::Read(at(peer, 0), local(0, 0, 100));
    let refuse = |rig: &mut Rig, lane: LaneId, path: Path| {
        if path == Path::Rdma {
            rig.client.path_refused(lane, "no device", rig.now_ns);
        }
        path == Path::Rdma
    };
    let batch = rig.submit(&[read]);
    let (_, connected) = run(&mut rig, refuse);
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    assert_eq!(connected.last(), Some(&Path::Stream));
    // The devices are left alone for a while.
    let batch = rig.submit(&[read]);
    let (_, connected) = run(&mut rig, refuse);
    assert_eq!((rig.finish(batch)[0].0, connected), (Status::Ok, Vec::new()));
    rig.now_ns += 61 * SECOND_NS;
    let batch = rig.submit(&[read]);
    let (_, connected) = run(&mut rig, |_, _, _| false);
    assert_eq!((rig.finish(batch)[0].0, connected.first()), (Status::Ok, Some(&Path::Rdma)));
    assert_eq!(rig.ways, [Some(Via::Rdma)]);
    // Where streams are not to be used, that is the answer.
    let mut rig = Rig::new(Config { stream: false, ..config(1) }, 1);
    let peer = rig.segment_peer(false);
    let batch = rig.submit(&[Request::Read(at(peer, 0), local(0, 0, 100))]);
    run(&mut rig, refuse);
    assert_eq!(rig.finish(batch)[0].0, Status::Unsupported);
}

#[test]
fn each_device_is_a_rail_and_one_that_fails_leaves_its_work_to_the_others() {
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
fn the_memory_of_answers_is_known_while_they_are_awaited() {
    let mut rig = Rig::new(config(1), 1).with_objects(&[(1, 5000)]);
    let batch = rig.submit(&[Request::Get(digest(1), local(2, 40, 6000))]);
    let frames = rig.frames();
    let request = frames[0].items::<crate::message::GetItem>()[0].request;
    assert_eq!(rig.client.answer_memory(request), Some(local(2, 40, 6000)));
    assert_eq!(rig.client.answer_memory(crate::ids::RequestId { generation: !0, ..request }), None);
    for reply in rig.answers(&frames[0]) {
        rig.deliver(&reply);
    }
    rig.run();
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    assert_eq!(rig.client.answer_memory(request), None);
}
