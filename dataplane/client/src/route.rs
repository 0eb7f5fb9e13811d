//! Which path a slice takes, and the book of what is on each lane.

use kvplane_proto::status::Status;

use super::Client;
use super::dispatch::Group;
use super::path::Path;
use super::table::{NOWHERE, SliceState};
use super::types::{LaneId, PeerId, Request, SegmentTarget, SliceId};
use crate::lane::Lane;
use crate::sched::Rail;

impl Client {
    /// Sends a slice on its way to a path of its peer, or completes it when there is nowhere to send it.
    pub(super) fn route(&mut self, id: SliceId) {
        self.find_route(id);
    }

    /// Routes a slice. Returns where it went, if that is where others to its segment would go now.
    pub(super) fn find_route(&mut self, id: SliceId) -> Option<(SegmentTarget, u8)> {
        let slice = self.slices.get(id.index, id.generation)?;
        debug_assert!(slice.link.lane == NOWHERE && slice.state == SliceState::Queued, "a slice was routed twice");
        let request = slice.request;
        let failed_twice = (slice.tries.attempts >= 2).then_some(slice.way.group);
        let peer = match request {
            Request::Exists(digest)
            | Request::Prefetch(digest)
            | Request::Asks(digest, ..)
            | Request::Size(digest)
            | Request::Remove(digest)
            | Request::Get(digest, _)
            | Request::Put(digest, _)
            | Request::PutAs(digest, ..)
            | Request::GetRange(digest, ..)
            | Request::PeekRange(digest, ..)
            | Request::GetHead(digest, _)
            | Request::RemoveHead(digest)
            | Request::RemoveHeadOf(digest, _)
            | Request::Begin(digest, ..)
            | Request::Fill(digest, ..)
            | Request::Seal(digest, ..)
            | Request::Discard(digest, ..)
            | Request::PutCopy(digest, ..)
            | Request::DropCopy(digest)
            | Request::RemoveCopy(digest)
            | Request::List(digest, _) => self.peer_for(id, digest),
            Request::Read(target, _) | Request::Write(target, _) => Some(target.peer),
            Request::OpenSegment(peer) => Some(peer),
        };
        let Some(peer) = peer else {
            self.complete(id.index, Status::NoOwner);
            return None;
        };
        if self.asks_departed(&request)
            || request.incarnation().is_some_and(|incarnation| incarnation != self.peers[peer.0 as usize].incarnation)
        {
            self.complete(id.index, Status::Stale);
            return None;
        }
        let Some(group) = self.pick_group(peer, &request, failed_twice) else {
            self.complete(id.index, Status::Unsupported);
            return None;
        };
        self.enter_group(id, peer, group);
        match request {
            Request::Read(target, _) | Request::Write(target, _) if failed_twice.is_none() => Some((target, group)),
            _ => None,
        }
    }

    /// The paths of a peer are in the order of preference: the first that serves the request and is not paused; where
    /// all are, the one that may be tried first. A slice that failed twice prefers another path to the one that
    /// failed it. None where the peer cannot be asked this, or only the shared lane may be used and no way over it is
    /// left.
    pub(super) fn pick_group(&self, peer: PeerId, request: &Request, last: Option<u8>) -> Option<u8> {
        let groups = self.peers[peer.0 as usize].groups.iter().enumerate();
        let serving = groups.filter(|(_, group)| self.serves(peer, group, request));
        let best = serving.min_by_key(|(number, group)| {
            let rails = group.rails.iter().map(|&rail| &self.rails[rail as usize].rail);
            let hopeful = rails.clone().any(|rail| rail.is_hopeful(self.now_ns));
            let wait_ns = if hopeful { 0 } else { rails.map(Rail::paused_until_ns).min().unwrap_or(0) };
            (!hopeful, last == Some(*number as u8), wait_ns)
        });
        best.map(|(number, _)| number as u8)
    }

    /// Whether a path of a peer can do what is asked.
    fn serves(&self, peer: PeerId, group: &Group, request: &Request) -> bool {
        let range = matches!(request, Request::Read(..) | Request::Write(..));
        if group.unavailable.as_ref().is_some_and(|(until_ns, _)| self.now_ns < *until_ns) {
            return false;
        }
        if group.path != Path::Shared {
            return range || group.path.is_greeted();
        }
        match request {
            Request::Read(target, _) | Request::Write(target, _) => {
                let lane = self.rails[group.rails[0] as usize].lanes[0];
                self.lanes[lane as usize].way(&self.config, target.segment, target.shareable).is_some()
            }
            Request::OpenSegment(_) => self.config.shared || self.peers[peer.0 as usize].groups.len() == 1,
            _ => self.config.shared,
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
    pub(super) fn enter_lane(&mut self, index: u32, lane: u32) {
        let entry = &mut self.lanes[lane as usize];
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
        slice.times.posted_ns = self.now_ns;
        slice.link.run = 0;
        let (last, via) = (core::mem::replace(&mut slice.rail, rail), slice.via);
        let bytes = slice.load_bytes();
        entry.load.bound_bytes += bytes;
        self.rails[rail as usize].rail.book(bytes, self.config.is_small(bytes), self.now_ns);
        if last != NOWHERE {
            self.rebound(index, (last, via));
        }
    }

    /// Takes a slice out of its group's queue, or it and its load off its lane.
    pub(super) fn leave_lane(&mut self, index: u32) {
        let slice = self.slices.at(index);
        let place = core::mem::replace(&mut slice.way.place, NOWHERE);
        if place != NOWHERE {
            let (peer, group, queue) =
                (slice.way.peer as usize, usize::from(slice.way.group), usize::from(slice.way.queue));
            self.peers[peer].groups[group].waiting[queue].queue.remove(place);
            return;
        }
        if slice.link.lane == NOWHERE {
            return;
        }
        let lane = slice.link.lane;
        self.unlink(index, lane);
        // Its part of the window is free: what waits may go.
        self.mark_group_of(lane);
        self.mark_dirty(lane);
    }

    /// Takes a slice and its load off its lane.
    #[inline]
    pub(super) fn unlink(&mut self, index: u32, lane: u32) {
        let slice = self.slices.at(index);
        slice.link.lane = NOWHERE;
        let (before, after) = (slice.link.before, slice.link.after);
        let (load_bytes, sent_bytes) = (slice.load_bytes(), slice.link.sent_bytes);
        let queued = slice.state == SliceState::Queued;
        slice.link.sent_bytes = 0;
        let entry = &mut self.lanes[lane as usize];
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
        let rail = &mut self.rails[entry.rail as usize];
        rail.rail.unbook(load_bytes, self.config.is_small(load_bytes));
        entry.progress_ns = self.now_ns;
    }

    /// The slices of a lane, oldest first.
    pub(super) fn slices_on(&mut self, lane: u32) -> Vec<u32> {
        let mut found = Vec::new();
        let mut next = self.lanes[lane as usize].list.first;
        while next != NOWHERE {
            found.push(next);
            next = self.slices.at(next).link.after;
        }
        found
    }

    pub(super) fn current(&mut self, lane: LaneId) -> Option<&mut Lane> {
        self.lanes.get_mut(lane.index as usize).filter(|entry| entry.generation == lane.generation)
    }
}
