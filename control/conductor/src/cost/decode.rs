//! Duration of a decode step: constants, and the model that is refitted from reports of instances.
//!
//! A step takes `base + token * resident tokens + request * requests` seconds. The coefficients start as
//! [`DecodeModel`]'s constants and are refitted as those of a prefill are: weighted least squares with exponential
//! forgetting, regularised toward the constants, where no coefficient is negative. A report moves the model by a
//! bounded factor, and an instance that differs from the others has a factor of its own.

use core::fmt;

use super::{FOLLOW, LeastSquares, MOST_RATIO, PRIOR, REFIT_EVERY, solve};

/// Factors by which the features are scaled, so that all coefficients are of the magnitude of a step: to tokens in
/// millions, and requests in hundreds.
const SCALES: [f64; 3] = [1.0, 1e-6, 1e-2];
/// Least and greatest plausible duration of a step, in seconds.
const STEP_S: (f64, f64) = (1e-5, 60.0);
/// Greatest plausible number of resident tokens, and of requests of a batch.
const MOST: (u64, u32) = (1 << 32, 1 << 20);
/// Duration of a step up to which a report is plausible, whatever was predicted, in seconds.
const PLAUSIBLE_S: f64 = 0.1;
/// Standard deviation of a coefficient around its initial value is that value, but at least this, in seconds of the
/// scaled feature: so a coefficient that starts as 0 can be learned.
const LEAST_SPREAD_S: f64 = 0.02;

/// Model of the time between tokens of a decode instance.
#[derive(Clone, Copy, Debug)]
pub struct DecodeModel {
    /// Duration of a step, in nanoseconds.
    pub base_ns: f64,
    /// Addition for each resident token of KV cache, in nanoseconds.
    pub token_ns: f64,
    /// Addition for each request of the batch, in nanoseconds.
    pub request_ns: f64,
}

impl Default for DecodeModel {
    /// Returns the fit to Figure 14 of the paper: 26.2 ms, and 36 ns per resident token.
    fn default() -> Self {
        Self { base_ns: 26.2e6, token_ns: 36.0, request_ns: 0.0 }
    }
}

impl DecodeModel {
    /// Returns the duration of a step with this many resident tokens and requests, in nanoseconds.
    #[must_use]
    pub fn step_ns(&self, tokens: u64, requests: usize) -> u64 {
        (self.base_ns + self.token_ns * tokens as f64 + self.request_ns * requests as f64) as u64
    }
}

/// Error of a text that is no [`DecodeModel`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeModelError {
    /// The whole text.
    pub text: String,
    /// Part of it that is no number, out of range, or one too many.
    pub part: String,
}

impl fmt::Display for DecodeModelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { text, part } = self;
        write!(f, "{part:?} in {text:?}: BASE_MS[,TOKEN_NS[,REQUEST_US]], from 0 to 1000000 each")
    }
}

impl core::error::Error for DecodeModelError {}

impl core::str::FromStr for DecodeModel {
    type Err = DecodeModelError;

    /// Parses `BASE_MS[,TOKEN_NS[,REQUEST_US]]`: milliseconds per step, nanoseconds per resident token, microseconds
    /// per request of the batch. Omitted parts are 0.
    fn from_str(text: &str) -> Result<Self, DecodeModelError> {
        let wrong = |part: &str| DecodeModelError { text: text.to_owned(), part: part.to_owned() };
        let mut parts = [0.0; 3];
        for (at, part) in text.split(',').enumerate() {
            let place = parts.get_mut(at).ok_or_else(|| wrong(part))?;
            *place = part
                .trim()
                .parse::<f64>()
                .ok()
                .filter(|number| (0.0..=1e6).contains(number))
                .ok_or_else(|| wrong(part))?;
        }
        Ok(Self { base_ns: parts[0] * 1e6, token_ns: parts[1], request_ns: parts[2] * 1e3 })
    }
}

/// Decode steps of an instance, as it reports them: their number and duration, and the means of the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct DecodeSteps {
    /// Number of steps; 0 if none are reported.
    pub steps: u32,
    /// Duration of all of them, in nanoseconds.
    pub took_ns: u64,
    /// Tokens of KV cache that were resident, as a mean over the steps.
    pub tokens: u64,
    /// Requests in the batch, as a mean over the steps.
    pub requests: u32,
}

impl DecodeSteps {
    /// Returns the mean duration of a step in seconds, within plausible bounds; none without steps.
    fn step_s(&self) -> Option<f64> {
        let seconds = self.took_ns as f64 / 1e9 / f64::from(self.steps);
        (self.steps > 0 && self.requests > 0 && self.took_ns > 0).then(|| seconds.clamp(STEP_S.0, STEP_S.1))
    }
}

/// Model of decode steps that is refitted from reports.
#[derive(Clone, Debug)]
pub struct LearnedDecode {
    model: DecodeModel,
    /// Initial coefficients of the scaled features, in seconds.
    initial: [f64; 3],
    sums: LeastSquares<3>,
    reports: u64,
    error: f64,
}

impl LearnedDecode {
    /// Creates a model that starts as `initial`.
    #[must_use]
    pub fn new(initial: DecodeModel) -> Self {
        let coefficients = [initial.base_ns, initial.token_ns, initial.request_ns];
        Self {
            model: initial,
            initial: core::array::from_fn(|at| coefficients[at] / 1e9 / SCALES[at]),
            sums: LeastSquares::new(),
            reports: 0,
            error: 0.0,
        }
    }

    /// Returns the model as fitted so far.
    #[must_use]
    pub const fn model(&self) -> &DecodeModel {
        &self.model
    }

    /// Returns the mean relative error of recent predictions; 0 before the first report.
    #[must_use]
    pub const fn error(&self) -> f64 {
        self.error
    }

    /// Returns the number of reports so far.
    #[must_use]
    pub const fn reports(&self) -> u64 {
        self.reports
    }

    /// Learns from steps of an instance with this factor, whose durations are `beside` times those of a usual instance
    /// of the pool. Returns the duration of a step that the model alone predicted, and the reported one, in
    /// nanoseconds, for the factor; none if nothing was reported.
    pub fn report(&mut self, steps: &DecodeSteps, factor: f64, beside: f64) -> Option<(u64, u64)> {
        let reported_s = steps.step_s()?;
        let (tokens, requests) = (steps.tokens.min(MOST.0), steps.requests.min(MOST.1));
        let predicted_s = (self.model.step_ns(tokens, requests as usize) as f64 / 1e9).max(STEP_S.0);
        let of_instance_s = predicted_s * factor;
        self.error += FOLLOW * ((of_instance_s / reported_s - 1.0).abs().min(MOST_RATIO) - self.error);
        let most_s = (predicted_s * MOST_RATIO).max(PLAUSIBLE_S);
        let seconds = (reported_s / beside).clamp(predicted_s / MOST_RATIO, most_s);
        let features = [1.0, tokens as f64 * SCALES[1], f64::from(requests) * SCALES[2]];
        // Relative errors are minimized: a long step has no more weight than a short one.
        let weight = 1.0 / seconds.powi(2);
        self.sums.add(&features, seconds, weight);
        self.reports += 1;
        if self.reports.is_multiple_of(u64::from(REFIT_EVERY)) {
            self.refit();
        }
        Some(((predicted_s * 1e9) as u64, (reported_s * 1e9) as u64))
    }

    /// Solves for the coefficients: those that would be negative are 0, since more work never takes less time.
    fn refit(&mut self) {
        let pulls = self.initial.map(|value| PRIOR / value.max(LEAST_SPREAD_S).powi(2));
        let mut is_zero = [false; 3];
        loop {
            let mut rows = [[0.0; 4]; 3];
            for (at, row) in rows.iter_mut().enumerate() {
                if is_zero[at] {
                    row[at] = 1.0;
                    continue;
                }
                for (column, value) in self.sums.normal[at].iter().enumerate().filter(|(column, _)| !is_zero[*column]) {
                    row[column] = *value;
                }
                row[at] += pulls[at];
                row[3] = self.sums.right[at] + pulls[at] * self.initial[at];
            }
            let Some(solved) = solve(rows) else { return };
            let least = (0..3).min_by(|one, other| solved[*one].total_cmp(&solved[*other]));
            match least.filter(|at| solved[*at] < 0.0) {
                Some(at) => is_zero[at] = true,
                None => {
                    let [base_ns, token_ns, request_ns] = core::array::from_fn(|at| solved[at] * SCALES[at] * 1e9);
                    self.model = DecodeModel { base_ns, token_ns, request_ns };
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::rng::Rng;

    use super::*;

    #[test]
    fn decode_model_is_parsed() {
        let step = |text: &str| text.parse::<DecodeModel>().map(|model| model.step_ns(1000, 10));
        assert_eq!(step("26.2,36"), Ok(26_236_000));
        assert_eq!(step("5, 0, 100"), Ok(6_000_000));
        assert_eq!(step("7"), Ok(7_000_000));
        for wrong in ["", "a", "1,2,3,4", "-1", "nan", "inf", "1,,2", "1e9"] {
            assert!(step(wrong).is_err_and(|why| why.to_string().contains("BASE_MS")), "{wrong}");
        }
    }

    /// Returns steps that take as long as `truth` says.
    fn steps_of(truth: &DecodeModel, tokens: u64, requests: u32, noise: f64) -> DecodeSteps {
        let took_ns = (truth.step_ns(tokens, requests as usize) as f64 * noise * 40.0) as u64;
        DecodeSteps { steps: 40, took_ns, tokens, requests }
    }

    fn assert_like(model: &LearnedDecode, truth: &DecodeModel, most_error: f64) {
        for (tokens, requests) in [(10_000, 1), (200_000, 20), (600_000, 40), (1_200_000, 64)] {
            let (found, wanted) = (model.model().step_ns(tokens, requests), truth.step_ns(tokens, requests));
            let error = (found as f64 / wanted as f64 - 1.0).abs();
            assert!(error < most_error, "{tokens} tokens, {requests} requests: {found} ns for {wanted}");
        }
    }

    #[test]
    fn steps_of_another_machine_are_learned_and_forgotten() {
        let mut rng = Rng::new(5, "steps");
        let mut model = LearnedDecode::new(DecodeModel::default());
        let twice = DecodeModel { base_ns: 52.4e6, token_ns: 72.0, request_ns: 50e3 };
        for truth in [twice, DecodeModel { base_ns: 10e6, token_ns: 20.0, request_ns: 0.0 }] {
            for _ in 0..3_000 {
                let requests = 1 + rng.below(64) as u32;
                let tokens = u64::from(requests) * (2_000 + rng.below(20_000));
                let noise = 0.9 + 0.2 * rng.unit();
                model.report(&steps_of(&truth, tokens, requests, noise), 1.0, 1.0);
            }
            assert_like(&model, &truth, 0.05);
            assert!(model.error() < 0.15, "{}", model.error());
        }
    }

    #[test]
    fn one_batch_size_scales_the_whole_model() {
        let mut model = LearnedDecode::new(DecodeModel::default());
        let twice = DecodeModel { base_ns: 52.4e6, token_ns: 72.0, request_ns: 0.0 };
        // All reports have the same batch: it does not tell the coefficients apart, which keep near their proportion.
        for _ in 0..200 {
            model.report(&steps_of(&twice, 400_000, 30, 1.0), 1.0, 1.0);
        }
        assert_like(&model, &twice, 0.3);
    }

    #[test]
    fn false_reports_move_the_model_by_little_and_never_break_it() {
        let mut model = LearnedDecode::new(DecodeModel::default());
        let truth = DecodeModel::default();
        let extremes = [
            DecodeSteps::default(),
            DecodeSteps { steps: 1, took_ns: 0, tokens: 1, requests: 1 },
            DecodeSteps { steps: 1, took_ns: 1, tokens: 0, requests: 0 },
            DecodeSteps { steps: u32::MAX, took_ns: 1, tokens: u64::MAX, requests: u32::MAX },
            DecodeSteps { steps: 1, took_ns: u64::MAX, tokens: u64::MAX, requests: u32::MAX },
            DecodeSteps { steps: 1, took_ns: u64::MAX, tokens: 0, requests: 1 },
        ];
        assert!(extremes[..3].iter().all(|steps| model.report(steps, 1.0, 1.0).is_none()));
        for round in 0..1_000 {
            model.report(&extremes[3 + round % 3], 0.1, 10.0);
            let DecodeModel { base_ns, token_ns, request_ns } = *model.model();
            let bounds = [base_ns, token_ns, request_ns].iter().all(|value| value.is_finite() && *value >= 0.0);
            assert!(bounds && model.error().is_finite(), "{model:?}");
        }
        // One report in fifty that is a thousand times too long moves a prediction by a few percent.
        let mut model = LearnedDecode::new(truth);
        let mut rng = Rng::new(9, "liar");
        for round in 0..2_000 {
            let requests = 1 + rng.below(64) as u32;
            let noise = if round % 50 == 0 { 1_000.0 } else { 1.0 };
            model.report(&steps_of(&truth, u64::from(requests) * 12_000, requests, noise), 1.0, 1.0);
        }
        assert_like(&model, &truth, 0.1);
    }

    #[test]
    fn constants_of_zero_are_learned_too() {
        let mut model = LearnedDecode::new(DecodeModel { base_ns: 0.0, token_ns: 0.0, request_ns: 0.0 });
        let truth = DecodeModel { base_ns: 8e6, token_ns: 30.0, request_ns: 40e3 };
        let mut rng = Rng::new(11, "zero");
        for _ in 0..4_000 {
            let requests = 1 + rng.below(64) as u32;
            let tokens = u64::from(requests) * (2_000 + rng.below(20_000));
            model.report(&steps_of(&truth, tokens, requests, 1.0), 1.0, 1.0);
        }
        assert_like(&model, &truth, 0.1);
    }
}
