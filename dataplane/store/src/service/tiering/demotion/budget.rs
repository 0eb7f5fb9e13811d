//! How much may be written to the SSD: a token bucket over bytes a day, and what follows for admission.
//!
//! The bucket holds an eighth of a day's bytes and is filled evenly. While it is more than half full, everything the
//! policy wants is admitted; below that only what was put or asked for twice lately; empty, nothing. What was promised
//! to be on the device (a put acknowledged buffered or durable) is written all the same and is charged, so that others
//! make up for it. Charged is what goes to the device: records with their headers and padding, and what reclaim writes
//! again.

const HOUR_NS: u64 = 3_600_000_000_000;
const DAY_NS: u64 = 24 * HOUR_NS;
const HOURS: usize = 24;

/// What is written to the SSD for want of a better use of what may be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Admission {
    /// All that the policy wants.
    #[default]
    Full,
    /// Only what was put or asked for twice lately.
    Selective,
    /// Nothing but what was promised.
    Promised,
}

/// The bucket, and what was written lately.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) struct Budget {
    /// 0: no limit.
    bytes_per_day: u64,
    /// Bytes that may be written; below 0 after what was promised was written regardless.
    level: i128,
    /// Until when the bucket was filled, and what of a byte is left over, in bytes times nanoseconds.
    filled_ns: Option<u64>,
    rest: u128,
    /// Bytes of each hour of the last day.
    hours: [u64; HOURS],
    hour: u64,
    /// What of the tier's writes was charged.
    charged_bytes: u64,
    /// What the operator was told last.
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

    /// Lets time pass.
    pub(in crate::service::tiering) fn tick(&mut self, now_ns: u64) {
        let since_ns = now_ns.saturating_sub(*self.filled_ns.get_or_insert(now_ns));
        self.filled_ns = Some(now_ns.max(self.filled_ns.unwrap_or(0)));
        let earned = u128::from(since_ns) * u128::from(self.bytes_per_day) + self.rest;
        self.rest = earned % u128::from(DAY_NS);
        self.level = (self.level + (earned / u128::from(DAY_NS)) as i128).min(self.capacity());
        let hour = now_ns / HOUR_NS;
        // As many hours have begun as are forgotten.
        for _ in 0..hour.saturating_sub(self.hour).min(HOURS as u64) {
            self.hour += 1;
            self.hours[(self.hour % HOURS as u64) as usize] = 0;
        }
        if hour > self.hour {
            self.hour = hour;
        }
    }

    /// So many bytes were written.
    pub(in crate::service::tiering) fn charge(&mut self, bytes: u64) {
        self.level -= i128::from(bytes);
        // A debt of more than a day would only lengthen the time without writes that nobody can see the end of.
        self.level = self.level.max(-i128::from(self.bytes_per_day));
        self.hours[(self.hour % HOURS as u64) as usize] += bytes;
    }

    /// The tier has written so many bytes in all by now: what is new among them is charged.
    pub(in crate::service::tiering) fn charge_up_to(&mut self, written_bytes: u64, now_ns: u64) {
        self.tick(now_ns);
        let new_bytes = written_bytes - core::mem::replace(&mut self.charged_bytes, written_bytes);
        self.charge(new_bytes);
    }

    /// What is admitted, where that is not what the operator was told last.
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

    /// Bytes written in the last 23 to 24 hours.
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
        fn what_is_admitted_keeps_to_the_budget_over_any_stretch_of_time(
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
    fn admission_gives_way_step_by_step_and_comes_back() {
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
