//! Counters and quantities of a tier.

use crate::contents::SegmentState;
use crate::log::Log;
use crate::reclaim::Reclaim;
use crate::types::DamageCounters;
use kvplane_proto::narrowing::length_u32;

/// Counters since the start, and current quantities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Objects in the index.
    pub objects: u32,
    /// Bytes of live records on the device.
    pub live_bytes: u64,
    /// Segments of the device.
    pub segments: u32,
    /// Segments that take records, or whose records and footer are being written.
    pub open_segments: u32,
    /// Bytes of segments with records that are not in live records.
    pub dead_bytes: u64,
    /// Segments without records.
    pub free_segments: u32,
    /// Segments with write errors.
    pub bad_segments: u32,
    /// Segments in use that have a footer.
    pub sealed_segments: u32,
    /// Puts accepted.
    pub puts: u64,
    /// Bytes of their payloads.
    pub put_bytes: u64,
    /// Puts refused because there was no room.
    pub put_refusals: u64,
    /// Puts refused because the payload did not match its writer's checksum.
    pub bad_payloads: u64,
    /// Removals accepted.
    pub removes: u64,
    /// Tombstones appended, including those of replaced objects.
    pub tombstones: u64,
    /// Gets that returned an object.
    pub hits: u64,
    /// Bytes of these objects.
    pub hit_bytes: u64,
    /// Gets of digests that are not in the tier.
    pub misses: u64,
    /// Groups written.
    pub groups: u64,
    /// Bytes of these groups: divided by `put_bytes`, the write amplification.
    pub written_bytes: u64,
    /// Flushes submitted.
    pub flushes: u64,
    /// Segments sealed.
    pub sealed: u64,
    /// Segments reclaimed.
    pub reclaims: u64,
    /// Records rewritten by reclaim.
    pub reinserted: u64,
    /// Bytes of their payloads.
    pub reinserted_bytes: u64,
    /// Objects evicted by reclaim.
    pub evicted: u64,
    /// Operations that the device failed to write.
    pub write_faults: u64,
    /// Records that were not whole.
    pub damage: DamageCounters,
    /// Completions of unknown operations.
    pub stale_completions: u64,
    /// Removals that the index holds until recovery is complete.
    pub tombstones_held: u64,
    /// Free segments that a caller requested; 0 if they are there, or there is no request.
    pub wanted_free_segments: u32,
}

impl TierStats {
    /// Collects the counters. Walks the segments.
    pub(super) fn of(log: &Log, reclaim: &Reclaim) -> Self {
        let (contents, config) = (&log.contents, log.device.config());
        let segments = || contents.segments.iter().map(|(_, segment)| segment.state);
        let count = |is: fn(SegmentState) -> bool| length_u32(segments().filter(|state| is(*state)).count());
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
            damage: contents.damage(),
            stale_completions: log.device.stale_completions(),
            tombstones_held: contents.tombstones_held(),
            wanted_free_segments: reclaim.wanted_free(),
        }
    }
}
