//! Retry budget of a peer: a share of its successes, a trickle, and a burst for one lost connection.
//!
//! It prevents retry storms: retries of many clients at once would not help a peer in trouble. Retries beyond the
//! budget back off instead of failing, bounded by their deadline.

/// Budget that each success adds, in thousandths of a retry: one retry for ten successes.
const EARNED_MILLI: u64 = 100;
/// Retries per second that are added regardless of successes.
const TRICKLE_PER_SECOND: u64 = 256;

/// Token bucket of the retries to one peer.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    milli: u64,
    most_milli: u64,
    at_ns: u64,
}

impl RetryBudget {
    /// Creates a full budget that holds at most `burst` retries.
    #[must_use]
    pub const fn new(burst: u32) -> Self {
        let most_milli = burst as u64 * 1000;
        Self { milli: most_milli, most_milli, at_ns: 0 }
    }

    /// Credits one success.
    pub fn earn(&mut self) {
        self.earn_many(1);
    }

    /// Credits several successes.
    pub fn earn_many(&mut self, requests: u64) {
        self.milli = self.milli.saturating_add(requests.saturating_mul(EARNED_MILLI)).min(self.most_milli);
    }

    /// Takes one retry from the budget; returns false if it is exhausted.
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
