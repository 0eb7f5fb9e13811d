//! Comparison of placement policies on a simulated cluster.

use std::sync::Arc;

use kvplane_conductor::policy::{LateBinding, Policy, Slo};
use kvplane_conductor::scheduler::ServiceTerms;
use kvplane_sim::{
    Algorithm1, Order, Outcome, RejectingAlgorithm1, Rejection, RequestStatus, SimConfig, Work, bound, run,
};
use kvplane_tools::trace::Request;
use serde::Serialize;

/// Converts the requests of a trace to work for a cluster, in order of arrival.
#[must_use]
pub(crate) fn works(requests: &[Request]) -> Vec<Work> {
    let mut works: Vec<Work> = requests
        .iter()
        .map(|request| Work {
            arrival_ns: request.timestamp_ms * 1_000_000,
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            blocks: Arc::from(request.blocks.as_slice()),
            terms: ServiceTerms::default(),
        })
        .collect();
    works.sort_by_key(|work| work.arrival_ns);
    works
}

/// Objectives of the results: the first token within 30 s, and each further one within 0.1 s.
pub(crate) const OBJECTIVE: Slo = Slo { ttft_ns: 30_000_000_000, tbt_ns: 100_000_000, ..Slo::NONE };

/// Creates Algorithm 1 with a rejection of the arXiv version.
#[must_use]
pub(crate) fn rejecting(rejection: Rejection) -> Box<dyn Policy> {
    Box::new(RejectingAlgorithm1::new(rejection))
}

/// Creates Algorithm 1 without transfers.
#[must_use]
pub(crate) fn local() -> Box<dyn Policy> {
    Box::new(Algorithm1 { transfers: false, ..Algorithm1::default() })
}

/// Creates the policies that reject requests: those of the papers, and kvplane's.
#[must_use]
pub(crate) fn refusing() -> Vec<Box<dyn Policy>> {
    let mut all: Vec<Box<dyn Policy>> = vec![Box::new(Algorithm1 { refuses: true, ..Algorithm1::default() })];
    all.extend([Rejection::Baseline, Rejection::Early, Rejection::Predicted].map(rejecting));
    all.push(Box::new(LateBinding { refuses: true, ..LateBinding::default() }));
    all
}

/// Results of one policy.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct PolicyOutcome {
    /// Name of the policy, or of the bound.
    pub(crate) policy: String,
    /// Arrival rate relative to the trace.
    pub(crate) load: f64,
    /// Mean time to first token, in seconds.
    pub(crate) mean_ttft_s: f64,
    /// Median time to first token, in seconds.
    pub(crate) p50_ttft_s: f64,
    /// 90th percentile of the time to first token, in seconds.
    pub(crate) p90_ttft_s: f64,
    /// 99th percentile of the time to first token, in seconds.
    pub(crate) p99_ttft_s: f64,
    /// Longest time to first token, in seconds.
    pub(crate) longest_ttft_s: f64,
    /// Fraction of prompt tokens that were not computed.
    pub(crate) hit: f64,
    /// Mean time of a prefill, in seconds.
    pub(crate) prefill_s: f64,
    /// Work of the busiest instance relative to the mean.
    pub(crate) imbalance: f64,
    /// Fraction of requests with the first token within 30 s and each further token within 0.1 s.
    pub(crate) goodput: f64,
    /// Fraction of the requests that were not rejected at arrival, with the first token within 30 s.
    pub(crate) kept: f64,
    /// Requests rejected at arrival.
    pub(crate) refused: usize,
    /// Requests rejected after the prefill.
    pub(crate) refused_late: usize,
    /// Requests that ended in the queue after the maximum wait.
    pub(crate) waited: usize,
    /// Oscillation of the booked work, relative to 30 s.
    pub(crate) oscillation: f64,
    /// Mean time between tokens of the served requests, over the longest tenth of each, in milliseconds.
    pub(crate) mean_tbt_ms: f64,
    /// Served requests whose tokens came later than 0.1 s after each other.
    pub(crate) tbt_missed: usize,
    /// Mean error of expected outputs relative to the generated tokens, and part of the outputs within the 90th
    /// percentile that was expected; 0 without decoding.
    pub(crate) output_error: f64,
    pub(crate) output_within: f64,
    /// Mean relative error of predicted decode steps.
    pub(crate) decode_error: f64,
}

impl PolicyOutcome {
    fn of(policy: String, load: f64, outcome: &Outcome) -> Self {
        let quantiles = outcome.ttft_quantiles_s(&[0.5, 0.9, 0.99, 1.0]);
        let output_errors = outcome.output_errors();
        Self {
            policy,
            load,
            mean_ttft_s: outcome.mean_ttft_s(),
            p50_ttft_s: quantiles[0],
            p90_ttft_s: quantiles[1],
            p99_ttft_s: quantiles[2],
            longest_ttft_s: quantiles[3],
            hit: outcome.hit(),
            prefill_s: outcome.prefill_s(),
            imbalance: outcome.imbalance,
            goodput: outcome.goodput(OBJECTIVE.ttft_ns, OBJECTIVE.tbt_ns),
            kept: outcome.kept(OBJECTIVE.ttft_ns),
            refused: outcome.count(RequestStatus::Refused),
            refused_late: outcome.count(RequestStatus::RefusedLate),
            waited: outcome.count(RequestStatus::Waited),
            oscillation: outcome.oscillation(30.0),
            mean_tbt_ms: outcome.mean_tbt_ms(),
            tbt_missed: outcome.tbt_missed(OBJECTIVE.tbt_ns),
            output_error: output_errors.relative,
            output_within: output_errors.within_high,
            decode_error: outcome.decode_error(),
        }
    }

    /// Headings of [`Self::request_lines`], one column each.
    pub(crate) const REQUEST_HEAD: &'static str =
        "policy,load,request,arrival_s,tokens,reused_tokens,prefill_s,ttft_s,status";

    /// Returns a line of comma-separated values for each request of an outcome, in the order of the trace: so what the
    /// slowest have in common can be counted.
    pub(crate) fn request_lines<'a>(
        &'a self,
        trace: &'a [Work],
        outcome: &'a Outcome,
    ) -> impl Iterator<Item = String> + 'a {
        outcome.requests.iter().zip(trace).enumerate().map(|(number, (request, work))| {
            let arrival_s = work.arrival_ns as f64 / self.load / 1e9;
            let [prefill_s, ttft_s] = [request.prefill_ns, request.ttft_ns].map(|ns| ns as f64 / 1e9);
            let policy = self.policy.replace(',', "");
            format!(
                "{policy},{},{number},{arrival_s:.3},{},{},{prefill_s:.3},{ttft_s:.3},{:?}",
                self.load, request.tokens, request.reused_tokens, request.status
            )
        })
    }

    /// Headings of a table of outcomes.
    pub(crate) const HEAD: [&'static str; 21] = [
        "policy",
        "load",
        "mean TTFT s",
        "p50",
        "p90",
        "p99",
        "longest",
        "hit",
        "prefill s",
        "imbalance",
        "goodput",
        "kept",
        "refused",
        "late",
        "waited",
        "swing",
        "mean TBT ms",
        "TBT missed",
        "output error",
        "within p90",
        "decode error",
    ];

    /// Returns a row of such a table.
    #[must_use]
    pub(crate) fn cells(&self) -> Vec<String> {
        vec![
            self.policy.clone(),
            format!("{}x", self.load),
            format!("{:.3}", self.mean_ttft_s),
            format!("{:.2}", self.p50_ttft_s),
            format!("{:.2}", self.p90_ttft_s),
            format!("{:.2}", self.p99_ttft_s),
            format!("{:.1}", self.longest_ttft_s),
            format!("{:.3}", self.hit),
            format!("{:.3}", self.prefill_s),
            format!("{:.2}", self.imbalance),
            format!("{:.3}", self.goodput),
            format!("{:.4}", self.kept),
            self.refused.to_string(),
            self.refused_late.to_string(),
            self.waited.to_string(),
            format!("{:.3}", self.oscillation),
            format!("{:.1}", self.mean_tbt_ms),
            self.tbt_missed.to_string(),
            format!("{:.2}", self.output_error),
            format!("{:.2}", self.output_within),
            format!("{:.3}", self.decode_error),
        ]
    }
}

/// Results of kvplane's policy divided by those of the best other policy, for each result another one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Verdict {
    load: f64,
    mean: f64,
    p99: f64,
    goodput: f64,
    /// Mean divided by that of the shortest-first bound.
    bound: f64,
}

impl Verdict {
    /// Headings of a table of verdicts.
    pub(crate) const HEAD: [&'static str; 5] =
        ["load", "mean TTFT", "p99", "goodput", "mean, by the shortest-first bound"];

    /// Compares the outcomes of policies that admit every request; `None` without a policy of kvplane and another one.
    pub(crate) fn of(outcomes: &[PolicyOutcome]) -> Option<Self> {
        let ours = outcomes.iter().find(|one| one.policy == "kvplane")?;
        let bound = outcomes.iter().find(|one| one.policy == SHORTEST)?;
        let is_other = |one: &&PolicyOutcome| !one.policy.starts_with("kvplane") && !one.policy.starts_with("bound");
        let others = || outcomes.iter().filter(is_other);
        others().next()?;
        let least = |of: fn(&PolicyOutcome) -> f64| others().map(of).fold(f64::INFINITY, f64::min);
        Some(Self {
            load: ours.load,
            mean: ours.mean_ttft_s / least(|one| one.mean_ttft_s),
            p99: ours.p99_ttft_s / least(|one| one.p99_ttft_s),
            goodput: ours.goodput / others().map(|one| one.goodput).fold(f64::MIN_POSITIVE, f64::max),
            bound: ours.mean_ttft_s / bound.mean_ttft_s,
        })
    }

    /// Returns a row of such a table.
    pub(crate) fn cells(&self) -> Vec<String> {
        let ratios = [self.mean, self.p99, self.goodput, self.bound].map(|ratio| format!("{ratio:.2}"));
        std::iter::once(format!("{}x", self.load)).chain(ratios).collect()
    }
}

/// Name of the bound of shortest prefill first.
const SHORTEST: &str = "bound, shortest first";

/// Runs both bounds and each of `policies` on `trace`, one after the other, those whose name `is_meant`; calls `done`
/// with each result, and what it follows from.
pub(crate) fn compare(
    trace: &[Work],
    config: &SimConfig,
    policies: Vec<Box<dyn Policy>>,
    is_meant: impl Fn(&str) -> bool,
    mut done: impl FnMut(PolicyOutcome, &Outcome),
) {
    let bounds = [("bound, FCFS", Order::Fcfs), (SHORTEST, Order::Shortest)];
    for (name, order) in bounds.into_iter().filter(|(name, _)| is_meant(name)) {
        let outcome = bound(trace, config, order);
        done(PolicyOutcome::of(name.to_owned(), config.load, &outcome), &outcome);
    }
    for policy in policies.into_iter().filter(|policy| is_meant(&policy.name())) {
        let name = policy.name();
        let outcome = run(trace, config, policy);
        done(PolicyOutcome::of(name, config.load, &outcome), &outcome);
    }
}

#[cfg(test)]
mod tests {
    use kvplane_sim::side_by_side;
    use kvplane_tools::trace::generate::{Shape, generate};

    use super::*;

    #[test]
    fn every_policy_serves_a_generated_trace() {
        let trace = generate(Shape::Conversation, 200, 3).unwrap();
        let works = works(&trace.requests);
        assert!(works.is_sorted_by_key(|work| work.arrival_ns));
        let (mut names, mut all) = (Vec::new(), Vec::new());
        compare(
            &works,
            &SimConfig::default(),
            side_by_side(),
            |_| true,
            |fared, outcome| {
                assert_eq!(outcome.requests.len(), 200);
                assert!(fared.mean_ttft_s > 0.0 && fared.refused + fared.waited == 0, "{fared:?}");
                assert_eq!(fared.cells().len(), PolicyOutcome::HEAD.len());
                let lines: Vec<String> = fared.request_lines(&works, outcome).collect();
                assert_eq!(lines.len(), 200);
                let columns = PolicyOutcome::REQUEST_HEAD.split(',').count();
                assert!(lines.iter().all(|line| line.split(',').count() == columns && line.ends_with("Served")));
                names.push(fared.policy.clone());
                all.push(fared);
            },
        );
        assert_eq!(names.len(), 10);
        let verdict = Verdict::of(&all).unwrap();
        assert!(verdict.mean > 0.0 && verdict.bound >= 1.0, "{verdict:?}");
        assert_eq!(verdict.cells().len(), Verdict::HEAD.len());
        assert_eq!(Verdict::of(&all[..2]), None, "bounds alone");
        assert_eq!(refusing().len(), 5);
    }

    #[test]
    fn a_verdict_takes_the_best_other_policy_for_each_result() {
        let outcome = |policy: &str, mean_ttft_s, p99_ttft_s, goodput| PolicyOutcome {
            policy: policy.to_owned(),
            load: 2.0,
            mean_ttft_s,
            p99_ttft_s,
            goodput,
            ..PolicyOutcome::default()
        };
        let outcomes = [
            outcome("bound, FCFS", 0.1, 0.1, 1.0),
            outcome(SHORTEST, 2.0, 0.1, 1.0),
            outcome("one", 4.0, 50.0, 0.25),
            outcome("other", 8.0, 10.0, 0.5),
            outcome("kvplane", 3.0, 5.0, 0.75),
            outcome("kvplane, admission", 0.1, 0.1, 1.0),
        ];
        let verdict = Verdict { load: 2.0, mean: 0.75, p99: 0.5, goodput: 1.5, bound: 1.5 };
        assert_eq!(Verdict::of(&outcomes), Some(verdict));
    }
}
