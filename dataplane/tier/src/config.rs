//! Sizes and limits of a tier, and the layout of its staging area. All its memory follows from them.

use kvplane_proto::ConfigError;
use kvplane_proto::narrowing::to_u32;

use crate::format::{
    FIRST_SEGMENT_OFFSET, FooterPage, OWNERSHIP_IO_BYTES, RECORD_HEADER_BYTES, SUPERBLOCK_IO_BYTES, Shape, UNIT_BYTES,
};
use crate::ops::PRIORITIES;

/// Alignment of the parts of the staging area.
pub const STAGING_ALIGN_BYTES: u64 = 4_096;

/// Longest key whose length fits in an entry of the index.
pub(crate) const KEY_BYTES_MOST: u16 = (1 << 13) - 1;
/// Longest payload whose length fits in an entry of the index.
pub(crate) const PAYLOAD_BYTES_MOST: u32 = (1 << 30) - 1;
/// Largest device whose offsets fit in an entry of the index.
pub(crate) const DEVICE_BYTES_MOST: u64 = UNIT_BYTES << 40;

/// Average size of an object, unless configured.
pub const OBJECT_BYTES: u32 = 32 << 10;

/// The limits of a tier. The first seven are properties of the device's content: they must be the same at every start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierConfig {
    /// Unit of the device's reads and writes: a power of two from 512 to 4096.
    pub block_bytes: u32,
    /// Bytes of a segment: a multiple of 4096.
    pub segment_bytes: u64,
    /// Number of segments.
    pub segments: u32,
    /// Bytes of a page of a footer: a multiple of the block.
    pub footer_page_bytes: u32,
    /// Payload under one checksum: a power of two from 64 KiB to 1 MiB.
    pub chunk_bytes: u32,
    /// Largest object.
    pub max_object_bytes: u32,
    /// Longest key.
    pub max_key_bytes: u16,
    /// Alignment of memory for direct I/O: a power of two up to the block.
    pub memory_align_bytes: u32,
    /// Payloads of at least this size are written without a copy, in whole blocks. Shorter ones are copied; those that
    /// fill their blocks to eight ninths take whole blocks too, the others are packed.
    pub extent_bytes: u32,
    /// Most pages of one footer: limits the records of a segment.
    pub footer_pages: u32,
    /// Number of objects that the index has room for.
    pub max_records: u32,
    /// Seed of the index's hash function. Draw it at start.
    pub hash_seed: u64,
    /// A group of records is written when it has this many bytes,
    pub group_bytes: u32,
    /// or when its first record has waited this long, or when no other group is being written.
    pub group_delay_ns: u64,
    /// Groups that may be in flight.
    pub groups: u32,
    /// Most time from a write to its flush, even if no call waits for it.
    pub sync_interval_ns: u64,
    /// True if the driver makes single writes durable (FUA); then a group with a durable put needs no flush.
    pub durable_writes: bool,
    /// Gets that may be in flight.
    pub max_reads: u32,
    /// Puts and removals that may be in flight: their acknowledgement is outstanding, or not taken yet.
    pub max_waiters: u32,
    /// Most bytes of one block operation: a multiple of 4096.
    pub max_op_bytes: u32,
    /// Operations of each priority that may be in flight.
    pub ops_in_flight: [u16; PRIORITIES],
    /// Bytes of one read of recovery or reclaim: a multiple of 4096.
    pub scan_bytes: u32,
    /// Scan reads that recovery has in flight.
    pub scan_buffers: u32,
    /// Memory for records that reclaim moves to the end of the log.
    pub copy_bytes: u32,
    /// Records that reclaim may move at once.
    pub max_moves: u32,
    /// Share of a reclaimed segment that may be rewritten, in percent.
    pub reinsert_percent: u8,
    /// Hits since a record was written that make it hot.
    pub hot_hits: u8,
    /// Reclaim starts when fewer segments are free.
    pub free_segments_low: u32,
    /// Segments with write errors that are tolerated before the tier takes no more writes.
    pub max_bad_segments: u32,
}

impl TierConfig {
    /// Returns limits that suit a device of `device_bytes` with blocks of `block_bytes`: segments of 128 MiB, or a 64th
    /// of a small device; a record for every [`OBJECT_BYTES`].
    #[must_use]
    pub fn for_device(device_bytes: u64, block_bytes: u32) -> Self {
        let usable = device_bytes.saturating_sub(FIRST_SEGMENT_OFFSET);
        let segment_bytes = (usable / 64).clamp(4 << 20, 128 << 20) / (1 << 20) * (1 << 20);
        let segments = (usable / segment_bytes).min(1 << 20) as u32;
        let max_object_bytes = (segment_bytes / 2).min(16 << 20) as u32;
        Self {
            block_bytes,
            segment_bytes,
            segments,
            footer_page_bytes: 16 << 10,
            chunk_bytes: 256 << 10,
            max_object_bytes,
            max_key_bytes: 4400,
            memory_align_bytes: block_bytes,
            extent_bytes: 32 << 10,
            footer_pages: to_u32(segment_bytes / 32 / (16 << 10)),
            max_records: records_for(usable, OBJECT_BYTES),
            hash_seed: 0,
            group_bytes: 256 << 10,
            group_delay_ns: 200_000,
            groups: 32,
            sync_interval_ns: 100_000_000,
            durable_writes: false,
            max_reads: 256,
            max_waiters: 4096,
            // An object of 1 MiB and its head in one operation.
            max_op_bytes: (1 << 20) + (64 << 10),
            ops_in_flight: [128, 64, 32, 32],
            scan_bytes: 256 << 10,
            scan_buffers: 16,
            copy_bytes: 2 * max_object_bytes,
            max_moves: 32,
            reinsert_percent: 50,
            hot_hits: 1,
            free_segments_low: 3,
            max_bad_segments: (segments / 4).min(8),
        }
    }

    /// Sizes the index for objects of `bytes` on average. Each costs [`crate::BYTES_PER_OBJECT`] of memory. Objects
    /// that the index has no room for are reclaimed early, even if the device has free space. May differ at every
    /// start.
    #[must_use]
    pub fn with_object_bytes(self, bytes: u32) -> Self {
        let usable = u64::from(self.segments) * self.segment_bytes;
        Self { max_records: records_for(usable, bytes), ..self }
    }

    /// Returns true if a payload of this size takes whole blocks, so that it is read alone.
    #[must_use]
    pub const fn has_blocks_of_its_own(&self, bytes: u32) -> bool {
        let padding = bytes.next_multiple_of(self.block_bytes) - bytes;
        bytes >= self.extent_bytes || padding <= bytes / 8
    }

    /// Returns the bytes of the device that are used.
    #[must_use]
    pub const fn device_bytes(&self) -> u64 {
        FIRST_SEGMENT_OFFSET + self.segments as u64 * self.segment_bytes
    }

    /// Returns the bytes of the staging area that the host provides, aligned to [`STAGING_ALIGN_BYTES`].
    #[must_use]
    pub fn staging_bytes(&self) -> u64 {
        Layout::of(self).bytes
    }

    /// Validates every field.
    ///
    /// # Errors
    /// The first field that is out of range, with the numbers.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_units()?;
        let block = u64::from(self.block_bytes);
        within(
            "footer_pages",
            self.footer_pages.into(),
            1,
            self.segment_bytes / 2 / u64::from(self.footer_page_bytes),
        )?;
        within("segments", self.segments.into(), 4, 1 << 20)?;
        within("device_bytes", self.device_bytes(), 0, DEVICE_BYTES_MOST)?;
        within("max_key_bytes", self.max_key_bytes.into(), 0, KEY_BYTES_MOST.into())?;
        within("extent_bytes", self.extent_bytes.into(), block, self.chunk_bytes.into())?;
        let footer = u64::from(self.footer_pages) * u64::from(self.footer_page_bytes);
        // Beside the largest object: the segment's header, a tombstone and its twin with their padding.
        let rest = footer + 6 * block + Layout::head_most(self).next_multiple_of(block);
        let largest = self.segment_bytes.saturating_sub(rest).min(PAYLOAD_BYTES_MOST.into());
        within("max_object_bytes", self.max_object_bytes.into(), 1, largest)?;
        within("max_records", self.max_records.into(), 1, 1 << 30)?;
        within("group_bytes", self.group_bytes.into(), block, 64 << 20)?;
        within("groups", self.groups.into(), 2, 4_096)?;
        within("max_reads", self.max_reads.into(), 1, 1 << 16)?;
        within("max_waiters", self.max_waiters.into(), 2, 1 << 20)?;
        for limit in self.ops_in_flight {
            within("ops_in_flight", limit.into(), 1, 4_096)?;
        }
        let least = Layout::head_most(self).next_multiple_of(4_096) + 4_096;
        within("scan_bytes", self.scan_bytes.into(), least.max(self.footer_page_bytes.into()), 64 << 20)?;
        within("scan_buffers", self.scan_buffers.into(), 1, 1_024)?;
        within("copy_bytes", self.copy_bytes.into(), Layout::copy_most(self), 1 << 30)?;
        within("max_moves", self.max_moves.into(), 1, 1_024)?;
        within("reinsert_percent", self.reinsert_percent.into(), 0, 75)?;
        within("free_segments_low", self.free_segments_low.into(), 2, u64::from(self.segments) - 2)?;
        within("max_bad_segments", self.max_bad_segments.into(), 0, self.segments.into())
    }

    fn validate_units(&self) -> Result<(), ConfigError> {
        within("block_bytes", self.block_bytes.into(), 512, 4_096)?;
        power("block_bytes", self.block_bytes)?;
        let block = u64::from(self.block_bytes);
        within("memory_align_bytes", self.memory_align_bytes.into(), 1, block)?;
        power("memory_align_bytes", self.memory_align_bytes)?;
        within("segment_bytes", self.segment_bytes, 64 << 10, 64 << 30)?;
        multiple("segment_bytes", self.segment_bytes, 4_096)?;
        within("footer_page_bytes", self.footer_page_bytes.into(), 512, 1 << 20)?;
        multiple("footer_page_bytes", self.footer_page_bytes.into(), block)?;
        within("chunk_bytes", self.chunk_bytes.into(), 64 << 10, 1 << 20)?;
        power("chunk_bytes", self.chunk_bytes)?;
        within("max_op_bytes", self.max_op_bytes.into(), 4_096, 1 << 30)?;
        multiple("max_op_bytes", self.max_op_bytes.into(), 4_096)?;
        multiple("scan_bytes", self.scan_bytes.into(), 4_096)
    }
}

fn records_for(device_bytes: u64, object_bytes: u32) -> u32 {
    (device_bytes / u64::from(object_bytes.max(1))).clamp(1024, 1 << 30) as u32
}

const fn within(field: &'static str, value: u64, least: u64, most: u64) -> Result<(), ConfigError> {
    if least <= value && value <= most {
        return Ok(());
    }
    Err(ConfigError::OutOfRange { field, value, least, most })
}

const fn multiple(field: &'static str, value: u64, unit: u64) -> Result<(), ConfigError> {
    if value.is_multiple_of(unit) { Ok(()) } else { Err(ConfigError::NotMultiple { field, value, unit }) }
}

const fn power(field: &'static str, value: u32) -> Result<(), ConfigError> {
    if value.is_power_of_two() { Ok(()) } else { Err(ConfigError::NotMultiple { field, value: value as u64, unit: 0 }) }
}

/// Offsets and lengths of the parts of the staging area.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) superblocks: u64,
    pub(crate) notes: u64,
    pub(crate) header: u64,
    pub(crate) blank: u64,
    pub(crate) page: u64,
    pub(crate) groups: u64,
    pub(crate) group_bytes: u32,
    pub(crate) reads: u64,
    pub(crate) read_bytes: u32,
    pub(crate) scans: u64,
    pub(crate) copies: u64,
    pub(crate) scrub: u64,
    pub(crate) bytes: u64,
}

impl Layout {
    pub(crate) fn of(config: &TierConfig) -> Self {
        let block = u64::from(config.block_bytes);
        let mut end = 0;
        let mut take = |bytes: u64| {
            let at = end;
            end += bytes.next_multiple_of(STAGING_ALIGN_BYTES);
            at
        };
        let packed = Self::packed_most(config).next_multiple_of(block) + block;
        let head = Self::head_most(config).next_multiple_of(block) + block;
        let read_bytes = packed.max(head).next_multiple_of(STAGING_ALIGN_BYTES);
        let group_bytes = u64::from(config.group_bytes).next_multiple_of(block) + packed + head + 4 * block;
        let group_bytes = group_bytes.next_multiple_of(STAGING_ALIGN_BYTES);
        Self {
            superblocks: take(2 * u64::from(SUPERBLOCK_IO_BYTES)),
            notes: take(2 * u64::from(OWNERSHIP_IO_BYTES)),
            header: take(block),
            blank: take(block),
            page: take(config.footer_page_bytes.into()),
            groups: take(group_bytes * u64::from(config.groups)),
            group_bytes: to_u32(group_bytes),
            reads: take(read_bytes * u64::from(Self::reads_most(config))),
            read_bytes: to_u32(read_bytes),
            scans: take(u64::from(config.scan_bytes) * u64::from(config.scan_buffers)),
            copies: take(config.copy_bytes.into()),
            scrub: take(Self::copy_most(config)),
            bytes: end,
        }
    }

    /// Returns the number of records that may be read at once: for gets, for reclaim, and one for the scrubber.
    pub(crate) const fn reads_most(config: &TierConfig) -> u32 {
        config.max_reads + config.max_moves + 1
    }

    /// Returns the bytes before the payload of the largest object with the longest key.
    pub(crate) fn head_most(config: &TierConfig) -> u64 {
        let shape = Shape {
            payload_bytes: config.max_object_bytes,
            key_bytes: config.max_key_bytes,
            extent: true,
            names_parts: false,
            copied: false,
        };
        shape.head_bytes(config.chunk_bytes)
    }

    /// Returns the bytes of the largest packed record.
    pub(crate) fn packed_most(config: &TierConfig) -> u64 {
        let head = RECORD_HEADER_BYTES as u64 + u64::from(config.max_key_bytes);
        (head + u64::from(config.extent_bytes)).next_multiple_of(UNIT_BYTES)
    }

    /// Returns the bytes of memory that a copy of the largest object takes.
    pub(crate) fn copy_most(config: &TierConfig) -> u64 {
        u64::from(config.max_object_bytes).next_multiple_of(STAGING_ALIGN_BYTES)
    }

    /// Returns the number of entries that the footer of one segment holds.
    pub(crate) fn entries_most(config: &TierConfig) -> u32 {
        FooterPage::capacity(config.footer_page_bytes) * config.footer_pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_for_small_and_large_devices() {
        for device_bytes in [32 << 20, 1 << 30, 100 << 30, 8 << 40] {
            for block_bytes in [512, 4096] {
                let config = TierConfig::for_device(device_bytes, block_bytes);
                assert_eq!(config.validate(), Ok(()), "{device_bytes} B");
                assert!(config.device_bytes() <= device_bytes);
            }
        }
        let small = TierConfig::for_device(1 << 30, 4096).with_object_bytes(4096);
        assert_eq!((small.validate(), small.max_records >= 250_000), (Ok(()), true), "objects of a block");
        let config = TierConfig::for_device(1 << 40, 4096);
        assert!(config.staging_bytes() < 96 << 20, "{} B", config.staging_bytes());
    }

    #[test]
    fn a_bad_field_is_named_with_its_numbers() {
        let good = TierConfig::for_device(1 << 30, 4096);
        let message = |config: TierConfig| config.validate().unwrap_err().to_string();
        assert_eq!(
            message(TierConfig { block_bytes: 1000, ..good.clone() }),
            "block_bytes is 1000: set it to a power of two"
        );
        assert_eq!(
            message(TierConfig { segment_bytes: (16 << 20) + 1, ..good.clone() }),
            "segment_bytes is 16777217: set it to a multiple of 4096"
        );
        assert!(message(TierConfig { max_object_bytes: 16 << 20, ..good.clone() }).starts_with("max_object_bytes is"));
        assert!(message(TierConfig { copy_bytes: 4096, ..good }).starts_with("copy_bytes is 4096: set it between"));
    }
}
