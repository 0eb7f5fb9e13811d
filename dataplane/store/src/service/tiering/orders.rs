//! What an operator orders of a tier, and is told by it.

use kvplane_tier::{Event, Harm, Ownership};

use super::{Admission, Tiering, VoidCause};

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

impl Tiering {
    /// Carries out an order.
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

    /// Something that the operator should know: the device was opened or refused, recovery is over, writes stopped.
    pub fn poll_notice(&mut self) -> Option<Event> {
        self.reports.notices.pop_front()
    }

    /// What is written to the SSD, where that is less than before, or again more; told once for each change.
    pub fn poll_admission(&mut self) -> Option<Admission> {
        self.demotion.budget.poll_admission()
    }

    /// What of the device's records was not whole since the start: the first time, and when there is twice as much.
    pub fn poll_harm(&mut self) -> Option<Harm> {
        let harm = self.ssd.tier.harm();
        let much = harm.records() >= self.reports.harm_to_tell;
        if much {
            self.reports.harm_to_tell = 2 * harm.records();
        }
        much.then_some(harm)
    }

    /// What the device said about its slots when it was opened: by which state of the control plane, and by which map.
    #[must_use]
    pub fn ownership(&self) -> Option<&Ownership> {
        self.ssd.tier.ownership()
    }

    /// Why what the device had counts as removed since the start, if so: once.
    pub fn poll_voided(&mut self) -> Option<VoidCause> {
        self.reconciliation.poll_voided()
    }

    /// Slots of which the device's contents are void, as nobody could tell what others changed there: their number
    /// since the last call, once no slot is compared any more. Not where [`Self::poll_voided`] says that it is all.
    pub fn poll_slots_voided(&mut self) -> Option<u64> {
        self.reconciliation.poll_slots_voided(&mut self.ssd)
    }
}
