//! Runs of slices beside one slice at a time: the same goes to the same lanes, and the same is counted.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::rig::{Rig, SECOND_NS, local, stream_config};
use crate::client::{Config, LaneId, Output, RailCounts, Request, SegmentTarget, SliceId};
use crate::ids::{BatchId, SegmentId};
use crate::status::Status;

const SLICE_BYTES: u64 = 128 << 10;
/// Requests are this far apart in the caller's memory: none continues another.
const STRIDE: u64 = 1 << 20;

#[derive(Clone, Debug)]
enum Step {
    /// Writes of so many bytes each, to the one segment or the other.
    Submit(Vec<(u64, u32)>),
    /// The host takes what there is to do.
    Take,
    /// Of each lane so many copies end, in order; perhaps the first of them with an error.
    End(usize, Option<Status>),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![Just(64), Just(64 << 10), 1..SLICE_BYTES, Just(SLICE_BYTES)];
    let status = prop_oneof![Just(Status::Stale), Just(Status::Unsupported), Just(Status::Busy)];
    let step = prop_oneof![
        3 => proptest::collection::vec((bytes, 1u32..3), 1..40).prop_map(Step::Submit),
        3 => Just(Step::Take),
        3 => (0usize..30, proptest::option::weighted(0.1, status)).prop_map(|(count, failed)| Step::End(count, failed)),
        2 => (0u64..150_000_000).prop_map(Step::Wait),
        2 => (0u64..3_000).prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 1..40)
}

/// What a client did and said.
#[derive(PartialEq, Debug, Default)]
struct Seen {
    /// What each lane posted, by the place of its memory.
    posted: BTreeMap<u32, Vec<u64>>,
    results: Vec<(Status, u64)>,
    counts: Vec<(RailCounts, u64)>,
    /// Its rails' rates and latencies.
    learned: Vec<(u64, u64)>,
}

struct Bed {
    rig: Rig,
    /// All that can be done at once is.
    many: bool,
    copying: BTreeMap<LaneId, VecDeque<SliceId>>,
    batches: Vec<BatchId>,
    next: u64,
    seen: Seen,
}

impl Bed {
    fn new(many: bool) -> Self {
        let config = Config {
            rdma: vec![1_000_000_000],
            lanes: 2,
            slice_bytes: SLICE_BYTES,
            lane_window_bytes: 1 << 20,
            report_tasks: true,
            ..stream_config()
        };
        let rig = Rig::new(config, 1);
        Self { rig, many, copying: BTreeMap::new(), batches: Vec::new(), next: 0, seen: Seen::default() }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Submit(ranges) => {
                let peer = self.rig.segment_peer(false);
                let request = |(place, &(bytes, index)): (u64, &(u64, u32))| {
                    let segment = SegmentId { index, generation: 1 };
                    let target = SegmentTarget { peer, segment, offset: 0, shareable: false };
                    Request::Write(target, local(0, place * STRIDE, bytes))
                };
                let requests: Vec<_> = (self.next..).zip(ranges).map(request).collect();
                self.next += requests.len() as u64;
                let together = if self.many { requests.len() } else { 1 };
                self.batches.extend(requests.chunks(together).map(|batch| self.rig.submit(batch)));
            }
            Step::Take => self.take(),
            Step::End(count, failed) => self.end(*count, *failed),
            Step::Wait(ns) => self.rig.now_ns += ns,
        }
    }

    fn take(&mut self) {
        while let Some(output) = self.rig.client.poll_output() {
            match output {
                Output::CopySegment { lane, slice, local, .. } => {
                    let mut taken = vec![(slice, local.offset)];
                    if self.many {
                        taken.extend(self.rig.client.copies(lane).map(|copy| (copy.slice, copy.local.offset)));
                    }
                    self.copying.entry(lane).or_default().extend(taken.iter().map(|taken| taken.0));
                    self.seen.posted.entry(lane.index).or_default().extend(taken.iter().map(|taken| taken.1));
                }
                Output::Connect { lane, address, .. } => {
                    self.rig.addresses.insert(lane, address);
                    self.rig.client.connected(lane, self.rig.now_ns);
                }
                Output::Send { lane, header, body, payload } => {
                    let (body, payload) =
                        (self.rig.client.body(body).to_vec(), self.rig.client.payload(payload).to_vec());
                    for reply in self.rig.answers(&super::rig::Sent { lane, header, body, payload }) {
                        self.rig.deliver(&reply);
                    }
                }
                Output::Done { .. } => {}
                other => panic!("nothing else is wanted: {other:?}"),
            }
        }
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
            // What is not called does not tell the time.
            if ended.is_empty() {
                continue;
            }
            if self.many {
                self.rig.client.all_copied(lane, ended, now_ns);
            } else {
                ended.into_iter().for_each(|slice| self.rig.client.copied(lane, slice, Ok(0), now_ns));
            }
        }
    }

    fn run(mut self, steps: &[Step]) -> Seen {
        // A connection of each lane, so that no frame is among what follows.
        self.step(&Step::Submit(vec![(SLICE_BYTES, 1); 64]));
        steps.iter().for_each(|step| self.step(step));
        for _ in 0..2_000 {
            self.take();
            self.end(7, None);
            self.rig.now_ns += 1_000_000;
            self.rig.client.handle_timeout(self.rig.now_ns);
            if self.batches.iter().all(|&batch| self.rig.client.is_complete(batch)) {
                break;
            }
        }
        assert!(self.rig.now_ns < 100 * SECOND_NS, "deadlines are far");
        let mut finished = 0;
        while self.rig.client.poll_finished().is_some() {
            finished += 1;
        }
        for batch in self.batches {
            let results = self.rig.client.results(batch);
            self.seen.results.extend(results.iter().map(|result| (result.status, result.bytes)));
            self.rig.client.release(batch);
        }
        assert_eq!(finished, self.seen.results.len(), "each task is told of once");
        for rail in self.rig.client.rail_metrics() {
            self.seen.counts.push((rail.counts.clone(), rail.inflight_bytes));
            self.seen.learned.push((rail.bytes_per_second, rail.latency_ns));
        }
        self.seen
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
    #[test]
    fn runs_end_as_single_slices_do(steps in steps()) {
        let (mut many, mut single) = (Bed::new(true).run(&steps), Bed::new(false).run(&steps));
        let close = |a: u64, b: u64| a.abs_diff(b) <= 2 + a.max(b) / 1_000_000;
        let (these, those) = (core::mem::take(&mut many.learned), core::mem::take(&mut single.learned));
        for (this, that) in these.iter().zip(&those) {
            prop_assert!(close(this.0, that.0) && close(this.1, that.1), "{:?} and {:?}", this, that);
        }
        prop_assert_eq!(many, single);
    }
}
