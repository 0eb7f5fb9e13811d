//! Payloads are fetched: read from where the peer's frame says into where the host says.
//!
//! One payload of a connection at a time, as its frames are taken in order; all its reads are under way together. Where
//! the destination cannot be registered, the bytes come through a bounce buffer, one after the other.

use std::collections::VecDeque;

use kvplane_sys::verbs::{Operation, Payload, Remote, Request};
use kvplane_sys::{IoBuf, Region};

use super::link::{Control, Expect, Link, Pull, Work};
use super::nic::{BOUNCE_BYTES, Nic};
use super::pieces::{self, Cutter};
use super::send::{PIECES, REQUEST_BYTES, ROOM_FOR_MESSAGES};
use super::wire::Place;
use crate::types::CloseCause;

impl Pull {
    pub(super) fn new(
        (token, sources, parts): (u64, VecDeque<Place>, bool),
        bytes: u64,
        pieces: Option<Vec<IoBuf>>,
        checksum: bool,
    ) -> Self {
        let wanted = pieces.is_some();
        Self {
            token,
            sources,
            parts,
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

    /// Goes past what was asked for.
    fn advance(&mut self, mut bytes: u64) {
        self.left_bytes = self.left_bytes.saturating_sub(bytes);
        if let Some(source) = self.sources.front_mut() {
            source.address += bytes;
            source.bytes -= bytes;
            if source.bytes == 0 {
                self.sources.pop_front();
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
}

impl Link {
    /// Goes on with the payload that is being fetched. Whether it waits for a bounce buffer.
    pub(super) fn fetch(&mut self, nic: &mut Nic) -> Result<bool, CloseCause> {
        let Expect::Pull(mut pull) = core::mem::replace(&mut self.expect, Expect::Frame) else { return Ok(false) };
        let result = self.fetch_more(&mut pull, nic);
        let done = pull.left_bytes == 0 && pull.sources.is_empty() && pull.reading == 0 && !pull.parts;
        if !done {
            self.expect = Expect::Pull(pull);
            return result;
        }
        self.control.push_back(Control::Pulled(pull.token));
        self.expect = Expect::Done((pull.wanted && pull.checksum).then(|| pieces::sum(&pull.pieces)));
        result
    }

    fn fetch_more(&mut self, pull: &mut Pull, nic: &mut Nic) -> Result<bool, CloseCause> {
        while let Some(&source) = pull.sources.front() {
            if source.bytes > pull.left_bytes {
                return Err(CloseCause::Rdma("the peer sends more than it said".to_owned()));
            }
            if !pull.wanted {
                pull.advance(source.bytes);
                continue;
            }
            if self.queue_pair.room() <= ROOM_FOR_MESSAGES || pull.bounce.is_some() {
                return Ok(false);
            }
            let from = Remote { address: source.address, key: source.key };
            let most = source.bytes.min(REQUEST_BYTES);
            let rest = &pull.pieces[pull.next.min(pull.pieces.len())..];
            let parts = Cutter::new(rest, pull.filled).cut(PIECES, most);
            let usable = parts.iter().take_while(|part| nic.memory.ensure(part.region())).count();
            if usable > 0 {
                let parts = &parts[..usable];
                let bytes = parts.iter().map(|part| part.bytes() as u64).sum();
                self.post(Work::Pull, Operation::Read { from }, parts, nic)?;
                pull.advance(bytes);
            } else {
                let Some(target) = parts.first() else {
                    return Err(CloseCause::Rdma("the peer sends more than it said".to_owned()));
                };
                let Some(bounce) = nic.take_bounce() else { return Ok(true) };
                let target = target.slice(0, target.bytes().min(BOUNCE_BYTES));
                let bytes = target.bytes();
                self.read_bounce(bounce, bytes, from, nic)?;
                pull.bounce = Some((bounce, target));
                pull.advance(bytes as u64);
            }
            pull.reading += 1;
        }
        if pull.parts && pull.reading == 0 && pull.left_bytes > 0 && !pull.asked {
            self.control.push_back(Control::Pulled(pull.token));
            pull.asked = true;
        }
        Ok(false)
    }

    fn read_bounce(&mut self, bounce: u32, bytes: usize, from: Remote, nic: &mut Nic) -> Result<(), CloseCause> {
        let Some(piece) = nic.bounce_piece(bounce, bytes) else {
            return Err(CloseCause::Rdma("no such bounce buffer".to_owned()));
        };
        let pieces = [piece];
        let request = Request::new(Work::Pull.to_bits(), Operation::Read { from }, Payload::Pieces(&pieces));
        let pushed = self.queue_pair.push(&request);
        if pushed.is_err() {
            nic.free_bounce(bounce);
        }
        pushed.map_err(|refusal| CloseCause::Rdma(format!("a request was refused: {refusal}")))
    }

    /// A read of the payload is over.
    pub(super) fn fetched(&mut self, success: bool, nic: &mut Nic) {
        let Expect::Pull(pull) = &mut self.expect else { return };
        pull.reading -= 1;
        // While one goes through a bounce buffer it is the last that was posted, and all before it are over.
        if pull.reading == 0
            && let Some((bounce, target)) = pull.bounce.take()
        {
            if success {
                let from = nic.bounce(bounce);
                Region::copy_between(target.region(), target.offset(), from.region(), from.offset(), target.bytes());
            }
            nic.free_bounce(bounce);
        }
    }

    /// The next part of a payload is there to be fetched.
    pub(super) fn next_part(&mut self, token: u64, places: Vec<Place>, more: bool) -> Result<(), CloseCause> {
        match &mut self.expect {
            Expect::Pull(pull) if pull.token == token && pull.asked && pull.sources.is_empty() => {
                let bytes = places.iter().map(|place| place.bytes).fold(0, u64::saturating_add);
                if bytes > pull.left_bytes || more == (bytes == pull.left_bytes) {
                    return Err(CloseCause::Rdma("the peer does not send what it said".to_owned()));
                }
                (pull.sources, pull.parts) = (places.into(), more);
                pull.asked = false;
                Ok(())
            }
            _ => Err(CloseCause::Rdma(format!("a part of payload {token} came that was not asked for"))),
        }
    }
}
