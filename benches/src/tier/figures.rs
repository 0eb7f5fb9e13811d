//! Figures of one measurement, of kvplane or fio.

use std::time::Duration;

/// Rate and latency of calls over a time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    pub(crate) per_s: f64,
    pub(crate) mb_s: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// CPU time of each call in µs, if known.
    pub(crate) cpu_us: f64,
}

impl Figures {
    /// Computes the figures from the times of calls of `bytes`.
    pub(crate) fn of(mut samples_ns: Vec<u64>, bytes: u64, took: Duration, cpu_ns: u64) -> Self {
        samples_ns.sort_unstable();
        let at = |share: f64| {
            let last = samples_ns.len().saturating_sub(1);
            samples_ns.get(((samples_ns.len() as f64 * share) as usize).min(last)).map_or(0.0, |ns| *ns as f64 / 1e3)
        };
        let calls = samples_ns.len() as f64;
        let per_s = calls / took.as_secs_f64();
        Self {
            per_s,
            mb_s: per_s * bytes as f64 / 1e6,
            p50_us: at(0.5),
            p99_us: at(0.99),
            cpu_us: cpu_ns as f64 / 1e3 / calls.max(1.0),
        }
    }
}
