//! One operation of a member in one view: which frame is sent next, where a payload belongs, and when all is there.

use kvplane_group::{GroupRank, RankSet};

use crate::frame::FrameKind;
use crate::operation::Operation;
use crate::schedule::{Dependency, Schedule};
use crate::span::{LocalStep, Placement, Span};

/// Payload that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reception {
    /// It belongs here.
    Place(Placement),
    /// It is not needed: the member has no place for it.
    Skip,
    /// An earlier one has to be combined first.
    TooEarly,
    /// It is no part of the operation.
    Unexpected,
}

/// Frame that is sent next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextFrame {
    pub(crate) to: GroupRank,
    pub(crate) kind: FrameKind,
    pub(crate) payload: Option<Span>,
}

/// Progress of the steps of a schedule.
#[derive(Clone, Debug)]
pub(crate) struct Execution {
    schedule: Schedule,
    /// Most bytes of a send that does not wait for its receiver to begin.
    small_bytes: u64,
    peers: RankSet<GroupRank>,
    /// Bytes of each send that were sent; `None` before its first frame, which may be empty.
    sent: Vec<Option<u64>>,
    /// Bytes of each receive that arrived; `None` before its first frame.
    received: Vec<Option<u64>>,
    /// Sends that are complete from the front.
    sends_done: usize,
    /// Receives that are complete from the front.
    receives_done: usize,
    /// Peers that have begun the operation.
    started: RankSet<GroupRank>,
    start_sent: RankSet<GroupRank>,
    confirmed: RankSet<GroupRank>,
    confirm_sent: RankSet<GroupRank>,
}

impl Execution {
    pub(crate) fn new(schedule: Schedule, peers: RankSet<GroupRank>, small_bytes: u64) -> Self {
        let (sends, receives) = (schedule.sends.len(), schedule.receives.len());
        Self {
            schedule,
            small_bytes,
            peers,
            sent: vec![None; sends],
            received: vec![None; receives],
            sends_done: 0,
            receives_done: 0,
            started: RankSet::EMPTY,
            start_sent: RankSet::EMPTY,
            confirmed: RankSet::EMPTY,
            confirm_sent: RankSet::EMPTY,
        }
    }

    /// True if the result is the same at all members, and is kept: such an operation completes without confirmations.
    pub(crate) const fn keeps_result(&self) -> bool {
        self.schedule.result.is_some()
    }

    pub(crate) const fn result(&self) -> Option<Span> {
        self.schedule.result
    }

    pub(crate) const fn work_bytes(&self) -> u64 {
        self.schedule.work_bytes
    }

    pub(crate) fn prepare(&self) -> &[LocalStep] {
        &self.schedule.prepare
    }

    pub(crate) fn finish(&self) -> &[LocalStep] {
        &self.schedule.finish
    }

    pub(crate) fn deliver(&self) -> &[LocalStep] {
        &self.schedule.deliver
    }

    /// A peer has begun the operation.
    pub(crate) fn note_start(&mut self, peer: GroupRank) {
        self.started.insert(peer);
    }

    /// A peer has all of its result.
    pub(crate) fn note_confirm(&mut self, peer: GroupRank) {
        self.confirmed.insert(peer);
    }

    /// True if all bytes have arrived, and all were sent.
    pub(crate) fn is_prepared(&self) -> bool {
        self.receives_done == self.received.len() && self.sends_done == self.sent.len()
    }

    /// True if the caller may get the result.
    pub(crate) fn is_complete(&self) -> bool {
        let is_confirmed = || self.confirmed.contains_all(self.peers) && self.confirm_sent.contains_all(self.peers);
        self.is_prepared() && (self.keeps_result() || is_confirmed())
    }

    /// Peers from which something has not arrived, or which do not take what is there for them.
    pub(crate) fn awaited(&self) -> RankSet<GroupRank> {
        let receives = self.schedule.receives.iter().enumerate().filter(|(at, _)| !self.has_received(*at));
        let sends = self.schedule.sends.iter().enumerate().filter(|(at, _)| !self.is_sent(*at));
        let is_there =
            |at: usize| self.available(at).is_some_and(|bytes| self.sent[at].is_none_or(|sent| bytes > sent));
        let sends = sends.filter(|(at, _)| is_there(*at));
        let data = receives.map(|(_, receive)| receive.from).chain(sends.map(|(_, send)| send.to)).collect();
        match (self.keeps_result(), self.is_prepared()) {
            (true, _) => data,
            (false, false) => data.union(self.peers.without(self.started)),
            (false, true) => self.peers.without(self.confirmed.intersection(self.confirm_sent)),
        }
    }

    fn has_received(&self, receive: usize) -> bool {
        receive < self.receives_done || self.received[receive] == Some(self.schedule.receives[receive].bytes)
    }

    /// Notes bytes of a peer, and returns where they belong. The caller places them before anything else.
    pub(crate) fn receive(
        &mut self,
        from: GroupRank,
        step: u16,
        offset: u64,
        bytes: u64,
        operation: &Operation,
    ) -> Reception {
        let found = self.schedule.receives.iter().position(|receive| receive.from == from && receive.step == step);
        let Some(at) = found else { return Reception::Unexpected };
        let total = self.schedule.receives[at].bytes;
        // A peer's frames arrive in order.
        if self.has_received(at) || self.received[at].unwrap_or(0) != offset || offset + bytes > total {
            return Reception::Unexpected;
        }
        if self.schedule.is_ordered && at > self.receives_done {
            return Reception::TooEarly;
        }
        self.received[at] = Some(offset + bytes);
        let placement = self.schedule.placement(at, offset, bytes, operation);
        while self.receives_done < self.received.len() && self.has_received(self.receives_done) {
            self.receives_done += 1;
        }
        placement.map_or(Reception::Skip, Reception::Place)
    }

    /// Bytes of a send that may be sent by now.
    fn available(&self, send: usize) -> Option<u64> {
        let bytes = self.schedule.sends[send].span.bytes;
        match self.schedule.sends[send].after {
            Dependency::Nothing => Some(bytes),
            Dependency::All(receive) => (self.receives_done > receive).then_some(bytes),
            Dependency::Same(receive) => self.received[receive],
        }
    }

    /// Returns the next frame for a peer in `room`, of at most `limit` bytes, and notes that it was sent.
    pub(crate) fn next_frame(&mut self, room: RankSet<GroupRank>, limit: u64) -> Option<NextFrame> {
        if !self.keeps_result()
            && let Some(to) = self.peers.without(self.start_sent).intersection(room).iter().next()
        {
            self.start_sent.insert(to);
            return Some(NextFrame { to, kind: FrameKind::Start, payload: None });
        }
        if let Some(frame) = self.next_data(room, limit) {
            return Some(frame);
        }
        let unconfirmed = || self.peers.without(self.confirm_sent).intersection(room).iter().next();
        if !self.keeps_result()
            && self.is_prepared()
            && let Some(to) = unconfirmed()
        {
            self.confirm_sent.insert(to);
            return Some(NextFrame { to, kind: FrameKind::Confirm, payload: None });
        }
        None
    }

    fn next_data(&mut self, room: RankSet<GroupRank>, limit: u64) -> Option<NextFrame> {
        for at in self.sends_done..self.sent.len() {
            let send = self.schedule.sends[at];
            let total = send.span.bytes;
            let is_small = total <= self.small_bytes;
            if self.sent[at] == Some(total) || !room.contains(send.to) || !(is_small || self.started.contains(send.to))
            {
                continue;
            }
            let offset = self.sent[at].unwrap_or(0);
            let available = self.available(at);
            let is_empty = total == 0 && available.is_some();
            let bytes = available.unwrap_or(0).saturating_sub(offset).min(limit);
            if bytes == 0 && !is_empty {
                continue;
            }
            // A frame that is not full waits for the rest that is about to arrive.
            if bytes < limit && offset + bytes < total {
                continue;
            }
            self.sent[at] = Some(offset + bytes);
            while self.sends_done < self.sent.len() && self.is_sent(self.sends_done) {
                self.sends_done += 1;
            }
            let kind = FrameKind::Data { step: send.step, offset };
            return Some(NextFrame { to: send.to, kind, payload: Some(send.span.part(offset, bytes)) });
        }
        None
    }

    fn is_sent(&self, send: usize) -> bool {
        self.sent[send] == Some(self.schedule.sends[send].span.bytes)
    }
}
