//! Frames leave: gathered, as many as fit one call.
//!
//! Headers, bodies and small payloads are put side by side into a staging that all connections of a driver share; large
//! payloads leave from where they are. What the kernel does not take at once stays: the staged rest moves to the
//! connection, which goes on when the socket has room.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use kvplane_proto::checksum::{PayloadChecksum, payload_checksum};
use kvplane_proto::frame::HEADER_BYTES;
use kvplane_proto::{FrameFlags, Limits};
use kvplane_sys::{Gather, IoBuf, MAX_PIECES};
use kvplane_tls::PLAIN_BYTES;

use super::Tcp;
use super::connection::{Connection, Frame, Piece, State};
use super::sealed::Wire;
use super::zero_copy::{ZeroCopyCounters, ZeroCopyOptions};
use crate::types::{CloseCause, ConnectionId, Event, Pieces};

/// Bytes of the staging: the largest frame without payload, and room for small payloads: for 64 of 4 KiB with their
/// headers, half of a usual batch of gets, or each half would need two calls.
const STAGING_BYTES: usize = (576 + 16) * 1024;
const _: () = assert!(STAGING_BYTES >= HEADER_BYTES + Limits::BODY_BYTES);
/// What one connection may send in a round, about. Bounds how long others wait, and lets what was just summed up still
/// be in the cache when the kernel copies it.
const ROUND_BYTES: usize = 512 << 10;
/// About so much is sealed before it is sent: a connection whose peer does not read keeps no more than that.
const SEALED_BYTES: usize = 128 << 10;
/// Payloads up to this length are copied to where their header is: cheaper than another piece for the kernel.
const COPIED_BYTES: usize = 8 << 10;
/// Payloads of pieces that are shorter than this on average are copied too, as far as they fit.
const COPIED_PIECE_BYTES: usize = 2 << 10;
const COPIED_PIECES_BYTES: usize = STAGING_BYTES - HEADER_BYTES - Limits::BODY_BYTES;
/// Bodies kept for their memory, and the longest of them.
const SPARE_BODIES: usize = 64;
const SPARE_BODY_BYTES: usize = 4096;
/// Places for frames that a connection may keep when it has none, and how many of them it is left with.
const FRAMES_KEPT: usize = 256;
const FRAMES_LEFT: usize = 16;

/// Where headers, bodies and small payloads are put side by side.
pub(super) struct Staging {
    /// Allocated with the first frame.
    bytes: Vec<u8>,
    used: usize,
}

impl Staging {
    pub(super) const fn new() -> Self {
        Self { bytes: Vec::new(), used: 0 }
    }

    const fn room(&self) -> usize {
        STAGING_BYTES - self.used
    }

    /// Puts a frame there, all but a long payload.
    fn put(&mut self, frame: &mut Frame, copied: bool) {
        let at = self.used;
        let body_at = at + HEADER_BYTES;
        let payload_at = body_at + frame.body.len();
        self.bytes[body_at..payload_at].copy_from_slice(&frame.body);
        self.used = payload_at;
        let mut sum = None;
        if let Some(payload) = &frame.payload {
            let sums = frame.header.flags.has(FrameFlags::CHECKSUM) && frame.header.payload_checksum == 0;
            if copied {
                for buffer in payload.buffers.as_slice() {
                    buffer.copy_out(&mut self.bytes[self.used..self.used + buffer.bytes()]);
                    self.used += buffer.bytes();
                }
                // Summed up where it is ours alone.
                sum = sums.then(|| payload_checksum(&self.bytes[payload_at..self.used]));
            } else {
                // Done as late as this, so that the kernel finds the bytes in the cache.
                sum = sums.then(|| summed(&payload.buffers));
            }
        }
        if let Some(sum) = sum {
            frame.header.payload_checksum = sum;
        }
        self.bytes[at..body_at].copy_from_slice(&frame.header.encode());
    }
}

fn summed(pieces: &Pieces) -> u64 {
    let mut checksum = PayloadChecksum::new();
    for buffer in pieces.as_slice() {
        buffer.region().read_with(buffer.offset(), buffer.bytes(), &mut |_, part| checksum.update(part));
    }
    checksum.finish()
}

impl Tcp {
    /// Sends what is queued on a connection, as far as its share of the round and the kernel allow.
    pub(super) fn transmit(&mut self, id: ConnectionId) {
        let mut sent = 0;
        loop {
            let (staging, spare) = (&mut self.send_staging, &mut self.spare_bodies);
            let Some(connection) = self.connections[id.index as usize].as_mut() else { return };
            if connection.state != State::Open || !connection.writable {
                return;
            }
            if matches!(connection.wire, Wire::Tls(_)) {
                self.transmit_sealed(id);
                return;
            }
            if sent >= ROUND_BYTES && !connection.is_sent() {
                self.mark_dirty(id.index);
                return;
            }
            let staged_here = connection.pieces.is_empty();
            if staged_here {
                connection.gather(staging, spare, &mut self.events);
            }
            if connection.pieces.is_empty() {
                break;
            }
            let left = core::mem::take(&mut connection.left);
            let staged = if staged_here { &staging.bytes[..] } else { &left[..] };
            let result = connection.send(staged, &self.zero_copy, &mut self.zero_copy_counters, &mut self.events);
            connection.left = left;
            match result {
                Ok((bytes, all)) => {
                    connection.writable = all;
                    self.moved_bytes += bytes;
                    sent += bytes;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => connection.writable = false,
                Err(error) => {
                    self.close(id, CloseCause::Kernel(error.raw_os_error().unwrap_or_default()));
                    return;
                }
            }
            connection.keep(staged_here, staging);
        }
        self.sent_all(id);
    }

    /// The same in records: so many are sealed, then sent, and the next when the kernel has taken them.
    fn transmit_sealed(&mut self, id: ConnectionId) {
        let mut sent = 0;
        loop {
            let (staging, spare) = (&mut self.send_staging, &mut self.spare_bodies);
            let Some(connection) = self.connections[id.index as usize].as_mut() else { return };
            if connection.state != State::Open || !connection.writable {
                return;
            }
            if connection.is_sent() {
                break;
            }
            if sent >= ROUND_BYTES {
                self.mark_dirty(id.index);
                return;
            }
            let staged_here = connection.is_agreed() && connection.pieces.is_empty();
            if staged_here {
                connection.gather(staging, spare, &mut self.events);
            }
            let left = core::mem::take(&mut connection.left);
            let staged = if staged_here { &staging.bytes[..] } else { &left[..] };
            let result = connection.send_sealed(staged, &mut self.tls.plain, &mut self.events);
            connection.left = left;
            connection.keep(staged_here, staging);
            match result {
                // Nothing can leave before the handshake is done.
                Ok(0) => return,
                Ok(bytes) => {
                    self.moved_bytes += bytes;
                    sent += bytes;
                }
                Err(why) => {
                    self.close(id, why);
                    return;
                }
            }
        }
        self.sent_all(id);
    }

    /// Everything that was queued has left.
    fn sent_all(&mut self, id: ConnectionId) {
        let Some(connection) = self.get(id) else { return };
        if connection.frames.capacity() > FRAMES_KEPT {
            connection.frames.shrink_to(FRAMES_LEFT);
        }
        if connection.pieces.capacity() > FRAMES_KEPT {
            connection.pieces.shrink_to(FRAMES_LEFT);
        }
        if connection.has_lent() {
            if connection.closing_after_send.is_some() {
                self.end_later(id.index);
            }
        } else if let Some(why) = connection.closing_after_send.clone() {
            self.close(id, why);
        }
    }

    /// Takes input again that was not taken because too many answers waited.
    pub(super) fn resume(&mut self, index: u32) {
        if let Some(connection) = self.connections[index as usize].as_mut()
            && connection.paused
            && connection.backlog() < Limits::REPLIES_QUEUED / 2
        {
            connection.paused = false;
            self.mark_ready(index);
        }
    }
}

/// One call with a copy: all pieces up to the first of at least `lent_from` bytes, which another call lends. How many
/// bytes left, and whether that was all it was given.
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

/// One call that lends: so many pieces of memory from the first one on. As [`send_copied`].
fn send_lent(socket: &impl AsFd, piece: &Piece, count: usize) -> io::Result<(usize, bool)> {
    let Piece::Memory { pieces, next, .. } = piece else { return Ok((0, true)) };
    let mut gather = Gather::new();
    for buffer in &pieces.as_slice()[*next..*next + count] {
        gather.push(buffer, buffer.bytes().min(ROUND_BYTES - gather.bytes()));
    }
    let bytes = gather.send_zero_copy(socket.as_fd())?;
    Ok((bytes, bytes == gather.bytes()))
}

impl Connection {
    /// One call, of the pieces that are next. How many bytes left, and whether that was all it was given.
    fn send(
        &mut self,
        staged: &[u8],
        options: &ZeroCopyOptions,
        counters: &mut ZeroCopyCounters,
        events: &mut VecDeque<Event>,
    ) -> io::Result<(usize, bool)> {
        let mut from = self.lends_from(options);
        let lendable = |connection: &Self, from| connection.pieces.front().map_or(0, |piece| piece.lendable(from));
        if lendable(self, from) > 0 {
            self.decide(options);
            from = self.lends_from(options);
        }
        let count = lendable(self, from);
        let mut refused = false;
        if let (1.., Some(piece)) = (count, self.pieces.front()) {
            match send_lent(&self.socket, piece, count) {
                Ok((bytes, all)) => {
                    self.lent_bytes(bytes, counters);
                    self.advance(bytes, events);
                    return Ok((bytes, all));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
                // Room for notices, locked memory, pages that cannot be held: a copy needs none of that. And what is
                // wrong with the connection is said again.
                Err(_) => (refused, from) = (true, usize::MAX),
            }
        }
        let (bytes, all) = send_copied(&self.socket, &self.pieces, staged, from)?;
        if refused {
            self.refused(counters, events);
        }
        self.copied_bytes(bytes);
        self.advance(bytes, events);
        Ok((bytes, all))
    }

    /// Seals and sends the pieces, some at a time, until the kernel takes no more. How many bytes left.
    fn send_sealed(
        &mut self,
        staged: &[u8],
        plain: &mut Vec<u8>,
        events: &mut VecDeque<Event>,
    ) -> Result<usize, CloseCause> {
        let mut sent = 0;
        while self.writable {
            let mut leaving = 0;
            while leaving < SEALED_BYTES && self.is_agreed() && !self.pieces.is_empty() {
                let bytes = fill(&self.pieces, staged, plain);
                let Wire::Tls(sealed) = &mut self.wire else { return Ok(sent) };
                leaving += sealed.seal(&plain[..bytes])?;
                self.sent_bytes += bytes as u64;
                self.advance(bytes, events);
            }
            let Wire::Tls(sealed) = &mut self.wire else { return Ok(sent) };
            if sealed.has_left() {
                break;
            }
            match sealed.send(&self.socket) {
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

    /// Turns waiting frames into pieces. Holds of payloads that were copied are reported: nobody needs them any more.
    fn gather(&mut self, staging: &mut Staging, spare: &mut Vec<Vec<u8>>, events: &mut VecDeque<Event>) {
        staging.used = 0;
        let (mut run_start, mut payload_bytes) = (0, 0);
        while let Some(frame) = self.frames.front() {
            let copied = frame.payload.as_ref().map_or(0, |payload| copied_bytes(&payload.buffers));
            let bytes = HEADER_BYTES + frame.body.len() + copied;
            if bytes > staging.room() || self.pieces.len() + 2 > MAX_PIECES || payload_bytes >= ROUND_BYTES {
                break;
            }
            if staging.bytes.is_empty() {
                staging.bytes = vec![0; STAGING_BYTES];
            }
            let Some(mut frame) = self.frames.pop_front() else { break };
            self.extra_pieces -= frame.extra_pieces();
            staging.put(&mut frame, copied > 0);
            if let Some(payload) = frame.payload.take() {
                if copied > 0 || payload.buffers.bytes() == 0 {
                    events.extend(payload.hold.map(Event::Sent));
                } else {
                    payload_bytes += payload.buffers.bytes();
                    self.pieces.push_back(Piece::Staged(run_start..staging.used));
                    run_start = staging.used;
                    let (pieces, hold, request) = (payload.buffers, payload.hold, frame.header.request);
                    self.pieces.push_back(Piece::Memory { pieces, next: 0, hold, request, last_call: None });
                }
            }
            if spare.len() < SPARE_BODIES && frame.body.capacity() <= SPARE_BODY_BYTES {
                frame.body.clear();
                spare.push(frame.body);
            }
        }
        if staging.used > run_start {
            self.pieces.push_back(Piece::Staged(run_start..staging.used));
        }
    }

    /// So many bytes of the pieces have left.
    fn advance(&mut self, mut bytes: usize, events: &mut VecDeque<Event>) {
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

    /// Moves what is left in the shared staging here; forgets what is not needed any more.
    fn keep(&mut self, staged_here: bool, staging: &Staging) {
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
        self.left = staging.bytes[first..staging.used].to_vec();
        for piece in &mut self.pieces {
            if let Piece::Staged(range) = piece {
                *range = range.start - first..range.end - first;
            }
        }
    }
}

/// Puts the first bytes of the pieces side by side, as many as one record takes; how many.
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

/// How much of a payload is copied to where its header is: all or nothing.
fn copied_bytes(pieces: &Pieces) -> usize {
    let bytes = pieces.bytes();
    let short = match pieces {
        Pieces::One(_) => false,
        Pieces::Many(buffers) => bytes <= COPIED_PIECES_BYTES && bytes / COPIED_PIECE_BYTES < buffers.len(),
    };
    if bytes <= COPIED_BYTES || short { bytes } else { 0 }
}
