//! Scheduler of the paper as printed: Algorithm 1 of FAST'25, with or without transfers.
//!
//! As printed includes its weaknesses: wait and transfer are added, other transfers of the source are ignored, and a
//! request is bound at arrival. "Local" is the same code with transfers disabled, as the authors describe their own.
//! The rejections of the arXiv version are in [`super::rejections`].

use kvplane_conductor::policy::{Ask, Choice, Fetch, Placement, Policy, PrefillView, Refusal, Slo, View};

/// Minimum delay before a retry.
const AGAIN_NS: u64 = 1_000_000_000;

/// Algorithm 1.
#[derive(Clone, Copy, Debug)]
pub struct Algorithm1 {
    /// Lines 5 and 20: ratio of the best prefix to the local one from which it is fetched.
    pub threshold: f64,
    /// True if blocks are fetched at all.
    pub transfers: bool,
    /// Line 18: true if a request is rejected at arrival whose predicted TTFT or TBT misses its objective.
    pub refuses: bool,
}

impl Default for Algorithm1 {
    fn default() -> Self {
        Self { threshold: 1.5, transfers: true, refuses: false }
    }
}

impl Algorithm1 {
    /// Computes lines 4 to 16 for one instance: the sum, and the placement.
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

    /// Computes lines 3 to 16: the instance with the least sum of wait, transfer and prefill, and that sum; `None` if
    /// no instance accepts requests.
    #[must_use]
    pub fn cheapest(&self, ask: &Ask, view: &View<'_>) -> Option<(u64, Placement)> {
        let best = view
            .alive()
            .map(|(at, instance)| (at, instance.held))
            .max_by_key(|(at, held)| (*held, std::cmp::Reverse(*at)))?;
        let weighed = view.alive().map(|(at, _)| self.weigh(ask, view, at, best));
        weighed.min_by_key(|(ttft_ns, placement)| (*ttft_ns, placement.prefill))
    }

    /// Returns the rejection of a request whose first token is predicted after `ttft_ns`.
    #[must_use]
    pub fn refusal(why: Refusal, ttft_ns: u64, view: &View<'_>) -> Choice {
        let late_ns = ttft_ns.saturating_sub(view.slo.ttft_ns);
        Choice::Refuse { why, retry_after_ns: late_ns.max(AGAIN_NS) }
    }

    /// Computes line 18: the objective that a request would miss.
    fn objection(&self, view: &View<'_>, ttft_ns: u64) -> Option<Refusal> {
        let Slo { ttft_ns: ttft_slo, tbt_ns: tbt_slo, .. } = view.slo;
        if !self.refuses {
            return None;
        }
        if ttft_ns > ttft_slo {
            return Some(Refusal::Ttft);
        }
        // Without decode instances, the time between tokens has no prediction.
        let tbt_ns = view.fastest_decode.map_or(0, |(_, step)| step);
        (tbt_ns > tbt_slo && tbt_slo < u64::MAX).then_some(Refusal::Tbt)
    }
}

impl Policy for Algorithm1 {
    fn name(&self) -> String {
        let base = if self.transfers { "Algorithm 1" } else { "local cache-aware" };
        if self.refuses { format!("{base}, SLO") } else { base.into() }
    }

    fn choose(&self, ask: &Ask, view: &View<'_>, _queued: bool) -> Choice {
        let Some((ttft_ns, placement)) = self.cheapest(ask, view) else { return View::nobody() };
        let why = self.objection(view, ttft_ns);
        why.map_or(Choice::Place(placement), |why| Self::refusal(why, ttft_ns, view))
    }

    fn takes(&self, _instance: &PrefillView) -> bool {
        false
    }
}
