//! Rejections of the paper's arXiv version.

use kvplane_conductor::cost::DecodeModel;
use kvplane_conductor::policy::{Ask, Choice, DecodeView, Policy, PrefillView, Refusal, Slo, View};

use super::Algorithm1;

/// Rejection rule of the arXiv version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rejection {
    /// Baseline: at arrival by the prefill load, after the prefill by the decode load.
    Baseline,
    /// Early rejection: at arrival by the greater of both present loads.
    Early,
    /// Early rejection with the decode load predicted for the end of the prefill.
    Predicted,
}

/// Algorithm 1 with a rejection rule of the arXiv version in place of its line 18.
#[derive(Clone, Copy, Debug)]
pub struct RejectingAlgorithm1 {
    /// Placement algorithm.
    pub algorithm: Algorithm1,
    /// Rejection rule.
    pub rejection: Rejection,
}

impl RejectingAlgorithm1 {
    /// Returns Algorithm 1 with its defaults, and `rejection`.
    #[must_use]
    pub fn new(rejection: Rejection) -> Self {
        Self { algorithm: Algorithm1::default(), rejection }
    }

    /// Returns the objective that a request would miss.
    fn objection(&self, ask: &Ask, view: &View<'_>, ttft_ns: u64) -> Option<Refusal> {
        let Slo { ttft_ns: ttft_slo, tbt_ns: tbt_slo, .. } = view.slo;
        if ttft_ns > ttft_slo {
            return Some(Refusal::Ttft);
        }
        let step = |(tokens, requests): (u64, u32)| view.decode_model.step_ns(tokens, requests as usize);
        let alive = || view.decode.iter().filter(|decode| decode.alive);
        let load = match self.rejection {
            Rejection::Baseline => return None,
            Rejection::Early => {
                // Step of the best instance now, with this request.
                let with = |(tokens, requests): (u64, u32)| (tokens + u64::from(ask.tokens), requests + 1);
                alive().map(|decode| step(with(decode.running))).min().unwrap_or(0)
            }
            Rejection::Predicted => {
                // Mean step of all instances at the end of the prefill.
                let sum = alive().fold(0u64, |sum, decode| sum.saturating_add(step(decode.later)));
                sum / alive().count().max(1) as u64
            }
        };
        (load > tbt_slo).then_some(Refusal::Tbt)
    }
}

impl Policy for RejectingAlgorithm1 {
    fn name(&self) -> String {
        let rejection = match self.rejection {
            Rejection::Baseline => "baseline rejection",
            Rejection::Early => "early rejection",
            Rejection::Predicted => "predicted rejection",
        };
        format!("{}, {rejection}", self.algorithm.name())
    }

    fn choose(&self, ask: &Ask, view: &View<'_>, _queued: bool) -> Choice {
        let Some((ttft_ns, placement)) = self.algorithm.cheapest(ask, view) else { return View::nobody() };
        let why = self.objection(ask, view, ttft_ns);
        why.map_or(Choice::Place(placement), |why| Algorithm1::refusal(why, ttft_ns, view))
    }

    fn takes(&self, instance: &PrefillView) -> bool {
        self.algorithm.takes(instance)
    }

    fn takes_decode(&self, tokens: u32, instance: &DecodeView, model: &DecodeModel, slo: Slo) -> bool {
        let (resident, requests) = instance.running;
        model.step_ns(resident + u64::from(tokens), requests as usize + 1) <= slo.tbt_ns
    }
}
