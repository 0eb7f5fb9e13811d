//! Commands of an operator to a tier, and reports to the operator.

use kvplane_tier::{DamageCounters, Event, Ownership};

use super::{Admission, Tiering, VoidCause};

/// Command of an operator to a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TierOrder {
    /// Check every record once at this rate; a paused pass continues. 0 pauses.
    Verify {
        /// Bytes a second.
        bytes_per_s: u64,
    },
    /// Reclaim until this part of the segments is free, in percent, at most 50. 0 cancels.
    Reclaim {
        /// Part of the segments, in percent.
        free_percent: u8,
    },
}

impl Tiering {
    /// Carries out a command.
    pub fn order(&mut self, order: TierOrder, now_ns: u64) {
        let tier = &mut self.ssd.tier;
        match order {
            TierOrder::Verify { bytes_per_s } => tier.scrub_once(now_ns, bytes_per_s),
            TierOrder::Reclaim { free_percent } => {
                let segments = u64::from(tier.config().segments);
                let wanted = (segments * u64::from(free_percent.min(100))).div_ceil(100);
                tier.reclaim_until(wanted as u32);
            }
        }
    }

    /// Returns the next event for the operator: the device was opened or refused, recovery is complete, writes stopped.
    pub fn poll_notice(&mut self) -> Option<Event> {
        self.reports.notices.pop_front()
    }

    /// Returns the admission of writes if it has changed since the last call.
    pub fn poll_admission(&mut self) -> Option<Admission> {
        self.demotion.budget.poll_admission()
    }

    /// Returns the damaged records since the start: at the first, and whenever their number has doubled.
    pub fn poll_damage(&mut self) -> Option<DamageCounters> {
        let damage = self.ssd.tier.damage();
        let much = damage.records() >= self.reports.damage_to_report;
        if much {
            self.reports.damage_to_report = 2 * damage.records();
        }
        much.then_some(damage)
    }

    /// Returns the record of ownership that the device had when it was opened: the cluster state, and the map.
    #[must_use]
    pub fn ownership(&self) -> Option<&Ownership> {
        self.ssd.tier.ownership()
    }

    /// Returns the reason for which the records at the start are void, if they are; once.
    pub fn poll_voided(&mut self) -> Option<VoidCause> {
        self.reconciliation.poll_voided()
    }

    /// Returns the number of slots whose records are void because no shard could tell what others changed there: those
    /// since the last call, once no slot is being reconciled. `None` if [`Self::poll_voided`] reports that all records
    /// are void.
    pub fn poll_slots_voided(&mut self) -> Option<u64> {
        self.reconciliation.poll_slots_voided(&mut self.ssd)
    }
}
