//! Send half of a connection: frames are gathered, as many as fit into one call.
//!
//! Headers, bodies and small payloads are copied side by side into a staging that all connections of a driver share;
//! large payloads are sent from where they are. If the kernel does not accept everything at once, the staged rest moves
//! to the connection, which continues when the socket has room.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use kvplane_proto::RequestId;
use kvplane_sys::{Gather, IoBuf, MAX_PIECES};
use kvplane_tls::PLAIN_BYTES;

use super::lending::{Lending, LentPayload, ZeroCopyCounters, ZeroCopyOptions};
use super::output_staging::{Frame, OutputStaging, copied_bytes};
use super::sealed::SealedStream;
use crate::types::{CloseCause, Event, Pieces};

/// Approximate send budget of one connection in a round, in bytes. For fairness, and to keep freshly checksummed bytes
/// in the cache when the kernel copies them.
pub(super) const ROUND_BYTES: usize = 512 << 10;
/// Approximate number of bytes that are encrypted before they are sent: bounds the buffer of a connection whose peer
/// does not read.
const SEALED_BYTES: usize = 128 << 10;
/// Queue capacity that an idle connection may keep, and the capacity to which a larger queue is shrunk.
const FRAMES_KEPT: usize = 256;
const FRAMES_LEFT: usize = 16;

/// A part of the output.
enum Piece {
    /// Headers, bodies and small payloads: a range of the staging.
    Staged(Range<usize>),
    /// A payload in its memory, from its piece `next` on.
    Memory {
        pieces: Pieces,
        next: usize,
        hold: Option<u64>,
        request: RequestId,
        /// Last zero-copy call that lent some of it to the kernel.
        last_call: Option<u32>,
    },
}

impl Piece {
    /// Returns the number of pieces of memory that may be lent to the kernel now, each of at least `least_bytes`. Zero
    /// if the payload has no hold.
    fn lendable(&self, least_bytes: usize) -> usize {
        let Self::Memory { pieces, next, hold: Some(_), .. } = self else { return 0 };
        let rest = pieces.as_slice()[*next..].iter().take(MAX_PIECES);
        rest.take_while(|buffer| buffer.bytes() >= least_bytes).count()
    }
}

/// Options and counters of zero-copy sends.
pub(super) struct ZeroCopyBooks {
    pub(super) options: ZeroCopyOptions,
    pub(super) counters: ZeroCopyCounters,
}

/// Send half of a connection: queued frames, and output that the kernel has not accepted yet.
pub(super) struct Writer {
    /// True if the socket may accept more bytes.
    pub(super) writable: bool,
    frames: VecDeque<Frame>,
    /// Pieces of memory of the queued frames beyond the first of each.
    extra_pieces: usize,
    /// Output in transmission.
    pieces: VecDeque<Piece>,
    /// Staged rest, to which the staged pieces refer after a partial send.
    left: Vec<u8>,
    /// Bytes that the kernel has accepted.
    sent_bytes: u64,
    pub(super) lending: Lending,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self {
            writable: true,
            frames: VecDeque::new(),
            extra_pieces: 0,
            pieces: VecDeque::new(),
            left: Vec::new(),
            sent_bytes: 0,
            lending: Lending::default(),
        }
    }

    /// Queues a frame.
    pub(super) fn push(&mut self, frame: Frame) {
        self.extra_pieces += frame.extra_pieces();
        self.frames.push_back(frame);
    }

    /// Returns the number of queued frames.
    pub(super) fn frames(&self) -> usize {
        self.frames.len()
    }

    /// Returns the pieces of memory of the queued frames beyond the first of each.
    pub(super) const fn extra_pieces(&self) -> usize {
        self.extra_pieces
    }

    /// Returns true if nothing waits to be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.pieces.is_empty()
    }

    /// Returns the bytes that the kernel has accepted.
    pub(super) const fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Returns true if a payload was lent in part and is not sent completely.
    pub(super) fn has_lent_in_part(&self) -> bool {
        matches!(self.pieces.front(), Some(Piece::Memory { last_call: Some(_), .. }))
    }

    /// Returns the memory that the writer owns, in bytes.
    #[cfg(test)]
    pub(super) fn owned_bytes(&self) -> usize {
        self.frames.capacity() * size_of::<Frame>() + self.pieces.capacity() * size_of::<Piece>() + self.left.capacity()
    }

    /// Returns the holds of all payloads that are not sent yet.
    pub(super) fn holds(&self) -> impl Iterator<Item = u64> {
        let queued = self.frames.iter().filter_map(|frame| frame.payload.as_ref()?.hold);
        let leaving = self.pieces.iter().filter_map(|piece| match piece {
            Piece::Memory { hold, .. } => *hold,
            Piece::Staged(_) => None,
        });
        leaving.chain(queued)
    }

    /// Discards unsent output. A payload lent in part stays lent in part; the rest was never passed to the kernel.
    pub(super) fn give_up(&mut self, events: &mut VecDeque<Event>) {
        let frames = self.frames.drain(..).filter_map(|frame| frame.payload?.hold);
        events.extend(frames.map(Event::Sent));
        while let Some(piece) = self.pieces.pop_front() {
            self.payload_left(piece, events);
        }
        self.left = Vec::new();
    }

    /// Shrinks long queues after everything was sent.
    pub(super) fn shrink(&mut self) {
        if self.frames.capacity() > FRAMES_KEPT {
            self.frames.shrink_to(FRAMES_LEFT);
        }
        if self.pieces.capacity() > FRAMES_KEPT {
            self.pieces.shrink_to(FRAMES_LEFT);
        }
    }

    /// Gathers frames and makes one send call. Returns the number of bytes sent, or `None` if the socket would block.
    pub(super) fn send(
        &mut self,
        socket: &impl AsFd,
        staging: &mut OutputStaging,
        books: &mut ZeroCopyBooks,
        events: &mut VecDeque<Event>,
    ) -> io::Result<Option<usize>> {
        let staged_here = self.pieces.is_empty();
        if staged_here {
            self.gather(staging, events);
        }
        let left = core::mem::take(&mut self.left);
        let staged = if staged_here { staging.bytes() } else { &left[..] };
        let result = self.send_once(socket, staged, books, events);
        self.left = left;
        let sent = match result {
            Ok((bytes, all)) => {
                self.writable = all;
                Some(bytes)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.writable = false;
                None
            }
            Err(error) => return Err(error),
        };
        self.keep(staged_here, staging);
        Ok(sent)
    }

    /// Makes one send call with the next pieces. Returns the number of bytes sent, and whether that was everything
    /// offered.
    fn send_once(
        &mut self,
        socket: &impl AsFd,
        staged: &[u8],
        books: &mut ZeroCopyBooks,
        events: &mut VecDeque<Event>,
    ) -> io::Result<(usize, bool)> {
        let ZeroCopyBooks { options, counters } = books;
        let mut from = self.lending.lends_from(options);
        let lendable = |writer: &Self, from| writer.pieces.front().map_or(0, |piece| piece.lendable(from));
        if lendable(self, from) > 0 {
            self.lending.decide(socket.as_fd(), options);
            from = self.lending.lends_from(options);
        }
        let count = lendable(self, from);
        let mut refused = false;
        if let (1.., Some(piece)) = (count, self.pieces.front_mut()) {
            match send_lent(socket, piece, count) {
                Ok((bytes, all)) => {
                    let call = self.lending.lent_bytes(bytes, counters);
                    if let Piece::Memory { last_call, .. } = piece {
                        *last_call = call;
                    }
                    self.advance(bytes, events);
                    return Ok((bytes, all));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
                // Notifications, locked memory or pages that cannot be pinned may be the cause: a copy needs none of
                // those. An error of the connection itself is reported again by the next call.
                Err(_) => (refused, from) = (true, usize::MAX),
            }
        }
        let (bytes, all) = send_copied(socket, &self.pieces, staged, from)?;
        if refused {
            self.lending.refused(socket.as_fd(), counters, events);
        }
        self.lending.copied_bytes(bytes);
        self.advance(bytes, events);
        Ok((bytes, all))
    }

    /// Sends like [`Self::send`], with TLS: encrypts and sends records batch by batch.
    pub(super) fn send_sealed(
        &mut self,
        socket: &impl AsFd,
        sealed: &mut SealedStream,
        staging: &mut OutputStaging,
        plain: &mut Vec<u8>,
        events: &mut VecDeque<Event>,
    ) -> Result<Option<usize>, CloseCause> {
        let staged_here = sealed.is_agreed() && self.pieces.is_empty();
        if staged_here {
            self.gather(staging, events);
        }
        let left = core::mem::take(&mut self.left);
        let staged = if staged_here { staging.bytes() } else { &left[..] };
        let result = self.seal(socket, sealed, staged, plain, events);
        self.left = left;
        self.keep(staged_here, staging);
        // Nothing can be sent before the handshake is complete.
        result.map(|bytes| (bytes > 0).then_some(bytes))
    }

    /// Encrypts and sends the pieces, batch by batch, until the socket would block. Returns the number of bytes sent.
    fn seal(
        &mut self,
        socket: &impl AsFd,
        sealed: &mut SealedStream,
        staged: &[u8],
        plain: &mut Vec<u8>,
        events: &mut VecDeque<Event>,
    ) -> Result<usize, CloseCause> {
        let mut sent = 0;
        while self.writable {
            let mut leaving = 0;
            while leaving < SEALED_BYTES && sealed.is_agreed() && !self.pieces.is_empty() {
                let bytes = fill(&self.pieces, staged, plain);
                leaving += sealed.seal(&plain[..bytes])?;
                self.advance(bytes, events);
            }
            if sealed.has_left() {
                break;
            }
            match sealed.send(socket) {
                Ok((bytes, all)) => {
                    self.writable = all;
                    sent += bytes;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(error) => return Err(CloseCause::Kernel(error.raw_os_error().unwrap_or_default())),
            }
        }
        Ok(sent)
    }

    /// Turns queued frames into pieces. The holds of payloads that were copied are reported at once.
    fn gather(&mut self, staging: &mut OutputStaging, events: &mut VecDeque<Event>) {
        staging.clear();
        let (mut run_start, mut payload_bytes) = (0, 0);
        while let Some(frame) = self.frames.front() {
            let copied = frame.payload.as_ref().map_or(0, |payload| copied_bytes(&payload.buffers));
            if !staging.has_room(frame, copied) || self.pieces.len() + 2 > MAX_PIECES || payload_bytes >= ROUND_BYTES {
                break;
            }
            let Some(mut frame) = self.frames.pop_front() else { break };
            self.extra_pieces -= frame.extra_pieces();
            staging.put(&mut frame, copied > 0);
            if let Some(payload) = frame.payload.take() {
                if copied > 0 || payload.buffers.bytes() == 0 {
                    events.extend(payload.hold.map(Event::Sent));
                } else {
                    payload_bytes += payload.buffers.bytes();
                    self.pieces.push_back(Piece::Staged(run_start..staging.used()));
                    run_start = staging.used();
                    let (pieces, hold, request) = (payload.buffers, payload.hold, frame.header.request);
                    self.pieces.push_back(Piece::Memory { pieces, next: 0, hold, request, last_call: None });
                }
            }
            staging.spare(frame.body);
        }
        if staging.used() > run_start {
            self.pieces.push_back(Piece::Staged(run_start..staging.used()));
        }
    }

    /// Advances past sent bytes.
    fn advance(&mut self, mut bytes: usize, events: &mut VecDeque<Event>) {
        self.sent_bytes += bytes as u64;
        while let Some(piece) = self.pieces.front_mut() {
            match piece {
                Piece::Staged(range) => {
                    let part = range.len().min(bytes);
                    range.start += part;
                    bytes -= part;
                    if range.start < range.end {
                        return;
                    }
                }
                Piece::Memory { pieces, next, .. } => {
                    let buffers: &mut [IoBuf] = match pieces {
                        Pieces::One(buffer) => core::slice::from_mut(buffer),
                        Pieces::Many(buffers) => buffers,
                    };
                    while let Some(buffer) = buffers.get_mut(*next) {
                        let part = buffer.bytes().min(bytes);
                        buffer.advance(part);
                        bytes -= part;
                        if !buffer.is_empty() {
                            return;
                        }
                        *next += 1;
                    }
                }
            }
            if let Some(piece) = self.pieces.pop_front() {
                self.payload_left(piece, events);
            }
        }
    }

    /// Handles a completely sent piece: its hold is reported now, or with the notification if the payload was lent.
    fn payload_left(&mut self, piece: Piece, events: &mut VecDeque<Event>) {
        let Piece::Memory { pieces, hold: Some(hold), request, last_call, .. } = piece else { return };
        match last_call {
            Some(last_call) => {
                let payload = LentPayload { last_call, end_bytes: self.sent_bytes, hold, request };
                self.lending.payload_left(payload, pieces, events);
            }
            None => events.push_back(Event::Sent(hold)),
        }
    }

    /// Moves the unsent rest from the shared staging to the connection, or frees a rest that is sent.
    fn keep(&mut self, staged_here: bool, staging: &OutputStaging) {
        if self.pieces.is_empty() {
            self.left = Vec::new();
            return;
        }
        if !staged_here {
            return;
        }
        let first = self.pieces.iter().find_map(|piece| match piece {
            Piece::Staged(range) => Some(range.start),
            Piece::Memory { .. } => None,
        });
        let Some(first) = first else { return };
        self.left = staging.bytes()[first..].to_vec();
        for piece in &mut self.pieces {
            if let Piece::Staged(range) = piece {
                *range = range.start - first..range.end - first;
            }
        }
    }
}

/// Makes one send call with a copy: all pieces up to the first of at least `lent_from` bytes, which another call lends.
/// Returns the number of bytes sent, and whether that was everything offered.
fn send_copied(
    socket: &impl AsFd,
    pieces: &VecDeque<Piece>,
    staged: &[u8],
    lent_from: usize,
) -> io::Result<(usize, bool)> {
    let mut gather = Gather::new();
    let mut lent_follows = false;
    'all: for piece in pieces {
        match piece {
            Piece::Staged(range) => gather.push_bytes(&staged[range.clone()]),
            Piece::Memory { pieces, next, hold, .. } => {
                for buffer in &pieces.as_slice()[*next..] {
                    let room = ROUND_BYTES - gather.bytes();
                    lent_follows = hold.is_some() && buffer.bytes() >= lent_from;
                    if gather.is_full() || room == 0 || lent_follows {
                        break 'all;
                    }
                    gather.push(buffer, buffer.bytes().min(room));
                }
            }
        }
        if gather.is_full() || gather.bytes() >= ROUND_BYTES {
            break;
        }
    }
    let bytes = if lent_follows { gather.send_more(socket.as_fd())? } else { gather.send(socket.as_fd())? };
    Ok((bytes, bytes == gather.bytes()))
}

/// Makes one zero-copy call with the first `count` pieces of memory. Returns the same as [`send_copied`].
fn send_lent(socket: &impl AsFd, piece: &Piece, count: usize) -> io::Result<(usize, bool)> {
    let Piece::Memory { pieces, next, .. } = piece else { return Ok((0, true)) };
    let mut gather = Gather::new();
    for buffer in &pieces.as_slice()[*next..*next + count] {
        gather.push(buffer, buffer.bytes().min(ROUND_BYTES - gather.bytes()));
    }
    let bytes = gather.send_zero_copy(socket.as_fd())?;
    Ok((bytes, bytes == gather.bytes()))
}

/// Copies the first bytes of the pieces side by side, up to the size of one record; returns their number.
fn fill(pieces: &VecDeque<Piece>, staged: &[u8], plain: &mut Vec<u8>) -> usize {
    plain.resize(PLAIN_BYTES, 0);
    let mut at = 0;
    for piece in pieces {
        match piece {
            Piece::Staged(range) => {
                let part = range.len().min(PLAIN_BYTES - at);
                plain[at..at + part].copy_from_slice(&staged[range.start..range.start + part]);
                at += part;
            }
            Piece::Memory { pieces, next, .. } => {
                for buffer in &pieces.as_slice()[*next..] {
                    let part = buffer.bytes().min(PLAIN_BYTES - at);
                    buffer.copy_out(&mut plain[at..at + part]);
                    at += part;
                }
            }
        }
        if at == PLAIN_BYTES {
            break;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::ZeroCopy;
    use crate::types::OutgoingPayload;
    use kvplane_proto::frame::Header;
    use kvplane_proto::message::{Kind, Operation};
    use kvplane_sys::{HugePages, Region, RegionOptions};
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    fn pair() -> (UnixStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        for socket in [&ours, &theirs] {
            socket.set_nonblocking(true).expect("a socket");
        }
        (ours, theirs)
    }

    fn read_all(mut socket: &UnixStream, into: &mut Vec<u8>) {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = socket.read(&mut bytes) {
            into.extend_from_slice(&bytes[..count]);
        }
    }

    /// Another connection uses the staging between any two calls.
    #[test]
    fn unsent_bytes_are_kept_and_sent_later() {
        const PAYLOAD_BYTES: usize = 4 << 20;
        let ((ours, theirs), (other_socket, other_peer)) = (pair(), pair());
        let (mut writer, mut other, mut staging) = (Writer::new(), Writer::new(), OutputStaging::new());
        let options = ZeroCopyOptions { when: ZeroCopy::Never, ..ZeroCopyOptions::default() };
        let mut books = ZeroCopyBooks { options, counters: ZeroCopyCounters::default() };
        let memory = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("writer", PAYLOAD_BYTES) };
        let region = Region::allocate(&memory).expect("memory");
        let payload: Vec<u8> = (0..PAYLOAD_BYTES as u32).map(|at| (at * 7) as u8).collect();
        region.copy_in(0, &payload);
        let header = Header::request(Kind::Request(Operation::Put), RequestId::default());
        let (first, last) = (header.with_body(&[1; 300], 1), header.with_body(&[2; 50_000], 1));
        let first = first.with_payload(PAYLOAD_BYTES as u64, None);
        let payloads = [Some(OutgoingPayload { buffers: IoBuf::whole(region).into(), hold: Some(9) }), None];
        for (header, payload) in [first, last].into_iter().zip(payloads) {
            let body = if header.payload_bytes > 0 { vec![1; 300] } else { vec![2; 50_000] };
            writer.push(Frame { header, body, payload });
        }
        let (mut came, mut events, mut refused) = (Vec::new(), VecDeque::new(), 0);
        while !writer.is_empty() {
            let sent = writer.send(&ours, &mut staging, &mut books, &mut events).expect("a socket");
            if sent.is_none() {
                refused += 1;
                assert!(!writer.writable);
                read_all(&theirs, &mut came);
                writer.writable = true;
            }
            other.push(Frame { header: last, body: vec![2; 50_000], payload: None });
            other.send(&other_socket, &mut staging, &mut books, &mut VecDeque::new()).expect("a socket");
            read_all(&other_peer, &mut Vec::new());
        }
        read_all(&theirs, &mut came);
        let whole = [&first.encode()[..], &[1; 300], &payload, &last.encode(), &[2; 50_000]].concat();
        assert!(came == whole, "{} bytes of {}", came.len(), whole.len());
        assert!(refused > 0 && matches!(events.make_contiguous(), [Event::Sent(9)]), "{refused} refusals, {events:?}");
        assert_eq!(writer.sent_bytes(), whole.len() as u64);
    }
}
