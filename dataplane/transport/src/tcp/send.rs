//! Frames leave: gathered into one send at a time.

use std::os::fd::AsFd;

use kvplane_proto::Limits;
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::{FLAG_CHECKSUM, HEADER_BYTES};
use kvplane_sys::{IoBuf, MAX_VECTORS, Region, Ring};

use super::Tcp;
use super::connection::{Connection, Frame, Piece, SEND_STAGING_BYTES, State};
use crate::token::{Source, Token};
use crate::types::{ConnectionId, Event, Gone};

/// Payload bytes of one send, about. Bounds how long one connection keeps the shard's thread in the kernel, and lets
/// what was just summed up still be in the cache when the kernel copies it.
const SEND_BYTES: usize = 512 << 10;
/// Payloads up to this length are copied to where their header is: cheaper than another piece for the kernel.
const COPIED_BYTES: usize = 8 << 10;

impl Tcp {
    pub(super) fn start_send(&mut self, ring: &mut Ring, id: ConnectionId) {
        let mut released = core::mem::take(&mut self.released);
        if let Some(connection) = self.get(id)
            && connection.may_gather()
        {
            connection.gather(&mut released);
        }
        self.events.extend(released.drain(..).map(Event::Sent));
        self.released = released;
        let Some(connection) = self.get(id) else { return };
        if connection.send_in_flight || connection.state != State::Open || connection.pieces.is_empty() {
            return;
        }
        let token = Token { source: Source::TcpSend, index: id.index, generation: id.generation }.to_bits();
        let (mut buffers, mut bytes) = ([const { None }; MAX_VECTORS], 0);
        let mut count = 0;
        for piece in connection.pieces.iter().take(MAX_VECTORS) {
            if bytes >= SEND_BYTES {
                break;
            }
            let part = piece.buffer.bytes().min(SEND_BYTES - bytes);
            buffers[count] = Some(piece.buffer.slice(0, part));
            bytes += part;
            count += 1;
        }
        // One piece is the common case of small frames: no vector is built for it.
        let queued = match (&buffers[0], count) {
            (Some(only), 1) => ring.send(connection.stream.as_fd(), core::slice::from_ref(only), token),
            _ => {
                let list: Vec<IoBuf> = buffers.into_iter().flatten().collect();
                ring.send(connection.stream.as_fd(), &list, token)
            }
        };
        match queued {
            Ok(()) => connection.send_in_flight = true,
            // The ring is full: flushed again by the host's next round.
            Err(_) if !connection.dirty => {
                connection.dirty = true;
                self.dirty.push_back(id.index);
            }
            Err(_) => {}
        }
    }

    pub(super) fn send_done(&mut self, ring: &mut Ring, id: ConnectionId, result: i32) {
        let Some(connection) = self.get(id) else { return };
        connection.send_in_flight = false;
        if result <= 0 {
            let why = if result == 0 { Gone::Peer } else { Gone::Kernel(-result) };
            self.close(ring, id, why);
            return;
        }
        let mut left = result as usize;
        let mut sent = Vec::new();
        while left > 0 {
            let piece = connection.pieces.front_mut().expect("the kernel sent no more than it was given");
            let part = piece.buffer.bytes().min(left);
            piece.buffer.advance(part);
            left -= part;
            if piece.buffer.is_empty() {
                sent.extend(connection.pieces.pop_front().and_then(|piece| piece.hold));
            }
        }
        let resume = connection.paused && connection.frames.len() < Limits::REPLIES_QUEUED / 2;
        let idle = connection.pieces.is_empty() && connection.frames.is_empty();
        let closing = if idle { connection.closing_after_send.take() } else { None };
        if resume {
            connection.paused = false;
        }
        self.events.extend(sent.into_iter().map(Event::Sent));
        if resume {
            self.mark_ready(id.index);
        }
        match closing {
            Some(why) => self.close(ring, id, why),
            None => self.start_send(ring, id),
        }
    }
}

impl Connection {
    fn may_gather(&self) -> bool {
        !self.send_in_flight && self.state == State::Open && self.pieces.is_empty()
    }

    /// Turns waiting frames into pieces: headers, bodies and small payloads side by side in the staging, large
    /// payloads where they are. Holds of payloads that were copied go to `released`.
    fn gather(&mut self, released: &mut Vec<u64>) {
        let (mut used, mut payload_bytes) = (0, 0);
        let mut run_start = 0;
        while let Some(frame) = self.frames.front() {
            let copied = frame.payload.as_ref().map_or(0, |payload| payload.buffers.bytes());
            let copied = if copied <= COPIED_BYTES { copied } else { 0 };
            let bytes = HEADER_BYTES + frame.body.len() + copied;
            let full = used + bytes > SEND_STAGING_BYTES || self.pieces.len() + 2 > MAX_VECTORS;
            if full || payload_bytes >= SEND_BYTES {
                break;
            }
            let Some(mut frame) = self.frames.pop_front() else { break };
            frame.sum_up();
            self.send_staging.slice(used, HEADER_BYTES).copy_in(&frame.header.encode());
            self.send_staging.slice(used + HEADER_BYTES, frame.body.len()).copy_in(&frame.body);
            if let Some(payload) = frame.payload.take() {
                let at = used + HEADER_BYTES + frame.body.len();
                used += bytes;
                payload_bytes += payload.buffers.bytes();
                if copied > 0 {
                    let mut at = at;
                    for buffer in payload.buffers.as_slice() {
                        copy(&self.send_staging.slice(at, buffer.bytes()), buffer);
                        at += buffer.bytes();
                    }
                    released.extend(payload.hold);
                } else {
                    let run = self.send_staging.slice(run_start, used - run_start);
                    self.pieces.push_back(Piece { buffer: run, hold: None });
                    let pieces = payload.buffers.as_slice().iter();
                    self.pieces.extend(pieces.map(|buffer| Piece { buffer: buffer.clone(), hold: None }));
                    if let Some(last) = self.pieces.back_mut() {
                        last.hold = payload.hold;
                    }
                    run_start = used;
                }
            } else {
                used += bytes;
            }
            if self.spare_bodies.len() < 64 {
                frame.body.clear();
                self.spare_bodies.push(frame.body);
            }
        }
        if used > run_start {
            self.pieces.push_back(Piece { buffer: self.send_staging.slice(run_start, used - run_start), hold: None });
        }
    }
}

impl Frame {
    /// Fills in the checksum of a payload where one is announced and not known yet. Done as late as this, so that the
    /// kernel finds the bytes in the cache.
    fn sum_up(&mut self) {
        let Some(payload) = &self.payload else { return };
        if self.header.flags & FLAG_CHECKSUM == 0 || self.header.payload_checksum != 0 {
            return;
        }
        let mut checksum = PayloadChecksum::new();
        for buffer in payload.buffers.as_slice() {
            buffer.region().read_with(buffer.offset(), buffer.bytes(), &mut |_, part| checksum.update(part));
        }
        self.header.payload_checksum = checksum.finish();
    }
}

fn copy(to: &IoBuf, from: &IoBuf) {
    Region::copy_between(to.region(), to.offset(), from.region(), from.offset(), from.bytes());
}
