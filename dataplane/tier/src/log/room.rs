//! Room that a record needs, and room that is taken in a segment.

use crate::config::Layout;
use crate::device::Device;
use crate::format::{RECORD_HEADER_BYTES, Shape, UNIT_BYTES};

/// Bytes of a tombstone on the device.
pub(super) const TOMBSTONE_BYTES: u64 = (RECORD_HEADER_BYTES as u64).next_multiple_of(UNIT_BYTES);

/// Room that a record needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Need {
    pub(super) device_bytes: u64,
    pub(super) buffer_bytes: u64,
    pub(super) entries: u32,
    pub(super) tombstones: u32,
}

/// Reason why there is no room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NoRoom {
    /// No buffer, list or prepared segment is free: transient.
    Busy,
    /// No segment is free: reclaim has to free one.
    Full,
}

impl Need {
    /// Room for a single tombstone.
    pub(super) const TOMBSTONE: Self =
        Self { device_bytes: TOMBSTONE_BYTES, buffer_bytes: TOMBSTONE_BYTES, entries: 1, tombstones: 1 };

    /// Returns the room for a record of this shape, with or without a tombstone before it.
    pub(crate) const fn of(shape: Shape, tombstone: bool, device: &Device) -> Self {
        let (config, block) = (device.config(), device.block());
        let most = shape.most_bytes(config.chunk_bytes, config.block_bytes);
        let mut need = Self { device_bytes: most, buffer_bytes: most, entries: 1, tombstones: 0 };
        // Only copied bytes need a buffer: of a lent payload, the last incomplete block.
        if is_lent(shape, device) {
            need.buffer_bytes -= shape.payload_room(config.block_bytes) - block;
        }
        if tombstone {
            let bytes = if shape.extent { block } else { TOMBSTONE_BYTES };
            need.device_bytes += bytes;
            need.buffer_bytes += bytes;
            need.entries += 1;
            need.tombstones += 1;
        }
        need
    }
}

/// Returns true if a payload of this length is written directly from the caller's memory.
pub(super) const fn is_lent(shape: Shape, device: &Device) -> bool {
    shape.payload_bytes >= device.config().extent_bytes
}

/// Returns the bytes of the twins of this many tombstones, in blocks of their own.
pub(super) fn twins_bytes(tombstones: u32, block: u64) -> u64 {
    (u64::from(tombstones) * TOMBSTONE_BYTES).next_multiple_of(block)
}

/// Returns the bytes that reclaim of a segment frees: the segment without its header and the longest footer.
pub(crate) const fn segment_room(device: &Device) -> u64 {
    let config = device.config();
    let footer = config.footer_pages as u64 * config.footer_page_bytes as u64;
    config.segment_bytes - device.block() - footer
}

/// Returns the taken part of a segment, in bytes of [`segment_room`]: of its space or of its footer, whichever is more.
/// Counts whole blocks, as the rest of a block may never be used.
pub(super) fn segment_taken(end: u64, entries: usize, device: &Device) -> u64 {
    let listed = u64::from(Layout::entries_most(device.config()));
    let room = segment_room(device);
    let of_footer = (entries as u64 * room).div_ceil(listed);
    (end.next_multiple_of(device.block()) - device.block()).max(of_footer).min(room)
}
