//! Many slices at once: ranges that go the same way in a row are bound, handed to a device and ended together.
//!
//! Nothing is decided here that is not decided for one slice elsewhere: what is the same for all of a run is looked at
//! once, and what is summed up is added once. Whatever is out of the ordinary ends a run and goes the usual way, slice
//! by slice. What comes of a run is exactly what comes of its slices one by one (`tests/bulk.rs`).

use super::dispatch::SMALL_WINDOW_BYTES;
use super::lane::{Endpoint, Lane};
use super::near::Place;
use super::path::{Path, Transport, Via};
use super::table::{Held, LEAST_LOAD_BYTES, NOWHERE, Slice, SliceEvent, SliceState, Table, slice_id};
use super::types::{DeviceCopy, LaneId, Output, Request, SegmentTarget, SliceId};
use super::{Client, Config};
use crate::ids::Version;

/// Lanes of a rail among which a run is dealt.
const LANES: usize = 8;

/// What a lane of a run gets: how many slices, the first of them, and the last slice that it has.
#[derive(Clone, Copy, Default)]
struct Share {
    lane: u32,
    load_bytes: u64,
    bound: u32,
    first: u32,
    last: u32,
}

/// Slices that ended together and were posted together.
#[derive(Clone, Copy, Default)]
struct Tally {
    posted_ns: u64,
    queued_ns: u64,
    small: bool,
    /// Where their memory is, at our end and at the peer's.
    places: (Place, Place),
    slices: u64,
    bytes: u64,
    load_bytes: u64,
    sent_bytes: u64,
    flying: u32,
}

/// The copies that a lane sends next.
pub(super) struct Copies<'a> {
    lane: &'a mut Lane,
    slices: &'a mut Table<Slice>,
    config: &'a Config,
    now_ns: u64,
}

impl Iterator for Copies<'_> {
    type Item = DeviceCopy;

    #[inline]
    fn next(&mut self) -> Option<DeviceCopy> {
        let lane = &mut *self.lane;
        let index = lane.next;
        if index == NOWHERE {
            return None;
        }
        let (generation, slice) = self.slices.named(index);
        let write = matches!(slice.request, Request::Write(..));
        let (Request::Read(target, local) | Request::Write(target, local)) = slice.request else { return None };
        if !lane.has_room(self.config) || lane.is_closed(target.segment, Via::Rdma) {
            return None;
        }
        slice.step(SliceEvent::Place);
        slice.sent_ns = self.now_ns;
        slice.sent_bytes = local.bytes;
        lane.sends(slice);
        slice.bytes = local.bytes;
        slice.via = Via::Rdma;
        Some(DeviceCopy {
            slice: slice_id(index, generation),
            segment: target.segment,
            offset: target.offset,
            local,
            write,
        })
    }
}

impl Client {
    /// Routes all slices of a new batch.
    pub(super) fn route_all(&mut self, batch: u32) {
        // Those that are split off on the way are routed at once.
        let until = self.batches.at(batch).slices.len();
        let mut position = 0;
        while position < until {
            let id = self.batches.at(batch).slices[position];
            position += 1;
            if let Some((like, group)) = self.find_route(id) {
                position += self.bind_run(batch, position..until, &like, group);
            }
        }
    }

    /// Binds the slices at these positions of a batch to lanes, as long as they are like the one before them and go at
    /// once: to the same segment, of the same size class, and over a path with one rail where nothing waits. Returns
    /// how many.
    fn bind_run(&mut self, batch: u32, which: core::ops::Range<usize>, like: &SegmentTarget, number: u8) -> usize {
        let group = &self.peers[like.peer.0 as usize].groups[usize::from(number)];
        let Some(&first) = self.batches.at(batch).slices.get(which.start) else { return 0 };
        let (&[rail], true, true) = (&group.rails[..], group.is_empty(), group.path.is_greeted()) else {
            return 0;
        };
        let small = self.config.is_small(self.slices.peek(first.index).load_bytes());
        let entry = &self.rails[rail as usize];
        // Small slices beside bulk are a matter of turns.
        let (bulk_bytes, small_bytes) = entry.rail.inflight_bytes();
        if small && bulk_bytes > 0 || !small && self.now_ns < group.express_until_ns || entry.lanes.len() > LANES {
            return 0;
        }
        let window_bytes = self.window_of(rail).max(if small { SMALL_WINDOW_BYTES } else { 0 });
        if !entry.rail.has_room(small, window_bytes, true) {
            return 0;
        }
        let mut shares = [Share::default(); LANES];
        let mut open = 0;
        for &lane in &entry.lanes {
            let entry = &self.lanes[lane as usize];
            if entry.state == Endpoint::Ready && entry.may_take_more(&self.config) {
                shares[open] = Share { lane, load_bytes: entry.load_bytes, bound: 0, first: NOWHERE, last: entry.last };
                open += 1;
            }
        }
        let booked_bytes = if small { small_bytes } else { bulk_bytes };
        let queue = self.queue_for(first.index, like.peer.0, number);
        let (bound, bytes) = self.deal(
            batch,
            which,
            (like, number, queue, rail),
            (small, booked_bytes, window_bytes),
            &mut shares[..open],
        );
        if bound == 0 {
            return 0;
        }
        self.rails[rail as usize].rail.book(bytes, small, self.now_ns);
        for share in &shares[..open] {
            let entry = &mut self.lanes[share.lane as usize];
            if share.bound == 0 {
                continue;
            }
            if entry.last == NOWHERE {
                (entry.first, entry.progress_ns) = (share.first, self.now_ns);
            }
            if entry.next == NOWHERE {
                entry.next = share.first;
            }
            entry.queued += share.bound;
            (entry.last, entry.load_bytes) = (share.last, share.load_bytes);
            self.mark_dirty(share.lane);
        }
        bound
    }

    /// Deals the slices of a run to lanes, each to the one with the least to do. Returns how many, and their load.
    fn deal(
        &mut self,
        batch: u32,
        which: core::ops::Range<usize>,
        (like, group, queue, rail): (&SegmentTarget, u8, u8, u32),
        (small, booked_bytes, window_bytes): (bool, u64, u64),
        shares: &mut [Share],
    ) -> (usize, u64) {
        let Self { config, slices, .. } = self;
        let (lane_bytes, small_bytes) = (config.lane_window_bytes, config.small_bytes);
        let (mut bound, mut bytes, mut task) = (0, 0, NOWHERE);
        for &id in &self.batches.at(batch).slices[which] {
            let slice = slices.at(id.index);
            let (Request::Read(target, local) | Request::Write(target, local)) = &slice.request else { break };
            let load_bytes = local.bytes.max(LEAST_LOAD_BYTES);
            let booked_bytes = booked_bytes + bytes;
            // Slices of one task are to one segment.
            let is_like = slice.task == task || (SegmentTarget { offset: like.offset, ..*target }) == *like;
            let is_small = load_bytes <= small_bytes;
            if !is_like || is_small != small || booked_bytes != 0 && booked_bytes >= window_bytes {
                break;
            }
            let (mut least_bytes, mut least) = (u64::MAX, None);
            for share in &mut *shares {
                if share.load_bytes < least_bytes && (share.load_bytes == 0 || share.load_bytes < lane_bytes) {
                    (least_bytes, least) = (share.load_bytes, Some(share));
                }
            }
            let Some(share) = least else { break };
            task = slice.task;
            (slice.peer, slice.group, slice.rail, slice.lane) = (like.peer.0, group, rail, share.lane);
            slice.queue = queue;
            slice.before = share.last;
            if share.last != NOWHERE {
                slices.at(share.last).after = id.index;
            }
            if share.bound == 0 {
                share.first = id.index;
            }
            share.bound += 1;
            share.last = id.index;
            share.load_bytes += load_bytes;
            bytes += load_bytes;
            bound += 1;
        }
        (bound, bytes)
    }

    /// The copies behind an [`Output::CopySegment`] of a lane over RDMA that may go too: for a host that has the device
    /// take several in a row. To be called before the next output is polled; what is left comes as outputs.
    pub fn copies(&mut self, lane: LaneId) -> impl Iterator<Item = DeviceCopy> {
        let ready = match self.current(lane) {
            Some(entry) if entry.path == Path::Rdma && entry.state == Endpoint::Ready => {
                let peer = entry.peer.0 as usize;
                self.is_fenced(peer)
            }
            _ => false,
        };
        let mut copies = ready.then(|| self.copies_of(lane.index));
        core::iter::from_fn(move || copies.as_mut()?.next())
    }

    /// The copies that the device of a lane over RDMA can do by itself, as far as there is room for them.
    #[inline]
    pub(super) fn copies_of(&mut self, index: u32) -> Copies<'_> {
        let Self { lanes, slices, config, now_ns, .. } = self;
        Copies { lane: &mut lanes[index as usize], slices, config, now_ns: *now_ns }
    }

    /// As [`Self::copied`], for copies of a lane over RDMA that have all succeeded, oldest first.
    pub fn all_copied(&mut self, lane: LaneId, slices: impl IntoIterator<Item = SliceId>, now_ns: u64) {
        self.now_ns = now_ns;
        let mut slices = slices.into_iter();
        match self.current(lane).map(|entry| entry.path) {
            Some(Path::Rdma) => {}
            Some(_) => return slices.for_each(|slice| self.copied(lane, slice, Ok(0), now_ns)),
            None => return,
        }
        while let Some(odd) = self.end_run(lane.index, &mut slices) {
            self.copied(lane, odd, Ok(0), now_ns);
        }
        self.lanes[lane.index as usize].progress_ns = now_ns;
        self.mark_group_of(lane.index);
        self.mark_dirty(lane.index);
    }

    /// Ends slices whose copies have succeeded, up to one that is out of the ordinary, which is returned.
    fn end_run(&mut self, lane: u32, ids: &mut impl Iterator<Item = SliceId>) -> Option<SliceId> {
        let mut tally = Tally::default();
        let mut odd = None;
        for id in ids {
            let Some(slice) = self.slices.get(id.index, id.generation) else { continue };
            let slow = self.now_ns.saturating_sub(slice.begun_ns) >= self.config.slow_ns;
            let mine = slice.lane == lane && slice.state == SliceState::Copying;
            if !mine || slow || slice.tasks != 1 || slice.held != Held::Nothing {
                odd = Some(id);
                break;
            }
            let (bytes, load_bytes) = (slice.weight_bytes(), slice.load_bytes());
            let small = self.config.is_small(load_bytes);
            let (posted_ns, queued_ns, places) = (slice.posted_ns, slice.queued_ns, self.places_of(&slice.request));
            if (posted_ns, queued_ns, small, places) != (tally.posted_ns, tally.queued_ns, tally.small, tally.places) {
                let next = Tally { posted_ns, queued_ns, small, places, ..Tally::default() };
                let before = core::mem::replace(&mut tally, next);
                self.take_stock(lane, &before);
            }
            tally.slices += 1;
            tally.bytes += bytes;
            tally.load_bytes += load_bytes;
            self.end_copy(lane, id, &mut tally);
        }
        self.take_stock(lane, &tally);
        odd
    }

    /// Takes a slice off its lane and its batch.
    #[inline]
    fn end_copy(&mut self, lane: u32, id: SliceId, tally: &mut Tally) {
        let slice = self.slices.end(id.index);
        slice.step(SliceEvent::Finish);
        tally.sent_bytes += slice.sent_bytes;
        tally.flying += u32::from(slice.sent_bytes > 0);
        let (before, after, batch, task) = (slice.before, slice.after, slice.batch, slice.task as usize);
        let (bytes, version) = (slice.bytes, slice.version);
        let entry = &mut self.lanes[lane as usize];
        match before {
            NOWHERE => entry.first = after,
            before => self.slices.at(before).after = after,
        }
        match after {
            NOWHERE => entry.last = before,
            after => self.slices.at(after).before = before,
        }
        let entry = self.batches.at(batch.index);
        let result = &mut entry.results[task];
        result.bytes += bytes;
        result.version = Version(version);
        let open = &mut entry.open_slices[task];
        *open -= 1;
        if *open > 0 {
            return;
        }
        entry.remaining -= 1;
        if self.config.report_tasks {
            self.finished.push_back((batch, task as u32));
        }
        if entry.remaining == 0 {
            self.outputs.push_back(Output::Done { batch });
        }
    }

    /// Books the end of slices that left a lane.
    fn take_stock(&mut self, lane: u32, tally: &Tally) {
        let &Tally { posted_ns, queued_ns, small, places, slices, bytes, load_bytes, sent_bytes, flying } = tally;
        if slices == 0 {
            return;
        }
        let now_ns = self.now_ns;
        let entry = &mut self.lanes[lane as usize];
        entry.load_bytes -= load_bytes;
        entry.sent_bytes -= sent_bytes;
        entry.flying -= flying;
        let (rail, peer) = (entry.rail, entry.peer.0 as usize);
        let nodes = self.nodes_of(rail, peer, places);
        let rail = &mut self.rails[rail as usize];
        rail.rail.unbook(load_bytes, small);
        rail.rail.all_done((slices, bytes), small, posted_ns, now_ns);
        let counts = rail.books.of(Transport::Rdma);
        counts.operations += slices;
        counts.bytes += bytes;
        if let Some((own, peer)) = nodes {
            counts.own_node.count_many(own, slices);
            counts.peer_node.count_many(peer, slices);
        }
        counts.queue.add_many(posted_ns.saturating_sub(queued_ns), slices);
        counts.service.add_many(now_ns.saturating_sub(posted_ns), slices);
        self.peers[peer].retries.earn_many(slices);
    }
}
