//! Bytes arrive: into the staging while frames are expected, in place while a payload is.

use std::collections::VecDeque;
use std::os::fd::AsFd;

use kvplane_proto::Limits;
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::{HEADER_BYTES, Header};
use kvplane_sys::{IoBuf, Ring};

use super::Tcp;
use super::connection::{Connection, Expect, Payload, RECEIVE_STAGING_BYTES, State};
use crate::token::{Source, Token};
use crate::types::{ConnectionId, Gone, Input, Target};

/// Least and most bytes asked for while frames are expected. Few, so that little of a large payload lands in the
/// staging; more when small frames come in crowds.
pub(super) const ASK_LEAST_BYTES: usize = 16 * 1024;
const ASK_MOST_BYTES: usize = 128 * 1024;
/// Most bytes of a payload received at once: what has arrived is summed up while it is in the cache and the next part
/// is on its way.
const PAYLOAD_ASK_BYTES: usize = 256 * 1024;

impl Tcp {
    pub(super) fn start_receive(&mut self, ring: &mut Ring, id: ConnectionId) {
        self.start_receive_if(ring, id, true);
    }

    /// `likely`: whether bytes are likely to be there already.
    pub(super) fn start_receive_if(&mut self, ring: &mut Ring, id: ConnectionId, likely: bool) {
        let Some(connection) = self.get(id) else { return };
        if connection.receive_in_flight || connection.state != State::Open || connection.paused {
            return;
        }
        let buffer = match &connection.expect {
            Expect::Decision { .. } => return,
            Expect::Frame => {
                let room = connection.make_room();
                connection.staging.slice(connection.end, room)
            }
            Expect::Payload(payload) => match payload.buffers.as_ref().and_then(VecDeque::front) {
                Some(buffer) => buffer.slice(0, buffer.bytes().min(PAYLOAD_ASK_BYTES)),
                // Thrown away: the staging is empty now and serves as the bin.
                None => connection.staging.slice(0, (payload.left_bytes as usize).min(RECEIVE_STAGING_BYTES)),
            },
        };
        let token = Token { source: Source::TcpReceive, index: id.index, generation: id.generation };
        let queued = if likely {
            ring.recv(connection.stream.as_fd(), buffer, false, token.to_bits())
        } else {
            ring.recv_when_readable(connection.stream.as_fd(), buffer, token.to_bits())
        };
        match queued {
            Ok(()) => connection.receive_in_flight = true,
            // The ring is full: the host's next round comes by again.
            Err(_) => self.mark_ready(id.index),
        }
    }

    pub(super) fn receive_done(&mut self, ring: &mut Ring, id: ConnectionId, result: i32) {
        let Some(connection) = self.get(id) else { return };
        connection.receive_in_flight = false;
        if connection.state != State::Open {
            return;
        }
        if result <= 0 {
            let why = if result == 0 { Gone::Peer } else { Gone::Kernel(-result) };
            self.close(ring, id, why);
            return;
        }
        let bytes = result as usize;
        match &mut connection.expect {
            Expect::Frame => {
                connection.end += bytes;
                connection.adapt(bytes);
            }
            Expect::Payload(payload) => {
                payload.took(bytes);
                if payload.left_bytes > 0 {
                    self.start_receive(ring, id);
                    return;
                }
            }
            Expect::Decision { .. } => unreachable!("nothing is received before the host has decided"),
        }
        self.mark_ready(id.index);
    }

    /// The next input of a connection. A frame's body replaces `scratch`. After a frame with a payload, the host calls
    /// [`Self::receive_payload`] before it asks again.
    pub fn input(&mut self, ring: &mut Ring, id: ConnectionId, scratch: &mut Vec<u8>) -> Input {
        let Some(connection) = self.get(id) else { return Input::Wait };
        if connection.state != State::Open || connection.closing_after_send.is_some() {
            return Input::Wait;
        }
        if let Expect::Payload(payload) = &connection.expect {
            if payload.left_bytes == 0 {
                let checksum = payload.checksum.as_ref().map(PayloadChecksum::finish);
                connection.expect = Expect::Frame;
                return Input::Payload(checksum);
            }
            self.start_receive(ring, id);
            return Input::Wait;
        }
        if connection.frames.len() >= Limits::REPLIES_QUEUED {
            connection.paused = true;
            return Input::Wait;
        }
        match connection.take_frame(scratch) {
            Ok(Some(header)) => Input::Frame(header),
            Ok(None) => {
                self.waiting.push(id);
                Input::Wait
            }
            Err(error) => {
                self.close(ring, id, Gone::Frame(error));
                Input::Wait
            }
        }
    }

    /// Says where the payload of the last frame goes. Then [`Self::input`] brings it.
    ///
    /// # Panics
    /// When no payload is awaited or the memory is not of its length.
    pub fn receive_payload(&mut self, ring: &mut Ring, id: ConnectionId, target: Target) {
        let Some(connection) = self.get(id) else { return };
        if connection.state != State::Open {
            return;
        }
        let Expect::Decision { payload_bytes } = connection.expect else {
            panic!("a payload's place was given where none is awaited");
        };
        let (buffers, checksum) = match target {
            Target::Discard => (None, false),
            Target::Memory { buffer, checksum } => (Some(VecDeque::from([buffer])), checksum),
            Target::Scatter { buffers, checksum } => (Some(VecDeque::from(buffers)), checksum),
        };
        if let Some(buffers) = &buffers {
            let bytes: usize = buffers.iter().map(IoBuf::bytes).sum();
            assert_eq!(bytes as u64, payload_bytes, "memory of another length than the payload's");
        }
        let checksum = checksum.then(PayloadChecksum::new);
        let mut payload = Payload { buffers, left_bytes: payload_bytes, checksum };
        // What came along with the header is copied; the rest arrives in place.
        let mut here = ((connection.end - connection.start) as u64).min(payload_bytes) as usize;
        while here > 0 {
            let mut part = here;
            if let Some(buffer) = payload.buffers.as_ref().and_then(VecDeque::front) {
                part = part.min(buffer.bytes());
                let staging = &connection.staging;
                kvplane_sys::Region::copy_between(
                    buffer.region(),
                    buffer.offset(),
                    staging.region(),
                    staging.offset() + connection.start,
                    part,
                );
            }
            payload.took(part);
            connection.start += part;
            here -= part;
        }
        let complete = payload.left_bytes == 0;
        connection.expect = Expect::Payload(payload);
        if !complete {
            self.start_receive(ring, id);
        }
    }
}

impl Payload {
    /// Bytes of the payload are in place, all of them in its first piece.
    fn took(&mut self, bytes: usize) {
        self.left_bytes -= bytes as u64;
        let Some(buffer) = self.buffers.as_mut().and_then(VecDeque::front_mut) else { return };
        if let (Some(checksum), true) = (&mut self.checksum, bytes > 0) {
            buffer.region().read_with(buffer.offset(), bytes, &mut |_, part| checksum.update(part));
        }
        buffer.advance(bytes);
        if buffer.is_empty() {
            self.buffers.as_mut().and_then(VecDeque::pop_front);
        }
    }
}

impl Connection {
    /// Room at the end of the staging: what is unread moves to the front when it would otherwise not fit.
    fn make_room(&mut self) -> usize {
        let unread = self.end - self.start;
        let wanted = self.wanted_bytes(unread);
        if unread == 0 {
            (self.start, self.end) = (0, 0);
        } else if self.end + wanted > RECEIVE_STAGING_BYTES {
            let (region, base) = (self.staging.region(), self.staging.offset());
            kvplane_sys::Region::copy_between(region, base, region, base + self.start, unread);
            (self.start, self.end) = (0, unread);
        }
        wanted.min(RECEIVE_STAGING_BYTES - self.end)
    }

    /// Bytes to ask for: the rest of a long body, or the usual.
    fn wanted_bytes(&self, unread: usize) -> usize {
        if unread < HEADER_BYTES {
            return self.ask_bytes;
        }
        // The header was checked when its body was found to be missing.
        let body = self.peek_header().map_or(0, |header| header.body_bytes as usize);
        (HEADER_BYTES + body).saturating_sub(unread).max(self.ask_bytes)
    }

    fn peek_header(&self) -> Result<Header, kvplane_proto::frame::FrameError> {
        let mut bytes = [0; HEADER_BYTES];
        self.staging.slice(self.start, HEADER_BYTES).copy_out(&mut bytes);
        Header::decode(&bytes)
    }

    /// Asks for more when receives come back full, for less when they do not.
    fn adapt(&mut self, bytes: usize) {
        self.last_receive_full = bytes >= self.ask_bytes;
        if bytes >= self.ask_bytes {
            self.ask_bytes = (self.ask_bytes * 2).min(ASK_MOST_BYTES);
        } else if bytes < self.ask_bytes / 4 {
            self.ask_bytes = (self.ask_bytes / 2).max(ASK_LEAST_BYTES);
        }
    }

    fn take_frame(&mut self, scratch: &mut Vec<u8>) -> Result<Option<Header>, kvplane_proto::frame::FrameError> {
        if self.end - self.start < HEADER_BYTES {
            return Ok(None);
        }
        let header = self.peek_header()?;
        let body_bytes = header.body_bytes as usize;
        if self.end - self.start < HEADER_BYTES + body_bytes {
            return Ok(None);
        }
        scratch.resize(body_bytes, 0);
        self.staging.slice(self.start + HEADER_BYTES, body_bytes).copy_out(scratch);
        header.check_body(scratch)?;
        self.start += HEADER_BYTES + body_bytes;
        if header.payload_bytes > 0 {
            self.expect = Expect::Decision { payload_bytes: header.payload_bytes };
            // A large payload is better received in place than through the staging.
            self.ask_bytes = ASK_LEAST_BYTES.max(self.ask_bytes / if header.payload_bytes > 65_536 { 8 } else { 1 });
        }
        Ok(Some(header))
    }
}
