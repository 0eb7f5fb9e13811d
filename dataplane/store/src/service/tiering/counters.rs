//! What is counted between memory and SSD.

use kvplane_tier::{Reason, RecoveryReport, ScrubReport, TierStats};

use super::{Admission, Tiering, VoidCause};

/// Counted since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierCounters {
    /// Gets that memory could not answer and the SSD did.
    pub hits: u64,
    /// Gets that the SSD should have answered, but what it has is damaged, or was removed meanwhile.
    pub misses: u64,
    /// Objects read for gets.
    pub reads: u64,
    /// Gets that joined a read in flight.
    pub reads_shared: u64,
    /// Gets that waited for a place among the tier's reads.
    pub reads_queued: u64,
    /// Objects that stayed in memory after they were read.
    pub promotions: u64,
    /// Objects that did not.
    pub passed_through: u64,
    /// Objects prefetched.
    pub prefetches: u64,
    /// Of those, asked for afterwards.
    pub prefetches_used: u64,
    /// Of those, not asked for in time: they left memory again.
    pub prefetches_expired: u64,
    /// Objects not prefetched for want of room.
    pub prefetch_refusals: u64,
    /// Objects given to the tier.
    pub writes: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// Times when the tier could not take an object at once.
    pub writes_put_off: u64,
    /// Objects that were not written for want of room among those that wait, or too large.
    pub writes_skipped: u64,
    /// Objects that were not written because the day's bytes were used up.
    pub writes_over_budget: u64,
    /// Objects that could not be written, in the end.
    pub writes_failed: u64,
    /// Writes that failed and are tried again.
    pub writes_retried: u64,
    /// Removals written.
    pub removals: u64,
    /// Removals that could not be: a restart may bring the object back.
    pub removals_unwritten: u64,
    /// Objects that reclaim dropped.
    pub reclaimed: u64,
    /// Slots whose objects on the SSD were believed at the start or when they came back: nobody else can have had them
    /// meanwhile.
    pub slots_kept: u64,
    /// Slots that came back, and whoever had them meanwhile told what was changed there.
    pub slots_compared: u64,
    /// Slots that came back of which nobody knew what had changed: what the SSD had of them is void.
    pub slots_voided: u64,
    /// Objects struck out as others had put or removed them while their slots were away.
    pub struck: u64,
    /// Records that the scrubber found not to be whole.
    pub quarantined: u64,
    /// Of those, written again from memory.
    pub rewritten: u64,
    /// Objects removed because their slot went to another owner.
    pub swept: u64,
}

/// A tier at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierSnapshot {
    /// Between memory and SSD.
    pub counters: TierCounters,
    /// On the SSD.
    pub stats: TierStats,
    /// Objects that wait to be written or are being written.
    pub backlog: u64,
    /// Their bytes, pinned in memory.
    pub backlog_bytes: u64,
    /// Reads in flight.
    pub reading: u64,
    /// Whether every record on the SSD has been looked at.
    pub is_recovered: bool,
    /// What recovery found, once it is over.
    pub recovered: Option<RecoveryReport>,
    /// Why nothing is written, if so.
    pub degraded: Option<Reason>,
    /// Why what the device had at the start counts as removed, if so.
    pub voided: Option<VoidCause>,
    /// What the scrubber does and has found.
    pub scrub: ScrubReport,
    /// Segments that an operator wants to be free, while they are not.
    pub wanted_free_segments: u32,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// What is written at the moment.
    pub admission: Admission,
    /// Bytes written in the last day, or since the start.
    pub day_bytes: u64,
    /// Bytes that may be; 0 without a limit.
    pub bytes_per_day: u64,
}

impl Tiering {
    /// How the tier is. Walks its segments.
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
