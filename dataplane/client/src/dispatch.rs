//! Late binding: slices wait with the peer, by class, and are given to a lane when its rail has room.
//!
//! A *group* is all rails of one path to one peer; its lanes are equal within a rail. Where the rails are over devices,
//! a slice takes the nearest to its memory at both ends, and farther ones only while those are not in order; so slices
//! of different places wait apart (`waiting`). What is posted is bounded by a
//! few milliseconds of the rail's measured rate, so that what comes later and matters more is not behind much. Small
//! slices have room of their own, and while they share a group with bulk, the first lane of each rail is theirs alone:
//! a small request is never behind a large one on a connection.

use kvplane_proto::limits::Limits;

use super::lane::{Cause, Endpoint, EndpointEvent};
use super::metrics::RailBooks;
use super::options::RailAddress;
use super::path::Path;
use super::table::NOWHERE;
use super::types::{PeerId, SliceId};
use super::waiting::WaitQueue;
use super::{Client, Config};
use crate::sched::{Candidate, Choice, Health, Priority, Rail, Ticket, pick, share_behind};

/// Bytes of small slices that a rail may have posted beside bulk; those of the highest class may have twice as many.
pub(super) const SMALL_WINDOW_BYTES: u64 = 1 << 20;
/// The first lanes stay free of bulk for this long after a small slice met bulk.
const EXPRESS_NS: u64 = 100_000_000;

/// A lane is given up when it is silent for so many times the time that its work should take.
const STALL_FACTOR: f64 = 8.0;
/// Nor while its oldest slice may still come at this rate.
const LEAST_BYTES_PER_SECOND: u64 = 4_000_000;
/// And not before it is silent for so many times the longest silence of its rail, up to [`Limits::RAIL_SILENCE_NS`].
const SILENCES: u64 = 4;

/// The rails of one path to a peer, and what waits for them.
pub(super) struct Group {
    pub(super) path: Path,
    pub(super) rails: Vec<u32>,
    /// What waits, by where its memory is; the first of them for what may take any rail.
    pub(super) waiting: Vec<WaitQueue>,
    /// Whose turn it is among those.
    pub(super) turn: usize,
    dirty: bool,
    /// Until when it is not used, as it does not lead to the peer from here, and why.
    pub(super) unavailable: Option<(u64, String)>,
    /// Until when bulk keeps off the first lane of each rail.
    pub(super) express_until_ns: u64,
}

/// A rail, its lanes and its books.
pub(super) struct RailEntry {
    pub(super) rail: Rail,
    pub(super) peer: u32,
    pub(super) group: u8,
    pub(super) lanes: Vec<u32>,
    /// Where it leads, where that is not the peer's own address.
    pub(super) address: Option<RailAddress>,
    pub(super) path: Path,
    pub(super) books: RailBooks,
}

/// What a lane is wanted for.
#[derive(Clone, Copy)]
pub(super) struct Ask {
    bytes: u64,
    small: bool,
    high: bool,
    /// Whether there is one rail only.
    only: bool,
    /// The rail that failed it last.
    avoid: u32,
    /// Bytes of its request that are not done.
    open_bytes: u64,
    /// Which of the group's queues it is of.
    queue: u8,
    /// The widest window of the rails beside, by their stated speeds.
    widest_ns: f64,
    /// How far the last of those is with its part.
    behind_ns: f64,
}

impl Group {
    pub(super) fn new(path: Path, rails: Vec<u32>) -> Self {
        let waiting = vec![WaitQueue::default()];
        Self { path, rails, waiting, turn: 0, dirty: false, unavailable: None, express_until_ns: 0 }
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.iter().all(|waiting| waiting.queue.is_empty())
    }
}

impl Config {
    /// Whether a slice of so many bytes counts as small.
    pub(super) const fn is_small(&self, bytes: u64) -> bool {
        bytes <= self.small_bytes
    }
}

impl Client {
    /// Gives a slice to a lane if one has room and nothing waits, else to the group's queue.
    pub(super) fn enter_group(&mut self, id: SliceId, peer: PeerId, number: u8) {
        let now_ns = self.now_ns;
        let queue = self.queue_for(id.index, peer.0, number);
        let slice = self.slices.at(id.index);
        (slice.way.peer, slice.way.group, slice.way.queue, slice.times.queued_ns) = (peer.0, number, queue, now_ns);
        let bytes = slice.load_bytes();
        let batch = slice.batch.index;
        let ticket = Ticket { bytes, small: self.config.is_small(bytes), ..self.batches.at(batch).ticket };
        let ask = self.ask(id.index, ticket.small, ticket.priority);
        let group = &mut self.peers[peer.0 as usize].groups[usize::from(number)];
        let large = group.waiting.iter().any(|waiting| waiting.queue.has(false));
        if ticket.small && (large || self.has_bulk(peer.0, number)) {
            self.peers[peer.0 as usize].groups[usize::from(number)].express_until_ns =
                now_ns.saturating_add(EXPRESS_NS);
        }
        let group = &self.peers[peer.0 as usize].groups[usize::from(number)];
        // Where nothing of its size waits, its turn is now.
        let waiting = &group.waiting[usize::from(queue)].queue;
        let next = waiting.is_empty() || ticket.small && !waiting.has(true);
        let lane = if next { self.choose(group, ask) } else { None };
        if let Some(lane) = lane {
            self.bind(id, lane);
            if !ticket.small || self.is_far(peer.0, number, queue, lane) {
                self.try_paused(peer.0, number);
            }
            return;
        }
        let group = &mut self.peers[peer.0 as usize].groups[usize::from(number)];
        let place = group.waiting[usize::from(queue)].queue.push(id.index, &ticket, now_ns);
        self.slices.at(id.index).way.place = place;
        self.mark_group(peer.0, number);
    }

    fn has_bulk(&self, peer: u32, number: u8) -> bool {
        let group = &self.peers[peer as usize].groups[usize::from(number)];
        group.rails.iter().any(|&rail| self.rails[rail as usize].rail.inflight_bytes().0 > 0)
    }

    /// Rails are compared from here on: they were idle, or have become more or fewer.
    fn start_shares(&mut self, peer: u32, number: u8) {
        for &rail in &self.peers[peer as usize].groups[usize::from(number)].rails {
            self.rails[rail as usize].rail.start_share();
        }
    }

    pub(super) fn ask(&mut self, index: u32, small: bool, priority: Priority) -> Ask {
        let slice = self.slices.at(index);
        let (bytes, task, batch, queue) = (slice.load_bytes(), slice.task, slice.batch.index, slice.way.queue);
        let avoid = if slice.tries.attempts > 0 { slice.rail } else { NOWHERE };
        let open = u64::from(self.batches.at(batch).open_slices[task as usize]);
        Ask {
            bytes,
            small,
            high: priority == Priority::High,
            only: false,
            avoid,
            open_bytes: open * bytes,
            queue,
            widest_ns: 0.0,
            behind_ns: f64::INFINITY,
        }
    }

    pub(super) fn bind(&mut self, id: SliceId, lane: u32) {
        let entry = &mut self.lanes[lane as usize];
        if entry.list.first == NOWHERE {
            entry.progress_ns = self.now_ns;
        }
        let unwatched = entry.alarm_ns.is_none();
        let (peer, number) = (entry.peer.0 as usize, usize::from(self.rails[entry.rail as usize].group));
        if self.peers[peer].groups[number].rails.len() > 1 && !self.has_bulk(peer as u32, number as u8) {
            self.start_shares(peer as u32, number as u8);
        }
        self.enter_lane(id.index, lane);
        self.mark_dirty(lane);
        if unwatched && self.peers[peer].groups[number].rails.len() > 1 {
            self.set_alarm(lane, Some(self.now_ns.saturating_add(Limits::STALL_NS)));
        }
    }

    /// A lane beside other rails is looked at while it has work: one that has not moved anything for too long is given
    /// up, as are the other lanes of its rail that have not. A port that is gone says nothing.
    pub(super) fn check_stall(&mut self, lane: u32) {
        let limit_ns = |client: &Self, lane: u32| {
            let entry = &client.lanes[lane as usize];
            let rate = client.rails[entry.rail as usize].rail.rate();
            let usual_ns = rate.base_ns().max(rate.latency_ns());
            // How far away the peer is, is not known before something was served.
            let least_ns = if usual_ns > 0.0 { Limits::STALL_NS } else { Limits::RAIL_HELLO_NS };
            // Lanes share their rail: what the others have may be served before.
            let rail = &client.rails[entry.rail as usize].rail;
            let (bulk, small) = rail.inflight_bytes();
            let work_ns = usual_ns + (bulk + small) as f64 / rate.bytes_per_ns();
            let silence_ns = rail.silence_ns().saturating_mul(SILENCES).min(Limits::RAIL_SILENCE_NS);
            // Nothing is heard of a payload before all of it is there, and a stated speed need not be the real one.
            let whole_ns = match entry.list.first {
                NOWHERE => 0,
                first => client.slices.peek(first).load_bytes().saturating_mul(1_000_000_000) / LEAST_BYTES_PER_SECOND,
            };
            least_ns.max((work_ns * STALL_FACTOR) as u64).max(silence_ns).max(whole_ns)
        };
        let entry = &self.lanes[lane as usize];
        if entry.list.first == NOWHERE && entry.connection.detached.is_empty() {
            return;
        }
        let stalled_ns = entry.progress_ns.saturating_add(limit_ns(self, lane));
        if stalled_ns > self.now_ns {
            self.set_alarm(lane, Some(stalled_ns));
            return;
        }
        let (rail, silent_ns) = (entry.rail as usize, self.now_ns.saturating_sub(entry.progress_ns));
        for position in 0..self.rails[rail].lanes.len() {
            let other = self.rails[rail].lanes[position];
            let entry = &self.lanes[other as usize];
            let silent_ns = self.now_ns.saturating_sub(entry.progress_ns);
            let waits = entry.list.first != NOWHERE || !entry.connection.detached.is_empty();
            if entry.state == Endpoint::Ready && waits && silent_ns >= limit_ns(self, other) / 2 {
                self.reset_lane(other, Cause::Peer);
                let transport = self.usual_transport(self.rails[rail].path);
                self.rails[rail].books.of(transport).silences += 1;
            }
        }
        // Only now, as it puts off when lanes are given up.
        self.rails[rail].rail.gave_up(silent_ns);
    }

    pub(super) fn mark_group(&mut self, peer: u32, number: u8) {
        let group = &mut self.peers[peer as usize].groups[usize::from(number)];
        if !group.dirty && !group.is_empty() {
            group.dirty = true;
            self.dirty_groups.push_back((peer, number));
        }
    }

    pub(super) fn mark_group_of(&mut self, lane: u32) {
        let rail = &self.rails[self.lanes[lane as usize].rail as usize];
        self.mark_group(rail.peer, rail.group);
    }

    pub(super) fn dispatch_dirty(&mut self) {
        for _ in 0..self.dirty_groups.len() {
            let Some((peer, number)) = self.dirty_groups.pop_front() else { return };
            // A peer that left since may have taken its groups along.
            if let Some(group) = self.peers[peer as usize].groups.get_mut(usize::from(number)) {
                group.dirty = false;
                self.dispatch(peer, number);
            }
        }
    }

    /// The lane for a slice now, or none: then it waits.
    pub(super) fn choose(&self, group: &Group, ask: Ask) -> Option<u32> {
        let express = !ask.small && self.now_ns < group.express_until_ns;
        if let [rail] = group.rails[..] {
            return self.lane_of(rail, Ask { only: true, ..ask }, express);
        }
        let costs = &group.waiting[usize::from(ask.queue)].costs;
        let mut cost = 0;
        loop {
            let (lane, settled) = self.choose_at(group, ask, express, cost);
            if lane.is_some() || settled {
                return lane;
            }
            // The rails at this distance are not in order: the next nearest help.
            cost = costs.iter().copied().filter(|&other| other > cost).min()?;
        }
    }

    /// The lane for a slice on the rails at this distance; and whether those are in order, one at least, so that none
    /// farther away is to be looked at.
    fn choose_at(&self, group: &Group, ask: Ask, express: bool, cost: u8) -> (Option<u32>, bool) {
        let costs = &group.waiting[usize::from(ask.queue)].costs;
        let here = group.rails.iter().enumerate().filter(|(at, _)| costs.get(*at).copied().unwrap_or(0) == cost);
        let here = here.map(|(_, &rail)| rail);
        let settled = here.clone().any(|rail| rail != ask.avoid && self.is_settled(rail));
        let usable = here.filter(|&rail| self.is_up(rail));
        let window_ns = |rail: u32| self.rails[rail as usize].rail.window_ns(self.window_of(rail));
        let widest_ns = if ask.small { 0.0 } else { usable.clone().map(window_ns).fold(0.0, f64::max) };
        let behind_ns = share_behind(usable.clone().map(|rail| &self.rails[rail as usize].rail));
        let ask = Ask { widest_ns, behind_ns, ..ask };
        let candidates = usable.clone().map(|rail| {
            let entry = &self.rails[rail as usize].rail;
            Candidate {
                predicted_ns: entry.predict_ns(ask.bytes, ask.small, self.now_ns),
                rate: entry.rate().bytes_per_ns(),
                room: self.lane_of(rail, ask, express).is_some(),
                avoid: rail == ask.avoid,
            }
        });
        let lane = match pick(candidates, ask.open_bytes) {
            Choice::Rail(position) => {
                let rail = usable.clone().nth(position).expect("a rail that was offered");
                self.lane_of(rail, ask, express)
            }
            Choice::Wait | Choice::Nowhere => None,
        };
        (lane, settled)
    }

    /// Whether a rail can be relied on: it never failed, or has earned its trust back since. One that is not connected
    /// yet is about to be.
    pub(super) fn is_settled(&self, rail: u32) -> bool {
        let entry = &self.rails[rail as usize].rail;
        entry.health() == Health::Healthy && entry.is_trusted(self.window_of(rail))
    }

    /// Whether a lane's rail is not one of the nearest.
    fn is_far(&self, peer: u32, number: u8, queue: u8, lane: u32) -> bool {
        let group = &self.peers[peer as usize].groups[usize::from(number)];
        let mut costs = group.waiting[usize::from(queue)].costs.iter().zip(&group.rails);
        costs.any(|(cost, rail)| *cost > 0 && *rail == self.lanes[lane as usize].rail)
    }

    pub(super) fn is_up(&self, rail: u32) -> bool {
        self.rails[rail as usize].lanes.iter().any(|&lane| self.lanes[lane as usize].state == Endpoint::Ready)
    }

    /// The lane of a rail with the least to do, the first among equals, if the rail has room for the slice.
    fn lane_of(&self, rail: u32, ask: Ask, express: bool) -> Option<u32> {
        let entry = &self.rails[rail as usize];
        let window = self.window_of(rail);
        let window = match (ask.small, entry.rail.inflight_bytes().0) {
            (false, _) => {
                let even = entry.rail.even_window_bytes(window, ask.widest_ns);
                let ahead = entry.rail.share_ns() > ask.behind_ns + ask.widest_ns;
                if ahead && entry.path == Path::Rdma { Rail::held_window_bytes(even) } else { even }
            }
            // Nothing to keep off: small slices have all of it.
            (true, 0) => window.max(SMALL_WINDOW_BYTES),
            (true, _) => SMALL_WINDOW_BYTES << u32::from(ask.high),
        };
        if !entry.rail.has_room(ask.small, window, ask.only) {
            return None;
        }
        let open = |lane: u32| {
            let lane = &self.lanes[lane as usize];
            lane.state == Endpoint::Ready
                && (lane.load.bound_bytes == 0 || lane.load.bound_bytes < self.config.lane_window_bytes)
                && lane.may_take_more(&self.config)
        };
        let least = |lanes: &[u32]| {
            let open = lanes.iter().copied().filter(|&lane| open(lane));
            open.min_by_key(|&lane| self.lanes[lane as usize].load.bound_bytes)
        };
        if express && entry.lanes[1..].iter().any(|&lane| self.lanes[lane as usize].state == Endpoint::Ready) {
            return least(&entry.lanes[1..]);
        }
        least(&entry.lanes)
    }

    pub(super) fn window_of(&self, rail: u32) -> u64 {
        let least = self.config.slice_bytes.saturating_mul(2);
        self.rails[rail as usize].rail.window_bytes(self.config.post_ahead_ns, least)
    }

    /// Connects the rails whose pause is over, by their first lanes: where the others are so fast that nothing ever
    /// waits, those would stay alone.
    fn try_paused(&mut self, peer: u32, number: u8) {
        let rails = self.peers[peer as usize].groups[usize::from(number)].rails.len();
        for position in 0..if rails > 1 { rails } else { 0 } {
            let rail = self.peers[peer as usize].groups[usize::from(number)].rails[position];
            let entry = &self.rails[rail as usize];
            let over = entry.rail.health() == Health::Paused && entry.rail.is_hopeful(self.now_ns);
            if let Some(&lane) = entry.lanes.first()
                && over
                && self.lanes[lane as usize].state == Endpoint::Idle
            {
                self.connect(lane);
            }
        }
    }

    /// A lane's peer has welcomed us: it is ready for use.
    pub(super) fn welcomed(&mut self, lane: u32) {
        self.step_lane(lane, EndpointEvent::Welcome);
        self.lanes[lane as usize].welcomed();
        let rail = &mut self.rails[self.lanes[lane as usize].rail as usize];
        rail.rail.connected();
        let (peer, group) = (rail.peer as usize, usize::from(rail.group));
        self.peers[peer].groups[group].unavailable = None;
        self.start_shares(peer as u32, group as u8);
        self.set_alarm(lane, None);
        self.mark_group_of(lane);
        self.mark_dirty(lane);
    }

    /// A lane was lost: its rail is paused if it was the last, and somebody was at fault.
    pub(super) fn rail_lost(&mut self, lane: u32, cause: Option<Cause>) {
        let (rail, retry_ns) = (self.lanes[lane as usize].rail, self.lanes[lane as usize].not_before_ns());
        if cause != Some(Cause::Withdrawn) && !self.is_up(rail) {
            let now_ns = self.now_ns;
            let entry = &mut self.rails[rail as usize];
            entry.rail.failed(retry_ns, now_ns);
            let (peer, number) = (entry.peer, entry.group);
            self.start_shares(peer, number);
            let transport = self.usual_transport(self.rails[rail as usize].path);
            self.rails[rail as usize].books.of(transport).pauses += 1;
        }
    }
}
