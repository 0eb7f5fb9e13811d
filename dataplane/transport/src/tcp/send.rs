//! Frames leave: gathered into one send at a time.

use std::os::fd::AsFd;

use kvplane_proto::Limits;
use kvplane_proto::frame::HEADER_BYTES;
use kvplane_sys::{IoBuf, MAX_VECTORS, Ring};

use super::Tcp;
use super::connection::{Connection, Piece, SEND_STAGING_BYTES, State};
use crate::token::{Source, Token};
use crate::types::{ConnectionId, Event, Gone};

/// Payload bytes of one send. Bounds how long one connection keeps the shard's thread in the kernel.
const SEND_BYTES: usize = 1 << 20;

impl Tcp {
    pub(super) fn start_send(&mut self, ring: &mut Ring, id: ConnectionId) {
        let Some(connection) = self.get(id) else { return };
        if connection.send_in_flight || connection.state != State::Open {
            return;
        }
        if connection.pieces.is_empty() {
            connection.gather();
        }
        if connection.pieces.is_empty() {
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
    /// Turns waiting frames into pieces: headers and bodies side by side in the staging, payloads where they are.
    fn gather(&mut self) {
        let (mut used, mut payload_bytes) = (0, 0);
        let mut run_start = 0;
        while let Some(frame) = self.frames.front() {
            let bytes = HEADER_BYTES + frame.body.len();
            let full = used + bytes > SEND_STAGING_BYTES || self.pieces.len() + 2 > MAX_VECTORS;
            if full || payload_bytes >= SEND_BYTES {
                break;
            }
            let Some(mut frame) = self.frames.pop_front() else { break };
            self.send_staging.slice(used, HEADER_BYTES).copy_in(&frame.header);
            self.send_staging.slice(used + HEADER_BYTES, frame.body.len()).copy_in(&frame.body);
            used += bytes;
            if let Some(payload) = frame.payload.take() {
                self.pieces.push_back(Piece { buffer: self.send_staging.slice(run_start, used - run_start), hold: None });
                payload_bytes += payload.buffer.bytes();
                self.pieces.push_back(Piece { buffer: payload.buffer, hold: payload.hold });
                run_start = used;
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
