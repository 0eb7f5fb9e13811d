//! Cost model: duration of a prefill and of a decode step, refitted from reports; duration of a transfer.
//!
//! Prefill of `n` tokens of which `p` are cached: `c0 + c1 (n-p) + c2 (n²-p²) + c3 p` seconds. The initial coefficients
//! are a fit to Figure 14 of the FAST'25 paper (LLaMA3-70B on eight A800). They are refitted from the reports of
//! instances: recursive weighted least squares with exponential forgetting, regularised toward the initial values, and
//! solved every few reports. An instance that is slower or faster than the others has a factor of its own.

mod decode;
pub mod pipeline;

pub use decode::{DecodeModel, DecodeModelError, DecodeSteps, LearnedDecode};

/// Tokens by which features are scaled, so that all are close to one.
const SCALE: f64 = 10_000.0;
/// Number of reports between two fits.
const REFIT_EVERY: u32 = 16;
/// Factor by which each report scales the weight of earlier ones.
const KEEP: f64 = 0.998;
/// Weight of the initial coefficients, in reports.
const PRIOR: f64 = 0.5;
/// Gain of the exponential moving averages.
const FOLLOW: f64 = 0.1;
/// Greatest ratio of a reported duration to the predicted one, in either direction, that counts: what is beyond it
/// counts as this much.
const MOST_RATIO: f64 = 4.0;

/// Model of the duration of a prefill.
#[derive(Clone, Debug)]
pub struct PrefillModel {
    /// Coefficients of the scaled features, in seconds.
    coefficients: [f64; 4],
    prior: [f64; 4],
    sums: LeastSquares<4>,
    reports: u32,
    error: f64,
}

impl Default for PrefillModel {
    /// Returns the fit to Figure 14 of the paper.
    fn default() -> Self {
        Self::new([0.0667, 1.097e-4, 7.41e-10, 2.61e-6])
    }
}

impl PrefillModel {
    /// Creates a model with coefficients in seconds: constant, per computed token, per difference of squares, per
    /// cached token.
    #[must_use]
    pub fn new(coefficients: [f64; 4]) -> Self {
        let [constant, computed, squares, cached] = coefficients;
        let scaled = [constant, computed * SCALE, squares * SCALE * SCALE, cached * SCALE];
        Self { coefficients: scaled, prior: scaled, sums: LeastSquares::new(), reports: 0, error: 0.0 }
    }

    /// Predicts the duration for a prompt of `tokens` of which the first `cached` are cached, in nanoseconds.
    #[must_use]
    pub fn predict_ns(&self, tokens: u32, cached: u32) -> u64 {
        let features = features(tokens, cached);
        let seconds: f64 = features.iter().zip(&self.coefficients).map(|(feature, c)| feature * c).sum();
        (seconds.max(0.001) * 1e9) as u64
    }

    /// Learns from a prefill that took `took_ns`, on an instance with this factor; nothing from a duration of 0, which
    /// is none. A report moves the model by a bounded factor: with a weight by its own duration, one that is far too
    /// short would count more than all others.
    pub fn report(&mut self, tokens: u32, cached: u32, took_ns: u64, factor: f64) {
        if took_ns == 0 {
            return;
        }
        let reported = took_ns as f64 / 1e9 / factor;
        let predicted = self.predict_ns(tokens, cached) as f64 / 1e9;
        self.error += FOLLOW * ((predicted / reported.max(1e-6) - 1.0).abs().min(MOST_RATIO) - self.error);
        let seconds = reported.clamp(predicted / MOST_RATIO, predicted * MOST_RATIO);
        let features = features(tokens, cached);
        // Relative errors are minimized: a long prefill has no more weight than a short one, nor has one that is
        // reported too short.
        let scale = if reported < seconds { predicted } else { seconds };
        let weight = 1.0 / scale.max(0.01).powi(2);
        self.sums.add(&features, seconds, weight);
        self.reports += 1;
        if self.reports.is_multiple_of(REFIT_EVERY) {
            self.refit();
        }
    }

    /// Returns the mean relative error of recent predictions.
    #[must_use]
    pub const fn error(&self) -> f64 {
        self.error
    }

    fn refit(&mut self) {
        let mut rows = [[0.0; 5]; 4];
        for (at, row) in rows.iter_mut().enumerate() {
            row[..4].copy_from_slice(&self.sums.normal[at]);
            row[4] = self.sums.right[at];
            let pull = PRIOR / self.prior[at].powi(2).max(1e-12);
            row[at] += pull;
            row[4] += pull * self.prior[at];
        }
        if let Some(solved) = solve(rows) {
            // Negative coefficients are excluded: more work never takes less time.
            self.coefficients = solved.map(|value| value.max(0.0));
        }
    }
}

fn features(tokens: u32, cached: u32) -> [f64; 4] {
    let (n, p) = (f64::from(tokens) / SCALE, f64::from(cached.min(tokens)) / SCALE);
    [1.0, n - p, n * n - p * p, p]
}

/// Sums of a weighted least squares fit with exponential forgetting: both sides of the normal equations.
#[derive(Clone, Debug)]
struct LeastSquares<const N: usize> {
    normal: [[f64; N]; N],
    right: [f64; N],
}

impl<const N: usize> LeastSquares<N> {
    const fn new() -> Self {
        Self { normal: [[0.0; N]; N], right: [0.0; N] }
    }

    /// Adds an observed value, and lets the older ones count less.
    fn add(&mut self, features: &[f64; N], value: f64, weight: f64) {
        for (row, feature) in features.iter().enumerate() {
            self.right[row] = self.right[row] * KEEP + weight * feature * value;
            for (column, other) in features.iter().enumerate() {
                self.normal[row][column] = self.normal[row][column] * KEEP + weight * feature * other;
            }
        }
    }
}

/// Solves a system of `N` rows, each with its right side behind the coefficients, so that `M` is `N + 1`: by Gaussian
/// elimination with pivoting; `None` if it is singular.
fn solve<const N: usize, const M: usize>(mut rows: [[f64; M]; N]) -> Option<[f64; N]> {
    for column in 0..N {
        let pivot = (column..N).max_by(|a, b| rows[*a][column].abs().total_cmp(&rows[*b][column].abs()))?;
        rows.swap(column, pivot);
        if rows[column][column].abs() < 1e-12 {
            return None;
        }
        for row in 0..N {
            if row != column {
                let factor = rows[row][column] / rows[column][column];
                let pivot = rows[column];
                rows[row].iter_mut().zip(pivot).for_each(|(value, above)| *value -= factor * above);
            }
        }
    }
    let solved: [f64; N] = core::array::from_fn(|at| rows[at][N] / rows[at][at]);
    solved.iter().all(|value| value.is_finite()).then_some(solved)
}

/// Factor of an instance: ratio of its durations to the predicted ones.
#[derive(Clone, Copy, Debug)]
pub struct Factor(pub f64);

impl Default for Factor {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Factor {
    /// Learns from a prefill or a step that took `took_ns` and was predicted by the model alone to take `predicted_ns`.
    pub fn report(&mut self, predicted_ns: u64, took_ns: u64) {
        let seen = took_ns as f64 / predicted_ns.max(1) as f64;
        self.0 += FOLLOW * (seen.clamp(0.1, 10.0) - self.0);
    }

    /// Scales a predicted duration to this instance.
    #[must_use]
    pub fn of(self, predicted_ns: u64) -> u64 {
        (predicted_ns as f64 * self.0) as u64
    }
}

/// Returns the duration of a transfer of `bytes` at `bytes_s`, in nanoseconds.
#[must_use]
pub fn transfer_ns(bytes: u64, bytes_s: u64) -> u64 {
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_s.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use kvplane_proto::rng::Rng;

    use super::*;

    #[test]
    fn model_starts_from_the_paper_and_learns_another_machine() {
        let mut model = PrefillModel::default();
        let seconds = |model: &PrefillModel, n, p| model.predict_ns(n, p) as f64 / 1e9;
        for (tokens, published) in [(8_192, 1.00), (32_768, 4.48), (131_072, 27.52)] {
            assert!((seconds(&model, tokens, 0) / published - 1.0).abs() < 0.05, "{tokens}");
        }
        let truth = PrefillModel::new([0.03, 2.0e-4, 3.0e-10, 1.0e-6]);
        let mut rng = Rng::new(3, "prefills");
        for _ in 0..2000 {
            let tokens = 500 + rng.below(60_000) as u32;
            let cached = rng.below(u64::from(tokens)) as u32;
            let noise = 0.9 + 0.2 * rng.unit();
            model.report(tokens, cached, (truth.predict_ns(tokens, cached) as f64 * noise) as u64, 1.0);
        }
        for (tokens, cached) in [(1_000, 0), (20_000, 10_000), (60_000, 0), (60_000, 59_000)] {
            let (found, wanted) = (seconds(&model, tokens, cached), seconds(&truth, tokens, cached));
            assert!((found / wanted - 1.0).abs() < 0.1, "{tokens}, {cached}: {found} for {wanted}");
        }
        assert!(model.error() < 0.15);
    }

    #[test]
    fn extreme_reports_do_not_break_the_model() {
        let mut model = PrefillModel::default();
        for _ in 0..100 {
            model.report(0, 0, 0, 1.0);
            model.report(u32::MAX, u32::MAX, u64::MAX, 0.1);
        }
        assert!(model.predict_ns(1_000_000, 0) > 0);
        let mut factor = Factor::default();
        factor.report(0, u64::MAX);
        assert!(factor.0 <= 2.0);
    }

    #[test]
    fn a_few_false_durations_move_the_model_by_little() {
        let truth = PrefillModel::default();
        for took_ns in [0, 1, 1_000, u64::MAX] {
            let mut model = PrefillModel::default();
            let mut rng = Rng::new(13, "false durations");
            for at in 0..2_000 {
                let tokens = 500 + rng.below(60_000) as u32;
                let is_false = at % 50 == 49;
                model.report(tokens, 0, if is_false { took_ns } else { truth.predict_ns(tokens, 0) }, 1.0);
            }
            for tokens in [1_000, 20_000, 60_000] {
                let (found, wanted) = (model.predict_ns(tokens, 0) as f64, truth.predict_ns(tokens, 0) as f64);
                assert!((0.5..2.0).contains(&(found / wanted)), "{took_ns} ns, {tokens} tokens: {found} for {wanted}");
            }
        }
    }
}
