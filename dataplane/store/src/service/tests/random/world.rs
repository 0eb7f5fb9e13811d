//! Randomized host: its state of the peers, and the invariants.

use std::collections::BTreeMap;

use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, PinId, RequestId, ReservationId, SegmentId};
use kvplane_proto::message::{
    CommitItem, GetItem, IdItem, Kind, LookupReply, Operation, PutItem, PutOptions, ReadItem, ReserveReply, RunItem,
    WriteItem,
};

use super::super::rig::{
    Answer, CHECKSUM, Rig, ServiceOutput, body_of, config, digest, digests, hello, identity, segment_info,
};
use super::Step;
use crate::StoreConfig;
use crate::service::{Hold, Memory, MemoryExtent, Path, PayloadTo, PeerKey};

const PEERS: usize = 5;
const SEGMENT_BYTES: u64 = 4096;

/// Operations that a correct peer requests on each path, and now and then on the wrong one.
const ASKED_OF_STREAMS: [Operation; 17] = [
    Operation::Put,
    Operation::Put,
    Operation::Get,
    Operation::Get,
    Operation::Exists,
    Operation::Size,
    Operation::Remove,
    Operation::Read,
    Operation::Read,
    Operation::Write,
    Operation::Write,
    Operation::ReadMany,
    Operation::ReadMany,
    Operation::WriteMany,
    Operation::WriteMany,
    Operation::OpenSegment,
    Operation::Lookup,
];
const ASKED_OF_SHARED: [Operation; 13] = [
    Operation::Reserve,
    Operation::Reserve,
    Operation::Reserve,
    Operation::Commit,
    Operation::Commit,
    Operation::Abort,
    Operation::Lookup,
    Operation::Lookup,
    Operation::Release,
    Operation::Release,
    Operation::Remove,
    Operation::Exists,
    Operation::Put,
];

/// Picks from here on name a handle that another peer holds.
const STOLEN: usize = 61;

/// Peer as the host sees it.
struct Peer {
    key: PeerKey,
    path: Path,
    closed: bool,
    /// Destination of the payload being received.
    arriving: Option<Vec<MemoryExtent>>,
    /// Puts not answered yet.
    puts: Vec<RequestId>,
    /// Puts of each request for reservations.
    reserves: BTreeMap<RequestId, Vec<PutItem>>,
    pins: Vec<(PinId, MemoryExtent)>,
    reservations: Vec<(ReservationId, MemoryExtent)>,
}

/// Returns a put; some have a tail, and some replace.
fn put_of(key: u8, bytes: u64, pick: usize) -> PutItem {
    let options = PutOptions { group: (pick % 2) as u64, replace: pick.is_multiple_of(3), ..PutOptions::default() };
    PutItem::plain(digest(key), bytes).with_options(&options)
}

fn overlap(one: &MemoryExtent, two: &MemoryExtent) -> bool {
    let both = one.memory == Memory::Pool && two.memory == Memory::Pool;
    both && one.offset < two.offset + two.bytes && two.offset < one.offset + one.bytes
}

pub(super) struct World {
    rig: Rig,
    peers: [Option<Peer>; PEERS],
    generation: u32,
    epoch: u64,
    holds: Vec<(Vec<MemoryExtent>, Hold)>,
    segments: Vec<SegmentId>,
    leaving: Vec<SegmentId>,
}

impl World {
    pub(super) fn new() -> Self {
        let config = StoreConfig { max_pins: 6, max_reservations: 4, max_objects: 8, ..config(4096) };
        Self {
            rig: Rig::with(config),
            peers: [const { None }; PEERS],
            generation: 0,
            epoch: 5,
            holds: Vec::new(),
            segments: Vec::new(),
            leaving: Vec::new(),
        }
    }

    pub(super) fn play(&mut self, step: &Step) {
        match *step {
            Step::Join { shared, hello } => self.join(shared, hello),
            Step::Ask { peer, operation, key, bytes, pick } => self.ask(peer, operation, key, bytes, pick),
            Step::Garbage { peer, operation, reply, items, ref body, payload_bytes, sum } => {
                let operation = Operation::ALL[operation];
                let kind = if reply { Kind::Reply(operation) } else { Kind::Request(operation) };
                let mut header = Header::request(kind, self.rig.next_request()).with_body(body, items as usize);
                if payload_bytes > 0 {
                    header = header.with_payload(payload_bytes, sum.then_some(CHECKSUM));
                }
                self.send(peer, &header, body);
            }
            Step::PayloadDone { peer, good } => self.payload_done(peer, good),
            Step::Sent(pick) => {
                if !self.holds.is_empty() {
                    let (_, hold) = self.holds.swap_remove(pick % self.holds.len());
                    self.rig.service.sent(hold);
                }
            }
            Step::Gone(peer) => self.gone(peer),
            Step::Pass { ms } => self.rig.pass(ms * 1_000_000),
            Step::Own { epoch_back, without } => {
                self.epoch = if epoch_back { self.epoch - 1 } else { self.epoch + 1 };
                self.rig.service.set_owned(Epoch(self.epoch), |slot| slot != u16::from(without));
            }
            Step::NewIncarnation => {
                self.rig.service.begin_incarnation(identity().incarnation);
                self.rig.service.set_owned(Epoch(self.epoch), |_| true);
            }
            Step::Register { at, writable } => {
                let mut info = segment_info(at * SEGMENT_BYTES, SEGMENT_BYTES);
                info.writable = writable;
                self.segments.extend(self.rig.service.segments_mut().register(info));
            }
            Step::Unregister { pick, evict } => self.unregister(pick, evict),
        }
        self.listen();
    }

    fn join(&mut self, shared: bool, says_hello: bool) {
        let Some(index) = self.peers.iter().position(Option::is_none) else { return };
        self.generation += 1;
        let key = PeerKey { index: index as u32, generation: self.generation };
        let path = if shared { Path::Shared } else { Path::Stream };
        self.rig.service.peer_joined(key, path, self.rig.now_ns);
        self.peers[index] = Some(Peer {
            key,
            path,
            closed: false,
            arriving: None,
            puts: Vec::new(),
            reserves: BTreeMap::new(),
            pins: Vec::new(),
            reservations: Vec::new(),
        });
        if says_hello {
            self.rig.ask(key, Operation::Hello, &hello().encode(), 1);
        }
    }

    fn ask(&mut self, peer: usize, operation: usize, key: u8, bytes: u64, pick: usize) {
        let path = self.peers[peer].as_ref().map_or(Path::Stream, |peer| peer.path);
        let asked: &[Operation] = if path == Path::Stream { &ASKED_OF_STREAMS } else { &ASKED_OF_SHARED };
        let operation = asked[operation % asked.len()];
        let request = self.rig.next_request();
        let segment = self.segments.iter().chain(&self.leaving).nth(pick % 4).copied().unwrap_or_default();
        let (body, items, payload_bytes) = match operation {
            Operation::OpenSegment => (Vec::new(), 0, 0),
            Operation::Put => (body_of([put_of(key, bytes, pick)]), 1, bytes),
            Operation::Write => (body_of([WriteItem { segment, offset: pick as u64 }]), 1, bytes),
            Operation::Read => (body_of([ReadItem { request, segment, offset: pick as u64, bytes }]), 1, 0),
            Operation::ReadMany | Operation::WriteMany => {
                let runs = self.runs(bytes as u32, pick);
                let whole: u64 = runs.iter().map(|run| u64::from(run.ranges) * u64::from(run.bytes)).sum();
                let payload_bytes = if operation == Operation::WriteMany { whole } else { 0 };
                (body_of(runs.iter().copied()), runs.len(), payload_bytes)
            }
            Operation::Get => (body_of([GetItem { digest: digest(key), request, capacity_bytes: bytes * 8 }]), 1, 0),
            Operation::Reserve => {
                let items: Vec<PutItem> = (0..pick as u8 % 3).map(|n| put_of(key + n, bytes, pick)).collect();
                if let Some(peer) = &mut self.peers[peer] {
                    peer.reserves.insert(request, items.clone());
                }
                (body_of(items.iter().copied()), items.len(), 0)
            }
            Operation::Commit | Operation::Abort => match self.take_reservation(peer, pick) {
                None => return,
                Some(reservation) if operation == Operation::Commit => {
                    (body_of([CommitItem { reservation, checksum: CHECKSUM }]), 1, 0)
                }
                Some(reservation) => (body_of([IdItem { id: reservation.to_bits() }]), 1, 0),
            },
            Operation::Release => match self.take_pin(peer, pick) {
                None => return,
                Some(pin) => (body_of([IdItem { id: pin.to_bits() }]), 1, 0),
            },
            _ => (digests((0..pick as u8 % 4).map(|n| key + n)), pick % 4, 0),
        };
        let mut header = Header::request(Kind::Request(operation), request).with_body(&body, items);
        if payload_bytes > 0 {
            header = header.with_payload(payload_bytes, Some(CHECKSUM));
        }
        self.send(peer, &header, &body);
    }

    /// Returns runs over several segments, most of them inside.
    fn runs(&self, bytes: u32, pick: usize) -> Vec<RunItem> {
        let segments = self.segments.iter().chain(&self.leaving).copied();
        let run = |(at, segment)| {
            let (ranges, stride_bytes) = (1 + (pick + at) as u32 % 4, pick as u64 * 16);
            RunItem { segment, offset: pick as u64, stride_bytes, bytes: bytes.max(1), ranges }
        };
        segments.enumerate().skip(pick % 2).take(1 + pick % 3).map(run).collect()
    }

    /// Takes a reservation that this peer holds, which then stops writing it; or, rarely, returns one of another peer.
    fn take_reservation(&mut self, peer: usize, pick: usize) -> Option<ReservationId> {
        if pick >= STOLEN {
            return self.others(peer).flat_map(|other| &other.reservations).map(|held| held.0).next();
        }
        let reservations = &mut self.peers[peer].as_mut().filter(|peer| !peer.closed)?.reservations;
        (!reservations.is_empty()).then(|| reservations.swap_remove(pick % reservations.len()).0)
    }

    fn take_pin(&mut self, peer: usize, pick: usize) -> Option<PinId> {
        if pick >= STOLEN {
            return self.others(peer).flat_map(|other| &other.pins).map(|held| held.0).next();
        }
        let pins = &mut self.peers[peer].as_mut().filter(|peer| !peer.closed)?.pins;
        (!pins.is_empty()).then(|| pins.swap_remove(pick % pins.len()).0)
    }

    fn others(&self, peer: usize) -> impl Iterator<Item = &Peer> {
        self.peers.iter().enumerate().filter(move |&(index, _)| index != peer).filter_map(|(_, other)| other.as_ref())
    }

    /// Delivers a frame, unless a payload is being received on its connection.
    fn send(&mut self, peer: usize, header: &Header, body: &[u8]) {
        let Some(peer) = self.peers[peer].as_mut().filter(|peer| peer.arriving.is_none()) else { return };
        let to = self.rig.service.request(peer.key, header, body, self.rig.now_ns);
        let extents = match &to {
            PayloadTo::Discard => Vec::new(),
            PayloadTo::Extent(extent) => vec![*extent],
            PayloadTo::Extents(range) => self.rig.service.extents(range.clone()).to_vec(),
        };
        if header.kind == Kind::Request(Operation::Put) && !peer.closed {
            peer.puts.push(header.request);
        }
        let along = header.kind == Kind::Request(Operation::Put);
        if header.payload_bytes > 0 && (along || peer.path == Path::Stream) {
            peer.arriving = Some(extents.clone());
        } else {
            assert_eq!(to, PayloadTo::Discard, "nothing arrives");
        }
        if to != PayloadTo::Discard {
            assert_eq!(extents.iter().map(|extent| extent.bytes).sum::<u64>(), header.payload_bytes);
        }
        let left = |extent: &MemoryExtent| self.leaving.iter().any(|&left| extent.memory == Memory::Segment(left));
        assert!(!extents.iter().any(left), "written after its end");
    }

    fn payload_done(&mut self, peer: usize, good: bool) {
        let Some(peer) = self.peers[peer].as_mut() else { return };
        if peer.arriving.take().is_some() {
            let sum = if good { CHECKSUM } else { 1 };
            self.rig.service.payload_done(peer.key, Some(sum), self.rig.now_ns);
        }
    }

    fn gone(&mut self, peer: usize) {
        if let Some(peer) = self.peers[peer].take() {
            self.rig.gone(peer.key);
        }
    }

    fn unregister(&mut self, pick: usize, evict: bool) {
        if let Some(&segment) = self.leaving.get(pick).filter(|_| evict) {
            self.rig.service.evict_users(segment);
        } else if !self.segments.is_empty() {
            let segment = self.segments.swap_remove(pick % self.segments.len());
            self.leaving.push(segment);
            self.rig.service.unregister(segment);
        }
    }

    /// Acts on the service's outputs.
    fn listen(&mut self) {
        for said in self.rig.drain() {
            match said {
                ServiceOutput::Answer(answer) => self.hear(&answer),
                ServiceOutput::Close(key, reason) => {
                    let peer = self.peers[key.index as usize].as_mut().filter(|peer| peer.key == key);
                    let peer = peer.expect("only who is there is closed");
                    assert!(!peer.closed, "closed twice: {reason}");
                    peer.closed = true;
                    peer.puts.clear();
                }
                ServiceOutput::Tail(offset, bytes) => {
                    let tail = MemoryExtent { memory: Memory::Pool, offset, bytes: bytes.len() as u64 };
                    let used = self.writes().chain(self.reads()).find(|extent| overlap(&tail, extent));
                    assert_eq!(used, None, "a tail is written where others are");
                }
                ServiceOutput::Unregistered(segment) => {
                    let at = self.leaving.iter().position(|&leaving| leaving == segment);
                    self.leaving.swap_remove(at.expect("it was unregistered, once"));
                    let used = |extent: &MemoryExtent| extent.memory == Memory::Segment(segment);
                    assert!(
                        !self.holds.iter().any(|(extents, _)| extents.iter().any(used)),
                        "read while its memory goes"
                    );
                    assert!(!self.writes().any(|extent| used(&extent)), "written while its memory goes");
                }
            }
        }
    }

    fn hear(&mut self, answer: &Answer) {
        self.holds.extend(answer.payload.map(|(_, hold)| (answer.extents.clone(), hold)));
        let left = |extent: &MemoryExtent| self.leaving.iter().any(|&left| extent.memory == Memory::Segment(left));
        assert!(!answer.extents.iter().any(left), "read after its end");
        let Some(peer) = self.peers[answer.peer.index as usize].as_mut().filter(|peer| peer.key == answer.peer) else {
            return;
        };
        assert!(!peer.closed, "an answer after the end");
        if answer.header.kind == Kind::Reply(Operation::Put) {
            let at = peer.puts.iter().position(|&request| request == answer.header.request);
            peer.puts.swap_remove(at.expect("each put is answered once"));
            assert_eq!(peer.arriving, None, "a put is answered after its payload");
        }
        if answer.status() != Status::Ok {
            return;
        }
        let pool = |offset, bytes| MemoryExtent { memory: Memory::Pool, offset, bytes };
        match answer.header.kind {
            Kind::Reply(Operation::Lookup) => {
                let found = answer.items::<LookupReply>().into_iter().filter(|reply| reply.status == Status::Ok);
                peer.pins.extend(found.map(|reply| (reply.pin, pool(reply.offset, reply.bytes))));
            }
            Kind::Reply(Operation::Reserve) => {
                let replies: Vec<ReserveReply> = answer.items();
                let asked = peer.reserves.remove(&answer.header.request).unwrap_or_default();
                for (reply, item) in replies.iter().zip(asked).filter(|(reply, _)| reply.status == Status::Ok) {
                    peer.reservations.push((reply.reservation, pool(reply.offset, item.bytes)));
                }
            }
            _ => {}
        }
    }

    /// Returns the ranges that a peer's bytes may be written to, by the host or by the peer.
    fn writes(&self) -> impl Iterator<Item = MemoryExtent> {
        self.peers
            .iter()
            .flatten()
            .flat_map(|peer| peer.arriving.iter().flatten().copied().chain(peer.reservations.iter().map(|held| held.1)))
    }

    /// Returns the ranges that are being read.
    fn reads(&self) -> impl Iterator<Item = MemoryExtent> {
        let lent = self.peers.iter().flatten().flat_map(|peer| peer.pins.iter().map(|held| held.1));
        lent.chain(self.holds.iter().flat_map(|held| held.0.iter().copied()))
    }

    pub(super) fn check(&self) {
        self.rig.store().check();
        let writes: Vec<MemoryExtent> = self.writes().collect();
        let reads: Vec<MemoryExtent> = self.reads().collect();
        for (at, write) in writes.iter().enumerate() {
            let others = writes[..at].iter().chain(&reads);
            for other in others {
                assert!(!overlap(write, other), "{write:?} is written while {other:?} is in use");
            }
        }
    }

    /// Ends everything in flight: payloads are received, replies are sent, connections end.
    pub(super) fn finish(&mut self) {
        for peer in 0..PEERS {
            self.payload_done(peer, true);
            self.listen();
            if let Some(peer) = &self.peers[peer] {
                assert_eq!(peer.puts, [], "every put is answered");
            }
            self.gone(peer);
        }
        for (_, hold) in core::mem::take(&mut self.holds) {
            self.rig.service.sent(hold);
        }
        while let Some(segment) = self.segments.pop() {
            self.leaving.push(segment);
            self.rig.service.unregister(segment);
        }
        self.listen();
        assert_eq!(self.leaving, [], "every segment's memory is back");
        assert_eq!(self.rig.service.poll_timeout(), None);
        self.rig.assert_idle();
    }
}
