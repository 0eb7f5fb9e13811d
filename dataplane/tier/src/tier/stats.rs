//! What is counted, and how the tier is.

use super::Tier;
use crate::segments::SegmentState;

/// Counts since the start, and how much there is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Objects in the index.
    pub objects: u32,
    /// Bytes of live records on the device.
    pub live_bytes: u64,
    /// Segments that the device is cut into.
    pub segments: u32,
    /// Segments that take records, or whose records and footer are being written.
    pub open_segments: u32,
    /// Bytes of segments with records that no live record takes.
    pub dead_bytes: u64,
    /// Segments without records.
    pub free_segments: u32,
    /// Segments with write errors.
    pub bad_segments: u32,
    /// Segments in use that have a footer.
    pub sealed_segments: u32,
    /// Puts taken.
    pub puts: u64,
    /// Bytes of their payloads.
    pub put_bytes: u64,
    /// Puts refused for want of room.
    pub put_refusals: u64,
    /// Puts refused because the payload was not what its writer stated.
    pub bad_payloads: u64,
    /// Removals taken.
    pub removes: u64,
    /// Tombstones appended, those of replaced objects included.
    pub tombstones: u64,
    /// Gets that gave an object.
    pub hits: u64,
    /// Bytes of them.
    pub hit_bytes: u64,
    /// Gets of what is not there.
    pub misses: u64,
    /// Groups written.
    pub groups: u64,
    /// Bytes of them: with `put_bytes`, the write amplification.
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Segments sealed.
    pub sealed: u64,
    /// Segments reclaimed.
    pub reclaims: u64,
    /// Records written again by reclaim.
    pub reinserted: u64,
    /// Bytes of their payloads.
    pub reinserted_bytes: u64,
    /// Objects dropped by reclaim.
    pub evicted: u64,
    /// Objects lost because the device could not write them.
    pub lost_writes: u64,
    /// Operations that the device could not write.
    pub write_faults: u64,
    /// Reads that the device could not do.
    pub read_faults: u64,
    /// Records that were damaged when they were read.
    pub damaged: u64,
    /// Records of an earlier use of their place: a write was lost.
    pub stale: u64,
    /// Records that belong elsewhere.
    pub misdirected: u64,
    /// Completions that nobody waited for.
    pub stale_completions: u64,
    /// Removals that the index holds until recovery is over.
    pub tombstones_held: u64,
}

/// Records that were not whole, since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Harm {
    /// Reads that the device could not do.
    pub unread: u64,
    /// Records that were damaged.
    pub damaged: u64,
    /// Records of an earlier use of their place.
    pub stale: u64,
    /// Records that belong elsewhere.
    pub misdirected: u64,
    /// Objects that the device could not write.
    pub unwritten: u64,
}

impl Harm {
    /// All of them.
    #[must_use]
    pub const fn records(&self) -> u64 {
        self.unread + self.damaged + self.stale + self.misdirected + self.unwritten
    }
}

impl core::fmt::Display for Harm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { unread, damaged, stale, misdirected, unwritten } = self;
        write!(
            f,
            "{} records were not whole ({damaged} damaged, {stale} old, {misdirected} misplaced, ",
            self.records()
        )?;
        write!(f, "{unread} unreadable, {unwritten} not written)")
    }
}

impl Tier {
    /// Records that were not whole, since the start.
    #[must_use]
    pub const fn harm(&self) -> Harm {
        let TierStats { read_faults, damaged, stale, misdirected, lost_writes, .. } = self.stats;
        Harm { unread: read_faults, damaged, stale, misdirected, unwritten: lost_writes }
    }

    /// Counts since the start, and how much there is now. Walks the segments.
    #[must_use]
    pub fn stats(&self) -> TierStats {
        let count =
            |is: fn(SegmentState) -> bool| self.segments.iter().filter(|(_, segment)| is(segment.state)).count() as u32;
        let with_records = u64::from(count(SegmentState::has_records));
        TierStats {
            objects: self.index.len() - self.stats.tombstones_held as u32,
            free_segments: self.segments.free_count(),
            segments: self.config.segments,
            sealed_segments: count(|state| state == SegmentState::Sealed),
            open_segments: count(|state| matches!(state, SegmentState::Open | SegmentState::Sealing)),
            dead_bytes: (with_records * self.config.segment_bytes).saturating_sub(self.stats.live_bytes),
            stale_completions: self.jobs.stale,
            ..self.stats
        }
    }

    /// Bytes written to the device in groups of records, since the start.
    #[must_use]
    pub const fn written_bytes(&self) -> u64 {
        self.stats.written_bytes
    }

    /// Whether nothing is under way: no operation, no unwritten record, nothing unsynced that somebody waits for.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let segments = self.seals.is_empty() && !self.generations.is_preparing();
        let calls = self.log.groups.is_empty() && self.reads.is_empty() && self.events.is_empty();
        self.jobs.is_idle() && self.flushes.is_idle() && segments && calls && !self.reclaim.is_active()
    }
}
