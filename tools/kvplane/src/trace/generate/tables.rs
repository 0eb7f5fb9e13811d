//! Parameters of the generator: quantiles of the published traces, and probabilities set to meet their statistics.

use kvplane_proto::rng::Rng;

/// Inverse distribution: (fraction, value) ascending from fraction 0 to fraction 1, geometric in between. Values are
/// above 0.
#[derive(Clone, Copy)]
pub(super) struct Quantiles(&'static [(f64, f64)]);

impl Quantiles {
    /// Draws one value.
    pub(super) fn draw(self, rng: &mut Rng) -> f64 {
        let share = rng.unit();
        let above = self.0.partition_point(|&(end, _)| end <= share).clamp(1, self.0.len() - 1);
        let ((from, low), (to, high)) = (self.0[above - 1], self.0[above]);
        low * (high / low).powf((share - from) / (to - from))
    }
}

/// Lengths of the first prompts of sessions.
pub(super) const SESSION_INPUT_TOKENS: Quantiles = Quantiles(&[
    (0.0, 891.0),
    (0.05, 897.0),
    (0.1, 905.0),
    (0.2, 1_092.0),
    (0.3, 1_756.0),
    (0.4, 3_914.0),
    (0.5, 5_450.0),
    (0.6, 7_700.0),
    (0.7, 11_100.0),
    (0.8, 16_200.0),
    (0.9, 26_000.0),
    (0.95, 38_538.0),
    (0.99, 89_869.0),
    (1.0, 126_195.0),
]);

/// Lengths of answers in sessions.
pub(super) const SESSION_OUTPUT_TOKENS: Quantiles = Quantiles(&[
    (0.0, 1.0),
    (0.01, 3.0),
    (0.1, 24.0),
    (0.25, 156.0),
    (0.5, 350.0),
    (0.75, 472.0),
    (0.9, 597.0),
    (0.99, 1_120.0),
    (1.0, 2_000.0),
]);

/// Lengths of prompts with the long head: more than its 12 blocks.
pub(super) const LONG_HEAD_INPUT_TOKENS: Quantiles =
    Quantiles(&[(0.0, 6_200.0), (0.5, 6_700.0), (0.9, 7_700.0), (1.0, 8_200.0)]);
/// Lengths of answers after the long head.
pub(super) const LONG_HEAD_OUTPUT_TOKENS: Quantiles = Quantiles(&[(0.0, 3.0), (0.5, 20.0), (0.8, 30.0), (1.0, 51.0)]);
/// Lengths of prompts with the short head: more than its 5 blocks.
pub(super) const SHORT_HEAD_INPUT_TOKENS: Quantiles = Quantiles(&[(0.0, 3_100.0), (1.0, 3_500.0)]);
/// Lengths of answers after the short head.
pub(super) const SHORT_HEAD_OUTPUT_TOKENS: Quantiles = Quantiles(&[(0.0, 16.0), (1.0, 25.0)]);

/// Tokens that a later turn adds to the prompt.
pub(super) const TURN_ADDED_TOKENS: Quantiles = Quantiles(&[
    (0.0, 4.0),
    (0.05, 20.0),
    (0.1, 63.0),
    (0.2, 192.0),
    (0.4, 395.0),
    (0.6, 553.0),
    (0.7, 684.0),
    (0.8, 1_291.0),
    (0.9, 4_605.0),
    (0.95, 7_390.0),
    (0.99, 17_031.0),
    (1.0, 45_000.0),
]);

/// Time from one turn to the next, in seconds.
pub(super) const TURN_GAP_S: Quantiles = Quantiles(&[
    (0.0, 12.0),
    (0.05, 32.0),
    (0.1, 45.0),
    (0.2, 66.0),
    (0.3, 84.0),
    (0.4, 109.0),
    (0.5, 140.0),
    (0.6, 187.0),
    (0.7, 262.0),
    (0.8, 390.0),
    (0.9, 640.0),
    (0.95, 900.0),
    (0.99, 2_100.0),
    (1.0, 4_200.0),
]);

/// Probability that a first turn is followed by a second.
pub(super) const SECOND_TURN: f64 = 0.285;
/// Probability that a later turn is followed by another.
pub(super) const FURTHER_TURN: f64 = 0.655;
/// Prompt length above which sessions continue less often, in inverse proportion, in tokens.
pub(super) const TAPER_TOKENS: f64 = 45_000.0;
/// Probability that a later turn repeats the prompt before it.
pub(super) const REPEAT: f64 = 0.025;
/// Probability that a later turn branches off from the prompt before it at a point in the middle.
pub(super) const BRANCH: f64 = 0.125;
