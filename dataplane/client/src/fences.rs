//! Fences: a peer is told which lanes are over before anything more is asked of it.
//!
//! What a peer has received on a lane that we gave up, and not yet carried out, it would carry out when it comes to it:
//! a write perhaps after a newer one to the same range that went over another lane. No reset of ours prevents that, as
//! a kernel keeps what it has received, and a reset may be lost. So a lane that ends while something unanswered on it
//! changes what the peer holds is named in a [`Operation::Fence`], which every other lane of the peer sends before it
//! asks anything more, once. Where writes follow frames in order nothing waits for the answer; where we write
//! ourselves, requests do. What one answer was had for is told to nobody again: the peer has ended it for good.
//!
//! Greetings come first on a lane, so a lane with anything unanswered is known to the peer: one that it does not know
//! is over there, and nobody has to remember it.

use std::collections::VecDeque;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{IdItem, Kind, Operation, encode_items};
use kvplane_proto::status::Status;

use super::Client;
use super::lane::Endpoint;
use super::path::Path;
use super::table::SliceState;
use super::types::{LaneId, PeerId, Request};

/// Lanes to one peer that ended with something unanswered.
#[derive(Default)]
pub(super) struct Fences {
    /// Those that the peer has not said are over, oldest first, as the peer knows them.
    open: VecDeque<u64>,
    /// How many came before those.
    answered: u64,
}

impl Fences {
    fn count(&self) -> u64 {
        self.answered + self.open.len() as u64
    }
}

/// A lane as its peer knows it: its positions and generations never come together twice.
pub(super) const fn connection_number(lane: LaneId) -> u64 {
    (lane.generation as u64) << 32 | lane.index as u64
}

/// Whether a request changes what the peer holds: carried out late, it would undo what came after it.
const fn is_change(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Write
            | Operation::WriteMany
            | Operation::Put
            | Operation::Remove
            | Operation::RemoveCopy
            | Operation::Commit
            | Operation::Fill
            | Operation::Seal
            | Operation::Discard
    )
}

impl Client {
    /// A lane ends: its peer is to be told, if it may still carry out something. Before its slices leave it.
    pub(super) fn note_fence(&mut self, lane: u32) {
        let entry = &self.lanes[lane as usize];
        let (path, id, peer) = (entry.path, entry.id(lane), entry.peer.0 as usize);
        let greeted = path.is_greeted();
        let unanswered = |client: &mut Self| {
            client.slices_on(lane).into_iter().any(|index| {
                let slice = client.slices.peek(index);
                // What a device of ours was told to write may still be on the network.
                let copied = path == Path::Rdma && slice.state == SliceState::Copying;
                let wire = client.wires.get(slice.wire.index, slice.wire.generation);
                copied && matches!(slice.request, Request::Write(..))
                    || wire.is_some_and(|wire| is_change(wire.operation))
            })
        };
        if greeted && unanswered(self) {
            self.peers[peer].fences.open.push_back(connection_number(id));
        }
    }

    /// Whether a peer has nothing left to be told.
    pub(super) fn is_fenced(&self, peer: usize) -> bool {
        self.peers[peer].fences.open.is_empty()
    }

    /// Tells the peer which lanes are over, if this one has something to send and was not told. Whether requests may
    /// follow at once.
    pub(super) fn tell_fences(&mut self, lane: u32) -> bool {
        let entry = &self.lanes[lane as usize];
        let fences = &self.peers[entry.peer.0 as usize].fences;
        if !entry.path.is_greeted() || fences.open.is_empty() {
            return true;
        }
        let (count, answered) = (fences.count(), fences.answered);
        let (in_order, idle) =
            (entry.path.writes_in_order(), entry.list.queued == 0 && entry.connection.owed.commits.is_empty());
        let may_follow = in_order && fences.open.len() <= Limits::FENCED;
        while !idle && self.lanes[lane as usize].connection.fenced < count {
            let told = self.lanes[lane as usize].connection.fenced.max(answered);
            let until = count.min(told + Limits::ITEMS_PER_FRAME as u64);
            self.send_fence(lane, (told - answered) as usize..(until - answered) as usize, until);
        }
        may_follow
    }

    /// The request's id is the count of fences up to the last that it names: that says what the answer is for.
    fn send_fence(&mut self, lane: u32, which: core::ops::Range<usize>, until: u64) {
        let entry = &mut self.lanes[lane as usize];
        entry.connection.fenced = until;
        let id = entry.id(lane);
        let (start, items) = (self.outbox.mark(), which.len());
        let open = &self.peers[entry.peer.0 as usize].fences.open;
        encode_items(open.range(which).map(|&id| IdItem { id }), self.outbox.writer());
        let body = self.outbox.since(start);
        self.counters.fences += 1;
        let header = Header::request(Kind::Request(Operation::Fence), RequestId::from_bits(until));
        self.send(id, header, body, items, &[]);
    }

    /// A peer says that lanes are over. `None` when no honest peer says that.
    pub(super) fn fence_answered(&mut self, lane: LaneId, header: &Header) -> Option<()> {
        let entry = &self.lanes[lane.index as usize];
        let until = header.request.to_bits();
        if header.status != Status::Ok || entry.state != Endpoint::Ready || until > entry.connection.fenced {
            return None;
        }
        let peer = entry.peer.0 as usize;
        let fences = &mut self.peers[peer].fences;
        let over = until.saturating_sub(fences.answered) as usize;
        fences.open.drain(..over);
        fences.answered = fences.answered.max(until);
        for lane in self.lanes_of(peer) {
            self.mark_dirty(lane);
        }
        Some(())
    }

    /// A peer is left: what it was not told is told to it when it is opened again.
    pub(super) fn leave_fences(&mut self, peer: usize) {
        let fences = core::mem::take(&mut self.peers[peer].fences);
        if fences.open.is_empty() {
            return;
        }
        if self.left_fences.len() >= Limits::FENCED_PEERS {
            self.left_fences.pop_front();
        }
        self.left_fences.push_back((self.peers[peer].address.clone(), fences));
    }

    /// A peer is opened: perhaps again.
    pub(super) fn take_left_fences(&mut self, peer: PeerId) {
        let address = &self.peers[peer.0 as usize].address;
        let left = self.left_fences.iter().position(|(of, _)| of == address);
        if let Some((_, fences)) = left.and_then(|position| self.left_fences.remove(position)) {
            self.peers[peer.0 as usize].fences = fences;
        }
    }
}
