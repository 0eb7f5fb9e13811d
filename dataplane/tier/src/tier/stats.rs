//! What is counted, and how the tier is.

use crate::contents::SegmentState;
use crate::log::Log;
use crate::reclaim::Reclaim;
use crate::types::Harm;

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
    /// Operations that the device could not write.
    pub write_faults: u64,
    /// Records that were not whole.
    pub harm: Harm,
    /// Completions that nobody waited for.
    pub stale_completions: u64,
    /// Removals that the index holds until recovery is over.
    pub tombstones_held: u64,
}

impl TierStats {
    /// Walks the segments.
    pub(super) fn of(log: &Log, reclaim: &Reclaim) -> Self {
        let (contents, config) = (&log.contents, log.device.config());
        let segments = || contents.segments.iter().map(|(_, segment)| segment.state);
        let count = |is: fn(SegmentState) -> bool| segments().filter(|state| is(*state)).count() as u32;
        let with_records = u64::from(count(SegmentState::has_records));
        let (calls, writes, reads) = (log.counts(), log.writer.counts(), log.reads.counts());
        let reclaimed = reclaim.counts();
        Self {
            objects: contents.objects(),
            live_bytes: contents.live_bytes(),
            segments: config.segments,
            open_segments: count(|state| matches!(state, SegmentState::Open | SegmentState::Sealing)),
            dead_bytes: (with_records * config.segment_bytes).saturating_sub(contents.live_bytes()),
            free_segments: contents.segments.free_count(),
            bad_segments: calls.bad_segments,
            sealed_segments: count(|state| state == SegmentState::Sealed),
            puts: calls.puts,
            put_bytes: calls.put_bytes,
            put_refusals: calls.put_refusals,
            bad_payloads: calls.bad_payloads,
            removes: calls.removes,
            tombstones: writes.tombstones,
            hits: reads.hits,
            hit_bytes: reads.hit_bytes,
            misses: reads.misses,
            groups: writes.groups,
            written_bytes: writes.bytes,
            flushes: log.writer.flushes.count(),
            sealed: log.writer.seals.sealed(),
            reclaims: reclaimed.reclaims,
            reinserted: reclaimed.reinserted,
            reinserted_bytes: reclaimed.reinserted_bytes,
            evicted: contents.evicted(),
            write_faults: calls.write_faults,
            harm: contents.harm(),
            stale_completions: log.device.stale_completions(),
            tombstones_held: contents.tombstones_held(),
        }
    }
}
