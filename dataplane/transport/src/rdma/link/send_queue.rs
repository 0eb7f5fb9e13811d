//! Send queue of a link: its queue pair, and the credits for messages.
//!
//! All requests that a connection posts between two flushes go to the device with one doorbell.

use kvplane_sys::IoBuf;
use kvplane_sys::verbs::{Operation, Payload, Piece, QueuePair, Remote, Request};

use super::credits::Credits;
use crate::rdma::books::Books;
use crate::rdma::nic::{EndpointId, Nic};
use crate::rdma::wire::Envelope;
use crate::rdma::work::Work;
use crate::types::CloseCause;

/// Largest request in bytes: longer transfers are split. All devices accept this size.
pub(super) const REQUEST_BYTES: u64 = 8 << 20;
/// Queue entries that copies and fetches leave free for messages.
pub(super) const ROOM_FOR_MESSAGES: usize = 8;

/// Send queue of a link.
pub(in crate::rdma) struct SendQueue {
    pub(in crate::rdma) queue_pair: QueuePair,
    pub(in crate::rdma) credits: Credits,
    /// Depth of the queue pair.
    depth: usize,
    /// Longest message that both sides accept, in bytes.
    message_bytes: usize,
}

impl SendQueue {
    /// Creates the send queue of an unconnected queue pair of this depth.
    pub(in crate::rdma) const fn new(queue_pair: QueuePair, depth: usize) -> Self {
        Self { queue_pair, credits: Credits::new(0, 0), depth, message_bytes: 0 }
    }

    /// Sets the credits and the message size after both sides have exchanged their receives.
    pub(in crate::rdma) const fn agree(&mut self, credits: Credits, message_bytes: usize) {
        (self.credits, self.message_bytes) = (credits, message_bytes);
    }

    /// Returns the longest message that both sides accept, in bytes.
    pub(super) const fn message_bytes(&self) -> usize {
        self.message_bytes
    }

    /// Returns the limit of requests that one copy may take.
    #[inline]
    pub(super) const fn most_of_copy(&self) -> usize {
        self.depth - ROOM_FOR_MESSAGES
    }

    /// Returns true if no request is posted or in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.queue_pair.unsent() == 0 && self.queue_pair.outstanding() == 0
    }

    /// Returns true if a message other than a credit message may be posted.
    pub(super) fn may_send(&self) -> bool {
        self.credits.may_send() && self.queue_pair.room() > 0
    }

    /// Returns true if a credit message is due and may be posted.
    pub(super) fn must_return_credits(&self) -> bool {
        self.credits.must_return() && self.queue_pair.room() > 0
    }

    /// Returns true if there is room for a request beyond the reserve for messages.
    pub(super) fn has_room(&self) -> bool {
        self.queue_pair.room() > ROOM_FOR_MESSAGES
    }

    /// Posts one message. The caller has checked for a credit, for room in the queue, and for a slot unless the message
    /// is short enough to be inline.
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

    /// Posts a request on registered memory.
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

    /// Rings the doorbell for posted requests, if any; this marks the endpoint as used.
    pub(super) fn flush(&mut self, endpoint: EndpointId, nic: &mut Nic, books: &mut Books) -> Result<(), CloseCause> {
        if self.queue_pair.unsent() > 0 {
            nic.endpoints.touch(endpoint);
            let posted = self.queue_pair.flush(true).map_err(|error| nic.gone(&error))?;
            books.counters.requests += posted as u64;
            books.counters.doorbells += 1;
        }
        Ok(())
    }

    /// Sends a keepalive probe: a zero-byte write that the peer's device acknowledges.
    pub(super) fn probe(&mut self) -> Result<(), CloseCause> {
        let nothing = Operation::Write { to: Remote { address: 0, key: 0 } };
        let request = Request::new(Work::Nothing.to_bits(), nothing, Payload::Pieces(&[]));
        self.queue_pair.push(&request).map_err(|refusal| CloseCause::Rdma(refusal.to_string()))?;
        // Bypasses [`Self::flush`], which would mark the endpoint as used and keep it from being evicted.
        self.queue_pair.flush(true).map(drop).map_err(|error| CloseCause::Rdma(error.to_string()))
    }
}
