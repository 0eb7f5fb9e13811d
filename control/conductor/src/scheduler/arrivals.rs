//! Rate and work of arriving requests: counts that decay.

use crate::policy::OfferedLoad;

/// Time constant of the decay, in seconds.
const DECAY_S: f64 = 60.0;
/// Least time over which arrivals are counted, in seconds: less tells nothing about a rate.
const LEAST_S: f64 = 10.0;

/// Requests that have arrived, each with a weight that decays.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    count: f64,
    work_s: f64,
    /// Times of the first and the last arrival.
    between_ns: Option<(u64, u64)>,
}

impl Arrivals {
    /// Counts a request whose prefill takes `work_ns`.
    pub(super) fn add(&mut self, work_ns: u64, now_ns: u64) {
        let kept = self.kept(now_ns);
        self.count = self.count * kept + 1.0;
        self.work_s = self.work_s * kept + work_ns as f64 / 1e9;
        let first_ns = self.between_ns.map_or(now_ns, |(first_ns, _)| first_ns);
        self.between_ns = Some((first_ns, now_ns));
    }

    /// Returns the part that the weights keep until now.
    fn kept(&self, now_ns: u64) -> f64 {
        let since_s = self.between_ns.map_or(0.0, |(_, last_ns)| now_ns.saturating_sub(last_ns) as f64 / 1e9);
        (-since_s / DECAY_S).exp()
    }

    /// Returns the load that they offer now.
    pub(super) fn offered(&self, now_ns: u64) -> OfferedLoad {
        let Some((first_ns, _)) = self.between_ns else { return OfferedLoad::default() };
        let counted_s = (now_ns.saturating_sub(first_ns) as f64 / 1e9).max(LEAST_S);
        let weights_s = DECAY_S * (1.0 - (-counted_s / DECAY_S).exp());
        let per_s = self.count * self.kept(now_ns) / weights_s;
        OfferedLoad { per_s, mean_s: self.work_s / self.count.max(f64::MIN_POSITIVE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_follows_the_arrivals() {
        let second = 1_000_000_000;
        let mut arrivals = Arrivals::default();
        assert_eq!(arrivals.offered(0), OfferedLoad::default());
        for at in 0..400 {
            arrivals.add(3 * second, at * second / 2);
            if at == 60 {
                let offered = arrivals.offered(at * second / 2);
                assert!((offered.per_s - 2.0).abs() < 0.1 && (offered.mean_s - 3.0).abs() < 1e-6, "{offered:?}");
            }
        }
        assert!((arrivals.offered(200 * second).per_s - 2.0).abs() < 0.1);
        assert!(arrivals.offered(500 * second).per_s < 0.02, "it decays");
    }
}
