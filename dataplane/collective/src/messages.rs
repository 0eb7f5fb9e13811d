//! Messages between two members, outside the sequence of operations.
//!
//! The sender offers a message, with its first bytes; if there are more, they follow when the receiver has memory for
//! them. Messages between two members with the same tag arrive in the order in which they were sent. They do not depend
//! on views: one fails if the connection to its peer is lost. The offer of a short one
//! brings all of it, and the receiver keeps it until it has memory for it; it keeps only so many. A send ends when the
//! receiver has the message in that memory, as gloo's and NCCL's do: a peer that ends before fails it.

use std::collections::VecDeque;

use kvplane_group::{GroupId, GroupRank, RankSet};

use crate::failure::Failure;
use crate::frame::{FrameKind, Head};
use crate::span::{Buffer, Placement, Span};
use crate::work::{Completion, Disposition, Outgoing, Output, StashId, WorkId};

/// Offers of a member that a peer has not accepted, at most: the rest waits. The receiver keeps as many.
const MAX_OFFERS: usize = 64;
/// Messages of a member that wait, at most.
pub(crate) const MAX_WAITING: usize = 4096;

/// A message that this member sends.
#[derive(Clone, Copy, Debug)]
struct Sending {
    work: WorkId,
    to: GroupRank,
    message: u64,
    tag: i32,
    total: u64,
    deadline_ns: u64,
    stage: SendStage,
}

impl Sending {
    fn is(&self, to: GroupRank, message: u64) -> bool {
        (self.to, self.message) == (to, message)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendStage {
    Waiting,
    Offered,
    /// Accepted, with so many bytes sent; once all are, their arrival is awaited.
    Accepted(u64),
}

/// Memory for a message.
#[derive(Clone, Copy, Debug)]
struct Receiving {
    work: WorkId,
    /// `None`: from any member.
    from: Option<GroupRank>,
    tag: i32,
    room: u64,
    deadline_ns: u64,
    /// The message that it is for, and the bytes that arrived.
    matched: Option<(GroupRank, u64, u64)>,
}

/// A message that a peer offers.
#[derive(Clone, Copy, Debug)]
struct Offer {
    from: GroupRank,
    message: u64,
    tag: i32,
    total: u64,
    bytes: u64,
    first: Option<StashId>,
}

/// The messages of a member.
#[derive(Clone, Debug)]
pub(crate) struct Messages {
    /// Most bytes that are sent with an offer.
    first_bytes: u64,
    sending: VecDeque<Sending>,
    receiving: VecDeque<Receiving>,
    offers: VecDeque<Offer>,
    /// Answers to offers, and offers that are withdrawn.
    answers: VecDeque<(GroupRank, FrameKind)>,
    /// Peers whose connection was lost, and has not been made again.
    gone: RankSet<GroupRank>,
    next: u64,
}

impl Messages {
    pub(crate) const fn new(first_bytes: u64) -> Self {
        Self {
            first_bytes,
            sending: VecDeque::new(),
            receiving: VecDeque::new(),
            offers: VecDeque::new(),
            answers: VecDeque::new(),
            gone: RankSet::EMPTY,
            next: 0,
        }
    }

    /// Sends a message.
    pub(crate) fn send(
        &mut self,
        work: WorkId,
        to: GroupRank,
        tag: i32,
        total: u64,
        deadline_ns: u64,
        outputs: &mut VecDeque<Output>,
    ) {
        if self.gone.contains(to) {
            outputs.push_back(lost(work, to));
            return;
        }
        let message = self.next;
        self.next += 1;
        self.sending.push_back(Sending { work, to, message, tag, total, deadline_ns, stage: SendStage::Waiting });
    }

    /// Provides memory for a message.
    pub(crate) fn receive(
        &mut self,
        work: WorkId,
        from: Option<GroupRank>,
        tag: i32,
        room: u64,
        deadline_ns: u64,
        outputs: &mut VecDeque<Output>,
    ) {
        let mut receiving = Receiving { work, from, tag, room, deadline_ns, matched: None };
        let fits = |offer: &Offer| offer.tag == tag && from.is_none_or(|from| from == offer.from);
        let Some(offer) = self.offers.iter().position(fits).and_then(|at| self.offers.remove(at)) else {
            match from.filter(|from| self.gone.contains(*from)) {
                Some(from) => outputs.push_back(lost(work, from)),
                None => self.receiving.push_back(receiving),
            }
            return;
        };
        if let Some(failure) = self.size_failure(&offer, room) {
            outputs.extend(offer.first.map(Output::Drop));
            outputs.push_back(Output::Complete { work, outcome: Err(failure) });
            return;
        }
        if let Some(stash) = offer.first {
            let placement = Placement::Store(Span::new(Buffer::Target, 0, offer.bytes));
            outputs.push_back(Output::Place { stash, work, placement });
        }
        receiving.matched = Some((offer.from, offer.message, offer.bytes));
        self.accept(receiving, outputs);
    }

    pub(crate) fn waiting(&self) -> usize {
        self.sending.len() + self.receiving.len()
    }

    /// Returns the failure of a message that does not fit its memory, and answers the offer.
    fn size_failure(&mut self, offer: &Offer, room: u64) -> Option<Failure> {
        if offer.total == room {
            return None;
        }
        self.answers.push_back((offer.from, FrameKind::Reject { message: offer.message, room }));
        Some(Failure::MessageSize { rank: offer.from, message: offer.total, room })
    }

    /// Ends a message that has all of its bytes; requests the rest otherwise.
    fn accept(&mut self, receiving: Receiving, outputs: &mut VecDeque<Output>) {
        let Some((from, message, bytes)) = receiving.matched else { return };
        self.answers.push_back((from, FrameKind::Accept { message }));
        if bytes == receiving.room {
            outputs.push_back(complete(receiving.work, from));
        } else {
            self.receiving.push_back(receiving);
        }
    }

    /// Processes a frame of a peer with `bytes` bytes of payload. `keep` makes the host keep them.
    pub(crate) fn handle(
        &mut self,
        from: GroupRank,
        kind: FrameKind,
        bytes: u64,
        keep: impl FnOnce() -> Option<StashId>,
        outputs: &mut VecDeque<Output>,
    ) -> Disposition {
        match kind {
            FrameKind::Offer { message, tag, total } => {
                self.take_offer(Offer { from, message, tag, total, bytes, first: None }, keep, outputs)
            }
            FrameKind::Accept { message } => {
                // The offer of a short message was all of it.
                if !self.end_sending(from, message, outputs)
                    && let Some(sending) = self.sending.iter_mut().find(|sending| sending.is(from, message))
                    && sending.stage == SendStage::Offered
                {
                    sending.stage = SendStage::Accepted(self.first_bytes);
                }
                Disposition::Ignore
            }
            FrameKind::Arrival { message } => {
                self.end_sending(from, message, outputs);
                Disposition::Ignore
            }
            FrameKind::Reject { message, room } => {
                let found = self.sending.iter().position(|sending| sending.is(from, message));
                if let Some(sending) = found.and_then(|at| self.sending.remove(at)) {
                    let failure = Failure::MessageSize { rank: from, message: sending.total, room };
                    outputs.push_back(Output::Complete { work: sending.work, outcome: Err(failure) });
                }
                Disposition::Ignore
            }
            FrameKind::Message { message, offset } => self.take_bytes(from, message, offset, bytes, outputs),
            FrameKind::Withdraw { message } => {
                self.withdraw(from, message, outputs);
                Disposition::Ignore
            }
            _ => Disposition::Ignore,
        }
    }

    /// Ends a message if all of it was sent. Returns false if it was not.
    fn end_sending(&mut self, to: GroupRank, message: u64, outputs: &mut VecDeque<Output>) -> bool {
        let is_sent = |sending: &Sending| {
            sending.is(to, message)
                && match sending.stage {
                    SendStage::Waiting => false,
                    SendStage::Offered => sending.total <= self.first_bytes,
                    SendStage::Accepted(sent) => sent == sending.total,
                }
        };
        let sending = self.sending.iter().position(is_sent).and_then(|at| self.sending.remove(at));
        outputs.extend(sending.map(|sending| complete(sending.work, to)));
        sending.is_some()
    }

    /// The sender of a message has given it up: memory for it waits for another one.
    fn withdraw(&mut self, from: GroupRank, message: u64, outputs: &mut VecDeque<Output>) {
        if let Some(at) = self.offers.iter().position(|offer| (offer.from, offer.message) == (from, message)) {
            outputs.extend(self.offers.remove(at).and_then(|offer| offer.first).map(Output::Drop));
        }
        let is_for =
            |receiving: &Receiving| receiving.matched.is_some_and(|(by, matched, _)| (by, matched) == (from, message));
        if let Some(Receiving { work, from, tag, room, deadline_ns, .. }) =
            self.receiving.iter().position(is_for).and_then(|at| self.receiving.remove(at))
        {
            self.receive(work, from, tag, room, deadline_ns, outputs);
        }
    }

    fn take_offer(
        &mut self,
        mut offer: Offer,
        keep: impl FnOnce() -> Option<StashId>,
        outputs: &mut VecDeque<Output>,
    ) -> Disposition {
        if offer.bytes != self.first_bytes.min(offer.total) {
            return Disposition::Ignore;
        }
        let fits = |receiving: &Receiving| {
            receiving.matched.is_none()
                && receiving.tag == offer.tag
                && receiving.from.is_none_or(|from| from == offer.from)
        };
        let Some(mut receiving) = self.receiving.iter().position(fits).and_then(|at| self.receiving.remove(at)) else {
            let is_within = self.offers.iter().filter(|other| other.from == offer.from).count() < MAX_OFFERS;
            if is_within {
                offer.first = if offer.bytes > 0 { keep() } else { None };
                self.offers.push_back(offer);
            }
            return offer.first.map_or(Disposition::Ignore, Disposition::Stash);
        };
        let work = receiving.work;
        if let Some(failure) = self.size_failure(&offer, receiving.room) {
            outputs.push_back(Output::Complete { work, outcome: Err(failure) });
            return Disposition::Ignore;
        }
        receiving.matched = Some((offer.from, offer.message, offer.bytes));
        self.accept(receiving, outputs);
        Disposition::Place(work, Placement::Store(Span::new(Buffer::Target, 0, offer.bytes)))
    }

    fn take_bytes(
        &mut self,
        from: GroupRank,
        message: u64,
        offset: u64,
        bytes: u64,
        outputs: &mut VecDeque<Output>,
    ) -> Disposition {
        let is_next = |receiving: &&mut Receiving| receiving.matched == Some((from, message, offset));
        let Some(receiving) = self.receiving.iter_mut().find(is_next) else { return Disposition::Ignore };
        let (work, room) = (receiving.work, receiving.room);
        if offset + bytes > room {
            return Disposition::Ignore;
        }
        receiving.matched = Some((from, message, offset + bytes));
        if offset + bytes == room {
            self.receiving.retain(|receiving| receiving.work != work);
            self.answers.push_back((from, FrameKind::Arrival { message }));
            outputs.push_back(complete(work, from));
        }
        Disposition::Place(work, Placement::Store(Span::new(Buffer::Target, offset, bytes)))
    }

    /// Returns the next frame for a peer in `room`.
    pub(crate) fn next_frame(&mut self, group: GroupId, room: RankSet<GroupRank>, limit: u64) -> Option<Outgoing> {
        let head = |kind| Head { group, epoch: 0, operation: 0, kind, signature: None };
        if let Some(at) = self.answers.iter().position(|(to, _)| room.contains(*to)) {
            let (to, kind) = self.answers.remove(at)?;
            return Some(Outgoing { to, head: head(kind), payload: None });
        }
        let offered =
            |to| self.sending.iter().filter(|sending| sending.to == to && sending.stage == SendStage::Offered).count();
        let can_go = |sending: &Sending| {
            room.contains(sending.to)
                && match sending.stage {
                    SendStage::Waiting => offered(sending.to) < MAX_OFFERS,
                    SendStage::Offered => false,
                    SendStage::Accepted(sent) => sent < sending.total,
                }
        };
        let at = self.sending.iter().position(can_go)?;
        let sending = &mut self.sending[at];
        let (work, message, total) = (sending.work, sending.message, sending.total);
        let (kind, offset, bytes) = match sending.stage {
            SendStage::Accepted(sent) => (FrameKind::Message { message, offset: sent }, sent, limit.min(total - sent)),
            _ => (FrameKind::Offer { message, tag: sending.tag, total }, 0, self.first_bytes.min(total)),
        };
        sending.stage = match sending.stage {
            SendStage::Waiting => SendStage::Offered,
            _ => SendStage::Accepted(offset + bytes),
        };
        let payload = (bytes > 0).then(|| (work, Span::new(Buffer::Source, offset, bytes)));
        Some(Outgoing { to: sending.to, head: head(kind), payload })
    }

    /// True once the peers know what this member has received.
    pub(crate) fn has_answered(&self) -> bool {
        self.answers.is_empty()
    }

    /// The connections to these peers exist.
    pub(crate) const fn link(&mut self, peers: RankSet<GroupRank>) {
        self.gone = self.gone.without(peers);
    }

    /// Ends all messages with peers that were lost.
    pub(crate) fn lose(&mut self, peers: RankSet<GroupRank>, outputs: &mut VecDeque<Output>) {
        self.gone = self.gone.union(peers);
        self.exclude(peers, outputs);
    }

    /// Ends all messages with peers that take part no longer. Those that have arrived whole can still be received.
    pub(crate) fn exclude(&mut self, peers: RankSet<GroupRank>, outputs: &mut VecDeque<Output>) {
        self.answers.retain(|(to, _)| !peers.contains(*to));
        for sending in self.sending.iter().filter(|sending| peers.contains(sending.to)) {
            outputs.push_back(lost(sending.work, sending.to));
        }
        self.sending.retain(|sending| !peers.contains(sending.to));
        let sender = |receiving: &Receiving| {
            let from = receiving.matched.map(|(from, ..)| from).or(receiving.from);
            from.filter(|from| peers.contains(*from))
        };
        for receiving in &self.receiving {
            outputs.extend(sender(receiving).map(|rank| lost(receiving.work, rank)));
        }
        self.receiving.retain(|receiving| sender(receiving).is_none());
        self.drop_offers(|offer| peers.contains(offer.from) && offer.bytes < offer.total, outputs);
    }

    /// Drops the messages of former incarnations of peers.
    pub(crate) fn forget(&mut self, peers: RankSet<GroupRank>, outputs: &mut VecDeque<Output>) {
        self.drop_offers(|offer| peers.contains(offer.from), outputs);
    }

    fn drop_offers(&mut self, is_dropped: impl Fn(&Offer) -> bool, outputs: &mut VecDeque<Output>) {
        for offer in self.offers.iter().filter(|offer| is_dropped(offer)) {
            outputs.extend(offer.first.map(Output::Drop));
        }
        self.offers.retain(|offer| !is_dropped(offer));
    }

    /// Returns the next deadline.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        let sending = self.sending.iter().map(|sending| sending.deadline_ns);
        sending.chain(self.receiving.iter().map(|receiving| receiving.deadline_ns)).min()
    }

    /// Ends the messages whose deadlines have passed.
    pub(crate) fn expire(&mut self, now_ns: u64, outputs: &mut VecDeque<Output>) {
        let late = |work, peer: Option<GroupRank>| {
            let awaited = peer.map(RankSet::single).unwrap_or_default();
            Output::Complete { work, outcome: Err(Failure::Deadline { awaited }) }
        };
        let is_late = |deadline_ns: u64| now_ns >= deadline_ns;
        for sending in self.sending.iter().filter(|sending| is_late(sending.deadline_ns)) {
            outputs.push_back(late(sending.work, Some(sending.to)));
            if sending.stage != SendStage::Waiting {
                self.answers.push_back((sending.to, FrameKind::Withdraw { message: sending.message }));
            }
        }
        self.sending.retain(|sending| !is_late(sending.deadline_ns));
        for receiving in self.receiving.iter().filter(|receiving| is_late(receiving.deadline_ns)) {
            outputs.push_back(late(receiving.work, receiving.from));
        }
        self.receiving.retain(|receiving| !is_late(receiving.deadline_ns));
    }

    /// Ends all messages.
    pub(crate) fn close(&mut self, outputs: &mut VecDeque<Output>) {
        let works = self.sending.drain(..).map(|sending| sending.work);
        let works: Vec<_> = works.chain(self.receiving.drain(..).map(|receiving| receiving.work)).collect();
        outputs.extend(works.into_iter().map(|work| Output::Complete { work, outcome: Err(Failure::Closed) }));
        outputs.extend(self.offers.drain(..).filter_map(|offer| offer.first).map(Output::Drop));
        self.answers.clear();
    }
}

fn lost(work: WorkId, rank: GroupRank) -> Output {
    Output::Complete { work, outcome: Err(Failure::PeerLost { rank }) }
}

fn complete(work: WorkId, peer: GroupRank) -> Output {
    let completion = Completion { epoch: 0, participants: RankSet::EMPTY, failed: RankSet::EMPTY, peer: Some(peer) };
    Output::Complete { work, outcome: Ok(completion) }
}
