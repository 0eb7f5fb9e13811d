//! Slices are made of requests, and bound to lanes as they are made.
//!
//! The first of a row is routed by itself; those behind it that go the same way at once are written as they lie in
//! their lane's list. Nothing is decided here that is not decided for one slice elsewhere: what is the same for all of
//! a run is looked at once. Whatever is out of the ordinary ends a run and goes the usual way, slice by slice. What
//! comes of a run is exactly what comes of its slices one by one (`tests/bulk.rs`).

use core::ops::Range;

use kvplane_proto::ids::BatchId;

use super::Client;
use super::dispatch::SMALL_WINDOW_BYTES;
use super::lane::Endpoint;
use super::table::{LEAST_LOAD_BYTES, NOWHERE, Slice, slice_id};
use super::types::{Request, SegmentTarget};

/// Lanes of a rail among which a run is dealt.
const LANES: usize = 8;

/// What a lane of a run gets: how many slices, the first of them, and the last slice that it has.
#[derive(Clone, Copy, Default)]
struct Share {
    lane: u32,
    load_bytes: u64,
    /// What they are known by as those that were bound together to this lane.
    run: u64,
    bound: u32,
    first: u32,
    last: u32,
}

/// Whose turn it is: the lane with the least to do, the first among equals. Where all have the same to do and slices
/// are equal, that is each in its turn.
#[derive(Default)]
struct Turns {
    /// Whose turn is next while the rest of a round is known, and the load of its slices; 0 where it is not.
    next: usize,
    load_bytes: u64,
}

impl Turns {
    #[inline]
    fn next(&mut self, shares: &[Share], load_bytes: u64) -> usize {
        if load_bytes != self.load_bytes {
            return self.look(shares, load_bytes);
        }
        let at = self.next;
        self.next = if at + 1 == shares.len() { 0 } else { at + 1 };
        at
    }

    #[inline(never)]
    fn look(&mut self, shares: &[Share], load_bytes: u64) -> usize {
        let least_bytes = shares.iter().map(|share| share.load_bytes).min().unwrap_or(0);
        let at = shares.iter().position(|share| share.load_bytes == least_bytes).unwrap_or(0);
        // The others are all as the first of a round leaves them, or as the last of a round finds them.
        let rest = |one: &Share, other: u64| one.load_bytes == other;
        let begun = shares[..at].iter().all(|one| rest(one, least_bytes + load_bytes));
        let known = begun && shares.get(at..).is_some_and(|ahead| ahead.iter().all(|one| rest(one, least_bytes)));
        (self.next, self.load_bytes) = (0, 0);
        if known && !shares.is_empty() {
            (self.next, self.load_bytes) = (if at + 1 == shares.len() { 0 } else { at + 1 }, load_bytes);
        }
        at
    }
}

/// What all slices of a run have in common.
struct Common {
    like: SegmentTarget,
    small: bool,
    /// Once they have so many bytes, the rail has its window of their size class: one that is larger goes alone.
    room_bytes: u64,
}

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
const fn take_part(request: &mut Request, (offset, bytes): (u64, u64)) {
    if let Request::Read(target, local) | Request::Write(target, local) = request {
        local.offset += offset - target.offset;
        local.bytes = bytes;
        target.offset = offset;
    }
}

impl Client {
    /// Makes a slice of each request.
    pub(super) fn make_whole(&mut self, id: BatchId, tasks: Range<usize>, requests: &[Request], at_once: bool) {
        let like = self.new_slice(id, tasks.start as u32, requests[tasks.start]);
        self.batches.at(id.index).open_slices[tasks.clone()].fill(1);
        let asked = (tasks.start as u32..).zip(&requests[tasks.clone()]);
        self.make::<false, _>(&like, tasks.len(), at_once, asked, |slice, &(task, request)| {
            (slice.task, slice.request) = (task, *request);
        });
    }

    /// Cuts a request into slices, or requests that touch each other.
    pub(super) fn cut(&mut self, id: BatchId, run: Range<usize>, requests: &[Request], at_once: bool) {
        let (first, last) = (&requests[run.start], &requests[run.end - 1]);
        let (Request::Read(target, local) | Request::Write(target, local)) = *first else { return };
        let like = self.new_slice(id, run.start as u32, *first);
        let end = last.local().map_or(0, |local| local.offset + local.bytes);
        let cuts = self.cuts(target.offset, end - local.offset, target.peer);
        let count = cuts.slices() as usize;
        let batch = self.batches.at(id.index);
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
        self.batches.at(batch).slices.reserve(count);
        let mut next = items.next();
        while let Some(item) = next {
            let mut slice = *like;
            set(&mut slice, &item);
            let (index, generation) = self.slices.insert(slice);
            let id = slice_id(index, generation);
            self.batches.at(batch).slices.push(id);
            left = left.saturating_sub(1);
            let route = if at_once { self.find_route(id) } else { None };
            next = match route {
                Some((target, _)) if left > 0 => self.bind_run::<ONE, _>(index, &target, &mut left, &mut items, &set),
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
        let mut shares = [Share::default(); LANES];
        let Some((rail, open, common)) = self.find_shares(routed, target, &mut shares) else { return items.next() };
        let shares = &mut shares[..open];
        let mut like = *self.slices.peek(routed);
        // As it was before it was bound, but for what all of them get.
        (like.rail, like.state) = (rail, super::table::SliceState::Queued);
        let (bound, bytes, next) = self.deal::<ONE, _>(&like, *left, &common, shares, items, set);
        *left -= bound;
        if bound > 0 {
            self.enter_lanes(rail, bytes, common.small, shares);
        }
        next
    }

    /// The lanes among which slices like one that was just routed are dealt.
    #[inline(never)]
    fn find_shares(
        &mut self,
        routed: u32,
        like: &SegmentTarget,
        shares: &mut [Share; LANES],
    ) -> Option<(u32, usize, Common)> {
        let slice = self.slices.peek(routed);
        let group = &self.peers[like.peer.0 as usize].groups[usize::from(slice.way.group)];
        let (&[rail], true, true) = (&group.rails[..], group.is_empty(), group.path.is_greeted()) else {
            return None;
        };
        let small = self.config.is_small(slice.load_bytes());
        let entry = &self.rails[rail as usize];
        // Small slices beside bulk are a matter of turns.
        let (bulk_bytes, small_bytes) = entry.rail.inflight_bytes();
        if small && bulk_bytes > 0 || !small && self.now_ns < group.express_until_ns || entry.lanes.len() > LANES {
            return None;
        }
        let window_bytes = self.window_of(rail).max(if small { SMALL_WINDOW_BYTES } else { 0 });
        if !entry.rail.has_room(small, window_bytes, true) {
            return None;
        }
        let mut open = 0;
        for &lane in &entry.lanes {
            let entry = &self.lanes[lane as usize];
            if entry.state == Endpoint::Ready && entry.may_take_more(&self.config) {
                let (load_bytes, last) = (entry.load.bound_bytes, entry.list.last);
                self.runs += 1;
                shares[open] = Share { lane, load_bytes, run: self.runs, bound: 0, first: NOWHERE, last };
                open += 1;
            }
        }
        let booked_bytes = if small { small_bytes } else { bulk_bytes };
        let room_bytes = window_bytes.max(1).saturating_sub(booked_bytes);
        (open > 0).then_some((rail, open, Common { like: *like, small, room_bytes }))
    }

    /// Books what lanes of a rail were dealt.
    fn enter_lanes(&mut self, rail: u32, bytes: u64, small: bool, shares: &[Share]) {
        self.rails[rail as usize].rail.book(bytes, small, self.now_ns);
        for share in shares {
            let entry = &mut self.lanes[share.lane as usize];
            if share.bound == 0 {
                continue;
            }
            if entry.list.last == NOWHERE {
                (entry.list.first, entry.progress_ns) = (share.first, self.now_ns);
            }
            if entry.list.next == NOWHERE {
                entry.list.next = share.first;
            }
            entry.list.queued += share.bound;
            (entry.list.last, entry.load.bound_bytes) = (share.last, share.load_bytes);
            self.mark_dirty(share.lane);
        }
    }

    /// Makes slices and deals them to lanes, each to the one with the least to do. Returns how many, their load, and
    /// the first item that is not among them.
    #[inline(always)]
    fn deal<const ONE: bool, I>(
        &mut self,
        like: &Slice,
        most: usize,
        common: &Common,
        shares: &mut [Share],
        items: &mut impl Iterator<Item = I>,
        set: &impl Fn(&mut Slice, &I),
    ) -> (usize, u64, Option<I>) {
        let Self { config, slices, batches, places, .. } = self;
        let ids = &mut batches.at(like.batch.index).slices;
        let (lane_bytes, small_bytes) = (config.lane_window_bytes.max(1), config.small_bytes);
        let (mut bound, mut bytes, mut task) = (0, 0, like.task);
        // Our buffer, and where it is: one place for all, as they are booked together when they end.
        let (mut buffer, mut ours) = (u32::MAX, None);
        let mut turns = Turns::default();
        let mut vacant = slices.vacant(like, most);
        let next = loop {
            let Some(item) = items.next() else { break None };
            let Some((index, generation, slice)) = vacant.fill(like) else { break Some(item) };
            set(slice, &item);
            let fits = 'fits: {
                let (Request::Read(target, local) | Request::Write(target, local)) = &slice.request else {
                    break 'fits None;
                };
                let load_bytes = local.bytes.max(LEAST_LOAD_BYTES);
                // Slices of one task are to one segment.
                let is_like = ONE
                    || slice.task == task
                    || (SegmentTarget { offset: common.like.offset, ..*target }) == common.like;
                let is_small = load_bytes <= small_bytes;
                if !is_like || is_small != common.small || bytes >= common.room_bytes {
                    break 'fits None;
                }
                if !ONE && local.buffer != buffer {
                    let place = places.get(local.buffer as usize).copied().unwrap_or_default();
                    if *ours.get_or_insert(place) != place {
                        break 'fits None;
                    }
                    buffer = local.buffer;
                }
                let at = turns.next(shares, load_bytes);
                shares.get_mut(at).filter(|share| share.load_bytes < lane_bytes).map(|share| (share, load_bytes))
            };
            let Some((share, load_bytes)) = fits else {
                vacant.leave(index);
                break Some(item);
            };
            task = slice.task;
            let before = core::mem::replace(&mut share.last, index);
            slice.link.lane = share.lane;
            slice.link.run = if ONE || slice.tasks == 1 { share.run } else { 0 };
            (slice.link.before, slice.link.after) = (before, NOWHERE);
            ids.push(slice_id(index, generation));
            if before != NOWHERE {
                vacant.at(before).link.after = index;
            }
            if share.bound == 0 {
                share.first = index;
            }
            share.bound += 1;
            share.load_bytes += load_bytes;
            bytes += load_bytes;
            bound += 1;
        };
        slices.filled(bound);
        (bound, bytes, next)
    }
}
