//! Lengths of outputs: quantiles of the last requests that finished, by flow and class.
//!
//! A request's output is expected to be like the last ones of its flow and class; while too few of these are known,
//! like those of its class in all flows, then like those of the pool. A length that the caller expects goes before all.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::scheduler::request::ServiceTerms;
use crate::scheduler::sizes::SizeWindow;

/// Requests of a flow and class, of a class, and of the pool whose outputs count.
const WINDOW: usize = 256;
/// Requests before which nothing is expected from a window.
const LEAST: usize = 16;
/// Maximum number of windows of flows and classes; beyond it, a new one takes the place of the one with the fewest
/// requests.
const MOST_KEYS: usize = 512;
/// Quantile that counts as a long output.
const HIGH: f64 = 0.9;
/// Greatest plausible number of generated tokens; more count as this many.
pub(in crate::scheduler) const MOST_OUTPUT_TOKENS: u32 = 1 << 24;
/// Gain of the moving averages of errors.
const FOLLOW: f64 = 0.02;

/// Expected length of an output, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::scheduler) struct ExpectedOutput {
    /// Mean of the lengths.
    pub mean: u32,
    /// Their 90th percentile.
    pub high: u32,
}

impl ExpectedOutput {
    /// Returns the expected length of an output of which so many tokens were generated already: the mean, then the 90th
    /// percentile, then a quarter more than there is.
    pub(in crate::scheduler) fn total_after(self, generated: f64) -> f64 {
        let Self { mean, high } = self;
        let expected = [f64::from(mean), f64::from(high)].into_iter().find(|total| generated < *total);
        expected.unwrap_or(generated * 1.25 + 1.0)
    }
}

/// Errors of the expected lengths, as moving averages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OutputErrors {
    /// Mean difference of expected and generated tokens, relative to the generated ones.
    pub relative: f64,
    /// Fraction of the outputs that were at most as long as the 90th percentile said.
    pub within_high: f64,
}

/// Lengths of outputs of one pool.
pub(in crate::scheduler) struct OutputLengths {
    by_flow: BTreeMap<(Arc<str>, Arc<str>), SizeWindow>,
    by_class: BTreeMap<Arc<str>, SizeWindow>,
    pool: SizeWindow,
    /// Moving averages of the difference and of the generated tokens, and of the fraction within the 90th percentile;
    /// none before the first prediction.
    errors: Option<(f64, f64, f64)>,
}

impl OutputLengths {
    pub(in crate::scheduler) const fn new() -> Self {
        Self { by_flow: BTreeMap::new(), by_class: BTreeMap::new(), pool: SizeWindow::of(WINDOW), errors: None }
    }

    /// Returns the output that a request is expected to have; `None` if nothing is known.
    pub(in crate::scheduler) fn expected(&self, terms: &ServiceTerms) -> Option<ExpectedOutput> {
        if terms.output_tokens > 0 {
            let tokens = terms.output_tokens.min(MOST_OUTPUT_TOKENS);
            return Some(ExpectedOutput { mean: tokens, high: tokens });
        }
        self.learned(terms)
    }

    /// Returns what the finished requests say about a request.
    fn learned(&self, terms: &ServiceTerms) -> Option<ExpectedOutput> {
        let key = (Arc::clone(&terms.flow), Arc::clone(&terms.class));
        let windows = [self.by_flow.get(&key), self.by_class.get(&terms.class), Some(&self.pool)];
        let known = windows.into_iter().flatten().find(|window| window.len() >= LEAST)?;
        Some(ExpectedOutput { mean: known.mean()? as u32, high: known.quantile(HIGH)? as u32 })
    }

    /// Learns from a request that generated `tokens`.
    pub(in crate::scheduler) fn finished(&mut self, terms: &ServiceTerms, tokens: u32) {
        let tokens = tokens.min(MOST_OUTPUT_TOKENS);
        if let Some(expected) = self.learned(terms) {
            let (off, generated) = (f64::from(expected.mean.abs_diff(tokens)), f64::from(tokens));
            let within = f64::from(u8::from(tokens <= expected.high));
            let errors = self.errors.get_or_insert((off, generated, within));
            errors.0 += FOLLOW * (off - errors.0);
            errors.1 += FOLLOW * (generated - errors.1);
            errors.2 += FOLLOW * (within - errors.2);
        }
        let key = (Arc::clone(&terms.flow), Arc::clone(&terms.class));
        window_of(&mut self.by_flow, key).add(u64::from(tokens));
        window_of(&mut self.by_class, Arc::clone(&terms.class)).add(u64::from(tokens));
        self.pool.add(u64::from(tokens));
    }

    /// Returns the median and the 90th percentile of the pool's last outputs; `None` if too few are known.
    pub(in crate::scheduler) fn quantiles(&self) -> Option<(u32, u32)> {
        let known = Some(&self.pool).filter(|window| window.len() >= LEAST)?;
        Some((known.quantile(0.5)? as u32, known.quantile(HIGH)? as u32))
    }

    /// Returns the errors of the lengths that were expected of requests that finished; `None` before the first one.
    pub(in crate::scheduler) fn errors(&self) -> Option<OutputErrors> {
        let (off, generated, within_high) = self.errors?;
        Some(OutputErrors { relative: off / generated.max(1.0), within_high })
    }
}

/// Returns the window of a key; a new one in a full table takes the place of the one with the fewest requests.
fn window_of<K: Ord + Clone>(windows: &mut BTreeMap<K, SizeWindow>, key: K) -> &mut SizeWindow {
    if windows.len() >= MOST_KEYS && !windows.contains_key(&key) {
        let least = windows.iter().min_by_key(|(_, window)| window.len()).map(|(key, _)| key.clone());
        least.map(|key| windows.remove(&key));
    }
    windows.entry(key).or_insert_with(|| SizeWindow::of(WINDOW))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(flow: &str, class: &str) -> ServiceTerms {
        ServiceTerms { flow: flow.into(), class: class.into(), ..ServiceTerms::default() }
    }

    #[test]
    fn outputs_are_expected_by_flow_then_class_then_pool() {
        let mut lengths = OutputLengths::new();
        assert_eq!(lengths.expected(&terms("a", "chat")), None);
        (0..LEAST).for_each(|_| lengths.finished(&terms("a", "chat"), 100));
        (0..200).for_each(|at| lengths.finished(&terms("b", "batch"), 1 + at * 37 % 200));
        let of = |flow: &str, class: &str| lengths.expected(&terms(flow, class)).map(|expected| expected.mean);
        assert_eq!((of("a", "chat"), of("new", "chat")), (Some(100), Some(100)));
        assert_eq!(of("new", "batch"), Some(100));
        assert!(of("new", "new").is_some(), "the pool's");
        let batch = lengths.expected(&terms("b", "batch")).expect("known");
        assert_eq!((batch.mean, batch.high), (100, 180));
        let own = ServiceTerms { output_tokens: 7, ..terms("a", "chat") };
        assert_eq!(lengths.expected(&own), Some(ExpectedOutput { mean: 7, high: 7 }));
        let totals = [0.0, 99.5, 150.0, 400.0].map(|generated| batch.total_after(generated));
        assert_eq!(totals, [100.0, 100.0, 180.0, 501.0]);
        assert!(lengths.errors().is_some_and(|errors| errors.relative > 0.0 && errors.within_high > 0.5));
    }

    #[test]
    fn keys_are_bounded_and_a_flood_displaces_no_known_flow() {
        let mut lengths = OutputLengths::new();
        (0..LEAST).for_each(|_| lengths.finished(&terms("known", ""), 50));
        for flow in 0..5_000 {
            lengths.finished(&terms(&format!("flood-{flow}"), ""), u32::MAX);
        }
        assert_eq!(lengths.by_flow.len(), MOST_KEYS);
        assert_eq!(lengths.expected(&terms("known", "")).map(|expected| expected.mean), Some(50));
        let others = lengths.expected(&terms("new", "")).expect("the class's");
        assert_eq!(others.high, MOST_OUTPUT_TOKENS);
    }
}
