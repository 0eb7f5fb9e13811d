//! Limits of a shard's shared tier, and the policy of uploads.

/// Objects that are worth an upload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UploadPolicy {
    /// Those that were read this many times lately.
    Read {
        /// Number of gets.
        times: u8,
    },
    /// All.
    All,
}

/// Settings of a shard's shared tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedConfig {
    /// Objects that are uploaded.
    pub upload: UploadPolicy,
    /// Length at which a pack is written. The longest object that is uploaded has half of it.
    pub pack_bytes: u64,
    /// Longest time for which an object waits in a pack that is not full, in nanoseconds.
    pub flush_ns: u64,
    /// Most bytes of packs of this shard in all its incarnations; beyond them the oldest pack is dropped. 0 for no
    /// limit.
    pub most_bytes: u64,
    /// Lifetime of a pack, by the store's own clock, in milliseconds. 0 for no limit.
    pub lifetime_ms: u64,
    /// Most objects in the index.
    pub most_objects: usize,
}

/// Shortest packs, longest packs: an entry's offset has 32 bits.
pub const PACK_BYTES: core::ops::RangeInclusive<u64> = 64 << 10..=1 << 30;

impl Default for SharedConfig {
    fn default() -> Self {
        Self {
            upload: UploadPolicy::Read { times: 1 },
            pack_bytes: 16 << 20,
            flush_ns: 5_000_000_000,
            most_bytes: 0,
            lifetime_ms: 7 * 24 * 3_600_000,
            most_objects: 1 << 20,
        }
    }
}

impl SharedConfig {
    /// Returns the length of the longest object that is uploaded, its tail included.
    #[must_use]
    pub const fn object_bytes_most(&self) -> u64 {
        self.pack_bytes / 2
    }
}

/// Bytes of object entries that are processed in one step: some 100 microseconds.
pub(crate) const STEP_ENTRIES: usize = 2048;
/// Slots that are purged in one step.
pub(crate) const STEP_SLOTS: usize = 32;
/// Packs after a checkpoint until the next one.
pub(crate) const CHECKPOINT_PACKS: u64 = 64;
/// Most reads in flight, and their bytes.
pub(crate) const READS_MOST: usize = 32;
/// See [`READS_MOST`].
pub(crate) const READ_BYTES_MOST: u64 = 64 << 20;
/// Bytes of a pack's end that are read first; most indexes are no longer.
pub(crate) const PACK_END_BYTES: u64 = 64 << 10;
/// Most deletions that wait while the store does not carry them out.
pub(crate) const DELETES_MOST: usize = 1 << 14;
/// Most removals of objects whose slot is being taken over: beyond it, the store's contents of these slots are void.
pub(crate) const MASKED_MOST: usize = 1 << 16;
/// Most removals in one pack: beyond it they are refused until it is written.
pub(crate) const REMOVALS_MOST: usize = 1 << 16;
/// Time for which a live former owner may take to release its slots, in nanoseconds.
pub(crate) const RELEASE_WAIT_NS: u64 = 60_000_000_000;
/// Time between two looks at its manifest meanwhile.
pub(crate) const RELEASE_STEP_NS: u64 = 500_000_000;
/// Operations of a takeover that the store may fail, over an hour if it fails all the while.
pub(crate) const STORE_TRIES: u32 = 128;
/// Longest wait of a takeover for a store that fails, in nanoseconds.
pub(crate) const STORE_WAIT_NS: u64 = 30_000_000_000;
/// Attempts to read a former owner's objects from a store that works.
pub(crate) const SOURCE_TRIES: u32 = 6;
/// Time between two checks of lifetimes and of the number of bytes, in nanoseconds.
pub(crate) const SWEEP_EVERY_NS: u64 = 10_000_000_000;
/// Time between two searches for streams whose owners are gone, in nanoseconds.
pub(crate) const CLEAN_EVERY_NS: u64 = 3_600_000_000_000;
