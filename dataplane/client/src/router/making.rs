//! Makes slices of the requests of a batch, and routes them.
//!
//! The first slice of a stretch is routed by itself; following slices that take the same way at once are bound in one
//! run ([`crate::traffic`]).

use core::ops::Range;

use kvplane_proto::ids::BatchId;

use super::Router;
use crate::tables::{Slice, slice_id};
use crate::types::{Request, SegmentTarget};

/// Offset in the target and length of a slice.
type Cut = (u64, u64);

/// Iterator over the tasks of adjacent requests, by the slices that they are cut into.
struct Spans<'a> {
    requests: &'a [Request],
    task: usize,
}

impl Spans<'_> {
    fn end(&self, task: usize) -> u64 {
        self.requests[task].local().map_or(0, |local| local.offset + local.bytes)
    }

    /// Returns the first of the tasks that the next slice serves, and their number; given the slice's range in our
    /// memory.
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

/// Narrows the request of a range to the cut of its target's range.
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
    /// Makes one slice of each request.
    pub(crate) fn make_whole(&mut self, id: BatchId, tasks: Range<usize>, requests: &[Request], at_once: bool) {
        let like = self.traffic.new_slice(id, tasks.start as u32, requests[tasks.start]);
        self.traffic.batches.at(id.index).open_slices[tasks.clone()].fill(1);
        let asked = (tasks.start as u32..).zip(&requests[tasks.clone()]);
        self.make::<false, _>(&like, tasks.len(), at_once, asked, |slice, &(task, request)| {
            (slice.task, slice.request) = (task, *request);
        });
    }

    /// Cuts a request, or adjacent requests, into slices.
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
        // The counts have to be complete before any of the slices ends.
        for ((from, tasks), _) in spans() {
            batch.open_slices[from as usize..(from + tasks) as usize].iter_mut().for_each(|open| *open += 1);
        }
        self.make::<false, _>(&like, count, at_once, spans(), |slice, &((task, tasks), cut)| {
            (slice.task, slice.tasks) = (task, tasks);
            take_part(&mut slice.request, cut);
        });
    }

    /// Makes a slice of each of so many items, as a copy of `like` modified by `set`, and routes it if `at_once`. The
    /// slices of each task were counted before.
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

    /// Makes and binds the slices behind one that was just routed, as long as they are like it and can be sent at once:
    /// to the same segment, of the same size class, and over a path with a single rail and an empty queue. Returns the
    /// first item that is not among them.
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
