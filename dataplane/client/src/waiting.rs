//! What waits for the rails of one path to a peer: one queue for each pair of places that its memory is at.
//!
//! Slices of memory at different places go by different rails. In one queue, one that waits for its own rail would hold
//! up all others. The queues take turns; among their first slices the more urgent one goes first.

use kvplane_proto::limits::Limits;

use super::Client;
use super::lane::Endpoint;
use super::near::Place;
use super::table::{NOWHERE, slice_id};
use super::types::Request;
use crate::sched::{ClassQueue, Health, Kinds, Next};

/// Pairs of places that are told apart with one peer; further ones count as unknown.
const QUEUES_MOST: usize = 64;

/// A queue, and how far the group's rails are from the memory of what waits in it.
#[derive(Default)]
pub(super) struct WaitQueue {
    ours: Place,
    theirs: Place,
    /// By the rail's position; 0 for those beyond its end. There is one of cost 0.
    pub(super) costs: Box<[u8]>,
    pub(super) queue: ClassQueue,
}

impl Client {
    /// Which queue of a group a slice waits in.
    pub(super) fn queue_for(&mut self, index: u32, peer: u32, number: u8) -> u8 {
        let group = &self.peers[peer as usize].groups[usize::from(number)];
        let devices = group.rails.first().and_then(|&rail| self.rails[rail as usize].address?.rdma);
        if group.rails.len() < 2 || devices.is_none() {
            return 0;
        }
        let (ours, theirs) = self.places_of(&self.slices.peek(index).request);
        let known = group.waiting.iter().position(|waiting| (waiting.ours, waiting.theirs) == (ours, theirs));
        if let Some(known) = known {
            // The first was made before it could be known.
            if known > 0 || !group.waiting[0].costs.is_empty() {
                return known as u8;
            }
        } else if group.waiting.len() >= QUEUES_MOST {
            return 0;
        }
        let costs = self.costs(peer, number, ours, theirs);
        let group = &mut self.peers[peer as usize].groups[usize::from(number)];
        if known.is_some() {
            group.waiting[0].costs = costs;
            return 0;
        }
        group.waiting.push(WaitQueue { ours, theirs, costs, queue: ClassQueue::new() });
        group.waiting.len() as u8 - 1
    }

    /// Where the memory of a request is, at our end and at the peer's.
    pub(super) fn places_of(&self, request: &Request) -> (Place, Place) {
        let ours = request.local().and_then(|local| self.places.get(local.buffer as usize).copied());
        let theirs = match request {
            Request::Read(target, _) | Request::Write(target, _) => target.place,
            _ => Place::UNKNOWN,
        };
        (ours.unwrap_or_default(), theirs)
    }

    /// How far each rail of a group is from memory at two places; the nearest is at 0.
    fn costs(&self, peer: u32, number: u8, ours: Place, theirs: Place) -> Box<[u8]> {
        let entry = &self.peers[peer as usize];
        let mut seen = Vec::new();
        let cost = |&rail: &u32| {
            let Some(devices) = self.rails[rail as usize].address.and_then(|address| address.rdma) else { return 0 };
            let first = !seen.contains(&devices.own);
            if first {
                seen.push(devices.own);
            }
            self.near.cost(devices, ours, &entry.near, theirs, first)
        };
        let mut costs: Box<[u8]> = entry.groups[usize::from(number)].rails.iter().map(cost).collect();
        let least = costs.iter().copied().min().unwrap_or(0);
        costs.iter_mut().for_each(|cost| *cost -= least);
        costs
    }

    /// Binds what waits for a group to lanes while there is room; connects more lanes for the rest.
    pub(super) fn dispatch(&mut self, peer: u32, number: u8) {
        let (now_ns, both) = (self.now_ns, Kinds { small: true, large: true });
        let queues = self.peers[peer as usize].groups[usize::from(number)].waiting.len();
        if queues == 1 {
            let mut kinds = both;
            loop {
                let group = &mut self.peers[peer as usize].groups[usize::from(number)];
                let Some(next) = group.waiting[0].queue.next(kinds, now_ns) else { break };
                self.serve((peer, number), 0, &next, &mut kinds);
            }
        } else {
            let mut kinds = vec![both; queues];
            while let Some((queue, next)) = self.next_of_all(peer, number, &kinds) {
                self.serve((peer, number), queue, &next, &mut kinds[queue]);
            }
        }
        self.connect_more(peer, number);
    }

    /// The slice whose turn it is, with its queue: of the most urgent, that of the next queue after the last one.
    fn next_of_all(&mut self, peer: u32, number: u8, kinds: &[Kinds]) -> Option<(usize, Next)> {
        let now_ns = self.now_ns;
        let group = &mut self.peers[peer as usize].groups[usize::from(number)];
        let (count, turn) = (group.waiting.len(), group.turn);
        let order = (1..=count).map(|step| (turn + step) % count);
        let first = |queue: usize| Some((queue, group.waiting[queue].queue.next(kinds[queue], now_ns)?));
        let found = order.filter_map(first).min_by_key(|(_, next)| next.priority)?;
        group.turn = found.0;
        Some(found)
    }

    /// Binds the slice whose turn it is in a queue. Where there is no room for one of its size, `kinds` says so from
    /// then on.
    fn serve(&mut self, (peer, number): (u32, u8), queue: usize, next: &Next, kinds: &mut Kinds) {
        let ask = self.ask(next.item, next.small, next.priority);
        let group = &self.peers[peer as usize].groups[usize::from(number)];
        let Some(lane) = self.choose(group, ask) else {
            // One of a higher class may have room where this one has none, but those come first anyway.
            match next.small {
                true => kinds.small = false,
                false => kinds.large = false,
            }
            return;
        };
        let group = &mut self.peers[peer as usize].groups[usize::from(number)];
        group.waiting[queue].queue.take(next.place, self.now_ns);
        self.slices.at(next.item).way.place = NOWHERE;
        self.bind(slice_id(next.item, self.slices.generation(next.item)), lane);
    }

    /// What still waits has found no room: as many more lanes are connected as it would fill, one of each rail first.
    fn connect_more(&mut self, peer: u32, number: u8) {
        for queue in 0..self.peers[peer as usize].groups[usize::from(number)].waiting.len() {
            let waiting = &self.peers[peer as usize].groups[usize::from(number)].waiting[queue];
            if !waiting.queue.is_empty() {
                self.connect_for(peer, number, queue);
            }
        }
    }

    /// The same for one queue: the nearest rails, and farther ones while those are not in order.
    fn connect_for(&mut self, peer: u32, number: u8, queue: usize) {
        let group = &self.peers[peer as usize].groups[usize::from(number)];
        let waiting = &group.waiting[queue];
        let cost = |at: usize| waiting.costs.get(at).copied().unwrap_or(0);
        let settled = group.rails.iter().enumerate().filter(|(_, rail)| self.is_settled(**rail));
        let farthest = settled.map(|(at, _)| cost(at)).min().unwrap_or(u8::MAX);
        let mut rails: Vec<(u8, u32)> = group.rails.iter().enumerate().map(|(at, &rail)| (cost(at), rail)).collect();
        rails.retain(|(cost, _)| *cost <= farthest);
        rails.sort_by_key(|(cost, _)| *cost);
        let slice_bytes = self.config.slice_bytes.max(Limits::SLICE_BYTES_LEAST);
        let mut wanted = waiting.queue.bytes().div_ceil(slice_bytes).max(1);
        for position in 0..usize::from(self.config.lanes.max(1)) {
            for &(_, rail) in &rails {
                let entry = &self.rails[rail as usize];
                let Some(&lane) = entry.lanes.get(position) else { continue };
                // A rail that is paused is tried by its first lane only, and others are connected regardless.
                let paused = entry.rail.health() == Health::Paused;
                if paused && position > 0 {
                    continue;
                }
                let coming = match self.lanes[lane as usize].state {
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

    /// Takes all that waits for a group out of its queues.
    pub(super) fn drain_group(&mut self, peer: usize, number: usize) -> Vec<u32> {
        let group = &mut self.peers[peer].groups[number];
        let waiting: Vec<u32> = group.waiting.iter_mut().flat_map(|waiting| waiting.queue.drain()).collect();
        for &index in &waiting {
            self.slices.at(index).way.place = NOWHERE;
        }
        waiting
    }
}
