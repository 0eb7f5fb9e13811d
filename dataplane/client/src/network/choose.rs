//! Late binding: slices are queued by peer and priority class, and bound to a lane only when its rail has room.
//!
//! A *group* is all rails of one path to one peer; the lanes of a rail are equivalent. If the rails are over devices, a
//! slice takes a rail nearest to its memory at both ends, and a farther one only while no nearest rail is healthy; so
//! slices of different places have separate queues ([`super::group`]). The posted work is bounded to a few milliseconds
//! of the rail's measured rate, so that an urgent slice that arrives later does not wait behind much of it. Small
//! slices have a window of their own, and while they share a group with bulk, the first lane of each rail is reserved
//! for them: a small request is never queued behind a large one on a connection.

use super::Network;
use super::group::{Ask, Group, QueueFor};
use super::lane::Endpoint;
use super::locality::Places;
use crate::sched::{Candidate, Choice, Cuts, Rail, cut_bytes, pick, share_behind};
use crate::types::{Path, PeerId, Request, SegmentTarget, Via};

/// Window of small slices on a rail besides bulk, in bytes; doubled for those of the highest class.
pub(crate) const SMALL_WINDOW_BYTES: u64 = 1 << 20;

impl Network {
    /// Returns the lane to bind a slice to, or `None` if it has to wait.
    pub(crate) fn choose(&self, group: &Group, ask: Ask) -> Option<u32> {
        let express = !ask.small && self.host.now_ns < group.express_until_ns;
        if let [rail] = group.rails[..] {
            return self.lane_of(rail, Ask { only: true, ..ask }, express);
        }
        let mut cost = 0;
        loop {
            let (lane, settled) = self.choose_at(group, ask, express, cost);
            if lane.is_some() || settled {
                return lane;
            }
            // No rail at this distance is healthy: try the next nearest.
            let costs = &group.waiting[usize::from(ask.queue)].costs;
            cost = costs.iter().copied().filter(|&other| other > cost).min()?;
        }
    }

    /// Returns the lane for a slice on the rails at this distance, and true if at least one of these rails is healthy,
    /// so that farther rails need not be tried.
    fn choose_at(&self, group: &Group, ask: Ask, express: bool, cost: u8) -> (Option<u32>, bool) {
        let queue = usize::from(ask.queue);
        let here = group.rails.iter().enumerate().filter(|(at, _)| group.cost(queue, *at) == cost);
        let here = here.map(|(_, &rail)| rail);
        let settled = here.clone().any(|rail| rail != ask.avoid && self.rails.is_settled(rail, &self.host.config));
        let usable = here.filter(|&rail| self.is_up(rail));
        let window_ns = |rail: u32| self.rails[rail].rail.window_ns(self.rails.window_of(rail, &self.host.config));
        let widest_ns = if ask.small { 0.0 } else { usable.clone().map(window_ns).fold(0.0, f64::max) };
        let behind_ns = share_behind(usable.clone().map(|rail| &self.rails[rail].rail));
        let ask = Ask { widest_ns, behind_ns, ..ask };
        let candidates = usable.clone().map(|rail| {
            let entry = &self.rails[rail].rail;
            Candidate {
                predicted_ns: entry.predict_ns(ask.bytes, ask.small, self.host.now_ns),
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
    pub(crate) fn is_up(&self, rail: u32) -> bool {
        self.rails[rail].lanes.iter().any(|&lane| self.lanes[lane].state == Endpoint::Ready)
    }

    /// Returns the least loaded lane of a rail, the first among equals, if the rail has room for the slice.
    fn lane_of(&self, rail: u32, ask: Ask, express: bool) -> Option<u32> {
        let entry = &self.rails[rail];
        let window = self.rails.window_of(rail, &self.host.config);
        let window = match (ask.small, entry.rail.inflight_bytes().0) {
            (false, _) => {
                let even = entry.rail.even_window_bytes(window, ask.widest_ns);
                let ahead = entry.rail.share_ns() > ask.behind_ns + ask.widest_ns;
                if ahead && entry.path == Path::Rdma { Rail::held_window_bytes(even) } else { even }
            }
            // No bulk in flight: small slices may use the whole window.
            (true, 0) => window.max(SMALL_WINDOW_BYTES),
            (true, _) => SMALL_WINDOW_BYTES << u32::from(ask.high),
        };
        if !entry.rail.has_room(ask.small, window, ask.only) {
            return None;
        }
        let open = |lane: u32| {
            let lane = &self.lanes[lane];
            lane.state == Endpoint::Ready
                && (lane.load.bound_bytes == 0 || lane.load.bound_bytes < self.host.config.lane_window_bytes)
                && lane.may_take_more(&self.host.config)
        };
        let least = |lanes: &[u32]| {
            let open = lanes.iter().copied().filter(|&lane| open(lane));
            open.min_by_key(|&lane| self.lanes[lane].load.bound_bytes)
        };
        if express && entry.lanes[1..].iter().any(|&lane| self.lanes[lane].state == Endpoint::Ready) {
            return least(&entry.lanes[1..]);
        }
        least(&entry.lanes)
    }

    /// Returns the cuts of a range into slices: every rail of the peer gets a part of a large one.
    pub(crate) fn cuts(&self, offset: u64, bytes: u64, peer: PeerId) -> Cuts {
        let slice_bytes = cut_bytes(bytes, self.host.config.most_slice_bytes(), self.peers[peer.0].most_rails());
        Cuts::new(offset, bytes, slice_bytes, self.host.config.align_bytes)
    }

    /// Returns the group for a request. The paths of a peer are in order of preference: returns the first that supports
    /// the request and is not paused; if all are paused, the one whose pause ends first. A slice that failed twice
    /// prefers another path to the one that failed it. Returns `None` if no path supports the request, or if only the
    /// shared lane would and no way over it is left.
    #[inline]
    pub(crate) fn pick_group(&self, peer: PeerId, request: &Request, last: Option<u8>) -> Option<u8> {
        let groups = self.peers[peer.0].groups.iter().enumerate();
        let serving = groups.filter(|(_, group)| self.serves(peer, group, request));
        let best = serving.min_by_key(|(number, group)| {
            let rails = group.rails.iter().map(|&rail| &self.rails[rail].rail);
            let hopeful = rails.clone().any(|rail| rail.is_hopeful(self.host.now_ns));
            let wait_ns = if hopeful { 0 } else { rails.map(Rail::paused_until_ns).min().unwrap_or(0) };
            (!hopeful, last == Some(*number as u8), wait_ns)
        });
        best.map(|(number, _)| number as u8)
    }

    /// Returns true if a path of a peer can serve a request.
    fn serves(&self, peer: PeerId, group: &Group, request: &Request) -> bool {
        if group.is_unavailable(self.host.now_ns) {
            return false;
        }
        if self.device_buffers.has(request) {
            return matches!(request, Request::Read(..) | Request::Write(..)) && copies_directly(self, group);
        }
        if group.path != Path::Shared {
            return group.serves(request);
        }
        match request {
            Request::Read(target, _) | Request::Write(target, _) => {
                let lane = self.rails[group.rails[0]].lanes[0];
                self.lanes[lane].way(&self.host.config, target.segment, target.shareable).is_some()
            }
            Request::OpenSegment(_) => self.host.config.shared || self.peers[peer.0].groups.len() == 1,
            _ => self.host.config.shared,
        }
    }

    /// Returns true if RDMA devices of ours may copy from or to a segment: one of them is connected or may be, and the
    /// segment is not known to be closed for it.
    pub(crate) fn may_copy(&self, target: &SegmentTarget) -> bool {
        let Some(peer) = self.peers.get(target.peer.0) else { return false };
        let is_open = |rail: &u32| {
            let mut lanes = self.rails[*rail].lanes.iter();
            lanes.any(|&lane| !self.lanes[lane].is_closed(target.segment, Via::Rdma))
        };
        peer.groups.iter().any(|group| copies_directly(self, group) && group.rails.iter().any(is_open))
    }

    /// Estimates the time to get an object of so many bytes from a peer: at the measured rate of its best rail, behind
    /// the work that is posted on it and queued for it.
    pub(crate) fn wait_ns(&self, peer: PeerId, request: &Request, bytes: u64) -> Option<f64> {
        let group = &self.peers[peer.0].groups[usize::from(self.pick_group(peer, request, None)?)];
        let bytes = bytes + group.waiting_bytes() / group.rails.len().max(1) as u64;
        let small = self.host.config.is_small(bytes);
        let predict = |rail: &u32| self.rails[*rail].rail.predict_ns(bytes, small, self.host.now_ns);
        group.rails.iter().map(predict).reduce(f64::min)
    }

    /// Returns true if every path to a peer is lost, and it is too early to retry one.
    pub(crate) fn is_down(&self, peer: PeerId) -> bool {
        let rails = self.peers[peer.0].groups.iter().flat_map(|group| &group.rails);
        rails.copied().all(|rail| !self.is_up(rail) && !self.rails[rail].rail.is_hopeful(self.host.now_ns))
    }

    /// Returns the queue of a group for a request.
    #[inline]
    pub(crate) fn queue_for(&mut self, request: &Request, peer: u32, number: u8) -> u8 {
        let group = &self.peers[peer].groups[usize::from(number)];
        let devices = group.rails.first().and_then(|&rail| self.rails[rail].address?.rdma);
        if group.rails.len() < 2 || devices.is_none() {
            return 0;
        }
        let places = self.locality.places_of(request);
        match group.queue_for(places) {
            QueueFor::Known(queue) => queue,
            QueueFor::New => {
                let costs = self.costs(peer, number, places);
                self.peers[peer].groups[usize::from(number)].add_queue(places, costs)
            }
        }
    }

    /// Returns the distance of each rail of a group from memory at two places, relative to the nearest, which is at 0.
    fn costs(&self, peer: u32, number: u8, places: Places) -> Box<[u8]> {
        let entry = &self.peers[peer];
        let mut seen = Vec::new();
        let cost = |&rail: &u32| {
            let Some(devices) = self.rails[rail].address.and_then(|address| address.rdma) else { return 0 };
            let first = !seen.contains(&devices.own);
            if first {
                seen.push(devices.own);
            }
            self.locality.near().cost(devices, places.ours, &entry.near, places.theirs, first)
        };
        let mut costs: Box<[u8]> = entry.groups[usize::from(number)].rails.iter().map(cost).collect();
        let least = costs.iter().copied().min().unwrap_or(0);
        costs.iter_mut().for_each(|cost| *cost -= least);
        costs
    }
}

/// Returns true if RDMA devices make the copies of a path, and one of its rails may work.
fn copies_directly(network: &Network, group: &Group) -> bool {
    let is_hopeful = |rail: &u32| network.rails[*rail].rail.is_hopeful(network.host.now_ns);
    matches!(group.path, Path::Rdma | Path::MooncakeRdma)
        && !group.is_unavailable(network.host.now_ns)
        && group.rails.iter().any(is_hopeful)
}

/// Returns true if a peer is suspect. While it still owes a reply, that reply ends the suspicion; where the connection
/// is lost, it ends by itself, so that the peer is tried again.
#[inline]
pub(crate) fn is_suspect(network: &Network, peer: PeerId) -> bool {
    let suspicion = network.peers[peer.0].suspicion;
    suspicion.is_some_and(|suspicion| network.host.now_ns < suspicion.until_ns || owes(network, peer))
}

/// Returns true if a peer owes a reply on a connection that is in use.
fn owes(network: &Network, peer: PeerId) -> bool {
    let rails = network.peers[peer.0].groups.iter().flat_map(|group| &group.rails);
    let mut lanes = rails.flat_map(|&rail| &network.rails[rail].lanes).map(|&lane| &network.lanes[lane]);
    lanes.any(|lane| lane.state == Endpoint::Ready && lane.owes_replies())
}
