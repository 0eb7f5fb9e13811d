//! Traffic: batches, their slices and the requests in flight, over the network that carries them.
//!
//! This layer moves slices into the queues of groups, onto the lists of lanes, and off them again, with the accounting
//! of each step. The layers above decide whether and where a slice is sent, and handle its outcome.

mod bulk;
mod deal;
mod ends;
mod runs;

use kvplane_proto::ids::{BatchId, RequestId};
use kvplane_proto::limits::Limits;
use kvplane_proto::status::Status;

pub use bulk::{Copies, RowCopy};

use crate::counts::Books;
use crate::network::{Ask, Network};
use crate::sched::{Kinds, Next, Priority, Ticket};
use crate::tables::{Batches, NOWHERE, Slice, SliceState, Table, Wire, Wires, slice_id};
use crate::types::{PeerId, Request, SliceId};

/// Time for which the first lanes are reserved for small slices after a small slice met bulk.
const EXPRESS_NS: u64 = 100_000_000;

/// Tables, and the network that they refer to.
pub(crate) struct Traffic {
    pub(crate) network: Network,
    pub(crate) batches: Batches,
    pub(crate) slices: Table<Slice>,
    pub(crate) wires: Wires,
    pub(crate) books: Books,
    /// Number of runs so far; a run is counted for each of its lanes.
    runs: u64,
}

impl Traffic {
    /// Returns the checksum that the bytes of a put are to have; 0 if none was stated.
    pub(crate) fn stated_checksum(&self, slice: u32) -> u64 {
        let slice = self.slices.peek(slice);
        let entry = slice.request.entry();
        entry.map_or(0, |number| self.batches.peek(slice.batch.index).puts.stated_checksum(number))
    }

    pub(crate) fn new(network: Network) -> Self {
        Self {
            network,
            batches: Batches::new(),
            slices: Table::new(),
            wires: Wires::new(),
            books: Books::default(),
            runs: 0,
        }
    }

    /// Binds a slice to a lane if one has room and no slice of its size is queued, else enqueues it in the group.
    pub(crate) fn enter_group(&mut self, id: SliceId, peer: PeerId, number: u8) {
        let now_ns = self.network.host.now_ns;
        let slice = self.slices.at(id.index);
        let queue = self.network.queue_for(&slice.request, peer.0, number);
        (slice.way.peer, slice.way.group, slice.way.queue, slice.times.queued_ns) = (peer.0, number, queue, now_ns);
        let bytes = slice.load_bytes();
        let batch = slice.batch.index;
        let ticket = Ticket { bytes, small: self.network.host.config.is_small(bytes), ..self.batches.at(batch).ticket };
        let ask = self.ask(id.index, ticket.small, ticket.priority);
        let group = &mut self.network.peers[peer.0].groups[usize::from(number)];
        let large = group.waiting.iter().any(|waiting| waiting.queue.has(false));
        if ticket.small && (large || self.network.rails.has_bulk(group)) {
            group.express_until_ns = now_ns.saturating_add(EXPRESS_NS);
        }
        let group = &self.network.peers[peer.0].groups[usize::from(number)];
        // If no slice of its size is queued, it is next.
        let waiting = &group.waiting[usize::from(queue)].queue;
        let next = waiting.is_empty() || ticket.small && !waiting.has(true);
        let lane = if next { self.network.choose(group, ask) } else { None };
        if let Some(lane) = lane {
            self.bind(id, lane);
            if !ticket.small
                || self.network.peers[peer.0].groups[usize::from(number)].is_far(queue, self.network.lanes[lane].rail)
            {
                self.network.try_paused(peer.0, number);
            }
            return;
        }
        let group = &mut self.network.peers[peer.0].groups[usize::from(number)];
        let place = group.waiting[usize::from(queue)].queue.push(id.index, &ticket, now_ns);
        self.slices.at(id.index).way.place = place;
        self.network.mark_group(peer.0, number);
    }

    /// Returns the requirements of a slice on its lane.
    fn ask(&mut self, index: u32, small: bool, priority: Priority) -> Ask {
        let slice = self.slices.at(index);
        let (bytes, task, batch, queue) = (slice.load_bytes(), slice.task, slice.batch.index, slice.way.queue);
        let avoid = if slice.tries.attempts > 0 { slice.link.rail } else { NOWHERE };
        let open = u64::from(self.batches.at(batch).open_slices[task as usize]);
        Ask::new(bytes, open * bytes, small, priority, queue, avoid)
    }

    /// Binds a slice to a lane.
    fn bind(&mut self, id: SliceId, lane: u32) {
        let network = &mut self.network;
        let entry = &mut network.lanes[lane];
        // Silence counts from the first request that the peer owes a reply to, also to one that was abandoned.
        if !entry.is_awaited() {
            entry.progress_ns = network.host.now_ns;
        }
        let unwatched = entry.alarm_ns.is_none();
        let group = &network.peers[entry.peer.0].groups[usize::from(network.rails[entry.rail].group)];
        let several = group.rails.len() > 1;
        if several && !network.rails.has_bulk(group) {
            network.rails.start_shares(group);
        }
        self.enter_lane(id.index, lane);
        self.network.lanes.mark_dirty(lane);
        if unwatched && several {
            let host = &mut self.network.host;
            self.network.lanes.set_alarm(&mut host.timers, lane, Some(host.now_ns.saturating_add(Limits::STALL_NS)));
        }
    }

    /// Binds the queued slices of the groups that may have room now.
    pub(crate) fn dispatch_dirty(&mut self) {
        for _ in 0..self.network.dirty_groups() {
            if let Some((peer, number)) = self.network.take_dirty_group() {
                self.dispatch(peer, number);
            }
        }
    }

    /// Binds the queued slices of a group to lanes while there is room; connects more lanes for the rest.
    fn dispatch(&mut self, peer: u32, number: u8) {
        let (now_ns, both) = (self.network.host.now_ns, Kinds { small: true, large: true });
        let queues = self.network.peers[peer].groups[usize::from(number)].waiting.len();
        if queues == 1 {
            let mut kinds = both;
            loop {
                let group = &mut self.network.peers[peer].groups[usize::from(number)];
                let Some(next) = group.waiting[0].queue.next(kinds, now_ns) else { break };
                self.serve(peer, number, 0, &next, &mut kinds);
            }
        } else {
            let mut kinds = vec![both; queues];
            loop {
                let group = &mut self.network.peers[peer].groups[usize::from(number)];
                let Some((queue, next)) = group.next_of_all(&kinds, now_ns) else { break };
                self.serve(peer, number, queue, &next, &mut kinds[queue]);
            }
        }
        self.network.connect_more(peer, number);
    }

    /// Binds the next slice of a queue. If there is no room for its size, clears that size in `kinds`.
    fn serve(&mut self, peer: u32, number: u8, queue: usize, next: &Next, kinds: &mut Kinds) {
        let ask = self.ask(next.item, next.small, next.priority);
        let group = &self.network.peers[peer].groups[usize::from(number)];
        let Some(lane) = self.network.choose(group, ask) else {
            // A slice of a higher class might have room where this one has none, but those come first anyway.
            match next.small {
                true => kinds.small = false,
                false => kinds.large = false,
            }
            return;
        };
        let group = &mut self.network.peers[peer].groups[usize::from(number)];
        group.waiting[queue].queue.take(next.place, self.network.host.now_ns);
        self.slices.at(next.item).way.place = NOWHERE;
        self.bind(slice_id(next.item, self.slices.generation(next.item)), lane);
    }

    /// Removes and returns all slices queued for a group.
    pub(crate) fn drain_group(&mut self, peer: u32, number: u8) -> Vec<u32> {
        let group = &mut self.network.peers[peer].groups[usize::from(number)];
        let waiting = group.drain();
        for &index in &waiting {
            self.slices.at(index).way.place = NOWHERE;
        }
        waiting
    }

    /// Closes an answered request: the caller advances its slices.
    pub(crate) fn close_wire(&mut self, request: RequestId) -> Wire {
        let wire = self.wires.close(request);
        self.network.lanes[wire.lane.index].load.outstanding -= 1;
        self.network.lanes.mark_dirty(wire.lane.index);
        wire
    }

    /// Appends a slice to its lane's list, and books its load on the lane.
    #[inline]
    fn enter_lane(&mut self, index: u32, lane: u32) {
        let entry = &mut self.network.lanes[lane];
        let before = core::mem::replace(&mut entry.list.last, index);
        if before == NOWHERE {
            entry.list.first = index;
        } else {
            self.slices.at(before).link.after = index;
        }
        if entry.list.next == NOWHERE {
            entry.list.next = index;
        }
        entry.list.queued += 1;
        let rail = entry.rail;
        let slice = self.slices.at(index);
        (slice.link.lane, slice.link.before, slice.link.after) = (lane, before, NOWHERE);
        slice.times.posted_ns = self.network.host.now_ns;
        slice.link.run = 0;
        let (last, via) = (core::mem::replace(&mut slice.link.rail, rail), slice.way.via);
        let bytes = slice.load_bytes();
        entry.load.bound_bytes += bytes;
        let host = &self.network.host;
        self.network.rails[rail].rail.book(bytes, host.config.is_small(bytes), host.now_ns);
        if last != NOWHERE {
            self.rebound(index, last, via);
        }
    }

    /// Removes a slice from its group's queue, or from its lane with its load.
    pub(crate) fn leave_lane(&mut self, index: u32) {
        let slice = self.slices.at(index);
        let place = core::mem::replace(&mut slice.way.place, NOWHERE);
        if place != NOWHERE {
            let group = &mut self.network.peers[slice.way.peer].groups[usize::from(slice.way.group)];
            group.waiting[usize::from(slice.way.queue)].queue.remove(place);
            return;
        }
        if slice.link.lane == NOWHERE {
            return;
        }
        let lane = slice.link.lane;
        self.unlink(index, lane);
        // Its part of the window is free for queued slices.
        self.network.mark_group_of(lane);
        self.network.lanes.mark_dirty(lane);
    }

    /// Removes a slice and its load from its lane.
    #[inline]
    fn unlink(&mut self, index: u32, lane: u32) {
        let slice = self.slices.at(index);
        slice.link.lane = NOWHERE;
        let (before, after) = (slice.link.before, slice.link.after);
        let (load_bytes, sent_bytes) = (slice.load_bytes(), slice.link.sent_bytes);
        let queued = slice.state == SliceState::Queued;
        slice.link.sent_bytes = 0;
        let entry = &mut self.network.lanes[lane];
        entry.list.queued -= u32::from(queued);
        if entry.list.next == index {
            entry.list.next = after;
        }
        entry.load.bound_bytes -= load_bytes;
        entry.load.sent_bytes -= sent_bytes;
        entry.load.flying -= u32::from(sent_bytes > 0);
        match before {
            NOWHERE => entry.list.first = after,
            before => self.slices.at(before).link.after = after,
        }
        match after {
            NOWHERE => entry.list.last = before,
            after => self.slices.at(after).link.before = before,
        }
        let rail = &mut self.network.rails[entry.rail];
        rail.rail.unbook(load_bytes, self.network.host.config.is_small(load_bytes));
        entry.progress_ns = self.network.host.now_ns;
    }

    /// Returns the slices of a lane, oldest first.
    pub(crate) fn slices_on(&self, lane: u32) -> Vec<u32> {
        let mut found = Vec::new();
        let mut next = self.network.lanes[lane].list.first;
        while next != NOWHERE {
            found.push(next);
            next = self.slices.peek(next).link.after;
        }
        found
    }

    /// Sets the hedging timer of a get.
    pub(crate) fn watch_until(&mut self, id: SliceId, at_ns: u64) {
        self.slices.at(id.index).hedge_ns = at_ns;
        self.network.host.timers.watch(id, at_ns);
    }

    /// Clears the hedging timer of a get, so that an answered get does not wake the host for nothing.
    pub(crate) fn unwatch(&mut self, id: SliceId) {
        let at_ns = core::mem::take(&mut self.slices.at(id.index).hedge_ns);
        if at_ns > 0 {
            self.network.host.timers.unwatch(id, at_ns);
        }
    }

    /// Creates a slice.
    pub(crate) fn new_slice(&self, batch: BatchId, task: u32, request: Request) -> Slice {
        Slice::new(batch, task, request, self.network.host.config.usual_via(), self.network.host.now_ns)
    }

    /// Adds a slice of a task.
    pub(crate) fn add_slice(&mut self, batch: BatchId, task: u32, request: Request) {
        let slice = self.new_slice(batch, task, request);
        let (index, generation) = self.slices.insert(slice);
        let entry = self.batches.at(batch.index);
        entry.slices.push(slice_id(index, generation));
        entry.open_slices[task as usize] += 1;
    }

    /// Returns the status with which a slice's batch has ended, if it has.
    pub(crate) fn ended(&self, index: u32) -> Option<Status> {
        self.batches.peek(self.slices.peek(index).batch.index).ended
    }

    /// Returns a batch whose deadline has passed, or that is complete.
    pub(crate) fn due_deadline(&mut self) -> Option<BatchId> {
        let host = &mut self.network.host;
        host.timers.due_deadline(host.now_ns, |batch| self.batches.is_complete(batch))
    }
}
