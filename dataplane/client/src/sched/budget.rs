//! A budget of retries: a share of what succeeds, a trickle, and a burst for one lost connection.
//!
//! A peer in trouble is not helped by everybody asking again at once. Retries beyond the budget are put off, not
//! failed: their deadline bounds them.

/// Retries earned by ten successes, in thousandths of one.
const EARNED_MILLI: u64 = 100;
/// Retries that come back in a second whatever happens.
const TRICKLE_PER_SECOND: u64 = 256;

/// A token bucket of retries of one peer.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    milli: u64,
    most_milli: u64,
    at_ns: u64,
}

impl RetryBudget {
    /// A full budget that holds `burst` retries at most.
    #[must_use]
    pub const fn new(burst: u32) -> Self {
        let most_milli = burst as u64 * 1000;
        Self { milli: most_milli, most_milli, at_ns: 0 }
    }

    /// Something succeeded.
    pub fn earn(&mut self) {
        self.earn_many(1);
    }

    /// So many requests succeeded.
    pub fn earn_many(&mut self, requests: u64) {
        self.milli = self.milli.saturating_add(requests.saturating_mul(EARNED_MILLI)).min(self.most_milli);
    }

    /// Takes one retry; false when there is none left.
    pub fn spend(&mut self, now_ns: u64) -> bool {
        let passed_ns = now_ns.saturating_sub(self.at_ns).min(1_000_000_000_000);
        let trickle = passed_ns * TRICKLE_PER_SECOND / 1_000_000;
        if trickle > 0 {
            self.milli = self.milli.saturating_add(trickle).min(self.most_milli);
            self.at_ns = now_ns;
        }
        if self.milli < 1000 {
            return false;
        }
        self.milli -= 1000;
        true
    }
}
