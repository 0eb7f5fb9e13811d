//! One RDMA connection (link): send queue, receive path, outbox, one-sided copies, and its shutdown.

mod answer_places;
mod copies;
mod credits;
pub(super) mod flushes;
mod foreign;
mod intake;
mod keys;
mod outbox;
mod pull;
mod send_queue;

use kvplane_proto::frame::Header;
use kvplane_proto::{Limits, SegmentId, Status as Outcome};
use kvplane_sys::verbs::{Completion, Mtu, QueuePair, RetiredRequest, Status};

use super::books::Books;
use super::ended::CopyCompletions;
use super::nic::{EndpointId, Nic};
use super::wire::{Envelope, MessageKind, SegmentKey};
use super::work::Work;
use crate::types::{CloseCause, ConnectionId, Event};
pub(super) use answer_places::AnswerPlaces;
pub(super) use copies::Copies;
pub use copies::RdmaCopy;
pub(super) use credits::{Credits, GRANT_LEAST};
pub(super) use foreign::{Asker, Foreign};
pub(super) use intake::{Intake, Next};
pub(super) use keys::KeySource;
pub(super) use outbox::{Control, Frame, Outbox};
pub(super) use send_queue::SendQueue;

/// Limit of queued control messages of one connection.
const CONTROLS: usize = 2 * Limits::SEGMENTS;

/// State of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// An offer was sent; the answer is outstanding.
    Offered,
    /// In use.
    Open,
    /// Closing: ends when the device holds none of its requests any more.
    Closing,
}

/// Parameters of the network path of a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    /// First packet number of our packets.
    pub(super) packet_number: u32,
    /// Bandwidth of the slower port, in bits per second; 0 if unknown.
    pub(super) bits_per_second: u64,
    /// Largest MTU that both ports support.
    pub(super) mtu: Mtu,
}

/// State of a link's shutdown.
#[derive(Default)]
pub(super) struct Shutdown {
    /// Reason of the shutdown, once it has begun.
    pub(super) why: Option<CloseCause>,
    /// Time since which the device is waited for, in nanoseconds.
    pub(super) since_ns: Option<u64>,
    /// The device has reported that no more messages arrive.
    pub(super) last_receive: bool,
    /// Reason with which the link is closed once everything is sent.
    pub(super) after_send: Option<CloseCause>,
}

/// An RDMA connection.
pub(super) struct Link {
    /// Device, by position, and endpoint on that device.
    pub(super) nic: u32,
    pub(super) endpoint: EndpointId,
    pub(super) state: State,
    /// True if we initiated the connection.
    pub(super) asks: bool,
    /// Receives granted to the peer.
    pub(super) grant: u16,
    pub(super) path: Path,
    pub(super) sends: SendQueue,
    pub(super) intake: Intake,
    pub(super) places: AnswerPlaces,
    pub(super) outbox: Outbox,
    pub(super) copies: Copies,
    /// State of a link with a stock engine; `None` for a link with a node or client of ours.
    pub(super) foreign: Option<Box<Foreign>>,
    pub(super) shutdown: Shutdown,
    /// Time since which no activity was seen, or of the last keepalive probe, in nanoseconds.
    idle_since_ns: Option<u64>,
}

impl Link {
    /// Creates an unconnected link on this device, with a queue pair of this depth.
    pub(super) fn new(nic: u32, endpoint: EndpointId, queue_pair: QueuePair, depth: usize) -> Self {
        Self {
            nic,
            endpoint,
            state: State::Offered,
            asks: false,
            grant: 0,
            path: Path { packet_number: 0, bits_per_second: 0, mtu: Mtu::Bytes256 },
            sends: SendQueue::new(queue_pair, depth),
            intake: Intake::new(),
            places: AnswerPlaces::default(),
            outbox: Outbox::default(),
            copies: Copies::new(),
            foreign: None,
            shutdown: Shutdown::default(),
            idle_since_ns: None,
        }
    }

    /// Returns the number of queued frames and, on the accepting side, their additional pieces.
    fn backlog(&self) -> usize {
        self.outbox.frames() + if self.asks { 0 } else { self.outbox.extra_pieces() }
    }

    /// Returns true if the link is open and nothing is in flight on it in either direction.
    pub(super) fn is_idle(&self) -> bool {
        self.state == State::Open
            && self.outbox.is_empty()
            && self.intake.is_idle()
            && self.copies.is_idle()
            && self.places.wants_nothing()
            && self.sends.is_idle()
    }

    /// Returns the time since which the link has been idle, or of its last probe; `None` if it is not idle now.
    pub(super) fn look_at_idle(&mut self, now_ns: u64) -> Option<u64> {
        if !self.is_idle() {
            self.idle_since_ns = None;
            return None;
        }
        Some(*self.idle_since_ns.get_or_insert(now_ns))
    }

    /// Sends a keepalive probe on an idle link.
    pub(super) fn probe(&mut self, now_ns: u64) -> Result<(), CloseCause> {
        self.idle_since_ns = Some(now_ns);
        self.sends.probe()
    }

    /// Returns true if nothing waits to be sent or fetched, and the device holds no request.
    pub(super) fn is_sent(&self) -> bool {
        self.outbox.is_empty() && self.sends.queue_pair.outstanding() == 0
    }

    /// Queues a frame.
    #[inline]
    pub(super) fn push(&mut self, frame: Frame) {
        if self.asks {
            self.intake.awaits(u64::from(frame.header.replies()));
        }
        self.outbox.push(frame);
    }

    /// Returns the next input for the host.
    pub(super) fn next_input(&mut self) -> Next {
        let full = self.backlog() >= Limits::REPLIES_QUEUED;
        self.intake.next(full)
    }

    /// Returns the next frame, if it has arrived completely.
    pub(super) fn take_frame(
        &mut self,
        nic: &mut Nic,
        books: &mut Books,
        scratch: &mut Vec<u8>,
    ) -> Result<Option<Header>, CloseCause> {
        self.intake.take_frame(&mut self.sends.credits, &mut self.places, nic, books, scratch)
    }

    /// Returns true if the link has input for the host after frames were sent.
    pub(super) fn has_input(&mut self) -> bool {
        let few = self.backlog() < Limits::REPLIES_QUEUED / 2;
        self.intake.resume(few) || self.intake.has_payload()
    }

    /// Sends queued messages as far as credits, slots and the send queue allow. Returns true if it waits for resources
    /// that other connections of the device hold.
    pub(super) fn transmit(&mut self, id: ConnectionId, nic: &mut Nic, books: &mut Books) -> Result<bool, CloseCause> {
        if self.state != State::Open {
            return Ok(false);
        }
        let mut starved = self.intake.fetch(&mut self.sends, &mut self.outbox, nic)?;
        // Before the messages, because those carry the key requests.
        let asked = self.copies.post_waiting(id, &mut self.sends, nic, &mut books.copied)?;
        self.ask_key(asked);
        starved |= self.outbox.transmit(&mut self.sends, &mut self.places, nic, books)?;
        if self.sends.must_return_credits() {
            self.sends.send_message(Envelope::new(MessageKind::Credit, 0), &[], nic, books)?;
        }
        self.sends.flush(self.endpoint, nic, books)?;
        Ok(starved)
    }

    /// Takes a copy that could not be posted in a run with others.
    #[inline]
    pub(super) fn take_copy(
        &mut self,
        id: ConnectionId,
        copy: &RdmaCopy<'_>,
        nic: &mut Nic,
        books: &mut Books,
    ) -> Result<(), CloseCause> {
        let asked = self.copies.take(id, copy, &mut self.sends, nic, &mut books.copied)?;
        self.ask_key(asked);
        Ok(())
    }

    /// Requests the key of a part of a segment from the peer.
    fn ask_key(&mut self, part: Option<(SegmentId, u64)>) {
        if let Some((segment, offset)) = part {
            self.outbox.push_control(Control::AskKey(segment, offset));
        }
    }

    /// Requests a flush from the peer.
    fn ask_flush(&mut self, segment: Option<SegmentId>) {
        if let Some(segment) = segment {
            self.outbox.push_control(Control::Flush(segment));
        }
    }

    /// Takes the peer's reply to a flush.
    pub(super) fn take_flushed(
        &mut self,
        id: ConnectionId,
        segment: SegmentId,
        outcome: Outcome,
        copied: &mut CopyCompletions,
    ) {
        let next = self.copies.take_flushed(id, segment, outcome, copied);
        self.ask_flush(next);
    }

    /// Sends the outcome of a flush to the peer.
    pub(super) fn answer_flush(&mut self, segment: SegmentId, outcome: Outcome) -> Result<(), CloseCause> {
        if self.outbox.controls() >= CONTROLS {
            return Err(CloseCause::Rdma("the peer requests flushes faster than it receives them".to_owned()));
        }
        self.outbox.push_control(Control::Flushed(segment, outcome));
        Ok(())
    }

    /// Sends the key of our segment to the peer.
    pub(super) fn answer_key(&mut self, segment: SegmentId, key: SegmentKey) -> Result<(), CloseCause> {
        if self.outbox.controls() >= CONTROLS {
            return Err(CloseCause::Rdma("the peer requests keys faster than it receives them".to_owned()));
        }
        if key.status == Outcome::Ok {
            self.copies.keys.tell(segment);
        }
        self.outbox.push_control(Control::Key(segment, key));
        Ok(())
    }

    /// Notifies the peer that a segment of ours is gone, if it has the key. Returns true if the peer was notified.
    pub(super) fn retract(&mut self, segment: SegmentId) -> bool {
        let tells = self.copies.keys.untell(segment) && self.state == State::Open;
        if tells {
            self.outbox.push_control(Control::SegmentGone(segment));
        }
        tells
    }

    /// Retires the requests that a completion covers. Most are successful copies, which need no other part of the link.
    #[inline]
    pub(super) fn retire(
        &mut self,
        id: ConnectionId,
        completion: &Completion<'_>,
        copied: &mut CopyCompletions,
        others: &mut Vec<(u32, RetiredRequest)>,
    ) {
        self.sends.queue_pair.retire_runs(completion, |tokens, status| {
            if status == Status::Success && copied.push_all(id, tokens) {
                return;
            }
            for &token in tokens {
                match Work::from_bits(token) {
                    // The earlier parts have succeeded too.
                    Work::Copy(token) if status == Status::Success => copied.push(id, token, Ok(())),
                    Work::CopyPart if status == Status::Success => {}
                    _ => others.push((id.index, RetiredRequest { token, status, receive: false })),
                }
            }
        });
    }

    /// Handles a completed request and resumes the work that waited for it.
    pub(super) fn work_over(&mut self, id: ConnectionId, work: Work, status: Status, nic: &mut Nic, books: &mut Books) {
        match work {
            Work::Nothing => {}
            Work::Slot(slot) => nic.arena.free_slot(slot),
            Work::Push(lent) => self.outbox.pushed(lent, books),
            Work::Pull => self.intake.fetched(status == Status::Success, nic),
            Work::CopyPart => self.copies.part_over(id, None, status, &mut books.copied),
            Work::Copy(token) => self.copies.part_over(id, Some(token), status, &mut books.copied),
            Work::FlushedCopy(token) => {
                let next = self.copies.flushed_copy_over(id, token, status, &mut books.copied);
                self.ask_flush(next);
            }
        }
    }

    /// Begins the shutdown: the device takes no more requests. Returns true if the link was open.
    pub(super) fn fail(&mut self, why: CloseCause) -> bool {
        let connected = self.state == State::Open;
        self.state = State::Closing;
        self.shutdown.why = Some(why);
        // If the device refuses, destroying the queue pair ends all posted requests.
        let _ = self.sends.queue_pair.fail();
        connected
    }

    /// Destroys the queue pair and reports everything that it held.
    pub(super) fn end(self, id: ConnectionId, nic: &mut Nic, books: &mut Books) {
        let copied = &mut books.copied;
        self.sends.queue_pair.close(|retired| match Work::from_bits(retired.token) {
            Work::Slot(slot) => nic.arena.free_slot(slot),
            Work::Copy(token) | Work::FlushedCopy(token) => copied.push(id, token, Err(Outcome::Unreachable)),
            _ => {}
        });
        self.intake.end(nic);
        self.outbox.end(nic, books);
        self.copies.end(id, &mut books.copied);
        books.events.push_back(Event::Gone(id, self.shutdown.why.unwrap_or(CloseCause::Closed)));
    }
}
