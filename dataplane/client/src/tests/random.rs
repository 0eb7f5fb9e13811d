//! Random scripts: regardless of peers, network and callers, each batch completes exactly once, with results in order,
//! never while I/O can still touch its memory, and leaves no state behind.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{BatchId, RequestId, SegmentId};
use kvplane_proto::message::{Kind, Operation, PageQuery};
use kvplane_proto::status::Status;

use super::rig::{
    ClientOutput, Object, Reply, Rig, SECOND_NS, SEGMENT_BYTES, digest, map, push_name, shared_config, stream_config,
};
use crate::{Config, LaneId, Local, PutBook, Request, SegmentTarget, SliceId, SubmitOptions};

/// Objects with keys below this exist from the start and are never removed.
const LASTING: u64 = 12;

/// An item in flight in the network.
#[derive(Clone, Debug)]
enum NetworkItem {
    Seen(ClientOutput),
    Reply(Reply),
    Payload { lane: LaneId, slice: SliceId, locals: Vec<Local>, sum: u64 },
}

impl NetworkItem {
    fn lane(&self) -> Option<LaneId> {
        match self {
            Self::Seen(
                ClientOutput::Connect { lane, .. } | ClientOutput::Copy { lane, .. } | ClientOutput::Reset(lane),
            )
            | Self::Payload { lane, .. } => Some(*lane),
            Self::Seen(ClientOutput::Frame(sent)) => Some(sent.lane),
            Self::Reply(reply) => Some(reply.lane),
            Self::Seen(ClientOutput::Done(_) | ClientOutput::WantMap) => None,
        }
    }

    /// Returns the caller's memory that the host may be reading or writing for it.
    fn memory(&self) -> &[Local] {
        match self {
            Self::Seen(ClientOutput::Copy { local, .. }) => core::slice::from_ref(local),
            Self::Payload { locals, .. } => locals,
            Self::Seen(ClientOutput::Frame(sent)) => &sent.payload,
            _ => &[],
        }
    }
}

struct World {
    rig: Rig,
    pending: Vec<NetworkItem>,
    open: BTreeMap<BatchId, Vec<Request>>,
    /// Memory of batches that the caller has reclaimed: the buffer is the batch's number.
    returned: BTreeSet<u32>,
    submitted: u32,
    segment: SegmentTarget,
    epoch: u64,
    dead: BTreeSet<LaneId>,
}

#[derive(Clone, Debug)]
struct Step {
    what: u8,
    which: u16,
}

fn lasting_bytes(number: u64) -> u64 {
    100 + number
}

impl World {
    fn new(config: Config) -> Self {
        let shared = config.shared;
        let mut rig = Rig::new(config, 2);
        for number in 0..LASTING {
            rig.objects.insert(digest(number), Object::new(lasting_bytes(number), number + 1));
        }
        let peer = rig.segment_peer(shared);
        let segment = SegmentId { index: 1, generation: 1 };
        let segment = SegmentTarget { peer, segment, offset: 0, shareable: shared, place: crate::Place::UNKNOWN };
        Self {
            rig,
            pending: Vec::new(),
            open: BTreeMap::new(),
            returned: BTreeSet::new(),
            submitted: 0,
            segment,
            epoch: 1,
            dead: BTreeSet::new(),
        }
    }

    fn step(&mut self, step: &Step) {
        let which = u64::from(step.which);
        match step.what {
            0..=39 => self.submit(which),
            40..=150 => self.advance(which, false),
            151..=190 => self.advance(which, true),
            191..=205 => self.lose(which),
            206..=215 => self.cancel(which),
            216..=225 => {
                let repeated = self.pick(which, |pending| matches!(pending, NetworkItem::Reply(_)));
                if let Some(index) = repeated {
                    self.pending.push(self.pending[index].clone());
                }
            }
            226..=230 => {
                self.epoch += 1;
                self.rig.client.set_map(map(self.epoch, 1 + which % 3, 1 + which / 8 % 2), self.rig.now_ns);
            }
            _ => {
                self.rig.now_ns += which * which;
                self.rig.client.handle_timeout(self.rig.now_ns);
            }
        }
        self.collect();
    }

    fn submit(&mut self, which: u64) {
        let buffer = self.submitted;
        self.submitted += 1;
        let mut offset = 0;
        let mut book = PutBook::new();
        let requests: Vec<Request> = (0..=which % 5)
            .map(|position| {
                let number = (which / 5 + position * 7) % (LASTING + 6);
                let bytes = if number < LASTING { lasting_bytes(number) } else { 50 } + which % 3;
                let local = Local { buffer, offset, bytes };
                offset += bytes.max(10_000);
                match (which / 8 + position) % 8 {
                    0 => Request::Exists(digest(number)),
                    1 => Request::Size(digest(number)),
                    2 => Request::Remove(digest(number.max(LASTING))),
                    3 | 4 => Request::Get(digest(number), local),
                    5 if number.is_multiple_of(2) => Request::Put(digest(number), local),
                    5 => {
                        // The replacement of a lasting object has the same length.
                        let local =
                            Local { bytes: if number < LASTING { lasting_bytes(number) } else { bytes }, ..local };
                        Request::PutAs(digest(number), local, push_name(&mut book, number, 0))
                    }
                    6 if number.is_multiple_of(3) => {
                        let local = Local { bytes: 40 + which % 90, ..local };
                        Request::GetRange(digest(number), which % 20, local)
                    }
                    6 if number.is_multiple_of(5) => Request::List(
                        digest(number),
                        PageQuery { walk: which, from: which, names: true, ..Default::default() },
                    ),
                    6 => Request::Read(self.part(which), Local { bytes: 10_000, ..local }),
                    _ => Request::Write(self.part(which), Local { bytes: 10_000, ..local }),
                }
            })
            .collect();
        let deadline_ns = self.rig.now_ns + which * which * which % (3 * SECOND_NS);
        let options = SubmitOptions::until(deadline_ns);
        let batch = self.rig.client.submit_puts(&requests, &book, &options, self.rig.now_ns).expect("a valid batch");
        self.open.insert(batch, requests);
    }

    /// Returns a range of the segment; now and then one that ends, or begins, outside.
    const fn part(&self, which: u64) -> SegmentTarget {
        let offset = if which.is_multiple_of(11) { SEGMENT_BYTES - which / 11 % 3 * 5_000 } else { which * 8 };
        SegmentTarget { offset, ..self.segment }
    }

    /// Takes and checks all outputs of the client.
    fn collect(&mut self) {
        for seen in self.rig.drain() {
            match seen {
                ClientOutput::Done(batch) => self.done(batch),
                ClientOutput::WantMap => {}
                seen => self.pending.push(NetworkItem::Seen(seen)),
            }
            for local in self.pending.last().map_or(&[][..], NetworkItem::memory) {
                assert!(!self.returned.contains(&local.buffer), "memory that was given back is used");
            }
        }
    }

    fn done(&mut self, batch: BatchId) {
        let requests = self.open.remove(&batch).expect("a batch completes once");
        self.rig.done = vec![batch];
        let results = self.rig.finish(batch);
        assert_eq!(results.len(), requests.len());
        for (request, &(status, bytes, _)) in requests.iter().zip(&results) {
            check_result(request, status, bytes);
        }
        let Some(buffer) = requests.iter().find_map(Request::local).map(|local| local.buffer) else { return };
        for pending in self.pending.iter().filter(|pending| pending.lane().is_some_and(|l| !self.dead.contains(&l))) {
            let used = pending.memory().iter().any(|local| local.buffer == buffer);
            assert!(!used, "{pending:?} is under way for a batch that is done");
        }
        self.returned.insert(buffer);
    }

    fn pick(&self, which: u64, wanted: impl Fn(&NetworkItem) -> bool) -> Option<usize> {
        let found: Vec<usize> = (0..self.pending.len()).filter(|&index| wanted(&self.pending[index])).collect();
        (!found.is_empty()).then(|| found[which as usize % found.len()])
    }

    /// Delivers an item in flight, damaged if `spoiled`.
    fn advance(&mut self, which: u64, spoiled: bool) {
        let Some(index) = self.pick(which, |_| true) else { return };
        let pending = self.pending.remove(index);
        match pending {
            NetworkItem::Seen(ClientOutput::Connect { lane, .. }) if spoiled => self.end(lane),
            NetworkItem::Seen(ClientOutput::Copy { lane, slice, .. }) if spoiled => {
                let status = [Status::Corrupt, Status::OutOfRange, Status::Busy][which as usize % 3];
                self.rig.client.copied(lane, slice, Err(status), self.rig.now_ns);
            }
            NetworkItem::Seen(ClientOutput::Reset(lane)) => self.end(lane),
            NetworkItem::Seen(ClientOutput::Frame(sent)) => {
                let held = (self.rig.pins.clone(), self.rig.reservations.clone());
                let mut replies = self.rig.answers(&sent);
                if spoiled && !replies.is_empty() {
                    replies.iter_mut().for_each(|reply| spoil(reply, which));
                    if matches!(sent.operation(), Operation::Lookup | Operation::Reserve)
                        && matches!(which % 8, 0..=2 | 6)
                    {
                        // This damage hides the granted handles from the client, so they are not awaited.
                        (self.rig.pins, self.rig.reservations) = held;
                    }
                }
                self.pending.extend(replies.into_iter().map(NetworkItem::Reply));
            }
            NetworkItem::Seen(seen) => self.rig.act(seen),
            NetworkItem::Reply(reply) => self.arrive(&reply),
            NetworkItem::Payload { slice, sum, .. } => {
                self.rig.client.payload_done(slice, Some(sum + u64::from(spoiled)), self.rig.now_ns);
            }
        }
    }

    fn arrive(&mut self, reply: &Reply) {
        if let Some((slice, locals)) = self.rig.receive(reply) {
            let returned = locals.iter().any(|local| self.returned.contains(&local.buffer));
            assert!(!returned, "memory that was given back is written");
            assert_eq!(locals.iter().map(|local| local.bytes).sum::<u64>(), reply.header.payload_bytes);
            // On one connection no frame arrives before the end of the payload; other lanes continue.
            self.pending.push(NetworkItem::Payload { lane: reply.lane, slice, locals, sum: reply.sum });
        }
    }

    fn lose(&mut self, which: u64) {
        let lanes: Vec<LaneId> = self.rig.addresses.keys().copied().filter(|lane| !self.dead.contains(lane)).collect();
        if !lanes.is_empty() {
            self.end(lanes[which as usize % lanes.len()]);
        }
    }

    /// Ends a lane: its I/O first, then the report to the client.
    fn end(&mut self, lane: LaneId) {
        self.pending.retain(|pending| pending.lane() != Some(lane) || matches!(pending, NetworkItem::Reply(_)));
        self.dead.insert(lane);
        self.rig.lose(lane);
    }

    fn cancel(&mut self, which: u64) {
        let batches: Vec<BatchId> = self.open.keys().copied().collect();
        if !batches.is_empty() {
            self.rig.client.cancel(batches[which as usize % batches.len()], self.rig.now_ns);
        }
    }

    /// From now on all peers are honest and time passes: everything must complete.
    fn finish(&mut self) {
        for _ in 0..100_000 {
            self.collect();
            if !self.pending.is_empty() {
                self.advance(0, false);
                continue;
            }
            let Some(at_ns) = self.rig.client.poll_timeout() else { break };
            self.rig.now_ns = self.rig.now_ns.max(at_ns);
            self.rig.client.handle_timeout(self.rig.now_ns);
        }
        assert!(self.open.is_empty(), "{} batches never completed", self.open.len());
        self.rig.assert_empty();
    }
}

fn spoil(reply: &mut Reply, which: u64) {
    let header = &mut reply.header;
    match which % 8 {
        0..=2 => {
            let Kind::Reply(operation) = header.kind else { return };
            let statuses = &Status::ALL[1..];
            let status = statuses[(which / 8) as usize % statuses.len()];
            *header = Header::reply(Kind::Reply(operation), header.request, status);
            reply.body.clear();
        }
        3 => reply.body.truncate(reply.body.len() / 2),
        4 => header.items += 1,
        5 => header.payload_bytes += 1_000_000,
        6 => header.request = RequestId::from_bits(which),
        _ => header.kind = Kind::Reply(Operation::ALL[(which / 8) as usize % Operation::ALL.len()]),
    }
}

fn check_result(request: &Request, status: Status, bytes: u64) {
    let number = |wanted: kvplane_proto::Digest| (0..LASTING).find(|&number| digest(number) == wanted);
    match *request {
        Request::Exists(_) | Request::Prefetch(_) | Request::Remove(_) => assert_eq!(bytes, 0),
        Request::Size(digest) | Request::Get(digest, _) => {
            if let (Status::Ok, Some(number)) = (status, number(digest)) {
                assert_eq!(bytes, lasting_bytes(number), "the result of another request");
            }
        }
        Request::Put(_, local) | Request::PutAs(_, local, _) => {
            assert_eq!(bytes, if status == Status::Ok { local.bytes } else { 0 });
        }
        Request::Read(_, local) | Request::Write(_, local) => {
            assert!(bytes <= local.bytes && (status != Status::Ok || bytes == local.bytes));
        }
        Request::GetRange(_, _, local) => assert_eq!(bytes, if status == Status::Ok { local.bytes } else { 0 }),
        Request::List(..) | Request::OpenSegment(_) => {}
        _ => unreachable!("not used here"),
    }
}

fn config() -> impl Strategy<Value = Config> {
    (any::<bool>(), 1u16..=2, prop_oneof![Just(64u64 << 20), Just(200)]).prop_map(
        |(shared, lanes, lane_window_bytes)| {
            let base = if shared { shared_config() } else { stream_config() };
            Config { lanes, lane_window_bytes, slice_bytes: 4096, ..base }
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    (any::<u8>(), any::<u16>()).prop_map(|(what, which)| Step { what, which })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_batch_completes_once_and_nothing_is_left(
        config in config(),
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let mut world = World::new(config);
        for step in &steps {
            world.step(step);
        }
        world.finish();
    }
}
