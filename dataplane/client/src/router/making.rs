//! Slices are made of requests, and bound to lanes as they are made.
//!
//! The first of a row is routed by itself; those behind it that go the same way at once are bound in a run
//! ([`crate::traffic`]).

use core::ops::Range;

use kvplane_proto::ids::BatchId;

use super::Router;
use crate::tables::{Slice, slice_id};
use crate::types::{Request, SegmentTarget};

/// A part of a request's range, as a slice moves it.
type Cut = (u64, u64);

/// The tasks of requests that touch each other, by the slices that they are cut into.
struct Spans<'a> {
    requests: &'a [Request],
    task: usize,
}

impl Spans<'_> {
    fn end(&self, task: usize) -> u64 {
        self.requests[task].local().map_or(0, |local| local.offset + local.bytes)
    }

    /// The first of the tasks that the next slice serves, and how many they are; by its place in our memory.
    fn next(&mut self, offset: u64, bytes: u64) -> (u32, u32) {
        while self.end(self.task) <= offset {
            self.task += 1;
        }
        let from = self.task;
        while self.end(self.task) < offset + bytes {
            self.task += 1;
        }
        (from as u32, (self.task - from + 1) as u32)
    }
}

/// Makes a slice of a range of the part of it that is a cut of the target's range.
#[inline(always)]
const fn take_part(request: &mut Request, cut: Cut) {
    let (offset, bytes) = cut;
    if let Request::Read(target, local) | Request::Write(target, local) = request {
        local.offset += offset - target.offset;
        local.bytes = bytes;
        target.offset = offset;
    }
}

impl Router {
    /// Makes a slice of each request.
    pub(crate) fn make_whole(&mut self, id: BatchId, tasks: Range<usize>, requests: &[Request], at_once: bool) {
        let like = self.traffic.new_slice(id, tasks.start as u32, requests[tasks.start]);
        self.traffic.batches.at(id.index).open_slices[tasks.clone()].fill(1);
        let asked = (tasks.start as u32..).zip(&requests[tasks.clone()]);
        self.make::<false, _>(&like, tasks.len(), at_once, asked, |slice, &(task, request)| {
            (slice.task, slice.request) = (task, *request);
        });
    }

    /// Cuts a request into slices, or requests that touch each other.
    pub(crate) fn cut(&mut self, id: BatchId, run: Range<usize>, requests: &[Request], at_once: bool) {
        let (first, last) = (&requests[run.start], &requests[run.end - 1]);
        let (Request::Read(target, local) | Request::Write(target, local)) = *first else { return };
        let like = self.traffic.new_slice(id, run.start as u32, *first);
        let end = last.local().map_or(0, |local| local.offset + local.bytes);
        let cuts = self.traffic.network.cuts(target.offset, end - local.offset, target.peer);
        let count = cuts.slices() as usize;
        let batch = self.traffic.batches.at(id.index);
        if run.len() == 1 {
            batch.open_slices[run.start] = count as u32;
            self.make::<true, _>(&like, count, at_once, cuts, |slice, cut| take_part(&mut slice.request, *cut));
            return;
        }
        batch.ranges.resize(requests.len(), (0, 0));
        for task in run.clone() {
            batch.ranges[task] = requests[task].local().map_or((0, 0), |local| (local.offset, local.bytes));
        }
        let spans = || {
            let mut spans = Spans { requests, task: run.start };
            cuts.clone().map(move |cut| (spans.next(local.offset + (cut.0 - target.offset), cut.1), cut))
        };
        // Known before any of them ends.
        for ((from, tasks), _) in spans() {
            batch.open_slices[from as usize..(from + tasks) as usize].iter_mut().for_each(|open| *open += 1);
        }
        self.make::<false, _>(&like, count, at_once, spans(), |slice, &((task, tasks), cut)| {
            (slice.task, slice.tasks) = (task, tasks);
            take_part(&mut slice.request, cut);
        });
    }

    /// Makes a slice of each of so many items, each a copy of `like` that `set` changes; and routes them, if that is
    /// to be at once. What waits for the slices of its tasks was counted before.
    #[inline(always)]
    fn make<const ONE: bool, I>(
        &mut self,
        like: &Slice,
        count: usize,
        at_once: bool,
        mut items: impl Iterator<Item = I>,
        set: impl Fn(&mut Slice, &I),
    ) {
        let (batch, mut left) = (like.batch.index, count);
        self.traffic.batches.at(batch).slices.reserve(count);
        let mut next = items.next();
        while let Some(item) = next {
            let mut slice = *like;
            set(&mut slice, &item);
            let (index, generation) = self.traffic.slices.insert(slice);
            let id = slice_id(index, generation);
            self.traffic.batches.at(batch).slices.push(id);
            left = left.saturating_sub(1);
            let route = if at_once { self.route(id) } else { None };
            next = match route {
                Some(target) if left > 0 => self.bind_run::<ONE, _>(index, &target, &mut left, &mut items, &set),
                _ => items.next(),
            };
        }
    }

    /// Makes the slices behind one that was just routed, bound to lanes: as long as they are like it and go at once, to
    /// the same segment, of the same size class, and over a path with one rail where nothing waits. Returns the first
    /// item that is not among them.
    #[inline(always)]
    fn bind_run<const ONE: bool, I>(
        &mut self,
        routed: u32,
        target: &SegmentTarget,
        left: &mut usize,
        items: &mut impl Iterator<Item = I>,
        set: &impl Fn(&mut Slice, &I),
    ) -> Option<I> {
        let Some(mut deal) = self.traffic.find_deal(routed, target) else { return items.next() };
        let dealt = self.traffic.deal::<ONE, _>(&mut deal, *left, items, set);
        *left -= dealt.bound;
        dealt.next
    }
}
