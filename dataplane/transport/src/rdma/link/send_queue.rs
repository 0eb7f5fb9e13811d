//! The send queue of a link: its queue pair, what may be posted on it, and the credits for messages.
//!
//! A connection's requests of one flush go to the device with one doorbell.

use kvplane_sys::IoBuf;
use kvplane_sys::verbs::{Operation, Payload, Piece, QueuePair, Remote, Request};

use super::credits::Credits;
use crate::rdma::books::Books;
use crate::rdma::nic::{EndpointId, Nic};
use crate::rdma::wire::Envelope;
use crate::rdma::work::Work;
use crate::types::CloseCause;

/// The longest request: longer ones are cut. All devices take as much.
pub(super) const REQUEST_BYTES: u64 = 8 << 20;
/// Requests that copies and fetches leave free for messages.
pub(super) const ROOM_FOR_MESSAGES: usize = 8;

/// What a link posts on.
pub(in crate::rdma) struct SendQueue {
    pub(in crate::rdma) queue_pair: QueuePair,
    pub(in crate::rdma) credits: Credits,
    /// Requests that the queue pair takes.
    depth: usize,
    /// The longest message that both sides take.
    message_bytes: usize,
}

impl SendQueue {
    /// Of a queue pair that is not connected and takes so many requests.
    pub(in crate::rdma) const fn new(queue_pair: QueuePair, depth: usize) -> Self {
        Self { queue_pair, credits: Credits::new(0, 0), depth, message_bytes: 0 }
    }

    /// Both sides have said how many receives they keep for the other, and of which length.
    pub(in crate::rdma) const fn agree(&mut self, credits: Credits, message_bytes: usize) {
        (self.credits, self.message_bytes) = (credits, message_bytes);
    }

    /// The longest message that both sides take.
    pub(super) const fn message_bytes(&self) -> usize {
        self.message_bytes
    }

    /// Requests that one copy may take, at most.
    #[inline]
    pub(super) const fn most_of_copy(&self) -> usize {
        self.depth - ROOM_FOR_MESSAGES
    }

    /// Whether the device holds nothing of it, and nothing waits to be given to it.
    pub(super) fn is_idle(&self) -> bool {
        self.queue_pair.unsent() == 0 && self.queue_pair.outstanding() == 0
    }

    /// Whether a message may be posted that is not about credits alone.
    pub(super) fn may_send(&self) -> bool {
        self.credits.may_send() && self.queue_pair.room() > 0
    }

    /// Whether a message about credits alone is due and may be posted.
    pub(super) fn must_return_credits(&self) -> bool {
        self.credits.must_return() && self.queue_pair.room() > 0
    }

    /// Whether there is room for a request beside the messages.
    pub(super) fn has_room(&self) -> bool {
        self.queue_pair.room() > ROOM_FOR_MESSAGES
    }

    /// Posts one message. There is a credit, room in the queue, and a slot unless it is short.
    pub(super) fn send_message(
        &mut self,
        envelope: Envelope,
        content: &[u8],
        nic: &mut Nic,
        books: &mut Books,
    ) -> Result<(), CloseCause> {
        let (credits, content_bytes) = (self.credits.send(), content.len() as u32);
        let message = &mut books.message;
        message.clear();
        message.extend_from_slice(&Envelope { credits, content_bytes, ..envelope }.encode());
        message.extend_from_slice(content);
        books.counters.messages += 1;
        let refused = |refusal| CloseCause::Rdma(format!("a message was refused: {refusal}"));
        if message.len() <= self.queue_pair.inline_bytes() as usize {
            let request = Request::new(Work::Nothing.to_bits(), Operation::Send, Payload::Inline(message));
            return self.queue_pair.push(&request).map_err(refused);
        }
        let Some(slot) = nic.arena.take_slot() else {
            return Err(CloseCause::Rdma("no slot for a message".to_owned()));
        };
        nic.arena.fill_slot(slot, message);
        let Some(piece) = nic.arena.slot_piece(slot, message.len()) else {
            return Err(CloseCause::Rdma(format!("a message of {} bytes does not fit a slot", message.len())));
        };
        let pieces = [piece];
        let request = Request::new(Work::Slot(slot).to_bits(), Operation::Send, Payload::Pieces(&pieces));
        let pushed = self.queue_pair.push(&request);
        if pushed.is_err() {
            nic.arena.free_slot(slot);
        }
        pushed.map_err(refused)
    }

    /// Posts a request on memory that is registered.
    pub(super) fn post(
        &mut self,
        work: Work,
        operation: Operation,
        parts: &[IoBuf],
        nic: &Nic,
    ) -> Result<(), CloseCause> {
        let pieces: Option<Vec<Piece<'_>>> =
            parts.iter().map(|part| nic.memory.piece(part, part.bytes() as u32)).collect();
        let Some(pieces) = pieces else { return Err(CloseCause::Rdma("memory is not registered".to_owned())) };
        let request = Request::new(work.to_bits(), operation, Payload::Pieces(&pieces));
        self.queue_pair.push(&request).map_err(|refusal| CloseCause::Rdma(format!("a request was refused: {refusal}")))
    }

    /// Posts a read into a bounce buffer.
    pub(super) fn read_bounce(
        &mut self,
        bounce: u32,
        bytes: usize,
        from: Remote,
        nic: &mut Nic,
    ) -> Result<(), CloseCause> {
        let Some(piece) = nic.arena.bounce_piece(bounce, bytes) else {
            return Err(CloseCause::Rdma("no such bounce buffer".to_owned()));
        };
        let pieces = [piece];
        let request = Request::new(Work::Pull.to_bits(), Operation::Read { from }, Payload::Pieces(&pieces));
        let pushed = self.queue_pair.push(&request);
        if pushed.is_err() {
            nic.arena.free_bounce(bounce);
        }
        pushed.map_err(|refusal| CloseCause::Rdma(format!("a request was refused: {refusal}")))
    }

    /// Hands what was posted to the device, if there is anything: this is a use of the endpoint.
    pub(super) fn flush(&mut self, endpoint: EndpointId, nic: &mut Nic, books: &mut Books) -> Result<(), CloseCause> {
        if self.queue_pair.unsent() > 0 {
            nic.endpoints.touch(endpoint);
            let posted = self.queue_pair.flush(true).map_err(|error| nic.gone(&error))?;
            books.counters.requests += posted as u64;
            books.counters.doorbells += 1;
        }
        Ok(())
    }

    /// Asks the peer's device for a sign of life: writes nothing, zero bytes.
    pub(super) fn probe(&mut self) -> Result<(), String> {
        let nothing = Operation::Write { to: Remote { address: 0, key: 0 } };
        let request = Request::new(Work::Nothing.to_bits(), nothing, Payload::Pieces(&[]));
        self.queue_pair.push(&request).map_err(|refusal| refusal.to_string())?;
        // Not by way of a flush: that would count as use, and keep it from being given up for another.
        self.queue_pair.flush(true).map(drop).map_err(|error| error.to_string())
    }
}
