//! Runs of slices compared with one slice at a time: they are posted on the same lanes, and the estimates and counts
//! are exactly the same.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use kvplane_proto::ids::{BatchId, SegmentId};
use kvplane_proto::status::Status;

use crate::tests::rig::{Rig, SECOND_NS, SentFrame, local, stream_config};
use crate::{
    Config, DeviceCopy, LaneId, Near, Nearness, Output, PeerAddress, PeerId, Place, RailCounts, Request, RowCopy,
    SegmentTarget, SliceId,
};

const SLICE_BYTES: u64 = 128 << 10;
/// Distance of requests in the caller's memory, so that none continues another.
const STRIDE: u64 = 1 << 20;

/// A write or a read: its bytes, the segment (of two), our buffer (of which the last two are on the second node), true
/// if the segment is missing, and true for a read.
type Ask = (u64, u32, u32, bool, bool);

#[derive(Clone, Debug)]
enum Step {
    Submit(Vec<Ask>),
    /// The host polls all outputs.
    Take,
    /// So many copies of each lane end, in order; the first of them with this error, if any.
    End(usize, Option<Status>),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![Just(64), Just(64 << 10), 1..SLICE_BYTES, Just(SLICE_BYTES), 1..4 * SLICE_BYTES];
    let (buffer, rare) = (prop_oneof![8 => 0u32..2, 1 => 2u32..4], || proptest::bool::weighted(0.1));
    let status = prop_oneof![Just(Status::Stale), Just(Status::Unsupported), Just(Status::Busy)];
    let step = prop_oneof![
        3 => proptest::collection::vec((bytes, 1u32..3, buffer, rare(), rare()), 1..40).prop_map(Step::Submit),
        3 => Just(Step::Take),
        3 => (0usize..30, proptest::option::weighted(0.1, status)).prop_map(|(count, failed)| Step::End(count, failed)),
        2 => (0u64..150_000_000).prop_map(Step::Wait),
        2 => (0u64..3_000).prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 1..40)
}

/// Observable behaviour of a client.
#[derive(PartialEq, Debug, Default)]
struct ClientTrace {
    /// Copies that each lane posted, by the position of their memory.
    posted: BTreeMap<u32, Vec<u64>>,
    results: Vec<(Status, u64)>,
    counts: Vec<(RailCounts, u64)>,
    /// State of each rail: rate, latency and base to the last bit, its silence, and its window.
    learned: Vec<([u64; 3], u64, u64)>,
}

struct Bed {
    rig: Rig,
    peer: PeerId,
    /// True to use runs: everything that can be done at once is.
    many: bool,
    copying: BTreeMap<LaneId, VecDeque<SliceId>>,
    batches: Vec<BatchId>,
    next: u64,
    seen: ClientTrace,
}

/// Returns the distances for as many devices as there are nodes at both ends, each near to its own node's memory.
fn nodes(count: usize) -> Near {
    let near = |same: bool| Nearness { tier: u8::from(!same), same_node: Some(same) };
    Near::new((0..count).map(|device| (0..2).map(|node| near(device == node)).collect()).collect())
}

impl Bed {
    fn new(many: bool, devices: usize) -> Self {
        let config = Config {
            lanes: 2,
            slice_bytes: SLICE_BYTES,
            lane_window_bytes: 1 << 20,
            report_tasks: true,
            ..stream_config()
        };
        let mut rig = Rig::new(config, 1);
        rig.client.set_rdma(vec![1_000_000_000; devices], nodes(devices));
        (0..4).for_each(|buffer| rig.client.set_buffer(buffer, Place::at(buffer as usize / 2), false));
        let peer = rig.client.open_peer_near(PeerAddress::native(([127, 0, 0, 1], 50).into(), None), nodes(devices));
        Self { rig, peer, many, copying: BTreeMap::new(), batches: Vec::new(), next: 0, seen: ClientTrace::default() }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Submit(writes) => {
                let peer = self.peer;
                let request = |(at, &(bytes, index, buffer, to, read)): (u64, &Ask)| {
                    let (segment, place) = (SegmentId { index, generation: 1 }, Place::at(usize::from(to)));
                    let target = SegmentTarget { peer, segment, offset: 0, shareable: false, place };
                    let local = local(buffer, at * STRIDE, bytes);
                    if read { Request::Read(target, local) } else { Request::Write(target, local) }
                };
                let requests: Vec<_> = (self.next..).zip(writes).map(request).collect();
                self.next += requests.len() as u64;
                let together = if self.many { requests.len() } else { 1 };
                self.batches.extend(requests.chunks(together).map(|batch| self.rig.submit(batch)));
            }
            Step::Take => self.take(),
            Step::End(count, failed) => self.end(*count, *failed),
            Step::Wait(ns) => self.rig.now_ns += ns,
        }
    }

    /// Polls all outputs. Replies are delivered afterwards, lane by lane, because runs and single slices differ in the
    /// order in which lanes take their turn.
    fn take(&mut self) {
        loop {
            let mut answered = self.take_round();
            if answered.is_empty() {
                return;
            }
            answered.sort_by_key(|(lane, _)| *lane);
            for (lane, sent) in answered {
                let Some(sent) = sent else {
                    self.copying.remove(&lane);
                    self.rig.lose(lane);
                    continue;
                };
                for reply in self.rig.answers(&sent) {
                    self.rig.deliver(&reply);
                }
            }
        }
    }

    /// Returns the frames sent, and `None` for each lane to be reset.
    fn take_round(&mut self) -> Vec<(LaneId, Option<SentFrame>)> {
        let mut answered = Vec::new();
        while let Some(output) = self.rig.client.poll_output() {
            let client = &mut self.rig.client;
            match output {
                Output::CopySegment { lane, slice, segment, offset, local, write, .. } => {
                    let mut taken = vec![(slice, local.offset)];
                    let mut next = Some(DeviceCopy { slice, segment, offset, local, write }).filter(|_| self.many);
                    let mut row = [RowCopy::default(); 5];
                    while let Some(first) = next {
                        let Some(mut copies) = client.copies(lane) else { break };
                        let count = copies.alike(&first, &mut row);
                        taken.extend(row[..count].iter().map(|copy| (copy.slice, copy.at)));
                        next = copies.next();
                        taken.extend(next.map(|copy| (copy.slice, copy.local.offset)));
                    }
                    self.copying.entry(lane).or_default().extend(taken.iter().map(|taken| taken.0));
                    self.seen.posted.entry(lane.index).or_default().extend(taken.iter().map(|taken| taken.1));
                }
                Output::Connect { lane, address, .. } => {
                    self.rig.addresses.insert(lane, address);
                    client.connected(lane, self.rig.now_ns);
                }
                Output::Send { lane, header, body, payload } => {
                    let (body, payload) =
                        (client.outbox().body(body).to_vec(), client.outbox().payload(payload).to_vec());
                    answered.push((lane, Some(SentFrame { lane, header, body, payload })));
                }
                Output::Reset { lane } => answered.push((lane, None)),
                Output::Done { .. } => {}
                other => panic!("nothing else is wanted: {other:?}"),
            }
        }
        answered
    }

    fn end(&mut self, count: usize, failed: Option<Status>) {
        let now_ns = self.rig.now_ns;
        for (&lane, copying) in &mut self.copying {
            let count = count.min(copying.len());
            let mut ended: VecDeque<_> = copying.drain(..count).collect();
            if let (Some(status), Some(first)) = (failed, ended.front().copied()) {
                ended.pop_front();
                self.rig.client.copied(lane, first, Err(status), now_ns);
            }
            // Without a call the client's time does not advance.
            if ended.is_empty() {
                continue;
            }
            if self.many {
                self.rig.client.all_copied(lane, ended, now_ns);
            } else {
                ended.into_iter().for_each(|slice| {
                    self.rig.client.copied(lane, slice, Ok(0), now_ns);
                });
            }
        }
    }

    fn run(mut self, steps: &[Step]) -> ClientTrace {
        // Connects each lane first, so that no handshake frames occur below.
        self.step(&Step::Submit(vec![(SLICE_BYTES, 1, 0, false, false); 64]));
        steps.iter().for_each(|step| self.step(step));
        for _ in 0..2_000 {
            self.take();
            self.end(7, None);
            self.rig.now_ns += 1_000_000;
            self.rig.client.handle_timeout(self.rig.now_ns);
            if self.batches.iter().all(|&batch| self.rig.client.batches().is_complete(batch)) {
                break;
            }
        }
        assert!(self.rig.now_ns < 100 * SECOND_NS, "deadlines are far");
        let mut finished = 0;
        while self.rig.client.poll_finished().is_some() {
            finished += 1;
        }
        for batch in self.batches {
            let results = self.rig.client.batches().results(batch);
            self.seen.results.extend(results.iter().map(|result| (result.status, result.bytes)));
            self.rig.client.release(batch);
        }
        assert_eq!(finished, self.seen.results.len(), "each task is reported once");
        for rail in self.rig.client.metrics().rail_metrics() {
            self.seen.counts.push((rail.counts.clone(), rail.inflight_bytes));
        }
        for entry in self.rig.client.network().rails.iter() {
            let rate = entry.rail.rate();
            let figures = [rate.bytes_per_ns(), rate.latency_ns(), rate.base_ns()].map(f64::to_bits);
            self.seen.learned.push((figures, entry.rail.silence_ns(), entry.rail.window_bytes(2_000_000, 0)));
        }
        self.seen
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
    #[test]
    fn runs_end_as_single_slices_do(devices in 1usize..3, steps in steps()) {
        let (many, single) = (Bed::new(true, devices).run(&steps), Bed::new(false, devices).run(&steps));
        prop_assert_eq!(many, single);
    }
}
