//! What happens when things go wrong or take too long: retries, parked slices, lost lanes, deadlines.
//!
//! Every retry is bounded: by the batch's deadline where time may heal the failure (the owner cannot be reached, is
//! busy, or is another one by now), by the budget of attempts where it may not.

use kvplane_proto::ids::RequestId;
use kvplane_proto::limits::Limits;
use kvplane_proto::status::Status;

use super::lane::{Cause, Endpoint, EndpointEvent};
use super::table::{HeldHandle, SliceEvent, Wire, slice_id};
use super::types::{LaneId, Output, Request};
use super::{Client, is_complete};

const PARK_FIRST_NS: u64 = 10_000_000;
const PARK_LAST_NS: u64 = 500_000_000;
/// The longest pause before a busy peer is asked again: what it has too much of is over soon.
const PARK_BUSY_NS: u64 = 80_000_000;
/// A newer map is asked for again when the last question is this old and the need is still there.
const MAP_AGAIN_NS: u64 = 500_000_000;

impl Client {
    /// Sends a slice again, unless its budget or its batch is at an end.
    ///
    /// A wrong owner, one that a key has not reached, a busy one, and one that cannot be reached are a matter of time,
    /// bounded by the deadline; anything else is bounded by the budget.
    pub(super) fn retry(&mut self, index: u32, status: Status) {
        let slice = self.slices.at(index);
        let segment = matches!(slice.request, Request::Read(..) | Request::Write(..) | Request::OpenSegment(_));
        if status == Status::WrongOwner && segment {
            // A segment lives in one incarnation of one process: no other map leads to it.
            self.leave_lane(index);
            self.complete(index, Status::Stale);
            return;
        }
        if matches!(slice.request, Request::Asks(..)) {
            // Another map may lead its objects to several shards: whoever asked asks for each by itself.
            self.leave_lane(index);
            let ended = self.ended(index);
            self.complete(index, ended.unwrap_or(status));
            if matches!(status, Status::WrongOwner | Status::Unreachable) {
                self.want_map();
            }
            return;
        }
        if self.is_tried_once(index) {
            self.leave_lane(index);
            self.complete(index, status);
            return;
        }
        self.turn_to_second(index, status);
        let slice = self.slices.peek(index);
        let (mut spent, mut heals) = (false, false);
        if !matches!(status, Status::WrongOwner | Status::NoKey | Status::Busy) {
            let counted = slice.tries.attempts.saturating_add(1);
            // An owner that died is replaced by the next map, and one that restarts is there again soon: losing it
            // never uses up the budget, it only has the slice prefer another path.
            heals = status == Status::Unreachable && self.has_successors(&slice.request);
            let slice = self.slices.at(index);
            slice.tries.attempts =
                if heals { slice.tries.attempts.max(counted.min(Limits::ATTEMPTS / 2)) } else { counted };
            spent = slice.tries.attempts >= Limits::ATTEMPTS;
        }
        let slice = self.slices.at(index);
        if spent {
            self.leave_lane(index);
            let ended = self.ended(index);
            self.complete(index, ended.unwrap_or(status));
        } else {
            let peer = slice.way.peer as usize;
            // Beyond the peer's budget of retries it waits, as it does for a busy peer. So does what lost its owner
            // more than once: a peer that ends each connection when the request comes is not sent it without a pause.
            let waits = matches!(status, Status::WrongOwner | Status::Busy | Status::NoKey | Status::TicketEnded)
                || heals && slice.tries.attempts >= Limits::ATTEMPTS / 2;
            let within = self.peers.get_mut(peer).is_none_or(|peer| peer.retries.spend(self.now_ns));
            let most_ns = if status == Status::Busy || heals { PARK_BUSY_NS } else { PARK_LAST_NS };
            self.send_again(index, (waits || !within).then_some(most_ns));
        }
        if matches!(status, Status::WrongOwner | Status::Unreachable) {
            self.want_map();
        }
    }

    /// True where another owner may take over the object of a request. Nobody takes over a segment, nor a request to a
    /// former owner.
    const fn has_successors(&self, request: &Request) -> bool {
        request.peer().is_none() && self.sources.is_none() && !self.config.fetches
    }

    /// Puts a slice back to the start, on another lane or, where there is a longest pause, among the parked.
    pub(super) fn send_again(&mut self, index: u32, later: Option<u64>) {
        self.leave_lane(index);
        if let Some(ended) = self.ended(index) {
            self.complete(index, ended);
            return;
        }
        self.counters.retries += 1;
        self.count_retry(index);
        let id = slice_id(index, self.slices.generation(index));
        let slice = self.slices.at(index);
        slice.step(SliceEvent::Requeue);
        slice.answer.held = HeldHandle::Nothing;
        (slice.answer.bytes, slice.answer.version, slice.answer.expected_checksum) = (0, 0, None);
        // What asks a peer that was left does not wait: the id may be another's by then.
        let request = slice.request;
        if let Some(most_ns) = later.filter(|_| !self.asks_departed(&request)) {
            let slice = self.slices.at(index);
            let wait_ns = (PARK_FIRST_NS << slice.tries.parkings.min(16)).min(most_ns);
            slice.tries.parkings = slice.tries.parkings.saturating_add(1);
            self.timers.park(id, self.now_ns.saturating_add(wait_ns));
        } else {
            self.route(id);
        }
    }

    fn ended(&mut self, index: u32) -> Option<Status> {
        let batch = self.slices.at(index).batch;
        self.batches.at(batch.index).ended
    }

    fn want_map(&mut self) {
        let now_ns = self.now_ns;
        if self.map_wanted_ns.is_none_or(|at_ns| now_ns >= at_ns.saturating_add(MAP_AGAIN_NS)) {
            self.map_wanted_ns = Some(now_ns);
            self.outbox.push(Output::WantMap);
        }
    }

    /// Routes the parked slices whose time has come.
    pub(super) fn unpark(&mut self, now_ns: u64) {
        // Taken out first: a slice that is parked again waits for its next time.
        for id in self.timers.due_parked(now_ns) {
            self.route(id);
        }
    }

    /// Deadlines, reconnects and parked slices. Call it when `poll_timeout` says.
    pub fn handle_timeout(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        let batches = |client: &mut Self| {
            let Self { timers, batches, .. } = client;
            timers.due_deadline(now_ns, |batch| is_complete(batches, batch))
        };
        while let Some(batch) = batches(self) {
            self.end_batch(batch, Status::DeadlineExceeded, Cause::Deadline);
        }
        self.unpark(now_ns);
        self.hedge();
        while let Some(lane) = self.timers.due_alarm(now_ns) {
            self.set_alarm(lane, None);
            match self.lanes[lane as usize].state {
                Endpoint::Connecting | Endpoint::Greeting => self.reset_lane(lane, Cause::Peer),
                Endpoint::Idle => self.mark_group_of(lane),
                Endpoint::Ready => self.check_stall(lane),
                Endpoint::Resetting => {}
            }
        }
    }

    /// Sets or clears the one alarm of a lane.
    pub(super) fn set_alarm(&mut self, lane: u32, at_ns: Option<u64>) {
        let entry = &mut self.lanes[lane as usize];
        let old_ns = core::mem::replace(&mut entry.alarm_ns, at_ns);
        self.timers.move_alarm(lane, old_ns, at_ns);
    }

    /// The host has not looked at anything since then, so that nothing could move: that is not held against the peers.
    /// To be called before what has come meanwhile is taken.
    pub fn was_away(&mut self, since_ns: u64, now_ns: u64) {
        self.now_ns = now_ns;
        let gap_ns = now_ns.saturating_sub(since_ns);
        for (at_ns, lane) in self.timers.alarms() {
            let entry = &mut self.lanes[lane as usize];
            let later_ns = |at_ns: u64, latest_ns: u64| at_ns.max(at_ns.saturating_add(gap_ns).min(latest_ns));
            if entry.is_coming() {
                self.set_alarm(lane, Some(later_ns(at_ns, now_ns.saturating_add(Limits::RAIL_HELLO_NS))));
            } else {
                entry.progress_ns = later_ns(entry.progress_ns, now_ns);
            }
        }
    }

    /// Applies an event to a lane; false when it was stale.
    pub(super) fn step_lane(&mut self, lane: u32, event: EndpointEvent) -> bool {
        let entry = &mut self.lanes[lane as usize];
        let came = entry.is_coming();
        let moved = entry.step(event);
        match (came, entry.is_coming()) {
            (false, true) => self.coming += 1,
            (true, false) => self.coming -= 1,
            _ => {}
        }
        moved
    }

    /// Asks the host to end a lane's I/O; nothing to do for one that is idle or being reset.
    pub(super) fn reset_lane(&mut self, lane: u32, cause: Cause) {
        if self.lanes[lane as usize].state == Endpoint::Idle || !self.step_lane(lane, EndpointEvent::Reset) {
            return;
        }
        let entry = &mut self.lanes[lane as usize];
        entry.connection.cause = Some(cause);
        let id = entry.id(lane);
        self.counters.resets += 1;
        self.note_fence(lane);
        self.outbox.push(Output::Reset { lane: id });
        self.set_alarm(lane, None);
    }

    /// The host says that a lane is gone and that no I/O of it is left, or that it could not be connected.
    pub fn lane_gone(&mut self, lane: LaneId, now_ns: u64) {
        self.now_ns = now_ns;
        let before = self.current(lane).map(|entry| entry.state);
        if before.is_none() || !self.step_lane(lane.index, EndpointEvent::Gone) {
            self.counters.stale_frames += 1;
            return;
        }
        if before == Some(Endpoint::Ready) {
            self.note_fence(lane.index);
        }
        self.counters.lanes_lost += 1;
        self.set_alarm(lane.index, None);
        let slices = self.slices_on(lane.index);
        let detached = core::mem::take(&mut self.lanes[lane.index as usize].connection.detached);
        detached.into_iter().for_each(|wire| self.free_wire(wire));
        let entry = &mut self.lanes[lane.index as usize];
        let (peer, refusal, cause) = (entry.peer, entry.connection.refusal.take(), entry.connection.cause);
        let greeted = entry.connection.greeted;
        entry.lost(now_ns);
        self.rail_lost(lane.index, cause);
        let waiting = self.stranded(lane.index);
        for index in slices {
            let wire = self.slices.at(index).wire;
            self.free_wire(wire);
            self.slice_lost(index, refusal, cause);
        }
        for index in waiting {
            if greeted || matches!(cause, Some(Cause::Deadline | Cause::Withdrawn)) {
                self.route(slice_id(index, self.slices.generation(index)));
            } else {
                self.slice_lost(index, refusal, cause);
            }
        }
        self.reclaim(peer);
    }

    /// A request that is not answered any more.
    fn free_wire(&mut self, wire: RequestId) {
        if self.wires.get(wire.index, wire.generation).is_some() {
            let freed = self.wires.remove(wire.index, Wire::VACANT);
            self.wires.recycle(freed);
        }
    }

    /// The host says that a lane's path does not lead to its peer from here, and that trying again soon would end the
    /// same. As [`Self::lane_gone`]; where the peer has another path, that is used for a while and no slice is charged.
    pub fn path_unavailable(&mut self, lane: LaneId, why: &str, now_ns: u64) {
        self.now_ns = now_ns;
        if self.current(lane).is_some_and(|entry| entry.state != Endpoint::Idle) && self.close_path(lane.index, why) {
            self.lanes[lane.index as usize].connection.cause = Some(Cause::Withdrawn);
        }
        self.lane_gone(lane, now_ns);
    }

    /// Has the other paths of a lane's peer used for a while; false when there are none.
    pub(super) fn close_path(&mut self, lane: u32, why: &str) -> bool {
        let rail = self.lanes[lane as usize].rail as usize;
        let (peer, number) = (self.rails[rail].peer as usize, usize::from(self.rails[rail].group));
        let transport = self.usual_transport(self.rails[rail].path);
        self.rails[rail].books.of(transport).unavailable += 1;
        let until_ns = self.now_ns.saturating_add(Limits::UNAVAILABLE_NS);
        let groups = &mut self.peers[peer].groups;
        if groups.len() > 1 {
            groups[number].unavailable = Some((until_ns, why.to_owned()));
        }
        groups.len() > 1
    }

    /// Its connection is gone: it fails, is charged, or goes elsewhere for free.
    fn slice_lost(&mut self, index: u32, refusal: Option<Status>, cause: Option<Cause>) {
        match (refusal, cause) {
            (Some(status), _) => self.settle(index, status),
            (None, None | Some(Cause::Peer)) => self.retry(index, Status::Unreachable),
            (None, Some(Cause::Deadline | Cause::Withdrawn)) => self.send_again(index, None),
        }
    }

    /// What waits for a group of which no lane is left nor on its way has to know that one was lost: another path may
    /// serve, and an attempt to connect that failed is charged.
    fn stranded(&mut self, lane: u32) -> Vec<u32> {
        let rail = &self.rails[self.lanes[lane as usize].rail as usize];
        let (peer, number) = (rail.peer, rail.group);
        let group = &self.peers[peer as usize].groups[usize::from(number)];
        let alive = group.rails.iter().flat_map(|&rail| &self.rails[rail as usize].lanes).any(|&lane| {
            let lane = &self.lanes[lane as usize];
            lane.state == Endpoint::Ready || lane.is_coming()
        });
        if alive {
            self.mark_group(peer, number);
            return Vec::new();
        }
        self.drain_group(peer as usize, usize::from(number))
    }
}
