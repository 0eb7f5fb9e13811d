//! Where what leaves is put side by side: headers, bodies and small payloads, for all connections of a driver.

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::{HEADER_BYTES, Header};
use kvplane_proto::{FrameFlags, Limits};

use crate::types::{OutgoingPayload, Pieces, checksum_of_pieces};

/// Bytes of the staging: the largest frame without payload, and room for small payloads: for 64 of 4 KiB with their
/// headers, half of a usual batch of gets, or each half would need two calls.
const STAGING_BYTES: usize = (576 + 16) * 1024;
const _: () = assert!(STAGING_BYTES >= HEADER_BYTES + Limits::BODY_BYTES);
/// Payloads up to this length are copied to where their header is: cheaper than another piece for the kernel.
const COPIED_BYTES: usize = 8 << 10;
/// Payloads of pieces that are shorter than this on average are copied too, as far as they fit.
const COPIED_PIECE_BYTES: usize = 2 << 10;
const COPIED_PIECES_BYTES: usize = STAGING_BYTES - HEADER_BYTES - Limits::BODY_BYTES;
/// Bodies kept for their memory, and the longest of them.
const SPARE_BODIES: usize = 64;
const SPARE_BODY_BYTES: usize = 4096;

/// A frame that waits to be sent.
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) payload: Option<OutgoingPayload>,
}

impl Frame {
    /// Pieces of memory of its payload beyond the first.
    pub(super) fn extra_pieces(&self) -> usize {
        self.payload.as_ref().map_or(0, |payload| payload.buffers.as_slice().len().saturating_sub(1))
    }
}

/// Where headers, bodies and small payloads are put side by side, for all connections of a driver.
pub(super) struct OutputStaging {
    /// Allocated with the first frame.
    bytes: Vec<u8>,
    used: usize,
    /// Bodies that have left, kept for their memory.
    spare_bodies: Vec<Vec<u8>>,
}

impl OutputStaging {
    pub(super) const fn new() -> Self {
        Self { bytes: Vec::new(), used: 0, spare_bodies: Vec::new() }
    }

    /// Begins anew: what was there has left, or is kept by a connection.
    pub(super) const fn clear(&mut self) {
        self.used = 0;
    }

    /// What is there.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    /// How much is there.
    pub(super) const fn used(&self) -> usize {
        self.used
    }

    /// Whether there is room for a frame of which so much of the payload is copied.
    pub(super) fn has_room(&self, frame: &Frame, copied: usize) -> bool {
        HEADER_BYTES + frame.body.len() + copied <= STAGING_BYTES - self.used
    }

    /// Memory for a body.
    pub(super) fn take_spare(&mut self) -> Vec<u8> {
        self.spare_bodies.pop().unwrap_or_default()
    }

    /// A body has left.
    pub(super) fn spare(&mut self, mut body: Vec<u8>) {
        if self.spare_bodies.len() < SPARE_BODIES && body.capacity() <= SPARE_BODY_BYTES {
            body.clear();
            self.spare_bodies.push(body);
        }
    }

    /// Memory kept for bodies.
    #[cfg(test)]
    pub(super) fn spare_bytes(&self) -> usize {
        self.spare_bodies.iter().map(Vec::capacity).sum()
    }

    /// Puts a frame there, with its payload if that is to be `copied`. There is room for it.
    pub(super) fn put(&mut self, frame: &mut Frame, copied: bool) {
        if self.bytes.is_empty() {
            self.bytes = vec![0; STAGING_BYTES];
        }
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
                sum = sums.then(|| checksum_of_pieces(payload.buffers.as_slice()));
            }
        }
        if let Some(sum) = sum {
            frame.header.payload_checksum = sum;
        }
        self.bytes[at..body_at].copy_from_slice(&frame.header.encode());
    }
}

/// How much of a payload is copied to where its header is: all or nothing.
pub(super) fn copied_bytes(pieces: &Pieces) -> usize {
    let bytes = pieces.bytes();
    let short = match pieces {
        Pieces::One(_) => false,
        Pieces::Many(buffers) => bytes <= COPIED_PIECES_BYTES && bytes / COPIED_PIECE_BYTES < buffers.len(),
    };
    if bytes <= COPIED_BYTES || short { bytes } else { 0 }
}
