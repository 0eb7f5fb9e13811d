//! The paper's scheduler as printed: Algorithm 1 of FAST'25, with or without transfers, and the admission of the
//! arXiv version.
//!
//! As printed means with its faults: waiting and transfer are added, the source's other transfers are not seen, and a
//! request is bound when it comes. "Local" is the same code with transfers disabled, as the authors say of their own.

use super::{Ask, Choice, DecodeView, Fetch, Placement, Policy, PrefillView, Refusal, Slo, View};
use crate::cost::DecodeModel;

/// What the predictor of the arXiv version assumes that every decode takes; the value is not published.
pub const DECODE_NS: u64 = 12_000_000_000;

/// The least time after which it is worth trying again.
const AGAIN_NS: u64 = 1_000_000_000;

/// When a request is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// Never.
    None,
    /// Algorithm 1, line 18: at arrival on the predicted TTFT and TBT.
    Slo,
    /// The arXiv version's baseline: at arrival on the load of prefill, after the prefill on that of decode.
    Baseline,
    /// Early rejection: at arrival on the greater of both loads now.
    Early,
    /// The same with the decode load predicted for when the prefill would end.
    Predicted,
}

/// Algorithm 1.
#[derive(Clone, Copy, Debug)]
pub struct Algorithm1 {
    /// Lines 5 and 20: from which ratio of the best prefix to one's own it is fetched.
    pub threshold: f64,
    /// Whether anything is fetched at all.
    pub transfers: bool,
    /// When a request is refused.
    pub admission: Admission,
}

impl Default for Algorithm1 {
    fn default() -> Self {
        Self { threshold: 1.5, transfers: true, admission: Admission::None }
    }
}

impl Algorithm1 {
    /// Lines 4 to 16 for one instance: the sum, and the placement.
    fn weigh(&self, ask: &Ask, view: &View<'_>, at: usize, best: (usize, u32)) -> (u64, Placement) {
        let instance = &view.prefill[at];
        let ratio = f64::from(best.1) / f64::from(instance.held);
        let mut placement = view.stay(ask, at);
        let mut transfer_ns = 0;
        if self.transfers && best.1 > instance.held && ratio > self.threshold {
            transfer_ns = view.move_ns(best.1 - instance.held);
            placement.reuse = best.1;
            placement.fetch = Fetch::One(best.0);
            placement.prefill_ns = view.prefill_ns(instance, ask.tokens, best.1);
            placement.wait_ns = instance.wait_ns.saturating_add(transfer_ns);
        }
        (transfer_ns.saturating_add(instance.wait_ns).saturating_add(placement.prefill_ns), placement)
    }

    fn admit(&self, ask: &Ask, view: &View<'_>, ttft_ns: u64) -> Result<(), Refusal> {
        let Slo { ttft_ns: ttft_slo, tbt_ns: tbt_slo } = view.slo;
        let step = |(tokens, requests): (u64, u32)| view.decode_model.step_ns(tokens, requests as usize);
        match self.admission {
            Admission::None => Ok(()),
            Admission::Slo => {
                // Where nobody decodes, tokens are not ours to promise.
                let tbt_ns = view.fastest_decode.map_or(0, |(_, step)| step);
                if ttft_ns > ttft_slo {
                    return Err(Refusal::Ttft);
                }
                if tbt_ns > tbt_slo && tbt_slo < u64::MAX { Err(Refusal::Tbt) } else { Ok(()) }
            }
            Admission::Baseline if ttft_ns > ttft_slo => Err(Refusal::Ttft),
            Admission::Baseline => Ok(()),
            Admission::Early | Admission::Predicted => {
                if ttft_ns > ttft_slo {
                    return Err(Refusal::Ttft);
                }
                let alive = || view.decode.iter().filter(|decode| decode.alive);
                let load = if self.admission == Admission::Early {
                    // What the best instance would have now, with this request.
                    let with = |(tokens, requests): (u64, u32)| (tokens + u64::from(ask.tokens), requests + 1);
                    alive().map(|decode| step(with(decode.running))).min().unwrap_or(0)
                } else {
                    // What the pool would have on average when the prefill ends.
                    let sum = alive().fold(0u64, |sum, decode| sum.saturating_add(step(decode.later)));
                    sum / alive().count().max(1) as u64
                };
                let over = load > tbt_slo;
                if over { Err(Refusal::Tbt) } else { Ok(()) }
            }
        }
    }
}

impl Policy for Algorithm1 {
    fn name(&self) -> String {
        let base = if self.transfers { "Algorithm 1" } else { "local cache-aware" };
        let admission = match self.admission {
            Admission::None => "",
            Admission::Slo => ", SLO",
            Admission::Baseline => ", baseline rejection",
            Admission::Early => ", early rejection",
            Admission::Predicted => ", predicted rejection",
        };
        format!("{base}{admission}")
    }

    fn choose(&self, ask: &Ask, view: &View<'_>, _queued: bool) -> Choice {
        let best = view
            .alive()
            .map(|(at, instance)| (at, instance.held))
            .max_by_key(|(at, held)| (*held, std::cmp::Reverse(*at)));
        let Some(best) = best else { return View::nobody() };
        let weighed = view.alive().map(|(at, _)| self.weigh(ask, view, at, best));
        let Some((ttft_ns, placement)) = weighed.min_by_key(|(ttft_ns, placement)| (*ttft_ns, placement.prefill))
        else {
            return View::nobody();
        };
        match self.admit(ask, view, ttft_ns) {
            Ok(()) => Choice::Place(placement),
            Err(why) => {
                let late_ns = ttft_ns.saturating_sub(view.slo.ttft_ns);
                Choice::Refuse { why, retry_after_ns: late_ns.max(AGAIN_NS) }
            }
        }
    }

    fn takes(&self, _instance: &PrefillView) -> bool {
        false
    }

    fn takes_decode(&self, tokens: u32, instance: &DecodeView, model: &DecodeModel, slo: Slo) -> bool {
        let (resident, requests) = instance.running;
        let refuses = matches!(self.admission, Admission::Baseline | Admission::Early | Admission::Predicted);
        !refuses || model.step_ns(resident + u64::from(tokens), requests as usize + 1) <= slo.tbt_ns
    }
}
