//! Bytes arrive: into the staging while frames are expected, in place while a payload is.
//!
//! One staging serves all connections of a driver: it belongs to the one that receives, and what that one has not read
//! yet moves out when another needs the place. So an idle connection owns no memory.

use std::io;
use std::os::fd::AsFd;

use kvplane_proto::Limits;
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::{FrameError, HEADER_BYTES, Header};
use kvplane_sys::{IoBuf, Scatter};
use kvplane_tls::FIRST_BYTE;

use super::Tcp;
use super::connection::{Connection, Expect, Payload, Place, State};
use super::sealed::{Turn, Wire};
use crate::types::{CloseCause, ConnectionId, Input, Target};

/// Bytes of the staging: the largest frame without payload, and room for small payloads.
pub(super) const STAGING_BYTES: usize = 576 * 1024;
const _: () = assert!(STAGING_BYTES >= HEADER_BYTES + Limits::BODY_BYTES);
/// Least and most bytes asked for while frames are expected. Few, so that little of a large payload lands in the
/// staging; more when small frames come in crowds.
pub(super) const ASK_LEAST_BYTES: usize = 16 * 1024;
const ASK_MOST_BYTES: usize = 128 * 1024;
/// Most bytes of a payload received at once: what has arrived is summed up while it is in the cache.
const PAYLOAD_ASK_BYTES: usize = 256 * 1024;
/// Payloads, or pieces of them, from this length on are received in place. Shorter ones are copied: many calls and
/// many pieces cost more than that.
const IN_PLACE_BYTES: usize = 16 * 1024;
/// What is asked for beyond the end of a payload, so that the next header comes along.
const BEYOND_BYTES: usize = 4096;
/// What one connection may receive in a round. Bounds how long others wait.
const ROUND_BYTES: usize = 256 * 1024;
/// Memory for unread bytes that a connection may keep when there are none.
const KEPT_BYTES: usize = 1024;

/// Where bytes arrive before it is known what they are.
pub(super) struct Staging {
    /// Allocated with the first byte.
    bytes: Vec<u8>,
    /// The connection whose unread bytes are here.
    owner: Option<u32>,
    start: usize,
    pub(super) end: usize,
}

impl Staging {
    pub(super) const fn new() -> Self {
        Self { bytes: Vec::new(), owner: None, start: 0, end: 0 }
    }

    fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(super) fn forget(&mut self, index: u32) {
        if self.owner == Some(index) {
            (self.owner, self.start, self.end) = (None, 0, 0);
        }
    }

    /// Free place for the bytes that arrive next, behind those that are unread.
    pub(super) fn room(&mut self, wanted: usize) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end + wanted > STAGING_BYTES {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let end = (self.end + wanted).min(STAGING_BYTES);
        &mut self.bytes[self.end..end]
    }
}

impl Tcp {
    /// Makes the staging this connection's.
    pub(super) fn claim(&mut self, index: u32) {
        let staging = &mut self.staging;
        if staging.owner == Some(index) {
            return;
        }
        if staging.bytes.is_empty() {
            staging.bytes = vec![0; STAGING_BYTES];
        }
        if let Some(owner) = staging.owner.and_then(|owner| self.connections[owner as usize].as_mut()) {
            owner.kept.extend_from_slice(staging.unread());
        }
        (staging.owner, staging.start, staging.end) = (Some(index), 0, 0);
        if let Some(connection) = self.connections[index as usize].as_mut() {
            staging.end = connection.kept.len();
            staging.bytes[..staging.end].copy_from_slice(&connection.kept);
            connection.kept.clear();
            connection.kept.shrink_to(KEPT_BYTES);
        }
    }

    /// The next input of a connection. A frame's body replaces `scratch`. After a frame with a payload, the host calls
    /// [`Self::receive_payload`] before it asks again.
    pub fn input(&mut self, id: ConnectionId, scratch: &mut Vec<u8>) -> Input {
        loop {
            let Some(connection) = self.get(id) else { return Input::Wait };
            if connection.state != State::Open || connection.closing_after_send.is_some() {
                return Input::Wait;
            }
            match &connection.expect {
                Expect::Decision { .. } => return Input::Wait,
                Expect::Payload(payload) if payload.left_bytes == 0 => {
                    let checksum = payload.checksum.as_ref().map(PayloadChecksum::finish);
                    connection.expect = Expect::Frame;
                    return Input::Payload(checksum);
                }
                Expect::Payload(_) => {}
                Expect::Frame if connection.has_answer() => {
                    // What the host was told before must be taken first: that the request's payload has left.
                    if self.events.is_empty()
                        && let Some((header, body)) = self.get(id).and_then(Connection::take_answer)
                    {
                        *scratch = body;
                        return Input::Frame(header);
                    }
                    self.again.push(id.index);
                    return Input::Wait;
                }
                Expect::Frame if connection.backlog() >= Limits::REPLIES_QUEUED => {
                    connection.paused = true;
                    return Input::Wait;
                }
                Expect::Frame => match self.take_frame(id.index, scratch) {
                    Ok(Some(header)) if self.ends_for_want_of_tls(id, &header) => return Input::Wait,
                    Ok(Some(header)) if self.keep_back(id, &header, scratch) => continue,
                    Ok(Some(header)) => return Input::Frame(header),
                    Ok(None) => {}
                    Err(error) => {
                        self.close(id, why_no_frame(error));
                        return Input::Wait;
                    }
                },
            }
            match self.bring(id) {
                Ok(true) => {}
                Ok(false) => return Input::Wait,
                Err(why) => {
                    self.close(id, why);
                    return Input::Wait;
                }
            }
        }
    }

    /// Brings more bytes: opens what came, or receives. False when there is nothing more, or not in this round.
    fn bring(&mut self, id: ConnectionId) -> Result<bool, CloseCause> {
        let Some(connection) = self.get(id) else { return Ok(false) };
        let plain = matches!(connection.wire, Wire::Plain);
        if !plain {
            match self.open_next(id)? {
                Turn::Opened => return Ok(true),
                Turn::Later => return Ok(false),
                Turn::Receive => {}
            }
        }
        let Some(connection) = self.get(id) else { return Ok(false) };
        if !connection.readable {
            return Ok(false);
        }
        if connection.budget_bytes == 0 {
            self.again.push(id.index);
            return Ok(false);
        }
        if plain {
            self.receive(id.index)?;
        } else {
            self.receive_sealed(id.index)?;
        }
        Ok(true)
    }

    /// The next frame, if it is there as a whole.
    fn take_frame(&mut self, index: u32, scratch: &mut Vec<u8>) -> Result<Option<Header>, FrameError> {
        let Some(connection) = self.connections[index as usize].as_mut() else { return Ok(None) };
        if self.staging.owner != Some(index) && connection.kept.is_empty() {
            return Ok(None);
        }
        self.claim(index);
        let staging = &mut self.staging;
        let unread = staging.end - staging.start;
        let Some(connection) = self.connections[index as usize].as_mut() else { return Ok(None) };
        let Some((bytes, rest)) = staging.unread().split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let header = Header::decode(bytes)?;
        let body_bytes = header.body_bytes as usize;
        if let Some(strangers) = &self.strangers {
            let id = ConnectionId { index, generation: self.generations[index as usize] };
            let limit = strangers.limits.body_bytes;
            if strangers.has(id) && (body_bytes > limit || header.payload_bytes > 0) {
                let value = header.payload_bytes.max(body_bytes as u64);
                return Err(FrameError::TooLong { field: "first frame", value, limit: limit as u64 });
            }
        }
        let Some(body) = rest.get(..body_bytes) else {
            // The rest of a long body is asked for at once.
            connection.ask_bytes = connection.ask_bytes.max(HEADER_BYTES + body_bytes - unread);
            return Ok(None);
        };
        header.check_body(body)?;
        scratch.clear();
        scratch.extend_from_slice(body);
        staging.start += HEADER_BYTES + body_bytes;
        connection.awaited = connection.awaited.saturating_sub(1);
        if header.payload_bytes > 0 {
            connection.expect = Expect::Decision { payload_bytes: header.payload_bytes };
        }
        Ok(Some(header))
    }

    /// Receives once: what there is, up to what is asked for.
    fn receive(&mut self, index: u32) -> Result<(), CloseCause> {
        self.claim(index);
        let staging = &mut self.staging;
        let Some(connection) = self.connections[index as usize].as_mut() else { return Ok(()) };
        let mut scatter = Scatter::new();
        let mut in_place = 0;
        match &connection.expect {
            Expect::Payload(payload) if payload.is_received_in_place() => {
                in_place = payload.push_to(&mut scatter);
                if in_place as u64 == payload.left_bytes && !scatter.is_full() {
                    scatter.push_bytes(staging.room(BEYOND_BYTES));
                }
            }
            Expect::Payload(payload) => {
                let wanted = payload.left_bytes.min(STAGING_BYTES as u64) as usize + BEYOND_BYTES;
                scatter.push_bytes(staging.room(wanted.max(connection.ask_bytes)));
            }
            _ => scatter.push_bytes(staging.room(connection.ask_bytes)),
        }
        let asked = scatter.bytes();
        let received = match scatter.receive(connection.socket.as_fd()) {
            Ok(0) => return Err(CloseCause::Peer),
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                connection.readable = false;
                return Ok(());
            }
            Err(error) => return Err(CloseCause::Kernel(error.raw_os_error().unwrap_or_default())),
        };
        // Less than asked for: nothing is left, and more is announced. An end that was announced already is not again.
        connection.readable = received == asked || connection.ended;
        connection.budget_bytes = connection.budget_bytes.saturating_sub(received);
        staging.end += received.saturating_sub(in_place);
        match &mut connection.expect {
            Expect::Payload(payload) => {
                payload.took(received.min(in_place));
                payload.take_from(staging);
            }
            _ => connection.adapt(received),
        }
        self.moved_bytes += received;
        self.active.touch(index);
        Ok(())
    }

    /// Says where the payload of the last frame goes. Then [`Self::input`] brings it.
    ///
    /// # Panics
    /// When no payload is awaited or the memory is not of its length.
    pub fn receive_payload(&mut self, id: ConnectionId, target: Target) {
        let Some(connection) = self.get(id) else { return };
        let Expect::Decision { payload_bytes } = connection.expect else {
            panic!("a payload's place was given where none is awaited");
        };
        let (place, checksum) = match target {
            Target::Discard => (Place::Nowhere, false),
            Target::Memory { buffer, checksum } => (Place::One(buffer), checksum),
            Target::Scatter { buffers, checksum } => (Place::Many { buffers, next: 0 }, checksum),
        };
        if !matches!(place, Place::Nowhere) {
            let bytes: usize = place.rest().iter().map(IoBuf::bytes).sum();
            assert_eq!(bytes as u64, payload_bytes, "memory of another length than the payload's");
        }
        let checksum = checksum.then(PayloadChecksum::new);
        let mut payload = Payload { place, left_bytes: payload_bytes, checksum };
        // What came along with the header is copied; of the rest, what is long arrives in place.
        self.claim(id.index);
        payload.take_from(&mut self.staging);
        if let Some(connection) = self.get(id) {
            if payload.left_bytes >= IN_PLACE_BYTES as u64 {
                connection.ask_bytes = ASK_LEAST_BYTES;
            }
            connection.expect = Expect::Payload(payload);
        }
    }
}

/// Why a connection ends whose bytes are no frame.
fn why_no_frame(error: FrameError) -> CloseCause {
    match error {
        FrameError::Magic(found) if found & 0xff == u32::from(FIRST_BYTE) => {
            let text = "a peer began with TLS, but --data-tls is off here; start this process with offer or require";
            CloseCause::Tls(text.to_owned())
        }
        error => CloseCause::Frame(error),
    }
}

impl Payload {
    fn is_received_in_place(&self) -> bool {
        let first = self.place.rest().first().map_or(0, IoBuf::bytes);
        first >= IN_PLACE_BYTES && self.left_bytes >= IN_PLACE_BYTES as u64
    }

    /// Adds the memory that is filled next; says how much it is.
    fn push_to<'a>(&'a self, scatter: &mut Scatter<'a>) -> usize {
        for buffer in self.place.rest() {
            let wanted = PAYLOAD_ASK_BYTES - scatter.bytes();
            if wanted == 0 || scatter.is_full() {
                break;
            }
            scatter.push(buffer, buffer.bytes().min(wanted));
        }
        scatter.bytes()
    }

    /// Takes what lies in the staging of it.
    fn take_from(&mut self, staging: &mut Staging) {
        let here = self.left_bytes.min(staging.unread().len() as u64) as usize;
        if here > 0 {
            self.put(&staging.unread()[..here]);
            staging.start += here;
        }
    }
}

impl Connection {
    /// It is this connection's turn of the round.
    pub(super) const fn start_round(&mut self) {
        self.ready = false;
        self.budget_bytes = ROUND_BYTES;
    }

    /// Asks for more when receives come back full, for less when they do not.
    fn adapt(&mut self, received: usize) {
        if received >= self.ask_bytes {
            self.ask_bytes = (self.ask_bytes * 2).min(ASK_MOST_BYTES);
        } else if received < self.ask_bytes / 4 {
            self.ask_bytes = (self.ask_bytes / 2).max(ASK_LEAST_BYTES);
        }
    }
}
