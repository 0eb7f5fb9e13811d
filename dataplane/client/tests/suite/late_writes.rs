//! No write is executed after a newer one: random writes to a peer with memory over streams and shared memory, while
//! lanes are lost whose frames the peer has received and executes when it comes to them, perhaps long after.
//!
//! The peer ends a connection only when it has executed what it received, or by a fence. Its memory records the writer
//! of each unit. A write is newer than another if it was submitted after that one had completed, whatever its outcome;
//! once a newer write has completed, an older one must not be found in its place.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use kvplane_client::LaneEvent;
use kvplane_client::{
    Client, Config, LaneId, Local, Output, Path, PeerAddress, PeerId, RailAddress, Request, SegmentTarget,
};
use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::message::{Hello, IdItem, Kind, Operation, RunItem, Welcome, WriteItem, decode_items};
use kvplane_proto::rng::Rng;
use kvplane_proto::{BatchId, Epoch, Incarnation, NodeId, SegmentId, ShardId, Status};
use proptest::prelude::*;

/// Units of the peer's memory, and bytes of each.
const UNITS: usize = 8;
const UNIT: u64 = 4096;
const MILLISECOND_NS: u64 = 1_000_000;

/// A frame that the peer has received.
struct Frame {
    header: Header,
    body: Vec<u8>,
    payload: Vec<Local>,
}

/// A connection at the peer's end.
struct Connection {
    path: Path,
    /// Connection number in its hello.
    number: Option<u64>,
    received: VecDeque<Frame>,
    /// Replies in flight to the client.
    answers: VecDeque<(Header, Vec<u8>)>,
    connected: bool,
    /// True if the client's end is gone: no reply reaches it.
    orphan: bool,
}

#[derive(Clone, Copy)]
struct Write {
    first: usize,
    units: usize,
    begun: u64,
    over: Option<u64>,
    done: bool,
}

struct World {
    client: Client,
    rng: Rng,
    now_ns: u64,
    /// Logical clock.
    tick: u64,
    peer: PeerId,
    address: PeerAddress,
    rails: Vec<RailAddress>,
    connections: BTreeMap<LaneId, Connection>,
    resets: Vec<LaneId>,
    /// Writes by the number of their buffer, from 1.
    writes: Vec<Write>,
    open: BTreeMap<BatchId, u32>,
    memory: [u32; UNITS],
    /// True for a peer that acknowledges fences without executing them.
    deaf: bool,
    fences: usize,
}

impl World {
    fn new(seed: u64, rails: u8, lanes: u16, shared: bool) -> Self {
        let config = Config { cluster: "late".into(), client: 7, lanes, slice_bytes: UNIT, ..Config::default() };
        let mut client = Client::new(config);
        let tcp = |rail| SocketAddr::from(([10, 0, 0, 1 + rail], 7000));
        let rails: Vec<RailAddress> = (0..rails)
            .map(|rail| RailAddress { local: None, tcp: tcp(rail), bytes_per_second: 1 << 30, tier: 0, rdma: None })
            .collect();
        let address = PeerAddress::native(tcp(0), shared.then(|| "/run/late.sock".into()));
        let peer = client.open_peer_over(address.clone(), &rails);
        Self {
            client,
            rng: Rng::new(seed, "late"),
            now_ns: 1,
            tick: 0,
            peer,
            address,
            rails,
            connections: BTreeMap::new(),
            resets: Vec::new(),
            writes: Vec::new(),
            open: BTreeMap::new(),
            memory: [0; UNITS],
            deaf: false,
            fences: 0,
        }
    }

    fn submit(&mut self) {
        let first = self.rng.below(UNITS as u64) as usize;
        let units = 1 + self.rng.below((UNITS - first) as u64) as usize;
        self.writes.push(Write { first, units, begun: self.tick, over: None, done: false });
        let buffer = self.writes.len() as u32;
        let segment = SegmentId { index: 1, generation: 1 };
        let target = SegmentTarget {
            peer: self.peer,
            segment,
            offset: first as u64 * UNIT,
            shareable: true,
            place: kvplane_client::Place::UNKNOWN,
        };
        let local = Local { buffer, offset: 0, bytes: units as u64 * UNIT };
        let deadline_ns = self.now_ns + (1 + self.rng.below(300)) * MILLISECOND_NS;
        let batch = self.client.submit(&[Request::Write(target, local)], deadline_ns, self.now_ns);
        self.open.insert(batch.expect("a valid batch"), buffer);
    }

    fn collect(&mut self) {
        while let Some(output) = self.client.poll_output() {
            match output {
                Output::Connect { lane, path, .. } => {
                    let (received, answers) = (VecDeque::new(), VecDeque::new());
                    let (number, connected, orphan) = (None, false, false);
                    let connection = Connection { path, number, received, answers, connected, orphan };
                    self.connections.insert(lane, connection);
                }
                Output::Send { lane, header, body, payload } => {
                    let body = self.client.outbox().body(body).to_vec();
                    let payload = self.client.outbox().payload(payload).to_vec();
                    let connection = self.connections.get_mut(&lane).expect("a connection");
                    connection.received.push_back(Frame { header, body, payload });
                }
                Output::CopySegment { lane, slice, offset, local, write: true, .. } => {
                    self.put(offset, &[local]);
                    self.client.copied(lane, slice, Ok(0), self.now_ns);
                }
                Output::Reset { lane } => self.resets.push(lane),
                Output::WantMap => {}
                Output::Done { batch } => {
                    let write = self.open.remove(&batch).expect("a batch completes once") as usize - 1;
                    self.writes[write].over = Some(self.tick);
                    self.writes[write].done = self.client.batches().results(batch)[0].status == Status::Ok;
                    self.client.release(batch);
                }
                other => panic!("{other:?} is not expected"),
            }
        }
    }

    fn put(&mut self, offset: u64, locals: &[Local]) {
        let mut unit = (offset / UNIT) as usize;
        for local in locals {
            for _ in 0..local.bytes / UNIT {
                self.memory[unit] = local.buffer;
                unit += 1;
            }
        }
    }

    /// The peer executes the next frame of a connection.
    fn serve(&mut self, lane: LaneId) {
        let connection = self.connections.get_mut(&lane).expect("a connection");
        let Some(Frame { header, body, payload }) = connection.received.pop_front() else { return };
        let Kind::Request(operation) = header.kind else { panic!("{header:?}") };
        let mut answer = (Header::reply(Kind::Reply(operation), header.request, Status::Ok), Vec::new());
        match operation {
            Operation::Hello => {
                connection.number = Some(Hello::decode(&body).expect("a hello").connection);
                let (node, incarnation, shard) = (NodeId(1), Incarnation(1), ShardId(0));
                answer.1 =
                    Welcome { version: VERSION, node, incarnation, shard, epoch: Epoch(0), pool_bytes: 0 }.encode();
                answer.0 = answer.0.with_body(&answer.1, 1);
            }
            Operation::Write => {
                let item = decode_items::<WriteItem>(&body, 1).expect("a write").next().expect("one item");
                self.put(item.offset, &payload);
            }
            Operation::WriteMany => {
                let mut units = payload.iter().flat_map(|local| (0..local.bytes / UNIT).map(|_| local.buffer));
                for run in decode_items::<RunItem>(&body, header.items).expect("runs") {
                    for (offset, _) in
                        run.offsets().flat_map(|at| (0..u64::from(run.bytes) / UNIT).map(move |n| (at + n * UNIT, n)))
                    {
                        self.memory[(offset / UNIT) as usize] = units.next().expect("a payload of the ranges' length");
                    }
                }
            }
            Operation::Fence => {
                self.fences += 1;
                let named: BTreeSet<u64> =
                    decode_items::<IdItem>(&body, header.items).expect("ids").map(|item| item.id).collect();
                let over = self.connections.iter_mut().filter(|(_, connection)| {
                    connection.number.is_some_and(|number| named.contains(&number)) && !self.deaf
                });
                for (over, connection) in over {
                    assert!(connection.orphan || self.resets.contains(over), "a lane in use is called over");
                    connection.received.clear();
                    connection.answers.clear();
                }
            }
            other => panic!("{other:?} is not expected"),
        }
        self.connections.get_mut(&lane).expect("a connection").answers.push_back(answer);
    }

    /// Closes the client's end. The peer keeps what it has received.
    fn lose(&mut self, lane: LaneId, unavailable: bool) {
        let Some(connection) = self.connections.get_mut(&lane).filter(|connection| !connection.orphan) else { return };
        connection.orphan = true;
        if connection.path == Path::Shared && unavailable {
            self.client.lane_event(lane, LaneEvent::PathUnavailable("lost"), self.now_ns);
        } else {
            self.client.lane_gone(lane, self.now_ns);
        }
    }

    fn advance(&mut self) {
        let pick = self.rng.below(self.connections.len().max(1) as u64) as usize;
        let Some((&lane, connection)) = self.connections.iter_mut().nth(pick) else { return };
        if connection.orphan && connection.received.is_empty() {
            self.connections.remove(&lane);
        } else if !connection.orphan && !connection.connected {
            connection.connected = true;
            self.client.connected(lane, self.now_ns);
        } else if !connection.orphan
            && self.rng.chance(0.5)
            && let Some((header, body)) = connection.answers.pop_front()
        {
            self.client.frame(lane, &header, &body, self.now_ns);
        } else if !connection.orphan || self.rng.chance(0.2) {
            self.serve(lane);
        }
    }

    fn step(&mut self) {
        self.tick += 1;
        match self.rng.below(100) {
            0..=9 => self.submit(),
            10..=13 => {
                let pick = self.rng.below(self.connections.len().max(1) as u64) as usize;
                let unavailable = self.rng.chance(0.5);
                if let Some(&lane) = self.connections.keys().nth(pick) {
                    self.lose(lane, unavailable);
                }
            }
            14..=19 => {
                if let Some(lane) = self.resets.pop() {
                    self.lose(lane, false);
                }
            }
            20 => {
                // A handle that is closed and opened again.
                self.client.close_peer(self.peer, self.now_ns);
                self.collect();
                self.peer = self.client.open_peer_over(self.address.clone(), &self.rails);
            }
            21..=25 => {
                self.now_ns += self.rng.below(20) * MILLISECOND_NS;
                self.client.handle_timeout(self.now_ns);
            }
            _ => self.advance(),
        }
        self.collect();
    }

    /// Returns a unit with an older write although a newer one has completed.
    fn wrong(&self) -> Option<usize> {
        (0..UNITS).find(|&unit| {
            let found = self.memory[unit] as usize;
            let Some(over) = found.checked_sub(1).and_then(|write| self.writes[write].over) else {
                return found == 0 && self.writes.iter().any(|write| write.done && write.covers(unit));
            };
            self.writes.iter().any(|write| write.done && write.covers(unit) && write.begun > over)
        })
    }

    /// Returns true if no unit was ever wrong.
    fn run(&mut self, steps: usize) -> bool {
        for _ in 0..steps {
            self.step();
            if self.wrong().is_some() {
                return false;
            }
        }
        true
    }
}

impl Write {
    const fn covers(&self, unit: usize) -> bool {
        self.first <= unit && unit < self.first + self.units
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_write_lands_over_a_newer_one(seed: u64, rails in 1u8..=3, lanes in 1u16..=3, shared: bool) {
        let mut world = World::new(seed, rails, lanes, shared);
        prop_assert!(world.run(1500), "unit {:?} at step {}", world.wrong(), world.tick);
    }
}

#[test]
fn a_peer_that_ignores_fences_is_detected() {
    for shared in [false, true] {
        let (mut wrong, mut done) = (0, 0);
        for seed in 0..40 {
            let mut world = World::new(seed, 2, 2, shared);
            world.deaf = true;
            wrong += usize::from(!world.run(1500));
            done += world.writes.iter().filter(|write| write.done).count();
            assert!(world.fences <= world.writes.len() * 8);
        }
        assert!(wrong >= 5 && done >= 400, "{wrong} of 40 runs went wrong, {done} writes were done");
    }
}
