//! Fetching of payloads: RDMA reads from the places in the peer's frame to the host's destination.
//!
//! One payload per connection at a time, because frames are handled in order; all of its reads are in flight together.
//! If the destination cannot be registered, the bytes pass through a bounce buffer, one read after the other.

use std::collections::VecDeque;

use kvplane_sys::verbs::{Operation, Remote};
use kvplane_sys::{IoBuf, Region};

use super::outbox::{Control, Outbox};
use super::send_queue::{REQUEST_BYTES, SendQueue};
use crate::rdma::nic::{BOUNCE_BYTES, Nic, PIECES};
use crate::rdma::pieces::Cutter;
use crate::rdma::wire::RemoteRange;
use crate::rdma::work::Work;
use crate::types::CloseCause;
use crate::types::checksum_of_pieces;

/// Source of a payload to fetch.
pub(super) struct PullSource {
    pub(super) token: u64,
    pub(super) places: VecDeque<RemoteRange>,
    /// True if the places are only a part of the payload.
    pub(super) parts: bool,
}

/// A payload that is being fetched.
pub(super) struct Pull {
    source: PullSource,
    /// Destination; empty if the payload is discarded.
    pieces: Vec<IoBuf>,
    /// First piece that is not full, and its filled bytes.
    next: usize,
    filled: usize,
    /// Bytes for which no read was posted yet.
    left_bytes: u64,
    wanted: bool,
    checksum: bool,
    /// Reads in flight.
    reading: u32,
    /// True if the next part was requested from the peer.
    asked: bool,
    /// Bounce buffer of the read in flight, and the destination of its bytes.
    bounce: Option<(u32, IoBuf)>,
}

impl Pull {
    pub(super) fn new(source: PullSource, bytes: u64, pieces: Option<Vec<IoBuf>>, checksum: bool) -> Self {
        let wanted = pieces.is_some();
        Self {
            source,
            pieces: pieces.unwrap_or_default(),
            next: 0,
            filled: 0,
            left_bytes: bytes,
            wanted,
            checksum,
            reading: 0,
            asked: false,
            bounce: None,
        }
    }

    /// Advances past bytes for which reads were posted.
    fn advance(&mut self, mut bytes: u64) {
        self.left_bytes = self.left_bytes.saturating_sub(bytes);
        if let Some(source) = self.source.places.front_mut() {
            source.address += bytes;
            source.bytes -= bytes;
            if source.bytes == 0 {
                self.source.places.pop_front();
            }
        }
        while self.wanted && bytes > 0 && self.next < self.pieces.len() {
            let room = (self.pieces[self.next].bytes() - self.filled) as u64;
            let part = room.min(bytes);
            self.filled += part as usize;
            bytes -= part;
            if part == room {
                (self.next, self.filled) = (self.next + 1, 0);
            }
        }
    }

    /// Returns true if the payload has arrived completely.
    pub(super) fn is_done(&self) -> bool {
        self.left_bytes == 0 && self.source.places.is_empty() && self.reading == 0 && !self.source.parts
    }

    /// Returns the token under which the peer has lent the payload.
    pub(super) const fn token(&self) -> u64 {
        self.source.token
    }

    /// Returns the checksum, if it is requested.
    pub(super) fn checksum(&self) -> Option<u64> {
        (self.wanted && self.checksum).then(|| checksum_of_pieces(&self.pieces))
    }

    /// Posts further reads. Returns true if it waits for a bounce buffer.
    pub(super) fn fetch(
        &mut self,
        sends: &mut SendQueue,
        outbox: &mut Outbox,
        nic: &mut Nic,
    ) -> Result<bool, CloseCause> {
        while let Some(&source) = self.source.places.front() {
            if source.bytes > self.left_bytes {
                return Err(CloseCause::Rdma("the peer announced more bytes than the payload has".to_owned()));
            }
            if !self.wanted {
                self.advance(source.bytes);
                continue;
            }
            if !sends.has_room() || self.bounce.is_some() {
                return Ok(false);
            }
            let from = Remote { address: source.address, key: source.key };
            let most = source.bytes.min(REQUEST_BYTES);
            let rest = &self.pieces[self.next.min(self.pieces.len())..];
            let parts = Cutter::new(rest, self.filled).cut(PIECES, most);
            let usable = parts.iter().take_while(|part| nic.memory.ensure(part.region())).count();
            if usable > 0 {
                let parts = &parts[..usable];
                let bytes = parts.iter().map(|part| part.bytes() as u64).sum();
                sends.post(Work::Pull, Operation::Read { from }, parts, nic)?;
                self.advance(bytes);
            } else {
                let Some(target) = parts.first() else {
                    return Err(CloseCause::Rdma("the peer announced more bytes than the destination has".to_owned()));
                };
                let Some(bounce) = nic.arena.take_bounce() else { return Ok(true) };
                let target = target.slice(0, target.bytes().min(BOUNCE_BYTES));
                let bytes = target.bytes();
                sends.read_bounce(bounce, bytes, from, nic)?;
                self.bounce = Some((bounce, target));
                self.advance(bytes as u64);
            }
            self.reading += 1;
        }
        if self.source.parts && self.reading == 0 && self.left_bytes > 0 && !self.asked {
            outbox.push_control(Control::Pulled(self.source.token));
            self.asked = true;
        }
        Ok(false)
    }

    /// Handles the completion of a read.
    pub(super) fn fetched(&mut self, success: bool, nic: &mut Nic) {
        self.reading -= 1;
        // A read through a bounce buffer is always the last one posted, so all earlier reads are complete.
        if self.reading == 0
            && let Some((bounce, target)) = self.bounce.take()
        {
            if success {
                let from = nic.arena.bounce(bounce);
                Region::copy_between(target.region(), target.offset(), from.region(), from.offset(), target.bytes());
            }
            nic.arena.free_bounce(bounce);
        }
    }

    /// Returns true if the announcement of the next part is expected.
    pub(super) fn awaits_part(&self, token: u64) -> bool {
        self.source.token == token && self.asked && self.source.places.is_empty()
    }

    /// Takes the places of the payload's next part.
    pub(super) fn next_part(&mut self, places: Vec<RemoteRange>, more: bool) -> Result<(), CloseCause> {
        let bytes = places.iter().map(|place| place.bytes).fold(0, u64::saturating_add);
        if bytes > self.left_bytes || more == (bytes == self.left_bytes) {
            return Err(CloseCause::Rdma("the next part of a payload does not have the announced length".to_owned()));
        }
        (self.source.places, self.source.parts) = (places.into(), more);
        self.asked = false;
        Ok(())
    }

    /// Releases the bounce buffer; the device holds none of the link's requests any more.
    pub(super) fn end(self, nic: &mut Nic) {
        if let Some((bounce, _)) = self.bounce {
            nic.arena.free_bounce(bounce);
        }
    }
}
