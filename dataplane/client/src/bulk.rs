//! Many slices at once: ranges that were bound together (`make`) are handed to a device and ended together.
//!
//! Nothing is decided here that is not decided for one slice elsewhere: what is the same for all of a run is looked at
//! once, and what is summed up is added once. Whatever is out of the ordinary ends a run and goes the usual way, slice
//! by slice. What comes of a run is exactly what comes of its slices one by one (`tests/bulk.rs`).

use super::lane::{Endpoint, Lane};
use super::near::Place;
use super::path::{Path, Transport, Via};
use super::table::{
    Batch, HeldHandle, LEAST_LOAD_BYTES, NOWHERE, Slice, SliceEvent, SliceState, Table, Times, slice_id,
};
use super::types::{DeviceCopy, LaneId, Local, Output, Request, SliceId};
use super::{Client, Config};

/// Slices that ended together and were posted together.
#[derive(Clone, Copy, Default)]
struct Tally {
    times: Times,
    small: bool,
    /// Where their memory is, at our end and at the peer's.
    places: (Place, Place),
    slices: u64,
    bytes: u64,
    load_bytes: u64,
}

impl Tally {
    /// Whether a slice that was sent has all of it in common.
    fn has(&self, slice: &Slice, lane: u32, config: &Config, places: &[Place]) -> bool {
        let (Request::Read(target, local) | Request::Write(target, local)) = &slice.request else { return false };
        let ours = places.get(local.buffer as usize).copied().unwrap_or_default();
        slice.link.lane == lane
            && slice.state == SliceState::Copying
            && slice.tasks == 1
            && slice.times == self.times
            && config.is_small(slice.load_bytes()) == self.small
            && (ours, target.place) == self.places
    }
}

/// One of the copies of a row: what it has for itself. They have the segment, the buffer and the direction in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RowCopy {
    /// For whom.
    pub slice: SliceId,
    /// Where in the segment.
    pub offset: u64,
    /// Where in the buffer.
    pub at: u64,
    /// How much.
    pub bytes: u64,
}

/// What a slice counts for beyond its bytes. By itself, as hardly any is so short: others only compare.
#[cold]
#[inline(never)]
const fn short_of_least(bytes: u64) -> u64 {
    LEAST_LOAD_BYTES - bytes
}

/// The copies that a lane sends next.
pub struct Copies<'a> {
    slices: &'a mut Table<Slice>,
    lane: &'a mut Lane,
    now_ns: u64,
    window_bytes: u64,
    closes_ways: bool,
    /// How many there may be, and how many more.
    most: u32,
    left: u32,
    /// The state of the lane, which it gets when they end.
    next: u32,
    sent_bytes: u64,
}

impl Copies<'_> {
    /// Those behind `first` that differ from it in their places only: fills `into` from its start, and returns how many
    /// they are.
    #[inline(never)]
    pub fn alike(&mut self, first: &DeviceCopy, into: &mut [RowCopy]) -> usize {
        let DeviceCopy { segment, write, local: Local { buffer, .. }, .. } = *first;
        if self.closes_ways && self.lane.is_closed(segment, Via::Rdma) {
            return 0;
        }
        let most = into.len().min(self.left as usize);
        let (now_ns, window_bytes) = (self.now_ns, self.window_bytes);
        let (mut next, mut sent_bytes, mut taken) = (self.next, self.sent_bytes, 0);
        for place in &mut into[..most] {
            if next == NOWHERE || sent_bytes >= window_bytes {
                break;
            }
            let (generation, slice) = self.slices.named(next);
            let (writes, target, local) = match &slice.request {
                Request::Read(target, local) => (false, target, local),
                Request::Write(target, local) => (true, target, local),
                _ => break,
            };
            if writes != write || target.segment != segment || local.buffer != buffer {
                break;
            }
            let Local { offset: at, bytes, .. } = *local;
            *place = RowCopy { slice: slice_id(next, generation), offset: target.offset, at, bytes };
            slice.post(bytes, now_ns);
            sent_bytes += bytes;
            taken += 1;
            next = slice.link.after;
        }
        (self.next, self.sent_bytes) = (next, sent_bytes);
        self.left -= taken as u32;
        taken
    }
}

impl Iterator for Copies<'_> {
    type Item = DeviceCopy;

    fn next(&mut self) -> Option<DeviceCopy> {
        let index = self.next;
        if index == NOWHERE || self.left == 0 || self.sent_bytes >= self.window_bytes {
            return None;
        }
        let (generation, slice) = self.slices.named(index);
        let write = matches!(slice.request, Request::Write(..));
        let (Request::Read(target, local) | Request::Write(target, local)) = &slice.request else { return None };
        if self.closes_ways && self.lane.is_closed(target.segment, Via::Rdma) {
            return None;
        }
        let slice_id = slice_id(index, generation);
        let copy = DeviceCopy { slice: slice_id, segment: target.segment, offset: target.offset, local: *local, write };
        let bytes = local.bytes;
        slice.post(bytes, self.now_ns);
        self.sent_bytes += bytes;
        self.left -= 1;
        self.next = slice.link.after;
        Some(copy)
    }
}

impl Drop for Copies<'_> {
    fn drop(&mut self) {
        let taken = self.most - self.left;
        self.lane.list.queued -= taken;
        // None is without bytes.
        self.lane.load.flying += taken;
        (self.lane.list.next, self.lane.load.sent_bytes) = (self.next, self.sent_bytes);
    }
}

impl Slice {
    /// The device gets all of it.
    #[inline]
    fn post(&mut self, bytes: u64, now_ns: u64) {
        self.step(SliceEvent::Place);
        self.sent_ns = now_ns;
        self.via = Via::Rdma;
        (self.link.sent_bytes, self.answer.bytes) = (bytes, bytes);
    }

    /// Whether the device was given all of it, and it was not asked for by a frame.
    fn was_sent_whole(&self) -> bool {
        let whole = self.link.sent_bytes == self.weight_bytes() && self.answer.bytes == self.link.sent_bytes;
        whole && self.answer.version == 0 && self.answer.held == HeldHandle::Nothing
    }
}

impl Batch {
    /// A slice of a task has succeeded. Whether it was the task's last.
    #[inline(always)]
    fn end_slice(&mut self, task: u32, bytes: u64) -> bool {
        self.results[task as usize].bytes += bytes;
        let open = &mut self.open_slices[task as usize];
        *open -= 1;
        if *open > 0 {
            return false;
        }
        self.remaining -= 1;
        true
    }
}

/// Takes a slice that is not the first of its lane's list out of it.
#[cold]
fn unlink(slices: &mut Table<Slice>, lane: &mut Lane, before: u32, after: u32) {
    slices.at(before).link.after = after;
    match after {
        NOWHERE => lane.list.last = before,
        after => slices.at(after).link.before = before,
    }
}

impl Client {
    /// The copies behind an [`Output::CopySegment`] of a lane over RDMA that may go too: for a host that has the device
    /// take several in a row. To be called before the next output is polled; what is left comes as outputs.
    #[inline]
    pub fn copies(&mut self, lane: LaneId) -> Option<Copies<'_>> {
        let entry = self.current(lane)?;
        let (ready, peer) = (entry.path == Path::Rdma && entry.state == Endpoint::Ready, entry.peer.0 as usize);
        (ready && self.is_fenced(peer)).then(|| self.copies_of(lane.index))
    }

    /// The copies that the device of a lane over RDMA can do by itself, as far as there is room for them.
    #[inline]
    pub(super) fn copies_of(&mut self, index: u32) -> Copies<'_> {
        let Self { lanes, slices, config, now_ns, .. } = self;
        let lane = &mut lanes[index as usize];
        Copies {
            most: lane.may_fly(config),
            left: lane.may_fly(config),
            next: lane.list.next,
            sent_bytes: lane.load.sent_bytes,
            // One that is larger goes alone.
            window_bytes: config.lane_window_bytes.max(1),
            closes_ways: lane.closes_ways(),
            now_ns: *now_ns,
            slices,
            lane,
        }
    }

    /// As [`Self::copied`], for copies of a lane over RDMA that have all succeeded, oldest first.
    // By itself: what its caller keeps at hand needs registers that this uses.
    #[inline(never)]
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
        let slow = self.now_ns.saturating_sub(slice.times.begun_ns) >= self.config.slow_ns;
        let mine = slice.link.lane == lane && slice.state == SliceState::Copying;
        if !mine || slow || slice.tasks != 1 || slice.answer.held != HeldHandle::Nothing {
            return None;
        }
        Some(Tally {
            times: slice.times,
            small: self.config.is_small(slice.load_bytes()),
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
        let Self { config, places, lanes, slices, batches, outbox, .. } = self;
        let lane_entry = &mut lanes[lane as usize];
        let report = config.report_tasks;
        // The first is looked at like any other; nobody's run is this one.
        let mut run = u64::MAX;
        let (mut count, mut bytes, mut more_load_bytes) = (0, 0, 0);
        let mut batch = slices.peek(first.index).batch;
        let mut entry = batches.at(batch.index);
        // Those at the front of the lane's list leave it without a look at their neighbours.
        let mut front = lane_entry.list.first;
        let mut next = Some(first);
        while let Some(id) = next {
            let Some(slice) = slices.get(id.index, id.generation) else {
                next = ids.next();
                continue;
            };
            if slice.link.run != run {
                if !tally.has(slice, lane, config, places) {
                    break;
                }
                run = if slice.link.run == 0 { u64::MAX } else { slice.link.run };
                // A run is of one batch.
                if slice.batch != batch {
                    batch = slice.batch;
                    entry = batches.at(batch.index);
                }
            }
            if slice.state != SliceState::Copying {
                break;
            }
            debug_assert!(tally.has(slice, lane, config, places) && slice.was_sent_whole(), "all of a run");
            debug_assert!(slice.batch == batch, "a run is of one batch");
            let slice = slices.end(id.index);
            let (before, after, task, slice_bytes) =
                (slice.link.before, slice.link.after, slice.task, slice.answer.bytes);
            count += 1;
            bytes += slice_bytes;
            if slice_bytes < LEAST_LOAD_BYTES {
                more_load_bytes += short_of_least(slice_bytes);
            }
            if id.index == front {
                front = after;
            } else {
                unlink(slices, lane_entry, before, after);
            }
            // Where tasks are not told of, only the end of the batch is.
            if entry.end_slice(task, slice_bytes) && (report || entry.remaining == 0) {
                if report {
                    outbox.report(batch, task);
                }
                if entry.remaining == 0 {
                    outbox.push(Output::Done { batch });
                }
            }
            next = ids.next();
        }
        lane_entry.list.first = front;
        match front {
            NOWHERE => lane_entry.list.last = NOWHERE,
            front => slices.at(front).link.before = NOWHERE,
        }
        (tally.slices, tally.bytes, tally.load_bytes) = (count, bytes, bytes + more_load_bytes);
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
        entry.load.bound_bytes -= load_bytes;
        // Each was sent as a whole.
        entry.load.sent_bytes -= bytes;
        entry.load.flying -= slices as u32;
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
