//! Receive half of a connection: headers and bodies go into the staging, payloads into their memory.
//!
//! As little as possible of a long payload passes through the staging: it is received in place, and only the part that
//! arrives together with its header is copied.

use std::io;
use std::os::fd::AsFd;

use kvplane_proto::Limits;
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::{FrameError, HEADER_BYTES, Header};
use kvplane_sys::{IoBuf, Scatter};

use super::staging::Staging;
use crate::types::{CloseCause, Target};

/// Size of the staging in bytes: the largest frame without payload, plus room for small payloads.
pub(super) const STAGING_BYTES: usize = 576 * 1024;
const _: () = assert!(STAGING_BYTES >= HEADER_BYTES + Limits::BODY_BYTES);
/// Smallest and largest receive size while frames are expected, in bytes. Small, so that little of a large payload
/// lands in the staging; larger when many small frames arrive.
pub(super) const ASK_LEAST_BYTES: usize = 16 * 1024;
const ASK_MOST_BYTES: usize = 128 * 1024;
/// Largest receive size of a payload in bytes: received bytes are checksummed while they are in the cache.
const PAYLOAD_ASK_BYTES: usize = 256 * 1024;
/// Least length of a payload, or of a piece of one, that is received in place, in bytes. Shorter ones are copied: many
/// calls and many pieces cost more than that.
const IN_PLACE_BYTES: usize = 16 * 1024;
/// Bytes received beyond the end of a payload, to receive the next header in the same call.
const BEYOND_BYTES: usize = 4096;
/// Receive budget of one connection in a round, in bytes, for fairness.
const ROUND_BYTES: usize = 256 * 1024;
/// Capacity for unread bytes that a connection keeps while it has none, in bytes.
const KEPT_BYTES: usize = 1024;

/// Kind of the bytes that arrive next.
#[allow(
    clippy::large_enum_variant,
    reason = "one for each connection, changed with every payload: a box would cost more"
)]
pub(super) enum Expect {
    /// Headers and bodies, received into the staging.
    Frame,
    /// A frame was delivered to the host, which has to name the destination of its payload.
    Decision { payload_bytes: u64 },
    /// A payload in transfer.
    Payload(Payload),
}

/// Remaining destination of a payload.
pub(super) enum Destination {
    Nowhere,
    One(IoBuf),
    Many { buffers: Vec<IoBuf>, next: usize },
}

pub(super) struct Payload {
    pub(super) destination: Destination,
    pub(super) left_bytes: u64,
    pub(super) checksum: Option<PayloadChecksum>,
}

impl Destination {
    /// Returns the remaining pieces.
    pub(super) fn rest(&self) -> &[IoBuf] {
        match self {
            Self::Nowhere => &[],
            Self::One(buffer) => core::slice::from_ref(buffer),
            Self::Many { buffers, next } => &buffers[*next..],
        }
    }

    fn first(&mut self) -> Option<&mut IoBuf> {
        match self {
            Self::Nowhere => None,
            Self::One(buffer) => Some(buffer),
            Self::Many { buffers, next } => buffers.get_mut(*next),
        }
    }

    /// Passes the next `bytes` bytes to `take`, piece by piece.
    fn advance(&mut self, mut bytes: usize, mut take: impl FnMut(&IoBuf, usize)) {
        while let Some(buffer) = self.first() {
            let part = buffer.bytes().min(bytes);
            if part > 0 {
                take(buffer, part);
                buffer.advance(part);
                bytes -= part;
            }
            match (buffer.is_empty(), &mut *self) {
                (true, Self::Many { next, .. }) => *next += 1,
                _ => return,
            }
        }
    }
}

impl Payload {
    /// Accounts for the next bytes of the payload, which were received in place.
    pub(super) fn took(&mut self, bytes: usize) {
        self.left_bytes -= bytes as u64;
        let checksum = &mut self.checksum;
        self.destination.advance(bytes, |buffer, part| {
            if let Some(checksum) = checksum {
                buffer.region().read_with(buffer.offset(), part, &mut |_, bytes| checksum.update(bytes));
            }
        });
    }

    /// Copies the next bytes of the payload to their destination.
    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.left_bytes -= bytes.len() as u64;
        // Checksums the private copy.
        if let Some(checksum) = &mut self.checksum {
            checksum.update(bytes);
        }
        let mut at = 0;
        self.destination.advance(bytes.len(), |buffer, part| {
            buffer.copy_in(&bytes[at..at + part]);
            at += part;
        });
    }
}

impl Payload {
    fn is_received_in_place(&self) -> bool {
        let first = self.destination.rest().first().map_or(0, IoBuf::bytes);
        first >= IN_PLACE_BYTES && self.left_bytes >= IN_PLACE_BYTES as u64
    }

    /// Adds the memory to fill next; returns its length.
    fn push_to<'a>(&'a self, scatter: &mut Scatter<'a>) -> usize {
        for buffer in self.destination.rest() {
            let wanted = PAYLOAD_ASK_BYTES - scatter.bytes();
            if wanted == 0 || scatter.is_full() {
                break;
            }
            scatter.push(buffer, buffer.bytes().min(wanted));
        }
        scatter.bytes()
    }

    /// Takes the part of the payload that is in the staging.
    fn take_from(&mut self, staging: &mut Staging) {
        let here = self.left_bytes.min(staging.unread().len() as u64) as usize;
        if here > 0 {
            self.put(&staging.unread()[..here]);
            staging.consume(here);
        }
    }
}

/// Receive half of a connection.
pub(super) struct Reader {
    /// True if the socket may have more bytes.
    pub(super) readable: bool,
    /// The peer sends nothing more: reads continue until they report the end.
    pub(super) ended: bool,
    /// True while input is not taken because too many replies wait to be sent (backpressure).
    pub(super) paused: bool,
    /// Remaining receive budget of this round.
    budget_bytes: usize,
    expect: Expect,
    /// Unread bytes, while another connection owns the staging.
    kept: Vec<u8>,
    /// Receive size while frames are expected, in bytes.
    ask_bytes: usize,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self {
            readable: false,
            ended: false,
            paused: false,
            budget_bytes: 0,
            expect: Expect::Frame,
            kept: Vec::new(),
            ask_bytes: ASK_LEAST_BYTES,
        }
    }

    /// Resets the budget at the connection's turn of a round.
    pub(super) const fn start_round(&mut self) {
        self.budget_bytes = ROUND_BYTES;
    }

    /// Returns true if the budget of this round is used up.
    pub(super) const fn is_spent(&self) -> bool {
        self.budget_bytes == 0
    }

    /// Returns the kind of the next bytes.
    pub(super) const fn expect(&self) -> &Expect {
        &self.expect
    }

    /// Returns the payload that is being received, if any.
    pub(super) const fn payload(&mut self) -> Option<&mut Payload> {
        match &mut self.expect {
            Expect::Payload(payload) => Some(payload),
            Expect::Frame | Expect::Decision { .. } => None,
        }
    }

    /// Ends the payload, which is complete; a frame is next.
    pub(super) fn finish_payload(&mut self) {
        self.expect = Expect::Frame;
    }

    /// Returns true if there are unread bytes outside of the staging.
    pub(super) fn has_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Moves unread bytes out of the staging.
    pub(super) fn keep(&mut self, unread: &[u8]) {
        self.kept.extend_from_slice(unread);
    }

    /// Moves unread bytes into the staging, which becomes owned by the connection at `index`.
    pub(super) fn enter(&mut self, index: u32, staging: &mut Staging) {
        staging.give_to(index, &self.kept);
        self.kept.clear();
        self.kept.shrink_to(KEPT_BYTES);
    }

    /// Discards the unread bytes.
    pub(super) fn forget_kept(&mut self) {
        self.kept = Vec::new();
    }

    /// Returns the memory that the reader owns, in bytes.
    #[cfg(test)]
    pub(super) fn owned_bytes(&self) -> usize {
        self.kept.capacity()
    }

    /// Returns the next frame, if it has arrived completely; `check` validates its header first. The connection owns
    /// the staging.
    pub(super) fn take_frame(
        &mut self,
        staging: &mut Staging,
        scratch: &mut Vec<u8>,
        check: impl FnOnce(&Header) -> Result<(), FrameError>,
    ) -> Result<Option<Header>, FrameError> {
        let unread = staging.unread();
        let Some((bytes, rest)) = unread.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let header = Header::decode(bytes)?;
        check(&header)?;
        let body_bytes = header.body_bytes as usize;
        let Some(body) = rest.get(..body_bytes) else {
            // The rest of a long body is received with one call.
            self.ask_bytes = self.ask_bytes.max(HEADER_BYTES + body_bytes - unread.len());
            return Ok(None);
        };
        header.check_body(body)?;
        scratch.clear();
        scratch.extend_from_slice(body);
        staging.consume(HEADER_BYTES + body_bytes);
        if header.payload_bytes > 0 {
            self.expect = Expect::Decision { payload_bytes: header.payload_bytes };
        }
        Ok(Some(header))
    }

    /// Receives once, up to a limit. Returns the number of bytes, or `None` if the socket is drained. The connection
    /// owns the staging.
    pub(super) fn receive(&mut self, socket: &impl AsFd, staging: &mut Staging) -> Result<Option<usize>, CloseCause> {
        let mut scatter = Scatter::new();
        let mut in_place = 0;
        match &self.expect {
            Expect::Payload(payload) if payload.is_received_in_place() => {
                in_place = payload.push_to(&mut scatter);
                if in_place as u64 == payload.left_bytes && !scatter.is_full() {
                    scatter.push_bytes(staging.room(BEYOND_BYTES));
                }
            }
            Expect::Payload(payload) => {
                let wanted = payload.left_bytes.min(STAGING_BYTES as u64) as usize + BEYOND_BYTES;
                scatter.push_bytes(staging.room(wanted.max(self.ask_bytes)));
            }
            _ => scatter.push_bytes(staging.room(self.ask_bytes)),
        }
        let asked = scatter.bytes();
        let received = scatter.receive(socket.as_fd());
        let Some(received) = self.received(received, asked)? else { return Ok(None) };
        staging.filled(received.saturating_sub(in_place));
        match &mut self.expect {
            Expect::Payload(payload) => {
                payload.took(received.min(in_place));
                payload.take_from(staging);
            }
            _ => self.adapt(received),
        }
        Ok(Some(received))
    }

    /// Evaluates the result of a receive call for `asked` bytes. Returns the number of bytes, or `None` if the socket
    /// is drained.
    pub(super) fn received(&mut self, received: io::Result<usize>, asked: usize) -> Result<Option<usize>, CloseCause> {
        let received = match received {
            Ok(0) => return Err(CloseCause::Peer),
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                return Ok(None);
            }
            Err(error) => return Err(CloseCause::Kernel(error.raw_os_error().unwrap_or_default())),
        };
        // A short receive drains the socket, and the poller reports what arrives next. The end is reported only once.
        self.readable = received == asked || self.ended;
        self.budget_bytes = self.budget_bytes.saturating_sub(received);
        Ok(Some(received))
    }

    /// Sets the destination of the payload of the last frame, and takes the part that arrived with its header. The
    /// connection owns the staging.
    ///
    /// # Panics
    /// When no payload is expected or the memory does not have its length.
    pub(super) fn place_payload(&mut self, target: Target, staging: &mut Staging) {
        let Expect::Decision { payload_bytes } = self.expect else {
            panic!("a payload destination was set although no payload is expected");
        };
        let (destination, checksum) = match target {
            Target::Discard => (Destination::Nowhere, false),
            Target::Memory { buffer, checksum } => (Destination::One(buffer), checksum),
            Target::Scatter { buffers, checksum } => (Destination::Many { buffers, next: 0 }, checksum),
        };
        if !matches!(destination, Destination::Nowhere) {
            let bytes: usize = destination.rest().iter().map(IoBuf::bytes).sum();
            assert_eq!(bytes as u64, payload_bytes, "memory of another length than the payload's");
        }
        let checksum = checksum.then(PayloadChecksum::new);
        let mut payload = Payload { destination, left_bytes: payload_bytes, checksum };
        // The part that arrived with the header is copied; of the rest, long pieces are received in place.
        payload.take_from(staging);
        if payload.left_bytes >= IN_PLACE_BYTES as u64 {
            self.ask_bytes = ASK_LEAST_BYTES;
        }
        self.expect = Expect::Payload(payload);
    }

    /// Adapts the receive size: larger when receives come back full, smaller when they do not.
    fn adapt(&mut self, received: usize) {
        if received >= self.ask_bytes {
            self.ask_bytes = (self.ask_bytes * 2).min(ASK_MOST_BYTES);
        } else if received < self.ask_bytes / 4 {
            self.ask_bytes = (self.ask_bytes / 2).max(ASK_LEAST_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvplane_proto::RequestId;
    use kvplane_proto::message::{Kind, Operation};
    use kvplane_sys::{HugePages, Region, RegionOptions};

    #[test]
    fn a_complete_frame_is_taken_and_its_payload_is_put_in_place() {
        let (mut reader, mut staging, mut scratch) = (Reader::new(), Staging::new(STAGING_BYTES), Vec::new());
        let (body, payload) = ([5; 100], [7; 50]);
        let header = Header::request(Kind::Request(Operation::Put), RequestId::default());
        let header = header.with_body(&body, 1).with_payload(payload.len() as u64, None);
        let frame = [&header.encode()[..], &body, &payload[..20]].concat();
        let mut take = |reader: &mut Reader, staging: &mut Staging| {
            reader.take_frame(staging, &mut scratch, |_| Ok(())).expect("a frame")
        };
        reader.enter(1, &mut staging);
        staging.take(&frame[..HEADER_BYTES + 10]).expect("there is room");
        assert_eq!(take(&mut reader, &mut staging), None, "the rest of its body has not arrived");
        staging.take(&frame[HEADER_BYTES + 10..]).expect("there is room");
        assert_eq!(take(&mut reader, &mut staging), Some(header));
        let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("reader", 4096) };
        let buffer = IoBuf::new(Region::allocate(&options).expect("memory"), 0, payload.len());
        reader.place_payload(Target::Memory { buffer: buffer.clone(), checksum: false }, &mut staging);
        let left = reader.payload().map(|payload| payload.left_bytes);
        assert_eq!((left, staging.unread().len()), (Some(30), 0));
        let mut found = [0; 20];
        buffer.region().copy_out(0, &mut found);
        assert_eq!(found, payload[..20]);
        assert_eq!(scratch, body);
    }

    #[test]
    fn a_rejected_header_fails_before_its_body_arrives() {
        let (mut reader, mut staging, mut scratch) = (Reader::new(), Staging::new(STAGING_BYTES), Vec::new());
        let header = Header::request(Kind::Request(Operation::Get), RequestId::default()).with_body(&[1; 64], 1);
        staging.give_to(1, &header.encode());
        let refused = FrameError::TooLong { field: "first frame", value: 64, limit: 1 };
        assert_eq!(reader.take_frame(&mut staging, &mut scratch, |_| Err(refused)), Err(refused));
    }
}
