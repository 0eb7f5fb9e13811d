//! Ways of copying a range, fallbacks when one is closed, and peers of foreign protocols.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use proptest::prelude::*;

use kvplane_proto::flags::FrameFlags;
use kvplane_proto::ids::{BatchId, NodeId, SegmentId};
use kvplane_proto::message::{Operation, ReadItem};
use kvplane_proto::status::Status;

use crate::LaneEvent;
use crate::tests::rig::{ClientOutput, Rig, SECOND_NS, SentFrame, local, shared_config, stream_config};
use crate::{Config, LaneId, Path, PeerAddress, PeerId, Request, SegmentTarget, Via};

const SEGMENT: SegmentId = SegmentId { index: 1, generation: 1 };

fn at(peer: PeerId, offset: u64, shareable: bool) -> SegmentTarget {
    SegmentTarget { peer, segment: SEGMENT, offset, shareable, place: crate::Place::UNKNOWN }
}

fn mooncake(rig: &mut Rig) -> PeerId {
    rig.client.open_peer(PeerAddress::mooncake(SocketAddr::from(([127, 0, 0, 1], 60)), 2))
}

/// Executes the client's outputs; copies in these ways fail.
fn run_without(rig: &mut Rig, closed: &[Via]) -> Vec<Operation> {
    let mut sent = Vec::new();
    loop {
        let before = rig.ways.len();
        let seen = rig.drain();
        if seen.is_empty() {
            return sent;
        }
        let fresh = Vec::from(&rig.ways[before..]);
        let mut ways = fresh.into_iter();
        for seen in seen {
            match seen {
                ClientOutput::Copy { lane, slice, .. }
                    if ways.next().flatten().is_some_and(|via| closed.contains(&via)) =>
                {
                    rig.client.copied(lane, slice, Err(Status::Unsupported), rig.now_ns);
                }
                ClientOutput::Frame(frame) => {
                    sent.push(frame.operation());
                    rig.act(ClientOutput::Frame(frame));
                }
                other => rig.act(other),
            }
        }
    }
}

/// Serves, except for shared lanes: these are unreachable, or reach another process. Returns true if one was requested.
fn run_without_shared(rig: &mut Rig, other: bool) -> bool {
    let mut wanted = false;
    loop {
        let seen = rig.drain();
        if seen.is_empty() {
            return wanted;
        }
        for seen in seen {
            if let ClientOutput::Connect { lane, path: Path::Shared } = seen {
                wanted = true;
                if other {
                    rig.addresses.get_mut(&lane).expect("it was just requested").node = NodeId(51);
                } else {
                    rig.client.lane_event(lane, LaneEvent::PathUnavailable("connection refused"), rig.now_ns);
                    continue;
                }
            }
            rig.act(seen);
        }
    }
}

#[test]
fn an_unavailable_path_is_not_retried_for_a_while() {
    for other in [false, true] {
        let mut rig = Rig::new(shared_config(), 1);
        let peer = rig.segment_peer(true);
        let write = [Request::Write(at(peer, 0, true), local(0, 0, 100))];
        for first in [true, false] {
            let batch = rig.submit(&write);
            assert_eq!(run_without_shared(&mut rig, other), first, "it is tried once");
            assert_eq!(rig.finish(batch)[0].0, Status::Ok);
            let shared = rig.client.metrics().rail_metrics().find(|rail| rail.path == Path::Shared).expect("its rail");
            let counts = (shared.counts.unavailable, shared.counts.pauses, shared.counts.operations);
            assert_eq!(counts, (1, 0, 0));
            assert!(shared.unavailable.is_some_and(|why| other == why.contains("another")), "{:?}", shared.unavailable);
        }
        rig.now_ns += kvplane_proto::limits::Limits::UNAVAILABLE_NS;
        let batch = rig.submit(&write);
        rig.run();
        assert_eq!((rig.finish(batch)[0].0, rig.ways.len()), (Status::Ok, 1), "and then again");
        assert!(rig.client.metrics().rail_metrics().all(|rail| rail.unavailable.is_none()));
        rig.assert_empty();
    }
}

/// The only path of a peer is retried like any failed path.
#[test]
fn the_only_path_is_retried() {
    let mut rig = Rig::new(Config { stream: false, ..shared_config() }, 1);
    let peer = rig.segment_peer(true);
    let batch = rig.submit(&[Request::Write(at(peer, 0, true), local(0, 0, 100))]);
    let mut tried = 0;
    while !rig.client.batches().is_complete(batch) {
        tried += usize::from(run_without_shared(&mut rig, false));
        let at_ns = rig.client.poll_timeout().expect("something is in flight");
        rig.now_ns = rig.now_ns.max(at_ns);
        rig.client.handle_timeout(rig.now_ns);
    }
    run_without_shared(&mut rig, false);
    assert_eq!(rig.finish(batch)[0].0, Status::Unreachable);
    assert!(tried > 1, "{tried}");
}

#[test]
fn the_cheapest_way_that_is_open_is_taken() {
    use Operation::{Hello, Write};
    // (mappings, CMA in our settings, CMA by the kernel, streams, mappable), and the way or the status.
    let cases = [
        (true, true, true, true, true, Ok(Some(Via::Map))),
        (true, true, true, true, false, Ok(Some(Via::Cma))),
        (true, true, false, true, false, Ok(None)),
        (true, false, true, true, false, Ok(None)),
        (false, true, true, true, true, Ok(Some(Via::Cma))),
        (false, false, true, true, true, Ok(None)),
        (true, true, false, false, false, Err(Status::Unsupported)),
        (true, false, true, false, false, Err(Status::Unsupported)),
        (false, true, true, false, true, Ok(Some(Via::Cma))),
    ];
    for (shared, cma, kernel, stream, mappable, expected) in cases {
        let mut rig = Rig::new(Config { shared, cma, stream, lanes: 1, ..shared_config() }, 1);
        rig.cma = kernel;
        let peer = rig.segment_peer(true);
        for _ in 0..2 {
            let batch = rig.submit(&[Request::Write(at(peer, 0, mappable), local(0, 0, 100))]);
            let sent = run_without(&mut rig, &[]);
            let status = expected.err().unwrap_or(Status::Ok);
            assert_eq!(rig.finish(batch)[0].0, status, "{shared} {cma} {kernel} {stream} {mappable}");
            assert!(sent.iter().all(|operation| matches!(operation, Hello | Write)));
            assert_eq!(sent.contains(&Write), expected == Ok(None), "{sent:?}");
        }
        let ways: Vec<Option<Via>> = expected.ok().flatten().map(|via| vec![Some(via); 2]).unwrap_or_default();
        assert_eq!(rig.ways, ways, "{shared} {cma} {kernel} {stream} {mappable}");
        rig.assert_empty();
    }
}

#[test]
fn a_closed_way_is_recorded_and_the_next_one_used() {
    let mut rig = Rig::new(Config { lanes: 1, ..shared_config() }, 1);
    rig.cma = true;
    let peer = rig.segment_peer(true);
    let write = Request::Write(at(peer, 0, true), local(0, 0, 100));
    let batch = rig.submit(&[write]);
    let sent = run_without(&mut rig, &[Via::Map, Via::Cma]);
    assert_eq!((rig.finish(batch), sent.last()), (vec![(Status::Ok, 100, 0)], Some(&Operation::Write)));
    assert_eq!(rig.ways, [Some(Via::Map), Some(Via::Cma)]);
    assert_eq!(rig.client.counters().retries, 2);
    // Not retried for this segment.
    let batch = rig.submit(&[write]);
    assert_eq!(run_without(&mut rig, &[]), [Operation::Write]);
    assert_eq!((rig.finish(batch)[0].0, rig.ways.len()), (Status::Ok, 2));
    // Ways are closed per segment.
    let other = SegmentTarget { segment: SegmentId { index: 2, generation: 1 }, ..at(peer, 0, true) };
    let batch = rig.submit(&[Request::Write(other, local(0, 0, 100))]);
    rig.run();
    assert_eq!((rig.finish(batch)[0].0, rig.ways.last()), (Status::Ok, Some(&Some(Via::Map))));
    // If no way is left, that is the result.
    let mut rig = Rig::new(Config { stream: false, ..shared_config() }, 1);
    rig.cma = true;
    let peer = rig.segment_peer(true);
    let batch = rig.submit(&[Request::Read(at(peer, 0, true), local(0, 0, 100))]);
    run_without(&mut rig, &[Via::Map, Via::Cma]);
    assert_eq!(rig.finish(batch), [(Status::Unsupported, 0, 0)]);
    rig.assert_empty();
}

#[test]
fn a_new_connection_tries_closed_ways_again() {
    let mut rig = Rig::new(Config { lanes: 1, ..shared_config() }, 1);
    rig.cma = true;
    let peer = rig.segment_peer(true);
    let write = Request::Write(at(peer, 0, true), local(0, 0, 100));
    let batch = rig.submit(&[write]);
    run_without(&mut rig, &[Via::Map, Via::Cma]);
    rig.finish(batch);
    let shared = rig.client.network().rails[rig.client.network().peers[peer.0].groups[0].rails[0]].lanes[0];
    let lane = rig.client.network().lanes[shared].id(shared);
    rig.lose(lane);
    rig.now_ns += 10 * SECOND_NS;
    let batch = rig.submit(&[write]);
    rig.run();
    assert_eq!((rig.finish(batch)[0].0, rig.ways.last()), (Status::Ok, Some(&Some(Via::Map))));
    assert_eq!(rig.ways.len(), 3);
    rig.assert_empty();
}

#[test]
fn this_process_and_files_need_no_greeting() {
    for (address, way) in [(PeerAddress::local(), Some(Via::Own)), (PeerAddress::file(5), None)] {
        let mut rig = Rig::new(stream_config(), 1);
        let peer = rig.client.open_peer(address);
        let batch = rig.submit(&[
            Request::Read(at(peer, 0, false), local(0, 0, 1 << 20)),
            Request::Write(at(peer, 0, false), local(1, 0, 10)),
            Request::OpenSegment(peer),
        ]);
        assert!(rig.frames().is_empty(), "nothing is sent");
        let results = rig.finish(batch);
        assert_eq!(results, [(Status::Ok, 1 << 20, 0), (Status::Ok, 10, 0), (Status::Unsupported, 0, 0)]);
        assert_eq!(rig.ways, [way; 5]);
        rig.assert_empty();
    }
}

#[test]
fn a_transfer_of_a_file_ends_before_its_batch_does() {
    let mut rig = Rig::new(stream_config(), 1);
    let peer = rig.client.open_peer(PeerAddress::file(5));
    let batch = rig.submit(&[Request::Read(at(peer, 0, false), local(0, 0, 100))]);
    let seen = rig.drain();
    let [ClientOutput::Connect { lane, path: Path::File }] = seen[..] else { panic!("{seen:?}") };
    rig.act(seen[0].clone());
    let seen = rig.drain();
    let [ClientOutput::Copy { lane: used, .. }] = seen[..] else { panic!("{seen:?}") };
    assert_eq!(used, lane);
    rig.client.cancel(batch, 2);
    let seen = rig.drain();
    let [ClientOutput::Reset(reset)] = seen[..] else { panic!("{seen:?}") };
    assert!(reset == lane && !rig.client.batches().is_complete(batch), "the kernel may still write");
    rig.lose(lane);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Cancelled, 0, 0)]);
    rig.assert_empty();
}

#[test]
fn a_foreign_peer_gets_one_plain_range_at_a_time() {
    for depth in [0, 1, 3] {
        let config = Config { lanes: 2, foreign_depth: depth, slice_bytes: 4096, ..stream_config() };
        let mut rig = Rig::new(config, 1);
        let peer = mooncake(&mut rig);
        let batch = rig.submit(&[
            Request::Read(at(peer, 1 << 20, false), local(0, 0, 40_960)),
            Request::Write(at(peer, 2 << 20, false), local(1, 0, 4096)),
            Request::OpenSegment(peer),
        ]);
        let frames = rig.frames();
        let least = depth.max(1) as usize;
        assert_eq!(frames.len(), 2 * least, "on two lanes");
        assert!(frames.iter().all(|sent| sent.header.flags == FrameFlags::NONE && sent.header.items == 1));
        // Small slices do not wait for large ones: the first frame may not be a read's.
        let read = frames.iter().position(|sent| sent.operation() == Operation::Read).expect("a read is in flight");
        let first = &frames[read].items::<ReadItem>()[0];
        assert_eq!((first.offset, first.bytes), (1 << 20, 4096));
        // While its payload arrives a request is in flight.
        let reply = rig.answers(&frames[read]).remove(0);
        let crate::PayloadTo::Local { slice, .. } = rig.place(&reply) else { panic!("a payload is wanted") };
        assert!(rig.frames().is_empty());
        rig.client.payload_done(slice, Some(reply.sum), 2);
        let mut more = rig.frames();
        assert_eq!(more.len(), 1);
        more.extend(frames.into_iter().enumerate().filter(|(index, _)| *index != read).map(|(_, sent)| sent));
        more.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
        rig.run();
        assert_eq!(rig.finish(batch), [(Status::Ok, 40_960, 0), (Status::Ok, 4096, 0), (Status::Unsupported, 0, 0)]);
        rig.assert_empty();
    }
}

/// Peers of every kind, whose copies, frames and connections succeed or fail, in any order.
struct World {
    rig: Rig,
    peers: Vec<(PeerId, Path)>,
    pending: Vec<ClientOutput>,
    open: Vec<BatchId>,
    /// Paths of the connected lanes, and frames in flight on foreign ones.
    paths: BTreeMap<LaneId, Path>,
    depth: BTreeMap<LaneId, u32>,
    buffer: u32,
}

impl World {
    fn new(cma: bool) -> Self {
        let config = Config { lanes: 2, foreign_depth: 2, slice_bytes: 4096, ..shared_config() };
        let mut rig = Rig::new(config, 1);
        rig.cma = cma;
        let peers = vec![
            (rig.segment_peer(true), Path::Shared),
            (rig.client.open_peer(PeerAddress::local()), Path::Local),
            (rig.client.open_peer(PeerAddress::file(1)), Path::File),
            (mooncake(&mut rig), Path::Mooncake),
            (rig.client.open_peer(PeerAddress::mooncake_rdma(1)), Path::MooncakeRdma),
        ];
        let (pending, open) = (Vec::new(), Vec::new());
        Self { rig, peers, pending, open, paths: BTreeMap::new(), depth: BTreeMap::new(), buffer: 0 }
    }

    fn step(&mut self, what: u8, which: usize) {
        match what {
            0..=9 => self.submit(which),
            10..=49 => self.advance(which, false),
            50..=54 => self.advance(which, true),
            55..=57 => {
                if let Some(lane) = self.paths.keys().nth(which % self.paths.len().max(1)).copied() {
                    self.forget(lane);
                    self.rig.lose(lane);
                }
            }
            58..=59 => {
                if let Some(&batch) = self.open.get(which % self.open.len().max(1)) {
                    self.rig.client.cancel(batch, self.rig.now_ns);
                }
            }
            _ => {
                self.rig.now_ns += which as u64 * 100_000;
                self.rig.client.handle_timeout(self.rig.now_ns);
            }
        }
        self.collect();
    }

    fn submit(&mut self, which: usize) {
        let (peer, _) = self.peers[which % self.peers.len()];
        self.buffer += 1;
        let segment = SegmentId { index: which as u32 % 3, generation: 1 };
        let to = SegmentTarget { segment, ..at(peer, which as u64, which.is_multiple_of(2)) };
        let local = local(self.buffer, 0, 1 + which as u64 * 50);
        let request = if which % 4 < 2 { Request::Read(to, local) } else { Request::Write(to, local) };
        self.open.push(self.rig.submit(&[request]));
    }

    /// Drops the outputs for a lane that is gone.
    fn forget(&mut self, gone: LaneId) {
        self.paths.remove(&gone);
        self.depth.remove(&gone);
        self.pending.retain(|seen| {
            let lane = match seen {
                ClientOutput::Connect { lane, .. } | ClientOutput::Copy { lane, .. } | ClientOutput::Reset(lane) => {
                    Some(*lane)
                }
                ClientOutput::Frame(SentFrame { lane, .. }) => Some(*lane),
                _ => None,
            };
            lane != Some(gone)
        });
    }

    fn advance(&mut self, which: usize, fail: bool) {
        if self.pending.is_empty() {
            return;
        }
        let seen = self.pending.remove(which % self.pending.len());
        match &seen {
            ClientOutput::Frame(sent) => {
                self.depth.entry(sent.lane).and_modify(|depth| *depth -= 1);
            }
            ClientOutput::Reset(lane) => self.forget(*lane),
            _ => {}
        }
        match seen {
            ClientOutput::Copy { lane, slice, .. } if fail => {
                self.rig.client.copied(lane, slice, Err(Status::Unsupported), self.rig.now_ns);
            }
            seen => self.rig.act(seen),
        }
    }

    /// Takes the next outputs of the client, and checks them against what each path may carry.
    fn collect(&mut self) {
        let before = self.rig.ways.len();
        let seen = self.rig.drain();
        let fresh = Vec::from(&self.rig.ways[before..]);
        let mut ways = fresh.into_iter();
        for seen in seen {
            match &seen {
                ClientOutput::Connect { lane, path } => drop(self.paths.insert(*lane, *path)),
                ClientOutput::Copy { lane, .. } => {
                    match (self.paths[lane], ways.next().expect("a way for each copy")) {
                        (Path::Shared, Some(Via::Cma)) => assert!(self.rig.cma),
                        (Path::MooncakeRdma, Some(Via::Rdma)) => {}
                        (Path::Shared, Some(Via::Map)) | (Path::Local, Some(Via::Own)) | (Path::File, None) => {}
                        other => panic!("{other:?}"),
                    }
                }
                ClientOutput::Frame(sent) => match self.paths[&sent.lane] {
                    Path::Mooncake => {
                        let depth = self.depth.entry(sent.lane).or_default();
                        *depth += 1;
                        assert!(*depth <= 2 && sent.header.items == 1 && sent.header.flags == FrameFlags::NONE);
                    }
                    Path::Stream | Path::Shared => drop(self.depth.insert(sent.lane, u32::MAX / 2)),
                    path => panic!("a frame on {path:?}"),
                },
                _ => {}
            }
            match seen {
                ClientOutput::Done(_) | ClientOutput::WantMap => self.rig.act(seen),
                seen => self.pending.push(seen),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn every_batch_ends_once_under_failures_of_its_ways(
        cma: bool,
        steps in prop::collection::vec((0u8..70, 0usize..1000), 1..150),
    ) {
        let mut world = World::new(cma);
        for (what, which) in steps {
            world.step(what, which);
        }
        // From here on everything succeeds.
        for _ in 0..100_000 {
            if world.pending.is_empty() {
                let Some(at_ns) = world.rig.client.poll_timeout() else { break };
                world.rig.now_ns = world.rig.now_ns.max(at_ns);
                world.rig.client.handle_timeout(world.rig.now_ns);
            } else {
                world.advance(0, false);
            }
            world.collect();
        }
        for batch in core::mem::take(&mut world.open) {
            let results = world.rig.finish(batch);
            prop_assert_eq!(results.len(), 1);
        }
        world.rig.assert_empty();
    }
}
