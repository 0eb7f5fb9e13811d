//! Policies that no control plane can choose: the rejections of the paper's arXiv version. And those that it can, side
//! by side.

use kvplane_conductor::cost::DecodeModel;
use kvplane_conductor::policy::{
    Algorithm1, Ask, Choice, DecodeView, Policy, PolicyName, PrefillView, Refusal, Slo, View,
};

/// Every policy with its defaults, refusing nobody, in the order in which they are shown; ours last.
#[must_use]
pub fn side_by_side() -> Vec<Box<dyn Policy>> {
    PolicyName::ALL.map(|named| named.make(false)).into()
}

/// When a request is refused, by the arXiv version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rejection {
    /// Its baseline: at arrival on the load of prefill, after the prefill on that of decode.
    Baseline,
    /// Early rejection: at arrival on the greater of both loads now.
    Early,
    /// The same with the decode load predicted for when the prefill would end.
    Predicted,
}

/// Algorithm 1 with a rejection of the arXiv version in place of its line 18.
#[derive(Clone, Copy, Debug)]
pub struct RejectingAlgorithm1 {
    /// The placement.
    pub algorithm: Algorithm1,
    /// When a request is refused.
    pub rejection: Rejection,
}

impl RejectingAlgorithm1 {
    /// Algorithm 1 with its defaults, and `rejection`.
    #[must_use]
    pub fn new(rejection: Rejection) -> Self {
        Self { algorithm: Algorithm1::default(), rejection }
    }

    /// Why a request would not be served as promised.
    fn objection(&self, ask: &Ask, view: &View<'_>, ttft_ns: u64) -> Option<Refusal> {
        let Slo { ttft_ns: ttft_slo, tbt_ns: tbt_slo } = view.slo;
        if ttft_ns > ttft_slo {
            return Some(Refusal::Ttft);
        }
        let step = |(tokens, requests): (u64, u32)| view.decode_model.step_ns(tokens, requests as usize);
        let alive = || view.decode.iter().filter(|decode| decode.alive);
        let load = match self.rejection {
            Rejection::Baseline => return None,
            Rejection::Early => {
                // What the best instance would have now, with this request.
                let with = |(tokens, requests): (u64, u32)| (tokens + u64::from(ask.tokens), requests + 1);
                alive().map(|decode| step(with(decode.running))).min().unwrap_or(0)
            }
            Rejection::Predicted => {
                // What the pool would have on average when the prefill ends.
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
