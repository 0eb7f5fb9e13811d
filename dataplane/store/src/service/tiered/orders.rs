//! What an operator asks of a tier, and what it does by itself to stay whole.

use kvplane_tier::{Harm, Miss};

use super::{Admission, Service};

/// Something an operator asks of a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TierOrder {
    /// Check every record once at this rate; a pass that was paused goes on. 0 pauses.
    Verify {
        /// Bytes a second.
        bytes_per_s: u64,
    },
    /// Reclaim until this part of the segments is free, in percent, at most 50. 0 ends it.
    Reclaim {
        /// How much.
        free_percent: u8,
    },
}

impl Service {
    /// Carries out an order; false without a tier.
    pub fn order_tier(&mut self, order: TierOrder, now_ns: u64) -> bool {
        let Some(tiered) = &mut self.tiered else { return false };
        match order {
            TierOrder::Verify { bytes_per_s } => tiered.tier.scrub_once(now_ns, bytes_per_s),
            TierOrder::Reclaim { free_percent } => {
                let segments = u64::from(tiered.tier.config().segments);
                let wanted = (segments * u64::from(free_percent.min(100))).div_ceil(100);
                tiered.tier.reclaim_until(wanted as u32);
            }
        }
        true
    }

    /// Whether less is written than the policy wants, or again all; told once for each change.
    pub fn poll_admission(&mut self) -> Option<Admission> {
        let tiered = self.tiered.as_mut()?;
        let now = tiered.budget.admission();
        (core::mem::replace(&mut tiered.told_admission, now) != now).then_some(now)
    }

    /// What of the device's records was not whole since the start: the first time, and when there is twice as much.
    pub fn poll_tier_harm(&mut self) -> Option<Harm> {
        let tiered = self.tiered.as_mut()?;
        let harm = tiered.tier.harm();
        let much = harm.records() >= tiered.harm_to_tell;
        if much {
            tiered.harm_to_tell = 2 * harm.records();
        }
        much.then_some(harm)
    }

    /// Charges what was written since the last time.
    pub(super) fn charge_budget(&mut self) {
        let now_ns = self.now_ns;
        let Some(tiered) = &mut self.tiered else { return };
        let written = tiered.tier.written_bytes();
        tiered.budget.tick(now_ns);
        tiered.budget.charge(written - core::mem::replace(&mut tiered.charged_bytes, written));
    }

    /// The scrubber found a record that is not whole. What memory has is written again.
    pub(super) fn quarantined(&mut self, digest: kvplane_proto::Digest, miss: Miss) {
        let Some(tiered) = &mut self.tiered else { return };
        tiered.counters.quarantined += 1;
        let here = self.store.as_ref().is_some_and(|store| store.exists(digest));
        // A device that is gone or cannot be read does not get better by writing to it; but another place may do.
        let lost = tiered.is_writing(digest) || tiered.removing.contains(&digest) || matches!(miss, Miss::Stale);
        if here && !lost {
            tiered.counters.rewritten += 1;
            self.hold_for_write(digest, None, None);
        }
    }
}
