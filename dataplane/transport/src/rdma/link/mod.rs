//! One connection: what it posts on, what arrives, what waits to be sent, and copies; and how it ends.

mod answer_places;
mod copies;
mod credits;
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

/// Things that one connection may have to tell by messages of their own.
const CONTROLS: usize = 2 * Limits::SEGMENTS;

/// What a link is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// We made an offer and wait for the answer.
    Offered,
    /// In use.
    Open,
    /// It ends when the device holds nothing of it any more.
    Closing,
}

/// What the two ports of a link are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    /// Where our packets are counted from.
    pub(super) packet_number: u32,
    /// The slower of both ports; 0 when that is not known.
    pub(super) bits_per_second: u64,
    /// The longest packets that both ports take.
    pub(super) mtu: Mtu,
}

/// How a link ends.
#[derive(Default)]
pub(super) struct Ending {
    /// Why, once it does.
    pub(super) why: Option<CloseCause>,
    /// Since when the device is waited for.
    pub(super) since_ns: Option<u64>,
    /// The device has said that no message comes any more.
    pub(super) last_receive: bool,
    /// Why it is closed once everything is sent.
    pub(super) after_send: Option<CloseCause>,
}

/// One connection.
pub(super) struct Link {
    /// Its device, by position, and its place among that one's endpoints.
    pub(super) nic: u32,
    pub(super) endpoint: EndpointId,
    pub(super) state: State,
    /// Whether we began it.
    pub(super) asks: bool,
    /// Receives that the peer was promised.
    pub(super) grant: u16,
    pub(super) path: Path,
    pub(super) sends: SendQueue,
    pub(super) intake: Intake,
    pub(super) places: AnswerPlaces,
    pub(super) outbox: Outbox,
    pub(super) copies: Copies,
    /// What makes it one with a stock engine, if it is.
    pub(super) foreign: Option<Box<Foreign>>,
    pub(super) ending: Ending,
    /// Since when nothing has been seen to happen on it, or its peer was asked for a sign of life.
    idle_since_ns: Option<u64>,
}

impl Link {
    /// A link on this device that is not connected, with a queue pair that takes so many requests.
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
            ending: Ending::default(),
            idle_since_ns: None,
        }
    }

    /// What waits to be sent, where it is an answer.
    fn backlog(&self) -> usize {
        self.outbox.frames() + if self.asks { 0 } else { self.outbox.extra_pieces() }
    }

    /// Whether nothing is under way on it, in no direction.
    pub(super) fn is_idle(&self) -> bool {
        self.state == State::Open
            && self.outbox.is_empty()
            && self.intake.is_idle()
            && self.copies.is_idle()
            && self.places.wants_nothing()
            && self.sends.is_idle()
    }

    /// Since when it has been idle, or its peer was asked for a sign of life; none when it is not idle now.
    pub(super) fn look_at_idle(&mut self, now_ns: u64) -> Option<u64> {
        if !self.is_idle() {
            self.idle_since_ns = None;
            return None;
        }
        Some(*self.idle_since_ns.get_or_insert(now_ns))
    }

    /// Asks the peer of an idle link for a sign of life.
    pub(super) fn probe(&mut self, now_ns: u64) -> Result<(), String> {
        self.idle_since_ns = Some(now_ns);
        self.sends.probe()
    }

    /// Whether nothing waits to be sent or fetched, and the device holds nothing.
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

    /// What the host can have next of it.
    pub(super) fn next_input(&mut self) -> Next {
        let full = self.backlog() >= Limits::REPLIES_QUEUED;
        self.intake.next(full)
    }

    /// The next frame, if it is there as a whole.
    pub(super) fn take_frame(
        &mut self,
        nic: &mut Nic,
        books: &mut Books,
        scratch: &mut Vec<u8>,
    ) -> Result<Option<Header>, CloseCause> {
        self.intake.take_frame(&mut self.sends.credits, &mut self.places, nic, books, scratch)
    }

    /// Whether it has input for the host, after what was sent.
    pub(super) fn has_input(&mut self) -> bool {
        let few = self.backlog() < Limits::REPLIES_QUEUED / 2;
        self.intake.resume(few) || self.intake.has_payload()
    }

    /// Sends what is queued, as far as credits, slots and the queue allow. Whether it waits for what other connections
    /// of the device have.
    pub(super) fn transmit(&mut self, id: ConnectionId, nic: &mut Nic, books: &mut Books) -> Result<bool, CloseCause> {
        if self.state != State::Open {
            return Ok(false);
        }
        let mut starved = self.intake.fetch(&mut self.sends, &mut self.outbox, nic)?;
        // Before the messages: they carry the questions for keys.
        let asked = self.copies.post_waiting(id, &mut self.sends, nic, &mut books.copied)?;
        self.ask_key(asked);
        starved |= self.outbox.transmit(&mut self.sends, &mut self.places, nic, books)?;
        if self.sends.must_return_credits() {
            self.sends.send_message(Envelope::new(MessageKind::Credit, 0), &[], nic, books)?;
        }
        self.sends.flush(self.endpoint, nic, books)?;
        Ok(starved)
    }

    /// Takes a copy that could not be posted together with others.
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

    /// Asks the peer what reaches a segment of its.
    fn ask_key(&mut self, segment: Option<SegmentId>) {
        if let Some(segment) = segment {
            self.outbox.push_control(Control::AskKey(segment));
        }
    }

    /// Tells the peer what reaches a segment of ours.
    pub(super) fn answer_key(&mut self, segment: SegmentId, key: SegmentKey) -> Result<(), CloseCause> {
        if self.outbox.controls() >= CONTROLS {
            return Err(CloseCause::Rdma("the peer asks for keys faster than it takes them".to_owned()));
        }
        if key.status == Outcome::Ok {
            self.copies.keys.tell(segment);
        }
        self.outbox.push_control(Control::Key(segment, key));
        Ok(())
    }

    /// Tells the peer that a segment of ours is gone, if it knows the key. Whether it knew it.
    pub(super) fn retract(&mut self, segment: SegmentId) -> bool {
        let tells = self.copies.keys.untell(segment) && self.state == State::Open;
        if tells {
            self.outbox.push_control(Control::SegmentGone(segment));
        }
        tells
    }

    /// Takes back what a completion ends. Copies that succeeded are most of it, and need nothing else of the link.
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
                    // The parts before it have succeeded too.
                    Work::Copy(token) if status == Status::Success => copied.push(id, token, Ok(())),
                    Work::CopyPart if status == Status::Success => {}
                    _ => others.push((id.index, RetiredRequest { token, status, receive: false })),
                }
            }
        });
    }

    /// A request is over: whatever waited for it goes on.
    pub(super) fn work_over(&mut self, id: ConnectionId, work: Work, status: Status, nic: &mut Nic, books: &mut Books) {
        match work {
            Work::Nothing => {}
            Work::Slot(slot) => nic.arena.free_slot(slot),
            Work::Push(lent) => self.outbox.pushed(lent, books),
            Work::Pull => self.intake.fetched(status == Status::Success, nic),
            Work::CopyPart => self.copies.part_over(id, None, status, &mut books.copied),
            Work::Copy(token) => self.copies.part_over(id, Some(token), status, &mut books.copied),
        }
    }

    /// Begins to end: the device takes nothing more for it. Whether it was in use.
    pub(super) fn fail(&mut self, why: CloseCause) -> bool {
        let connected = self.state == State::Open;
        self.state = State::Closing;
        self.ending.why = Some(why);
        // Where the device refuses, the end of the queue pair is the end of all that was posted.
        let _ = self.sends.queue_pair.fail();
        connected
    }

    /// The queue pair is destroyed and everything that it held reported.
    pub(super) fn end(self, id: ConnectionId, nic: &mut Nic, books: &mut Books) {
        let copied = &mut books.copied;
        self.sends.queue_pair.close(|retired| match Work::from_bits(retired.token) {
            Work::Slot(slot) => nic.arena.free_slot(slot),
            Work::Copy(token) => copied.push(id, token, Err(Outcome::Unreachable)),
            _ => {}
        });
        self.intake.end(nic);
        self.outbox.end(nic, books);
        self.copies.end(id, &mut books.copied);
        books.events.push_back(Event::Gone(id, self.ending.why.unwrap_or(CloseCause::Closed)));
    }
}
