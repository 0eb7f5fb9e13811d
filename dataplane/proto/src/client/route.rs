//! Which lane a slice goes on, and the book of what is on each lane.

use super::Client;
use super::path::Path;
use super::table::{NOWHERE, SliceState};
use super::types::{LaneId, PeerId, Request, SliceId};
use crate::client::lane::Lane;
use crate::status::Status;

/// Load that a slice without payload adds to its lane.
const SMALL_LOAD_BYTES: u64 = 512;

impl Client {
    /// Puts a slice on a lane's queue, or completes it when there is nowhere to send it.
    pub(super) fn route(&mut self, id: SliceId) {
        let Some(slice) = self.slices.get(id.index, id.generation) else { return };
        debug_assert!(slice.lane == NOWHERE && slice.state == SliceState::Queued, "a slice was routed twice");
        let request = slice.request;
        let peer = match request {
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
        let Some(lane) = self.pick_lane(peer, &request) else {
            self.complete(id.index, Status::Unsupported);
            return;
        };
        self.lanes[lane as usize].queue.push_back(id);
        self.enter_lane(id.index, lane);
        self.mark_dirty(lane);
    }

    /// The shared lane where it serves; else the other lane with the least to do, the first among equals, so that a
    /// quiet client keeps one warm connection. None where the peer cannot be asked this, or only the shared lane may be
    /// used and no way over it is left.
    fn pick_lane(&self, peer: PeerId, request: &Request) -> Option<u32> {
        let range = matches!(request, Request::Read(..) | Request::Write(..));
        let lanes = &self.peers[peer.0 as usize].lanes;
        let path = |lane: u32| self.lanes[lane as usize].path;
        let suspect = |lane: u32| self.lanes[lane as usize].is_suspect(self.now_ns);
        let shared = lanes.first().copied().filter(|&lane| path(lane) == Path::Shared);
        let asked =
            lanes.iter().copied().filter(|&lane| path(lane) != Path::Shared && (range || path(lane).is_greeted()));
        let other = asked.min_by_key(|&lane| (suspect(lane), self.lanes[lane as usize].load_bytes));
        let shared = shared.filter(|&lane| match request {
            Request::Read(target, _) | Request::Write(target, _) => {
                self.lanes[lane as usize].way(&self.config, target.segment, target.shareable).is_some()
            }
            Request::OpenSegment(_) => self.config.shared || other.is_none(),
            _ => self.config.shared,
        });
        match (shared, other) {
            (Some(lane), Some(other)) => Some(if suspect(lane) { other } else { lane }),
            (lane, other) => lane.or(other),
        }
    }

    pub(super) fn mark_dirty(&mut self, lane: u32) {
        let entry = &mut self.lanes[lane as usize];
        if !entry.dirty {
            entry.dirty = true;
            self.dirty.push_back(lane);
        }
    }

    /// Puts a slice at the end of its lane's list and its load on the lane.
    fn enter_lane(&mut self, index: u32, lane: u32) {
        let entry = &mut self.lanes[lane as usize];
        let before = core::mem::replace(&mut entry.last, index);
        if before == NOWHERE {
            entry.first = index;
        } else {
            self.slices.at(before).after = index;
        }
        let slice = self.slices.at(index);
        (slice.lane, slice.before, slice.after) = (lane, before, NOWHERE);
        entry.load_bytes += slice.weight_bytes().max(SMALL_LOAD_BYTES);
    }

    /// Takes a slice and its load off its lane. A queued slice's queue entry goes stale and is skipped.
    pub(super) fn leave_lane(&mut self, index: u32) {
        let slice = self.slices.at(index);
        if slice.lane == NOWHERE {
            return;
        }
        let lane = core::mem::replace(&mut slice.lane, NOWHERE);
        let (before, after) = (slice.before, slice.after);
        let (load_bytes, sent_bytes) = (slice.weight_bytes().max(SMALL_LOAD_BYTES), slice.sent_bytes);
        slice.sent_bytes = 0;
        let entry = &mut self.lanes[lane as usize];
        entry.load_bytes -= load_bytes;
        entry.sent_bytes -= sent_bytes;
        entry.flying -= u32::from(sent_bytes > 0);
        match before {
            NOWHERE => entry.first = after,
            before => self.slices.at(before).after = after,
        }
        match after {
            NOWHERE => entry.last = before,
            after => self.slices.at(after).before = before,
        }
        // Its part of the window is free: what waits may go.
        self.mark_dirty(lane);
    }

    /// The slices of a lane, oldest first.
    pub(super) fn slices_on(&mut self, lane: u32) -> Vec<u32> {
        let mut found = Vec::new();
        let mut next = self.lanes[lane as usize].first;
        while next != NOWHERE {
            found.push(next);
            next = self.slices.at(next).after;
        }
        found
    }

    pub(super) fn current(&mut self, lane: LaneId) -> Option<&mut Lane> {
        self.lanes.get_mut(lane.index as usize).filter(|entry| entry.generation == lane.generation)
    }
}
