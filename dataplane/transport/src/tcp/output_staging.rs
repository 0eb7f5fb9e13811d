//! Send staging of a driver, shared by all of its connections: collects headers, bodies and small payloads.

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::{HEADER_BYTES, Header};
use kvplane_proto::{FrameFlags, Limits};

use crate::types::{OutgoingPayload, Pieces, checksum_of_pieces};

/// Size of the staging in bytes: the largest frame without payload, plus room for small payloads: for 64 of 4 KiB with
/// their headers, half of a usual batch of gets; otherwise each half would need two calls.
const STAGING_BYTES: usize = (576 + 16) * 1024;
const _: () = assert!(STAGING_BYTES >= HEADER_BYTES + Limits::BODY_BYTES);
/// Payloads up to this length are copied next to their header: cheaper than another piece for the kernel.
const COPIED_BYTES: usize = 8 << 10;
/// Payloads whose pieces are shorter than this on average are copied too, as far as they fit.
const COPIED_PIECE_BYTES: usize = 2 << 10;
const COPIED_PIECES_BYTES: usize = STAGING_BYTES - HEADER_BYTES - Limits::BODY_BYTES;
/// Limits of the recycled body buffers: their number, and the capacity of each in bytes.
const SPARE_BODIES: usize = 64;
const SPARE_BODY_BYTES: usize = 4096;

/// A queued frame.
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) payload: Option<OutgoingPayload>,
}

impl Frame {
    /// Returns the number of pieces of its payload beyond the first.
    pub(super) fn extra_pieces(&self) -> usize {
        self.payload.as_ref().map_or(0, |payload| payload.buffers.as_slice().len().saturating_sub(1))
    }
}

/// Send staging: headers, bodies and small payloads side by side, shared by all connections of a driver.
pub(super) struct OutputStaging {
    /// Allocated with the first frame.
    bytes: Vec<u8>,
    used: usize,
    /// Recycled buffers of sent bodies.
    spare_bodies: Vec<Vec<u8>>,
}

impl OutputStaging {
    pub(super) const fn new() -> Self {
        Self { bytes: Vec::new(), used: 0, spare_bodies: Vec::new() }
    }

    /// Empties the staging: its contents are sent, or were moved to a connection.
    pub(super) const fn clear(&mut self) {
        self.used = 0;
    }

    /// Returns the contents.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    /// Returns the length of the contents, in bytes.
    pub(super) const fn used(&self) -> usize {
        self.used
    }

    /// Returns true if there is room for a frame of whose payload `copied` bytes are copied.
    pub(super) fn has_room(&self, frame: &Frame, copied: usize) -> bool {
        HEADER_BYTES + frame.body.len() + copied <= STAGING_BYTES - self.used
    }

    /// Returns a buffer for a body.
    pub(super) fn take_spare(&mut self) -> Vec<u8> {
        self.spare_bodies.pop().unwrap_or_default()
    }

    /// Recycles the buffer of a sent body.
    pub(super) fn spare(&mut self, mut body: Vec<u8>) {
        if self.spare_bodies.len() < SPARE_BODIES && body.capacity() <= SPARE_BODY_BYTES {
            body.clear();
            self.spare_bodies.push(body);
        }
    }

    /// Returns the memory of recycled buffers, in bytes.
    #[cfg(test)]
    pub(super) fn spare_bytes(&self) -> usize {
        self.spare_bodies.iter().map(Vec::capacity).sum()
    }

    /// Appends a frame, with its payload if that is to be `copied`. The caller has checked that there is room.
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
                // Checksums the private copy.
                sum = sums.then(|| payload_checksum(&self.bytes[payload_at..self.used]));
            } else {
                // Computed as late as this, so that the kernel finds the bytes in the cache.
                sum = sums.then(|| checksum_of_pieces(payload.buffers.as_slice()));
            }
        }
        if let Some(sum) = sum {
            frame.header.payload_checksum = sum;
        }
        self.bytes[at..body_at].copy_from_slice(&frame.header.encode());
    }
}

/// Returns the number of bytes of a payload that are copied next to its header: all or none.
pub(super) fn copied_bytes(pieces: &Pieces) -> usize {
    let bytes = pieces.bytes();
    let short = match pieces {
        Pieces::One(_) => false,
        Pieces::Many(buffers) => bytes <= COPIED_PIECES_BYTES && bytes / COPIED_PIECE_BYTES < buffers.len(),
    };
    if bytes <= COPIED_BYTES || short { bytes } else { 0 }
}
