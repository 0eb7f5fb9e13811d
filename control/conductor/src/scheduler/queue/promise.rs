//! Promises of admission: the time by which an admitted request has its first token, and the margin that is learned
//! from how late requests were.
//!
//! An admitted request has a deadline, its arrival and its objective, and a *target*, which is the deadline less a
//! margin. Admission and the order of the queue keep targets; predictions are wrong by something, so requests are done
//! some time after their targets. The margin is the quantile, for the probability promised, of that delay among the
//! last requests with a similar objective that were done near their targets, or later: with it, at most as many miss
//! their deadlines as the promise allows. Of the quantile it is the upper end of a confidence interval of 95 %, by
//! order statistics, so that few samples make a larger margin.

use std::collections::BTreeMap;

use crate::policy::Probability;
use crate::scheduler::sizes::SizeWindow;

/// Promise of a first token, given to an admitted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::scheduler) struct Promise {
    /// Time from the arrival to the deadline.
    pub(in crate::scheduler) objective_ns: u64,
    /// Deadline less the margin at its admission: the order of the queue lets it be done by then.
    pub(in crate::scheduler) target_ns: u64,
}

/// Part of an objective that is the margin until enough requests have been served.
const FIRST_MARGIN: u64 = 8;
/// Part of an objective that the margin is at most.
const MOST_MARGIN: u64 = 2;
/// Number of delays from which the margin is learned.
const ENOUGH: usize = 100;

/// Learned margins, for objectives of each power of two of nanoseconds.
#[derive(Debug, Default)]
pub(in crate::scheduler) struct Margins {
    /// Delays after the target; 0 for requests that were done by then.
    delays: BTreeMap<u32, SizeWindow>,
}

impl Margins {
    pub(in crate::scheduler) const fn new() -> Self {
        Self { delays: BTreeMap::new() }
    }

    /// Returns the margin for requests with this objective that are to meet it with this probability: nanoseconds, at
    /// most half the objective.
    pub(in crate::scheduler) fn margin_ns(&self, objective_ns: u64, probability: Probability) -> u64 {
        let delays = self.delays.get(&objective_ns.max(1).ilog2());
        let count = delays.map_or(0, SizeWindow::len);
        let share = probability.share();
        let expected = (count as f64 + 1.0) * share;
        let rank = (expected + 1.645 * (count as f64 * share * (1.0 - share)).sqrt()).ceil() as usize;
        let learned_ns = delays.and_then(|delays| delays.of_rank(rank)).unwrap_or(0);
        let least_ns = if count < ENOUGH { objective_ns / FIRST_MARGIN } else { 0 };
        learned_ns.max(least_ns).min(objective_ns / MOST_MARGIN)
    }

    /// Learns from a request that had its first token at `done_ns`. One that was done long before its target, as in a
    /// short queue, tells nothing of those that wait for as long as their targets allow.
    pub(in crate::scheduler) fn report(&mut self, promise: Promise, done_ns: u64) {
        if done_ns.saturating_add(promise.objective_ns / FIRST_MARGIN) < promise.target_ns {
            return;
        }
        let window = self.delays.entry(promise.objective_ns.max(1).ilog2()).or_insert_with(SizeWindow::new);
        window.add(done_ns.saturating_sub(promise.target_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn report(margins: &mut Margins, objective_s: u64, delay_ns: u64) {
        let promise = Promise { objective_ns: objective_s * SECOND, target_ns: 100 * SECOND };
        margins.report(promise, 100 * SECOND + delay_ns);
    }

    #[test]
    fn the_margin_covers_as_many_delays_as_promised() {
        let mut margins = Margins::new();
        assert_eq!(margins.margin_ns(16 * SECOND, Probability::DEFAULT), 2 * SECOND, "nothing is known yet");
        // Delays from 0 to 999 ms.
        (0..1000).for_each(|at| report(&mut margins, 16, at * 617 % 1000 * 1_000_000));
        let probability = |permille| Probability::of_permille(permille).unwrap();
        let margin_ms = |permille| margins.margin_ns(16 * SECOND, probability(permille)) / 1_000_000;
        assert_eq!((margin_ms(500), margin_ms(900), margin_ms(990), margin_ms(999)), (526, 916, 996, 999));
        assert_eq!(
            margins.margin_ns(SECOND, Probability::DEFAULT),
            SECOND / 8,
            "objectives of another size have delays of their own"
        );
    }

    #[test]
    fn the_margin_follows_the_last_requests_and_leaves_half_of_the_objective() {
        let mut margins = Margins::new();
        (0..1000).for_each(|_| report(&mut margins, 16, 60 * SECOND));
        assert_eq!(margins.margin_ns(16 * SECOND, Probability::DEFAULT), 8 * SECOND);
        (0..1000).for_each(|_| report(&mut margins, 16, 0));
        assert_eq!(margins.margin_ns(16 * SECOND, Probability::DEFAULT), 0);
    }

    #[test]
    fn requests_that_did_not_have_to_wait_tell_nothing() {
        let mut margins = Margins::new();
        let promise = Promise { objective_ns: 16 * SECOND, target_ns: 100 * SECOND };
        (0..200).for_each(|_| margins.report(promise, 97 * SECOND));
        assert_eq!(margins.margin_ns(16 * SECOND, Probability::DEFAULT), 2 * SECOND);
        (0..200).for_each(|_| margins.report(promise, 99 * SECOND));
        assert_eq!(margins.margin_ns(16 * SECOND, Probability::DEFAULT), 0);
    }

    #[test]
    fn a_few_requests_are_not_enough_to_do_without_a_margin() {
        let mut margins = Margins::new();
        (0..99).for_each(|_| report(&mut margins, 16, 0));
        assert_eq!(margins.margin_ns(16 * SECOND, Probability::DEFAULT), 2 * SECOND);
        report(&mut margins, 16, 3 * SECOND);
        assert_eq!(margins.margin_ns(16 * SECOND, Probability::DEFAULT), 3 * SECOND, "the longest delay of a hundred");
        assert_eq!(margins.margin_ns(0, Probability::DEFAULT), 0);
    }
}
