//! Write budget of the SSD: a token bucket over bytes a day, and the admission that follows from it.
//!
//! The bucket holds an eighth of a day's bytes and is filled evenly. While it is more than half full, all writes of the
//! policy are admitted; below that only objects that were put or read twice lately; when it is empty, none. Writes that
//! were promised (puts acknowledged as buffered or durable) are done regardless and are charged, so that others make up
//! for it. Every byte that is written to the device is charged: records with their headers and padding, and rewrites by
//! reclaim.

const HOUR_NS: u64 = 3_600_000_000_000;
const DAY_NS: u64 = 24 * HOUR_NS;
const HOURS: usize = 24;

/// Admission of writes to the SSD under the write budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Admission {
    /// All writes of the policy.
    #[default]
    Full,
    /// Only objects that were put or read twice lately.
    Selective,
    /// Only promised writes.
    Promised,
}

/// Token bucket, and the bytes written lately.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) struct Budget {
    /// Budget of bytes a day; 0 for no limit.
    bytes_per_day: u64,
    /// Bytes that may be written; below 0 after promised writes.
    level: i128,
    /// Time up to which the bucket was filled, and the remaining fraction of a byte, in bytes times nanoseconds.
    filled_ns: Option<u64>,
    rest: u128,
    /// Bytes written in each hour of the last day.
    hours: [u64; HOURS],
    hour: u64,
    /// Bytes of the tier's writes that were charged.
    charged_bytes: u64,
    /// Admission last reported to the operator.
    told: Admission,
}

impl Budget {
    pub(in crate::service::tiering) fn new(bytes_per_day: u64) -> Self {
        let mut budget = Self {
            bytes_per_day,
            level: 0,
            filled_ns: None,
            rest: 0,
            hours: [0; HOURS],
            hour: 0,
            charged_bytes: 0,
            told: Admission::Full,
        };
        budget.level = budget.capacity();
        budget
    }

    fn capacity(&self) -> i128 {
        i128::from(self.bytes_per_day / 8).max(1)
    }

    /// Fills the bucket up to the current time.
    pub(in crate::service::tiering) fn tick(&mut self, now_ns: u64) {
        let since_ns = now_ns.saturating_sub(*self.filled_ns.get_or_insert(now_ns));
        self.filled_ns = Some(now_ns.max(self.filled_ns.unwrap_or(0)));
        let earned = u128::from(since_ns) * u128::from(self.bytes_per_day) + self.rest;
        self.rest = earned % u128::from(DAY_NS);
        self.level = (self.level + (earned / u128::from(DAY_NS)) as i128).min(self.capacity());
        let hour = now_ns / HOUR_NS;
        // One hour's count is cleared for each hour that has begun.
        for _ in 0..hour.saturating_sub(self.hour).min(HOURS as u64) {
            self.hour += 1;
            self.hours[(self.hour % HOURS as u64) as usize] = 0;
        }
        if hour > self.hour {
            self.hour = hour;
        }
    }

    /// Charges bytes that were written.
    pub(in crate::service::tiering) fn charge(&mut self, bytes: u64) {
        self.level -= i128::from(bytes);
        // A debt of more than a day would only prolong the time without writes.
        self.level = self.level.max(-i128::from(self.bytes_per_day));
        self.hours[(self.hour % HOURS as u64) as usize] += bytes;
    }

    /// Charges the bytes that the tier has written since the last call; `written_bytes` is its total.
    pub(in crate::service::tiering) fn charge_up_to(&mut self, written_bytes: u64, now_ns: u64) {
        self.tick(now_ns);
        let new_bytes = written_bytes - core::mem::replace(&mut self.charged_bytes, written_bytes);
        self.charge(new_bytes);
    }

    /// Returns the admission if it differs from the one last reported.
    pub(in crate::service::tiering) fn poll_admission(&mut self) -> Option<Admission> {
        let now = self.admission();
        (core::mem::replace(&mut self.told, now) != now).then_some(now)
    }

    pub(in crate::service::tiering) fn admission(&self) -> Admission {
        match self.level {
            _ if self.bytes_per_day == 0 => Admission::Full,
            ..=0 => Admission::Promised,
            level if level <= self.capacity() / 2 => Admission::Selective,
            _ => Admission::Full,
        }
    }

    /// Returns the bytes written in the last 23 to 24 hours.
    pub(in crate::service::tiering) fn day_bytes(&self) -> u64 {
        self.hours.iter().sum()
    }

    pub(in crate::service::tiering) const fn bytes_per_day(&self) -> u64 {
        self.bytes_per_day
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn admitted_writes_keep_to_the_budget_over_any_period(
            bytes_per_day in 1_000_000..10_000_000_000u64,
            steps in prop::collection::vec((0..4_000_000_000_000u64, 0..1_000_000u64), 1..200),
        ) {
            let mut budget = Budget::new(bytes_per_day);
            let (mut now_ns, mut written): (u64, Vec<(u64, u64)>) = (0, Vec::new());
            for (wait_ns, bytes) in steps {
                now_ns += wait_ns;
                budget.tick(now_ns);
                if budget.admission() != Admission::Promised {
                    budget.charge(bytes);
                    written.push((now_ns, bytes));
                }
            }
            for from in 0..written.len() {
                let sum: u128 = written[from..].iter().map(|(_, bytes)| u128::from(*bytes)).sum();
                let time = u128::from(written[written.len() - 1].0 - written[from].0);
                let last = u128::from(written[written.len() - 1].1);
                let allowed = u128::from(bytes_per_day / 8) + time * u128::from(bytes_per_day) / u128::from(DAY_NS);
                prop_assert!(sum <= allowed + last + 2, "{} bytes, {} allowed", sum, allowed);
            }
            let day: u64 = written.iter().filter(|(at, _)| at / HOUR_NS + 24 > now_ns / HOUR_NS).map(|(_, b)| b).sum();
            prop_assert_eq!(budget.day_bytes(), day);
        }
    }

    #[test]
    fn admission_is_reduced_step_by_step_and_restored() {
        let mut budget = Budget::new(24_000);
        budget.tick(5);
        assert_eq!(budget.admission(), Admission::Full);
        budget.charge(1500);
        assert_eq!(budget.admission(), Admission::Selective);
        budget.charge(1500);
        assert_eq!(budget.admission(), Admission::Promised);
        budget.charge(1000);
        budget.tick(5 + HOUR_NS);
        assert_eq!(budget.admission(), Admission::Promised, "a debt is made up for");
        budget.tick(5 + 2 * HOUR_NS);
        assert_eq!(budget.admission(), Admission::Selective);
        budget.tick(5 + 8 * HOUR_NS);
        assert_eq!((budget.admission(), budget.day_bytes()), (Admission::Full, 4000));
        budget.tick(5 + 25 * HOUR_NS);
        assert_eq!(budget.day_bytes(), 0);
        let mut unlimited = Budget::new(0);
        unlimited.charge(u64::MAX);
        assert_eq!(unlimited.admission(), Admission::Full);
    }
}
