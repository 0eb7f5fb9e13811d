//! Many slices at once: ranges that go the same way in a row are bound, handed to a device and ended together.
//!
//! Nothing is decided here that is not decided for one slice elsewhere: what is the same for all of a run is looked at
//! once, and what is summed up is added once. Whatever is out of the ordinary ends a run and goes the usual way, slice
//! by slice. What comes of a run is exactly what comes of its slices one by one (`tests/bulk.rs`).

use super::Client;
use super::dispatch::SMALL_WINDOW_BYTES;
use super::lane::{Endpoint, Lane};
use super::near::Place;
use super::path::{Path, Transport, Via};
use super::table::{Held, LEAST_LOAD_BYTES, NOWHERE, Slice, SliceEvent, SliceState, Table, Times, slice_id};
use super::types::{DeviceCopy, LaneId, Output, Request, SegmentTarget, SliceId};

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
    times: Times,
    small: bool,
    /// Where their memory is, at our end and at the peer's, and what that was found out from: our buffer.
    places: (Place, Place),
    memory: (u32, Place),
    slices: u64,
    bytes: u64,
    load_bytes: u64,
}

/// Takes a slice that is not the first of its lane's list out of it.
#[cold]
fn unlink(slices: &mut Table<Slice>, lane: &mut Lane, before: u32, after: u32) {
    slices.at(before).after = after;
    match after {
        NOWHERE => lane.last = before,
        after => slices.at(after).before = before,
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

    /// The copies behind an [`Output::CopySegment`] of a lane over RDMA that may go too, put behind those in `into`: for
    /// a host that has the device take several in a row. To be called before the next output is polled; what is left
    /// comes as outputs.
    pub fn take_copies(&mut self, lane: LaneId, into: &mut Vec<DeviceCopy>) {
        let Some(entry) = self.current(lane) else { return };
        let (queued, peer) = (entry.queued as usize, entry.peer.0 as usize);
        if entry.path == Path::Rdma && entry.state == Endpoint::Ready && self.is_fenced(peer) {
            into.reserve(queued);
            self.send_copies(lane.index, usize::MAX, |copy| into.push(copy));
        }
    }

    /// Sends at most so many copies that the device of a lane over RDMA can do by itself, as far as there is room.
    #[inline]
    pub(super) fn send_copies(&mut self, index: u32, most: usize, mut each: impl FnMut(DeviceCopy)) {
        let Self { lanes, slices, config, now_ns, .. } = self;
        let (lane, now_ns) = (&mut lanes[index as usize], *now_ns);
        let mut next = lane.next;
        let mut taken = 0;
        let (mut flying, mut sent_bytes) = (lane.flying, lane.sent_bytes);
        while taken < most && next != NOWHERE && lane.has_room_beside(config, flying, sent_bytes) {
            let (generation, slice) = slices.named(next);
            let write = matches!(slice.request, Request::Write(..));
            let (Request::Read(target, local) | Request::Write(target, local)) = &slice.request else { break };
            if lane.is_closed(target.segment, Via::Rdma) {
                break;
            }
            let id = slice_id(next, generation);
            let copy = DeviceCopy { slice: id, segment: target.segment, offset: target.offset, local: *local, write };
            let bytes = local.bytes;
            slice.step(SliceEvent::Place);
            slice.sent_ns = now_ns;
            slice.via = Via::Rdma;
            (slice.sent_bytes, slice.bytes) = (bytes, bytes);
            // None is without bytes.
            flying += 1;
            sent_bytes += bytes;
            taken += 1;
            next = slice.after;
            each(copy);
        }
        lane.queued -= taken as u32;
        (lane.next, lane.flying, lane.sent_bytes) = (next, flying, sent_bytes);
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
        let mut next = slices.next();
        while let Some(id) = next {
            next = match self.tally_for(lane.index, id) {
                Some(mut tally) => {
                    let next = self.end_alike(lane.index, id, &mut slices, &mut tally);
                    self.take_stock(lane.index, &tally);
                    next
                }
                None => {
                    self.copied(lane, id, Ok(0), now_ns);
                    slices.next()
                }
            };
        }
        self.lanes[lane.index as usize].progress_ns = now_ns;
        self.mark_group_of(lane.index);
        self.mark_dirty(lane.index);
    }

    /// What a slice has in common with those that end together with it; none for one that is out of the ordinary.
    fn tally_for(&self, lane: u32, id: SliceId) -> Option<Tally> {
        let slice = self.slices.get(id.index, id.generation)?;
        let (Request::Read(target, local) | Request::Write(target, local)) = &slice.request else { return None };
        let slow = self.now_ns.saturating_sub(slice.times.begun_ns) >= self.config.slow_ns;
        let mine = slice.lane == lane && slice.state == SliceState::Copying;
        if !mine || slow || slice.tasks != 1 || slice.held != Held::Nothing {
            return None;
        }
        Some(Tally {
            times: slice.times,
            small: self.config.is_small(slice.load_bytes()),
            memory: (local.buffer, target.place),
            places: self.places_of(&slice.request),
            ..Tally::default()
        })
    }

    /// Ends a slice whose copy has succeeded and those behind it that have everything of a tally in common. Returns
    /// the first that has not.
    #[inline]
    fn end_alike(
        &mut self,
        lane: u32,
        first: SliceId,
        ids: &mut impl Iterator<Item = SliceId>,
        tally: &mut Tally,
    ) -> Option<SliceId> {
        let Self { config, places, lanes, slices, batches, outputs, finished, .. } = self;
        let lane_entry = &mut lanes[lane as usize];
        let Tally { times, small, memory, places: both, slices: mut count, mut bytes, mut load_bytes } = *tally;
        let mut memory = memory;
        let (small_bytes, report) = (config.small_bytes, config.report_tasks);
        let mut batch = slices.peek(first.index).batch;
        let mut entry = batches.at(batch.index);
        // Those at the front of the lane's list leave it without a look at their neighbours.
        let mut front = lane_entry.first;
        let mut next = Some(first);
        while let Some(id) = next {
            let Some(slice) = slices.get(id.index, id.generation) else {
                next = ids.next();
                continue;
            };
            let (Request::Read(target, local) | Request::Write(target, local)) = &slice.request else { break };
            let slice_bytes = local.bytes;
            let slice_load_bytes = slice_bytes.max(LEAST_LOAD_BYTES);
            let mine = slice.lane == lane && slice.state == SliceState::Copying && slice.tasks == 1;
            if !mine || slice.times != times || (slice_load_bytes <= small_bytes) != small {
                break;
            }
            if (local.buffer, target.place) != memory {
                let ours = places.get(local.buffer as usize).copied().unwrap_or_default();
                if (ours, target.place) != both {
                    break;
                }
                memory = (local.buffer, target.place);
            }
            debug_assert!(slice.sent_bytes == slice_bytes && slice.bytes == slice_bytes, "it was sent as a whole");
            debug_assert!(slice.version == 0 && slice.held == Held::Nothing, "it was not asked for by a frame");
            count += 1;
            bytes += slice_bytes;
            load_bytes += slice_load_bytes;
            let slice = slices.end(id.index);
            slice.step(SliceEvent::Finish);
            let (before, after, task) = (slice.before, slice.after, slice.task as usize);
            if slice.batch != batch {
                batch = slice.batch;
                entry = batches.at(batch.index);
            }
            if id.index == front {
                front = after;
            } else {
                unlink(slices, lane_entry, before, after);
            }
            entry.results[task].bytes += slice_bytes;
            let open = &mut entry.open_slices[task];
            *open -= 1;
            if *open == 0 {
                entry.remaining -= 1;
                if report {
                    finished.push_back((batch, task as u32));
                }
                if entry.remaining == 0 {
                    outputs.push_back(Output::Done { batch });
                }
            }
            next = ids.next();
        }
        lane_entry.first = front;
        match front {
            NOWHERE => lane_entry.last = NOWHERE,
            front => slices.at(front).before = NOWHERE,
        }
        (tally.slices, tally.bytes, tally.load_bytes) = (count, bytes, load_bytes);
        next
    }

    /// Books the end of slices that left a lane.
    fn take_stock(&mut self, lane: u32, tally: &Tally) {
        let &Tally { times, small, places, slices, bytes, load_bytes, .. } = tally;
        if slices == 0 {
            return;
        }
        let now_ns = self.now_ns;
        let entry = &mut self.lanes[lane as usize];
        entry.load_bytes -= load_bytes;
        // Each was sent as a whole.
        entry.sent_bytes -= bytes;
        entry.flying -= slices as u32;
        let (rail, peer) = (entry.rail, entry.peer.0 as usize);
        let nodes = self.nodes_of(rail, peer, places);
        let rail = &mut self.rails[rail as usize];
        rail.rail.unbook(load_bytes, small);
        rail.rail.all_done((slices, bytes), small, times.posted_ns, now_ns);
        let counts = rail.books.of(Transport::Rdma);
        counts.operations += slices;
        counts.bytes += bytes;
        if let Some((own, peer)) = nodes {
            counts.own_node.count_many(own, slices);
            counts.peer_node.count_many(peer, slices);
        }
        counts.queue.add_many(times.posted_ns.saturating_sub(times.queued_ns), slices);
        counts.service.add_many(now_ns.saturating_sub(times.posted_ns), slices);
        self.peers[peer].retries.earn_many(slices);
    }
}
