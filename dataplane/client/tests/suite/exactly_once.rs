//! Exactly-once delivery of every byte: random reads and writes over several rails to a peer with memory, while
//! connections are lost, payloads are damaged, batches are cancelled and deadlines pass.
//!
//! A request that succeeds has its bytes where they belong, each of them in exactly one accepted reply. A batch
//! completes once, and from then on no I/O uses its memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;

use kvplane_client::PutBook;
use kvplane_client::sched::Priority;
use kvplane_client::{
    Client, Config, LaneId, Local, Output, PayloadTo, PeerAddress, PeerId, RailAddress, Request, SegmentTarget,
    SliceId, SubmitOptions,
};
use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::message::{Kind, Operation, ReadItem, RunItem, Welcome, WriteItem, decode_items};
use kvplane_proto::{BatchId, Epoch, Incarnation, NodeId, RequestId, SegmentId, ShardId, Status};
use proptest::prelude::*;

/// Bytes of the peer's segment and of each of the caller's buffers.
const MEMORY: usize = 256 << 10;
/// Granularity of ranges, so that they are often adjacent.
const UNIT: u64 = 1000;
const MILLISECOND_NS: u64 = 1_000_000;

/// An item in flight on a connection, in order.
#[derive(Clone)]
enum Flight {
    Hello,
    /// Ranges as one payload, with the operation of their request.
    Read(RequestId, Operation, Vec<(u64, u64)>),
    Write(RequestId, Operation, Vec<(u64, u64)>, Vec<Local>),
    Answer(Answer),
}

#[derive(Clone)]
struct Answer {
    header: Header,
    body: Vec<u8>,
    payload: Vec<u8>,
}

struct Lane {
    up: bool,
    flights: VecDeque<Flight>,
    /// Payload being received into the caller's memory.
    arriving: Option<(SliceId, Vec<Local>, Vec<u8>)>,
}

struct Open {
    requests: Vec<Request>,
    buffer: u32,
}

struct World {
    client: Client,
    now_ns: u64,
    peer: PeerId,
    remote: Vec<u8>,
    buffers: Vec<Vec<u8>>,
    lanes: BTreeMap<LaneId, Lane>,
    /// Lanes to be reset by the host.
    resets: Vec<LaneId>,
    open: BTreeMap<BatchId, Open>,
    done: BTreeSet<u32>,
    /// Range of each batch's writes.
    wrote: Vec<Wrote>,
    /// Number of batches submitted or completed: a logical clock.
    turns: u64,
    /// Number of accepted replies for each byte of each buffer.
    accepted: Vec<Vec<u8>>,
    /// Writes that wait for their reply.
    writes: BTreeMap<(LaneId, u64), Vec<Local>>,
    succeeded: usize,
}

/// Range of the segment that a batch writes to, empty for one that reads, and the time span in which it may write.
struct Wrote {
    range: Range<u64>,
    from: u64,
    until: u64,
}

fn pattern(seed: u64, address: u64) -> u8 {
    kvplane_proto::rng::mix64(seed << 32 ^ address) as u8
}

/// Returns the ranges of a gathered request.
fn ranges(body: &[u8], items: u32) -> Vec<(u64, u64)> {
    let runs = decode_items::<RunItem>(body, items).expect("runs");
    runs.flat_map(|run| run.offsets().map(move |offset| (offset, u64::from(run.bytes)))).collect()
}

impl World {
    fn new(rails: usize, lanes: u16) -> Self {
        let config = Config {
            cluster: "exact".into(),
            client: 1,
            shared: false,
            lanes,
            slice_bytes: 4096,
            small_bytes: 1024,
            align_bytes: 1024,
            lane_window_bytes: 20_000,
            ..Config::default()
        };
        let mut client = Client::new(config);
        let tcp = |rail: usize| SocketAddr::from(([10, 0, 0, 1 + rail as u8], 7000));
        let rails: Vec<RailAddress> = (0..rails)
            .map(|rail| RailAddress {
                local: None,
                tcp: tcp(rail),
                bytes_per_second: 1 << 30,
                tier: rail as u8 % 3,
                rdma: None,
            })
            .collect();
        let peer = client.open_peer_over(PeerAddress::native(tcp(0), None), &rails);
        Self {
            client,
            now_ns: 1,
            peer,
            remote: (0..MEMORY as u64).map(|address| pattern(0, address)).collect(),
            buffers: Vec::new(),
            lanes: BTreeMap::new(),
            resets: Vec::new(),
            open: BTreeMap::new(),
            done: BTreeSet::new(),
            wrote: Vec::new(),
            turns: 0,
            accepted: Vec::new(),
            writes: BTreeMap::new(),
            succeeded: 0,
        }
    }

    /// Reads are from the lower half of the segment, writes go to a range of the upper half that belongs to this batch.
    fn submit(&mut self, which: u64) {
        let buffer = self.buffers.len() as u32;
        let count = 1 + which % 7;
        let bytes = UNIT * [1, 3, 17][(which / 7 % 3) as usize];
        let gap = if which & 64 == 0 { 0 } else { UNIT };
        let write = which & 128 != 0;
        let half = MEMORY as u64 / 2;
        let base = if write { half + (u64::from(buffer) * 131_000) % half } else { which * 37 % half };
        let segment = SegmentId { index: 1, generation: 1 };
        let mut requests = Vec::new();
        for position in 0..count {
            let (offset, at) = (base + position * (bytes + gap), position * (bytes + gap));
            let end = if write { MEMORY as u64 } else { half };
            if offset + bytes > end {
                break;
            }
            let target = SegmentTarget {
                peer: self.peer,
                segment,
                offset,
                shareable: false,
                place: kvplane_client::Place::UNKNOWN,
            };
            let local = Local { buffer, offset: at, bytes };
            requests.push(if write { Request::Write(target, local) } else { Request::Read(target, local) });
        }
        if requests.is_empty() {
            return;
        }
        self.buffers.push((0..MEMORY as u64 / 2).map(|at| pattern(1 + u64::from(buffer), at)).collect());
        self.accepted.push(vec![0; MEMORY / 2]);
        let range = if write { base..base + count * (bytes + gap) } else { 0..0 };
        self.turns += 1;
        self.wrote.push(Wrote { range, from: self.turns, until: u64::MAX });
        let options = SubmitOptions {
            priority: Some(Priority::ALL[(which / 256 % 3) as usize]),
            tenant: (which / 1024 % 3) as u32,
            weight: 1 + (which / 1024 % 3) as u16,
            due_ns: (which & 2048 != 0).then_some(self.now_ns + which * 100),
            ..SubmitOptions::until(self.now_ns + (1 + which * which % 400) * MILLISECOND_NS)
        };
        let batch = self.client.submit_puts(&requests, &PutBook::new(), &options, self.now_ns).expect("a valid batch");
        self.open.insert(batch, Open { requests, buffer });
    }

    fn collect(&mut self) {
        while let Some(output) = self.client.poll_output() {
            match output {
                Output::Connect { lane, .. } => {
                    let entry = Lane { up: false, flights: VecDeque::new(), arriving: None };
                    self.lanes.insert(lane, entry);
                }
                Output::Send { lane, header, body, payload } => {
                    let body = self.client.outbox().body(body).to_vec();
                    let payload = self.client.outbox().payload(payload).to_vec();
                    self.sent(lane, &header, &body, payload);
                }
                Output::Reset { lane } => self.resets.push(lane),
                Output::Done { batch } => self.finish(batch),
                Output::WantMap => {}
                other => panic!("{other:?} is not expected"),
            }
        }
    }

    fn sent(&mut self, lane: LaneId, header: &Header, body: &[u8], payload: Vec<Local>) {
        for local in &payload {
            assert!(!self.done.contains(&local.buffer), "memory of a batch that is done is sent");
        }
        let flights: Vec<Flight> = match header.kind {
            Kind::Request(Operation::Hello) => vec![Flight::Hello],
            Kind::Request(Operation::Fence) => {
                // Lost connections of this peer execute nothing late: see `late_writes` for one whose connections do.
                let header = Header::reply(Kind::Reply(Operation::Fence), header.request, Status::Ok);
                vec![Flight::Answer(Answer { header, body: Vec::new(), payload: Vec::new() })]
            }
            Kind::Request(Operation::Read) => {
                let items = decode_items::<ReadItem>(body, header.items).expect("reads");
                items.map(|item| Flight::Read(item.request, Operation::Read, vec![(item.offset, item.bytes)])).collect()
            }
            Kind::Request(Operation::ReadMany) => {
                vec![Flight::Read(header.request, Operation::ReadMany, ranges(body, header.items))]
            }
            Kind::Request(Operation::Write) => {
                let item = decode_items::<WriteItem>(body, 1).expect("a write").next().expect("one item");
                self.writes.insert((lane, header.request.to_bits()), payload.clone());
                let ranges = vec![(item.offset, header.payload_bytes)];
                vec![Flight::Write(header.request, Operation::Write, ranges, payload)]
            }
            Kind::Request(Operation::WriteMany) => {
                self.writes.insert((lane, header.request.to_bits()), payload.clone());
                let ranges = ranges(body, header.items);
                vec![Flight::Write(header.request, Operation::WriteMany, ranges, payload)]
            }
            other => panic!("{other:?} is not expected"),
        };
        self.lanes.get_mut(&lane).expect("a lane").flights.extend(flights);
    }

    fn finish(&mut self, batch: BatchId) {
        let open = self.open.remove(&batch).expect("a batch completes once");
        self.turns += 1;
        self.wrote[open.buffer as usize].until = self.turns;
        let mine = &self.wrote[open.buffer as usize];
        // Of two batches that write to one place, the later one wins, or either if both were in flight together.
        let shared = self.wrote.iter().enumerate().any(|(buffer, other)| {
            let meets = other.range.start < mine.range.end && mine.range.start < other.range.end;
            buffer != open.buffer as usize && meets && other.until > mine.from
        });
        for (request, result) in open.requests.iter().zip(self.client.batches().results(batch)) {
            let (Request::Read(target, local) | Request::Write(target, local)) = *request else { unreachable!() };
            assert!(result.bytes <= local.bytes);
            if result.status != Status::Ok {
                continue;
            }
            self.succeeded += 1;
            assert_eq!(result.bytes, local.bytes);
            let here = local.offset as usize..(local.offset + local.bytes) as usize;
            let there = target.offset as usize..(target.offset + local.bytes) as usize;
            let times = &self.accepted[open.buffer as usize][here.clone()];
            assert!(times.iter().all(|&times| times == 1), "a byte was accepted not once");
            let ours = &self.buffers[open.buffer as usize][here];
            if matches!(request, Request::Read(..)) {
                assert_eq!(ours, &self.remote[there], "what was read is what is there");
            } else {
                assert!(shared || ours == &self.remote[there], "what was written is there");
            }
        }
        let uses = |locals: &[Local]| locals.iter().any(|local| local.buffer == open.buffer);
        for lane in self.lanes.values() {
            let arriving = lane.arriving.as_ref().is_some_and(|(_, locals, _)| uses(locals));
            let sending = lane.flights.iter().any(|flight| matches!(flight, Flight::Write(.., locals) if uses(locals)));
            assert!(!arriving && !sending, "memory of a batch that is done is in use");
        }
        self.done.insert(open.buffer);
        self.client.release(batch);
    }

    /// Processes the next item of some connection.
    fn advance(&mut self, which: u64, damaged: bool) {
        let busy: Vec<LaneId> = self
            .lanes
            .iter()
            .filter(|(_, lane)| !lane.up || lane.arriving.is_some() || !lane.flights.is_empty())
            .map(|(id, _)| *id)
            .collect();
        if busy.is_empty() {
            return;
        }
        let id = busy[which as usize % busy.len()];
        let lane = self.lanes.get_mut(&id).expect("a lane");
        if !lane.up {
            lane.up = true;
            self.client.connected(id, self.now_ns);
        } else if let Some((slice, locals, bytes)) = lane.arriving.take() {
            self.arrived(slice, &locals, &bytes, damaged);
        } else if let Some(flight) = lane.flights.pop_front() {
            self.happen(id, flight);
        }
    }

    fn arrived(&mut self, slice: SliceId, locals: &[Local], mut bytes: &[u8], damaged: bool) {
        for local in locals {
            let range = local.offset as usize..(local.offset + local.bytes) as usize;
            let (part, rest) = bytes.split_at(range.len());
            bytes = rest;
            self.buffers[local.buffer as usize][range.clone()].copy_from_slice(part);
            if damaged {
                self.buffers[local.buffer as usize][range.start] ^= 1;
            } else {
                self.accepted[local.buffer as usize][range].iter_mut().for_each(|times| *times += 1);
            }
        }
        assert!(bytes.is_empty());
        self.client.payload_done(slice, Some(u64::from(damaged)), self.now_ns);
    }

    fn happen(&mut self, id: LaneId, flight: Flight) {
        let answer = match flight {
            Flight::Hello => {
                let (node, incarnation, shard) = (NodeId(1), Incarnation(1), ShardId(0));
                let body =
                    Welcome { version: VERSION, node, incarnation, shard, epoch: Epoch(0), pool_bytes: 0 }.encode();
                let header = Header::reply(Kind::Reply(Operation::Hello), RequestId::default(), Status::Ok);
                Answer { header: header.with_body(&body, 1), body, payload: Vec::new() }
            }
            Flight::Read(request, operation, ranges) => {
                let parts = ranges.iter().map(|&(at, bytes)| &self.remote[at as usize..(at + bytes) as usize]);
                let payload = parts.collect::<Vec<_>>().concat();
                let header = Header::reply(Kind::Reply(operation), request, Status::Ok)
                    .with_payload(payload.len() as u64, Some(0));
                Answer { header, body: Vec::new(), payload }
            }
            Flight::Write(request, operation, ranges, locals) => {
                let parts = locals.iter().map(|local| {
                    &self.buffers[local.buffer as usize][local.offset as usize..(local.offset + local.bytes) as usize]
                });
                let payload = parts.collect::<Vec<_>>().concat();
                let mut from = 0;
                for (at, bytes) in ranges {
                    let (at, bytes) = (at as usize, bytes as usize);
                    self.remote[at..at + bytes].copy_from_slice(&payload[from..from + bytes]);
                    from += bytes;
                }
                assert_eq!(from, payload.len());
                let header = Header::reply(Kind::Reply(operation), request, Status::Ok);
                Answer { header, body: Vec::new(), payload: Vec::new() }
            }
            Flight::Answer(answer) => return self.answered(id, answer),
        };
        self.lanes.get_mut(&id).expect("a lane").flights.push_back(Flight::Answer(answer));
    }

    fn answered(&mut self, id: LaneId, answer: Answer) {
        let stale = self.client.counters().stale_frames;
        let to = self.client.frame(id, &answer.header, &answer.body, self.now_ns);
        let accepted = self.client.counters().stale_frames == stale;
        let written = self.writes.remove(&(id, answer.header.request.to_bits())).filter(|_| accepted);
        for local in written.into_iter().flatten() {
            let range = local.offset as usize..(local.offset + local.bytes) as usize;
            self.accepted[local.buffer as usize][range].iter_mut().for_each(|times| *times += 1);
        }
        let (slice, locals) = match to {
            PayloadTo::Discard => return,
            PayloadTo::Local { local, slice } => (slice, vec![local]),
            PayloadTo::Scatter { slice } => (slice, self.client.scatter(slice).to_vec()),
        };
        let done = locals.iter().any(|local| self.done.contains(&local.buffer));
        assert!(!done, "memory of a batch that is done is written");
        self.lanes.get_mut(&id).expect("a lane").arriving = Some((slice, locals, answer.payload));
    }

    fn lose(&mut self, id: LaneId) {
        if self.lanes.remove(&id).is_some() {
            self.client.lane_gone(id, self.now_ns);
        }
    }

    fn step(&mut self, what: u8, which: u16) {
        let which = u64::from(which);
        let nth = |lanes: &BTreeMap<LaneId, Lane>| lanes.keys().nth(which as usize % lanes.len().max(1)).copied();
        match what {
            0..=29 => self.submit(which),
            30..=199 => self.advance(which, false),
            200..=204 => self.advance(which, true),
            205..=216 => {
                if let Some(id) = nth(&self.lanes) {
                    self.lose(id);
                }
            }
            217..=222 => {
                if let Some(&batch) = self.open.keys().nth(which as usize % self.open.len().max(1)) {
                    self.client.cancel(batch, self.now_ns);
                }
            }
            223..=235 => {
                if let Some(id) = self.resets.pop() {
                    self.lose(id);
                }
            }
            _ => {
                self.now_ns += which * 400;
                self.client.handle_timeout(self.now_ns);
            }
        }
        self.collect();
    }

    /// From now on everything succeeds: all batches must complete.
    fn settle(&mut self) {
        for round in 0..1_000_000_u64 {
            self.collect();
            if let Some(id) = self.resets.pop() {
                self.lose(id);
            } else if self.lanes.values().any(|l| !l.up || l.arriving.is_some() || !l.flights.is_empty()) {
                self.advance(round, false);
            } else if let Some(at_ns) = self.client.poll_timeout() {
                self.now_ns = self.now_ns.max(at_ns);
                self.client.handle_timeout(self.now_ns);
            } else {
                break;
            }
        }
        assert!(self.open.is_empty(), "{} batches never completed", self.open.len());
        assert_eq!(self.client.batches().len(), 0);
        for rail in self.client.metrics().rail_metrics() {
            assert_eq!(rail.inflight_bytes, 0, "leaked in-flight bytes");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_exactly_once_under_any_failures(
        rails in 1usize..=4,
        lanes in 1u16..=2,
        steps in prop::collection::vec((any::<u8>(), any::<u16>()), 1..400),
    ) {
        let mut world = World::new(rails, lanes);
        for &(what, which) in &steps {
            world.step(what, which);
        }
        world.settle();
        // Without faults everything succeeds.
        let before = world.succeeded;
        for which in [6, 128 + 6, 128 + 64 + 20] {
            world.submit(which);
            world.settle();
        }
        prop_assert!(world.succeeded > before);
    }
}

/// Regression of the checker: two batches in flight together wrote to one place, and the earlier one was executed last.
#[test]
fn regression_of_overlapping_writes() {
    let mut world = World::new(3, 1);
    for step in include_str!("histories/overlapping_writes.txt").split_whitespace() {
        let (what, which) = step.split_once(':').expect("two numbers");
        world.step(what.parse().expect("a number"), which.parse().expect("a number"));
    }
    world.settle();
}
