//! State of a tier at a moment, for metrics and operators.

use kvplane_tier::{Reason, RecoveryReport, ScrubReport, TierStats};

use super::{Admission, TierCounters, Tiering, VoidCause};

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
        let stats = ssd.tier.stats();
        TierSnapshot {
            counters: ssd.counters,
            stats,
            backlog: backlog as u64,
            backlog_bytes,
            reading: self.promotion.reads() as u64,
            reconciling_slots: ssd.doubts.reconciling(),
            is_recovered: ssd.tier.is_recovered(),
            recovered: self.reports.recovered,
            degraded: ssd.tier.degraded(),
            voided: self.reconciliation.voided(),
            scrub: ssd.tier.scrub_report(),
            wanted_free_segments: stats.wanted_free_segments,
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
