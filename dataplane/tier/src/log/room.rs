//! How much room a record needs, and how much of a segment is taken.

use crate::config::Layout;
use crate::device::Device;
use crate::format::{RECORD_HEADER_BYTES, Shape, UNIT_BYTES};

/// Bytes that a tombstone takes on the device.
pub(super) const TOMBSTONE_BYTES: u64 = (RECORD_HEADER_BYTES as u64).next_multiple_of(UNIT_BYTES);

/// What a record needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Need {
    pub(super) device_bytes: u64,
    pub(super) buffer_bytes: u64,
    pub(super) entries: u32,
    pub(super) tombstones: u32,
}

/// Why there is no room just now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NoRoom {
    /// Buffers, lists or a prepared segment: soon.
    Busy,
    /// Segments: after reclaim.
    Full,
}

impl Need {
    /// What a tombstone alone needs.
    pub(super) const TOMBSTONE: Self =
        Self { device_bytes: TOMBSTONE_BYTES, buffer_bytes: TOMBSTONE_BYTES, entries: 1, tombstones: 1 };

    /// What a record of this shape needs, with a tombstone before it or not.
    pub(crate) const fn of(shape: Shape, tombstone: bool, device: &Device) -> Self {
        let (config, block) = (device.config(), device.block());
        let most = shape.most_bytes(config.chunk_bytes, config.block_bytes);
        let mut need = Self { device_bytes: most, buffer_bytes: most, entries: 1, tombstones: 0 };
        // Room for what is copied: of a payload that is lent the last incomplete block.
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

/// Whether the payload of such a record goes to the device from where it is.
pub(super) const fn is_lent(shape: Shape, device: &Device) -> bool {
    shape.payload_bytes >= device.config().extent_bytes
}

/// Room for the twins of so many tombstones, in blocks of their own.
pub(super) fn twins_bytes(tombstones: u32, block: u64) -> u64 {
    (u64::from(tombstones) * TOMBSTONE_BYTES).next_multiple_of(block)
}

/// What a segment gives back: its bytes without those of the header and the longest footer.
pub(crate) const fn segment_room(device: &Device) -> u64 {
    let config = device.config();
    let footer = config.footer_pages as u64 * config.footer_page_bytes as u64;
    config.segment_bytes - device.block() - footer
}

/// How much of a segment is taken, in bytes of [`segment_room`]: of its place or of its footer, whichever is more.
/// Whole blocks, as what a block has room for yet may never come.
pub(super) fn segment_taken(end: u64, entries: usize, device: &Device) -> u64 {
    let listed = u64::from(Layout::entries_most(device.config()));
    let room = segment_room(device);
    let of_footer = (entries as u64 * room).div_ceil(listed);
    (end.next_multiple_of(device.block()) - device.block()).max(of_footer).min(room)
}
