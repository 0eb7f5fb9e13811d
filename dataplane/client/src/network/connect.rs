//! Connections: when lanes are connected, and what follows when they are welcomed, lost or refused.

use kvplane_proto::limits::Limits;
use kvplane_proto::status::Status;

use super::Network;
use super::lane::{Cause, Endpoint, EndpointEvent};
use crate::sched::Health;
use crate::types::{LaneId, Output, Transport, Via};

/// Time for which a path is not retried after the peer refused it.
const REFUSED_NS: u64 = 60_000_000_000;

impl Network {
    /// Reconnects the rails whose pause is over, by their first lanes: if the other rails are so fast that no slice
    /// ever waits, nothing else would reconnect them.
    pub(crate) fn try_paused(&mut self, peer: u32, number: u8) {
        let rails = self.peers[peer].groups[usize::from(number)].rails.len();
        for position in 0..if rails > 1 { rails } else { 0 } {
            let rail = self.peers[peer].groups[usize::from(number)].rails[position];
            let entry = &self.rails[rail];
            let over = entry.rail.health() == Health::Paused && entry.rail.is_hopeful(self.host.now_ns);
            if let Some(&lane) = entry.lanes.first()
                && over
                && self.lanes[lane].state == Endpoint::Idle
            {
                self.connect(lane);
            }
        }
    }

    /// Handles the welcome of a lane's peer: the lane is ready for use.
    pub(crate) fn welcomed(&mut self, lane: u32) {
        self.lanes.step(lane, EndpointEvent::Welcome);
        self.lanes[lane].welcomed();
        let rail = &mut self.rails[self.lanes[lane].rail];
        let group = &mut self.peers[rail.peer].groups[usize::from(rail.group)];
        rail.rail.connected();
        group.unavailable = None;
        self.rails.start_shares(group);
        self.lanes.set_alarm(&mut self.host.timers, lane, None);
        self.mark_group_of(lane);
        self.lanes.mark_dirty(lane);
    }

    /// Handles the loss of a lane: pauses its rail if it was the last lane, unless the client closed it itself without
    /// a fault.
    pub(crate) fn rail_lost(&mut self, lane: u32, cause: Option<Cause>) {
        let (rail, retry_ns) = (self.lanes[lane].rail, self.lanes[lane].not_before_ns());
        if cause != Some(Cause::Withdrawn) && !self.is_up(rail) {
            let now_ns = self.host.now_ns;
            let entry = &mut self.rails[rail];
            entry.rail.failed(retry_ns, now_ns);
            let group = &self.peers[entry.peer].groups[usize::from(entry.group)];
            self.rails.start_shares(group);
            let transport = self.host.config.usual_transport(self.rails[rail].path);
            self.rails[rail].books.of(transport).pauses += 1;
        }
    }

    /// Handles a peer's acknowledgement of a fence. Returns `None` if it violates the protocol.
    pub(crate) fn fence_answered(&mut self, lane: u32, status: Status, until: u64) -> Option<()> {
        let entry = &self.lanes[lane];
        if status != Status::Ok || entry.state != Endpoint::Ready || until > entry.connection.fenced {
            return None;
        }
        let peer = entry.peer;
        self.peers[peer.0].fences.answer(until);
        for lane in self.lanes_of(peer) {
            self.lanes.mark_dirty(lane);
        }
        Some(())
    }

    /// Requests a connection from the host, unless the lane still backs off: then it sets its alarm and returns false.
    pub(crate) fn connect(&mut self, lane: u32) -> bool {
        let entry = &self.lanes[lane];
        if let Some(at_ns) = entry.waits_until(self.host.now_ns) {
            if entry.alarm_ns != Some(at_ns) {
                self.lanes.set_alarm(&mut self.host.timers, lane, Some(at_ns));
            }
            return false;
        }
        self.lanes.step(lane, EndpointEvent::Connect);
        let entry = &self.lanes[lane];
        let (id, path, peer) = (entry.id(lane), entry.path, entry.peer);
        let rail = &self.rails[entry.rail];
        let mut address = self.peers[peer.0].address.clone();
        if let Some(own) = &rail.address {
            address.tcp = own.tcp;
        }
        // By this time the lane must be connected and welcomed: a silent peer does not occupy the lane forever. On a
        // dead rail beside a working one the time is short. If no rail works the peer may just be slow, and giving up
        // on all rails early would charge the waiting slices an attempt.
        let group = &self.peers[peer.0].groups[usize::from(rail.group)];
        let others = group.rails.iter().any(|&rail| self.is_up(rail));
        let hello_ns = if others { entry.rail_hello_ns() } else { Limits::HELLO_NS };
        self.lanes.set_alarm(&mut self.host.timers, lane, Some(self.host.now_ns.saturating_add(hello_ns)));
        self.host.outbox.push(Output::Connect { lane: id, address, path });
        true
    }

    /// Handles a peer that does not support the purpose of a lane: its path is not retried for a while.
    pub(crate) fn path_refused(&mut self, lane: LaneId, why: &str) {
        let Some(entry) = self.lanes.current(lane) else { return };
        let rail = &mut self.rails[entry.rail];
        rail.books.of(Transport::of(rail.path, Via::Rdma)).unavailable += 1;
        let until_ns = self.host.now_ns.saturating_add(REFUSED_NS);
        self.peers[rail.peer].groups[usize::from(rail.group)].unavailable = Some((until_ns, why.to_owned()));
    }

    /// Extends the timeouts by the time during which the host polled nothing: the peers are not blamed for it.
    pub(crate) fn note_absence(&mut self, since_ns: u64) {
        let now_ns = self.host.now_ns;
        let gap_ns = now_ns.saturating_sub(since_ns);
        for (at_ns, lane) in self.host.timers.alarms() {
            let entry = &mut self.lanes[lane];
            let later_ns = |at_ns: u64, latest_ns: u64| at_ns.max(at_ns.saturating_add(gap_ns).min(latest_ns));
            if entry.is_coming() {
                let at_ns = later_ns(at_ns, now_ns.saturating_add(Limits::RAIL_HELLO_NS));
                self.lanes.set_alarm(&mut self.host.timers, lane, Some(at_ns));
            } else {
                entry.progress_ns = later_ns(entry.progress_ns, now_ns);
            }
        }
    }

    /// Closes a lane's path for a while in favour of the peer's other paths; returns false if there are none.
    pub(crate) fn close_path(&mut self, lane: u32, why: &str) -> bool {
        let rail = &mut self.rails[self.lanes[lane].rail];
        rail.books.of(self.host.config.usual_transport(rail.path)).unavailable += 1;
        let until_ns = self.host.now_ns.saturating_add(Limits::UNAVAILABLE_NS);
        let groups = &mut self.peers[rail.peer].groups;
        if groups.len() > 1 {
            groups[usize::from(rail.group)].unavailable = Some((until_ns, why.to_owned()));
        }
        groups.len() > 1
    }

    /// Connects as many more lanes as the waiting slices would fill, one of each rail first.
    pub(crate) fn connect_more(&mut self, peer: u32, number: u8) {
        for queue in 0..self.peers[peer].groups[usize::from(number)].waiting.len() {
            let waiting = &self.peers[peer].groups[usize::from(number)].waiting[queue];
            if !waiting.queue.is_empty() {
                self.connect_for(peer, number, queue);
            }
        }
    }

    /// Connects lanes for one queue: on the nearest rails, and on farther ones while no nearest rail is healthy.
    fn connect_for(&mut self, peer: u32, number: u8, queue: usize) {
        let group = &self.peers[peer].groups[usize::from(number)];
        let waiting = &group.waiting[queue];
        let cost = |at: usize| group.cost(queue, at);
        let settled =
            group.rails.iter().enumerate().filter(|(_, rail)| self.rails.is_settled(**rail, &self.host.config));
        let farthest = settled.map(|(at, _)| cost(at)).min().unwrap_or(u8::MAX);
        let mut rails: Vec<(u8, u32)> = group.rails.iter().enumerate().map(|(at, &rail)| (cost(at), rail)).collect();
        rails.retain(|(cost, _)| *cost <= farthest);
        rails.sort_by_key(|(cost, _)| *cost);
        let slice_bytes = self.host.config.most_slice_bytes();
        let mut wanted = waiting.queue.bytes().div_ceil(slice_bytes).max(1);
        for position in 0..usize::from(self.host.config.lanes.max(1)) {
            for &(_, rail) in &rails {
                let entry = &self.rails[rail];
                let Some(&lane) = entry.lanes.get(position) else { continue };
                // A paused rail is tried by its first lane only, and does not count towards the wanted lanes.
                let paused = entry.rail.health() == Health::Paused;
                if paused && position > 0 {
                    continue;
                }
                let coming = match self.lanes[lane].state {
                    Endpoint::Idle => self.connect(lane),
                    Endpoint::Connecting | Endpoint::Greeting => true,
                    Endpoint::Ready | Endpoint::Resetting => false,
                };
                wanted -= u64::from(coming && !paused);
                if wanted == 0 {
                    return;
                }
            }
        }
    }
}
