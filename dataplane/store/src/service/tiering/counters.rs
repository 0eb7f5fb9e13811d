//! Counters of the traffic between memory and SSD.

use kvplane_tier::{Reason, RecoveryReport, ScrubReport, TierStats};

use super::{Admission, Tiering, VoidCause};

/// Counters since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierCounters {
    /// Gets that were answered from the SSD.
    pub hits: u64,
    /// Gets that the SSD could not answer because the record is damaged, or was removed meanwhile.
    pub misses: u64,
    /// Objects read for gets.
    pub reads: u64,
    /// Gets that joined a read in flight.
    pub reads_shared: u64,
    /// Gets that waited because the tier had its maximum of reads in flight.
    pub reads_queued: u64,
    /// Objects that stayed in memory after they were read.
    pub promotions: u64,
    /// Objects that left memory after they were read.
    pub passed_through: u64,
    /// Objects prefetched.
    pub prefetches: u64,
    /// Prefetched objects that a get read afterwards.
    pub prefetches_used: u64,
    /// Prefetched objects that no get read in time: they left memory again.
    pub prefetches_expired: u64,
    /// Objects not prefetched for lack of room.
    pub prefetch_refusals: u64,
    /// Objects passed to the tier.
    pub writes: u64,
    /// Bytes of those objects.
    pub write_bytes: u64,
    /// Times that the tier could not accept an object at once.
    pub writes_put_off: u64,
    /// Objects not written because the backlog was full, or because they are too large.
    pub writes_skipped: u64,
    /// Objects not written because the day's budget was used up.
    pub writes_over_budget: u64,
    /// Objects whose writes failed for good.
    pub writes_failed: u64,
    /// Writes that failed and are retried.
    pub writes_retried: u64,
    /// Removals written.
    pub removals: u64,
    /// Removals that could not be written: a restart may bring the object back.
    pub removals_unwritten: u64,
    /// Objects that reclaim dropped.
    pub reclaimed: u64,
    /// Slots whose objects on the SSD were trusted at the start or when the slots came back, because no other shard can
    /// have owned them meanwhile.
    pub slots_kept: u64,
    /// Slots that came back and were reconciled with the changes of their owners meanwhile.
    pub slots_compared: u64,
    /// Slots that came back and whose changes no shard knew: their records on the SSD are void.
    pub slots_voided: u64,
    /// Objects removed because other owners had put or removed them while their slots were away.
    pub struck: u64,
    /// Damaged records that the scrubber found.
    pub quarantined: u64,
    /// Damaged records that were written again from memory.
    pub rewritten: u64,
    /// Objects removed because their slot went to another owner.
    pub swept: u64,
}

/// State of a tier at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierSnapshot {
    /// Counters of the traffic between memory and SSD.
    pub counters: TierCounters,
    /// Statistics of the tier.
    pub stats: TierStats,
    /// Objects in the backlog: queued to be written, or being written.
    pub backlog: u64,
    /// Bytes of the backlog, pinned in memory.
    pub backlog_bytes: u64,
    /// Reads in flight.
    pub reading: u64,
    /// Slots whose records are hidden until they are reconciled with another owner's changes.
    pub reconciling_slots: u64,
    /// True once recovery has read every record.
    pub is_recovered: bool,
    /// Result of recovery, once it is complete.
    pub recovered: Option<RecoveryReport>,
    /// Reason for which the tier is degraded, if it is.
    pub degraded: Option<Reason>,
    /// Reason for which the records at the start are void, if they are.
    pub voided: Option<VoidCause>,
    /// State of the scrubber.
    pub scrub: ScrubReport,
    /// Segments that an operator has requested to be free and that are not yet.
    pub wanted_free_segments: u32,
    /// Length of a segment, in bytes.
    pub segment_bytes: u64,
    /// Present admission of writes.
    pub admission: Admission,
    /// Bytes written in the last day, or since the start.
    pub day_bytes: u64,
    /// Budget of bytes a day; 0 for no limit.
    pub bytes_per_day: u64,
}

impl TierSnapshot {
    /// Returns true while recovery may still find objects: it is incomplete, and the SSD is not degraded, which would
    /// end it.
    #[must_use]
    pub const fn is_recovering(&self) -> bool {
        !self.is_recovered && self.degraded.is_none()
    }
}

impl Tiering {
    /// Returns the state of the tier. Walks its segments.
    #[must_use]
    pub fn snapshot(&self) -> TierSnapshot {
        let (ssd, budget) = (&self.ssd, &self.demotion.budget);
        let (backlog, backlog_bytes) = self.demotion.backlog();
        TierSnapshot {
            counters: ssd.counters,
            stats: ssd.tier.stats(),
            backlog: backlog as u64,
            backlog_bytes,
            reading: self.promotion.reads() as u64,
            reconciling_slots: ssd.doubts.reconciling(),
            is_recovered: ssd.tier.is_recovered(),
            recovered: self.reports.recovered,
            degraded: ssd.tier.degraded(),
            voided: self.reconciliation.voided(),
            scrub: ssd.tier.scrub_report(),
            wanted_free_segments: ssd.tier.wanted_free_segments(),
            segment_bytes: ssd.tier.config().segment_bytes,
            admission: budget.admission(),
            day_bytes: budget.day_bytes(),
            bytes_per_day: budget.bytes_per_day(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_degraded_ssd_is_not_recovering() {
        let state = |is_recovered, degraded| TierSnapshot { is_recovered, degraded, ..TierSnapshot::default() };
        assert!(state(false, None).is_recovering());
        assert!(!state(true, None).is_recovering());
        assert!(!state(false, Some(Reason::Gone)).is_recovering());
        assert!(!state(true, Some(Reason::Gone)).is_recovering());
    }
}
