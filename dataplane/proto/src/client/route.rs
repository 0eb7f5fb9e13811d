//! Which shard, and which lane to it; and what happens when a lane is lost or a deadline passes.

use super::lane::{Endpoint, EndpointEvent, Lane};
use super::table::SliceState;
use super::types::{LaneId, Output, Path, PeerAddress, PeerId, Request, SliceId};
use super::{Client, Peer};
use crate::digest::Digest;
use crate::limits::Limits;
use crate::map::ClusterMap;
use crate::status::Status;

/// Load that a slice without payload adds to its lane.
const SMALL_LOAD_BYTES: u64 = 512;
const PARK_FIRST_NS: u64 = 10_000_000;
const PARK_LAST_NS: u64 = 500_000_000;

impl Client {
    /// The peer at this address; the same one when it is known already.
    pub fn open_peer(&mut self, address: PeerAddress) -> PeerId {
        if let Some(&peer) = self.peer_index.get(&address) {
            return peer;
        }
        let peer = PeerId(u32::try_from(self.peers.len()).expect("2^32 peers"));
        let mut lanes = Vec::new();
        let mut add = |path, number| {
            lanes.push(self.lanes.len() as u32);
            self.lanes.push(Lane::new(peer, path, number));
        };
        if self.config.shared && address.shm.is_some() {
            add(Path::Shared, 0);
        }
        if self.config.stream || lanes_needed(&address, self.config.shared) {
            (0..self.config.lanes.max(1)).for_each(|number| add(Path::Stream, number));
        }
        self.peer_index.insert(address.clone(), peer);
        self.peers.push(Peer { address, lanes });
        peer
    }

    /// Puts a slice on a lane's queue, or completes it when there is nowhere to send it.
    pub(super) fn route(&mut self, id: SliceId) {
        let Some(slice) = self.slices.get(id.index, id.generation) else { return };
        let peer = match slice.request {
            Request::Exists(digest)
            | Request::Size(digest)
            | Request::Remove(digest)
            | Request::Get(digest, _)
            | Request::Put(digest, _) => self.owner_peer(digest),
            Request::Read(target, _) | Request::Write(target, _) => Some(target.peer),
            Request::OpenSegment(peer) => Some(peer),
        };
        let Some(peer) = peer else {
            self.complete(id.index, Status::NoOwner);
            return;
        };
        let lane = self.pick_lane(peer, id.index);
        let slice = self.slices.at(id.index);
        slice.lane = lane;
        let load = slice.weight_bytes().max(SMALL_LOAD_BYTES);
        self.lanes[lane as usize].load_bytes += load;
        self.lanes[lane as usize].queue.push_back(id);
        self.mark_dirty(lane);
    }

    fn owner_peer(&mut self, digest: Digest) -> Option<PeerId> {
        let (map, owners) = self.map.as_ref()?;
        let owner = owners.owner_of(digest)?;
        let (member, shard) = (usize::from(owner.member), usize::from(owner.shard.0));
        if let Some(peer) = self.owner_peers[member][shard] {
            return Some(peer);
        }
        let address = address_of(map, member, shard, &self.config.host);
        let peer = self.open_peer(address);
        self.owner_peers[member][shard] = Some(peer);
        Some(peer)
    }

    /// The shared lane where it serves; else the stream lane with the least to do, the first among equals, so that a quiet
    /// client keeps one warm connection.
    fn pick_lane(&mut self, peer: PeerId, slice: u32) -> u32 {
        let shareable = match self.slices.at(slice).request {
            Request::Read(target, _) | Request::Write(target, _) => target.shareable,
            _ => true,
        };
        let lanes = &self.peers[peer.0 as usize].lanes;
        let shared = lanes.iter().copied().find(|&lane| self.lanes[lane as usize].path == Path::Shared);
        let stream =
            lanes.iter().copied().filter(|&lane| self.lanes[lane as usize].path == Path::Stream).min_by_key(|&lane| {
                let lane = &self.lanes[lane as usize];
                (lane.is_suspect(self.now_ns), lane.load_bytes)
            });
        match (shared, stream) {
            (Some(lane), None) | (None, Some(lane)) => lane,
            (Some(lane), Some(_)) if shareable && !self.lanes[lane as usize].is_suspect(self.now_ns) => lane,
            (_, Some(lane)) => lane,
            (None, None) => unreachable!("a peer without lanes"),
        }
    }

    pub(super) fn mark_dirty(&mut self, lane: u32) {
        let entry = &mut self.lanes[lane as usize];
        if !entry.dirty {
            entry.dirty = true;
            self.dirty.push_back(lane);
        }
    }

    /// Takes a slice's load off its lane. A queued slice's queue entry goes stale and is skipped.
    pub(super) fn leave_lane(&mut self, slice: u32) {
        let entry = self.slices.at(slice);
        if entry.lane == u32::MAX {
            return;
        }
        let bytes = entry.weight_bytes();
        let in_flight = matches!(entry.state, SliceState::Asked | SliceState::Receiving);
        let lane = &mut self.lanes[entry.lane as usize];
        lane.load_bytes = lane.load_bytes.saturating_sub(bytes.max(SMALL_LOAD_BYTES));
        if in_flight {
            lane.sent_bytes = lane.sent_bytes.saturating_sub(bytes);
        }
        entry.lane = u32::MAX;
    }

    /// Sends a slice again, unless its budget or its batch is at an end.
    pub(super) fn retry(&mut self, index: u32, status: Status) {
        let id = SliceId { index, generation: self.slices.generation(index) };
        let slice = self.slices.at(index);
        slice.attempts = slice.attempts.saturating_add(1);
        let (attempts, batch) = (slice.attempts, slice.batch);
        self.leave_lane(index);
        if let Some(ended) = self.batches.at(batch.index).ended {
            self.complete(index, ended);
            return;
        }
        // A wrong owner is a matter of time, bounded by the deadline; anything else by the budget.
        if status != Status::WrongOwner && attempts >= Limits::ATTEMPTS {
            self.complete(index, status);
            return;
        }
        self.counters.retries += 1;
        let slice = self.slices.at(index);
        slice.step(super::table::SliceEvent::Requeue);
        slice.held = super::table::Held::Nothing;
        (slice.bytes, slice.version, slice.expected_checksum) = (0, 0, None);
        if matches!(status, Status::WrongOwner | Status::Busy) {
            let wait_ns = (PARK_FIRST_NS << u32::from(attempts.min(16) - 1)).min(PARK_LAST_NS);
            self.parked.push((self.now_ns + wait_ns, id));
        } else {
            self.route(id);
        }
        if matches!(status, Status::WrongOwner | Status::Unreachable) && !self.map_wanted {
            self.map_wanted = true;
            self.outputs.push_back(Output::WantMap);
        }
    }

    /// Routes the parked slices whose time has come.
    pub(super) fn unpark(&mut self, now_ns: u64) {
        let mut parked = core::mem::take(&mut self.parked);
        parked.retain(|&(not_before_ns, id)| {
            if not_before_ns <= now_ns {
                self.route(id);
            }
            not_before_ns > now_ns
        });
        self.parked.append(&mut parked);
    }

    /// Deadlines, reconnects and parked slices. Call it when `poll_timeout` says.
    pub fn handle_timeout(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        while let Some(&core::cmp::Reverse((deadline_ns, batch))) = self.deadlines.peek() {
            // Completed batches leave their entries behind; they are dropped as they surface.
            if deadline_ns > now_ns && !self.is_complete(batch) {
                break;
            }
            self.deadlines.pop();
            self.end_batch(batch, Status::DeadlineExceeded);
        }
        self.unpark(now_ns);
        for lane in 0..self.lanes.len() {
            if self.lanes[lane].reconnect_at().is_some_and(|at| at <= now_ns) {
                self.mark_dirty(lane as u32);
            }
        }
    }

    pub(super) fn reset_lane(&mut self, lane: u32) {
        if lane == u32::MAX || self.lanes[lane as usize].state == Endpoint::Idle {
            return;
        }
        if self.lanes[lane as usize].step(EndpointEvent::Reset) {
            self.outputs.push_back(Output::Reset { lane: self.lanes[lane as usize].id(lane) });
        }
    }

    /// Closes the lanes to shards that are not in the new map.
    pub(super) fn reset_departed(&mut self, map: &ClusterMap) {
        for peer in 0..self.peers.len() {
            let address = &self.peers[peer].address;
            let stays = address.node.0 == 0
                || map.members.iter().any(|m| m.node == address.node && m.incarnation == address.incarnation);
            if !stays {
                for position in 0..self.peers[peer].lanes.len() {
                    self.reset_lane(self.peers[peer].lanes[position]);
                }
            }
        }
    }

    /// The host says that a lane is gone and that no I/O of it is left, or that it could not be connected.
    pub fn lane_gone(&mut self, lane: LaneId, now_ns: u64) {
        self.now_ns = now_ns;
        if self.current(lane).is_none() || !self.lanes[lane.index as usize].step(EndpointEvent::Gone) {
            self.counters.stale_frames += 1;
            return;
        }
        self.counters.lanes_lost += 1;
        let wires: Vec<u32> = self.wires.iter().filter(|(_, wire)| wire.lane == lane).map(|(index, _)| index).collect();
        for wire in wires {
            let freed = self.wires.remove(wire);
            self.wires.recycle(freed);
        }
        let slices: Vec<u32> =
            self.slices.iter().filter(|(_, slice)| slice.lane == lane.index).map(|(index, _)| index).collect();
        let entry = &mut self.lanes[lane.index as usize];
        entry.queue.clear();
        entry.lost(now_ns);
        let refusal = entry.refusal.take();
        for slice in slices {
            match refusal {
                Some(status) => {
                    self.leave_lane(slice);
                    self.complete(slice, status);
                }
                None => self.retry(slice, Status::Unreachable),
            }
        }
    }

    pub(super) fn current(&mut self, lane: LaneId) -> Option<&mut Lane> {
        self.lanes.get_mut(lane.index as usize).filter(|entry| entry.generation == lane.generation)
    }
}

/// A peer that offers no shared memory is reached by streams even where shared memory was asked for.
fn lanes_needed(address: &PeerAddress, shared: bool) -> bool {
    !shared || address.shm.is_none()
}

fn address_of(map: &ClusterMap, member: usize, shard: usize, host: &str) -> PeerAddress {
    let member = &map.members[member];
    let address = &member.shards[shard];
    PeerAddress {
        node: member.node,
        incarnation: member.incarnation,
        shard: crate::ids::ShardId(shard as u16),
        tcp: address.tcp,
        shm: address.shm.clone().filter(|_| !host.is_empty() && member.host == host),
    }
}
