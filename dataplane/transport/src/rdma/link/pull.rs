//! Payloads are fetched: read from where the peer's frame says into where the host says.
//!
//! One payload of a connection at a time, as its frames are taken in order; all its reads are under way together. Where
//! the destination cannot be registered, the bytes come through a bounce buffer, one after the other.

use std::collections::VecDeque;

use kvplane_sys::verbs::{Operation, Remote};
use kvplane_sys::{IoBuf, Region};

use super::outbox::{Control, Outbox};
use super::send_queue::{REQUEST_BYTES, SendQueue};
use crate::rdma::nic::{BOUNCE_BYTES, Nic, PIECES};
use crate::rdma::pieces::Cutter;
use crate::rdma::wire::Place;
use crate::rdma::work::Work;
use crate::types::CloseCause;
use crate::types::checksum_of_pieces;

/// Where a payload waits to be fetched.
pub(super) struct PullSource {
    pub(super) token: u64,
    pub(super) places: VecDeque<Place>,
    /// These are not all of it.
    pub(super) parts: bool,
}

/// A payload that is being fetched.
pub(super) struct Pull {
    source: PullSource,
    /// Where it goes; nowhere when it is not wanted.
    pieces: Vec<IoBuf>,
    /// The first piece with room, and what is filled of it.
    next: usize,
    filled: usize,
    /// Bytes that no read was posted for yet.
    left_bytes: u64,
    wanted: bool,
    checksum: bool,
    /// Reads under way.
    reading: u32,
    /// The peer knows that we wait for another part.
    asked: bool,
    /// The read that goes through a bounce buffer, and where its bytes belong.
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

    /// Goes past what reads were posted for.
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

    /// Whether all of it is here.
    pub(super) fn is_done(&self) -> bool {
        self.left_bytes == 0 && self.source.places.is_empty() && self.reading == 0 && !self.source.parts
    }

    /// Under which name the peer has lent it.
    pub(super) const fn token(&self) -> u64 {
        self.source.token
    }

    /// What it sums to, where that is wanted.
    pub(super) fn checksum(&self) -> Option<u64> {
        (self.wanted && self.checksum).then(|| checksum_of_pieces(&self.pieces))
    }

    /// Goes on. Whether it waits for a bounce buffer.
    pub(super) fn fetch(
        &mut self,
        sends: &mut SendQueue,
        outbox: &mut Outbox,
        nic: &mut Nic,
    ) -> Result<bool, CloseCause> {
        while let Some(&source) = self.source.places.front() {
            if source.bytes > self.left_bytes {
                return Err(CloseCause::Rdma("the peer sends more than it said".to_owned()));
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
                    return Err(CloseCause::Rdma("the peer sends more than it said".to_owned()));
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

    /// A read is over.
    pub(super) fn fetched(&mut self, success: bool, nic: &mut Nic) {
        self.reading -= 1;
        // While one goes through a bounce buffer it is the last that was posted, and all before it are over.
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

    /// Whether the peer may say now where the next part is.
    pub(super) fn awaits_part(&self, token: u64) -> bool {
        self.source.token == token && self.asked && self.source.places.is_empty()
    }

    /// The next part is there to be fetched.
    pub(super) fn next_part(&mut self, places: Vec<Place>, more: bool) -> Result<(), CloseCause> {
        let bytes = places.iter().map(|place| place.bytes).fold(0, u64::saturating_add);
        if bytes > self.left_bytes || more == (bytes == self.left_bytes) {
            return Err(CloseCause::Rdma("the peer does not send what it said".to_owned()));
        }
        (self.source.places, self.source.parts) = (places.into(), more);
        self.asked = false;
        Ok(())
    }

    /// The device holds nothing of it any more.
    pub(super) fn end(self, nic: &mut Nic) {
        if let Some((bounce, _)) = self.bounce {
            nic.arena.free_bounce(bounce);
        }
    }
}
