//! Default policy: late binding from a central queue, shortest prefill first within deadlines, and placement by cost.
//!
//! * A request is bound only when an instance is about to be free, so it never waits behind another while a second
//!   instance idles, and the queue can be sorted.
//! * Order: shortest prefill first, with the best cache of any instance, within deadlines ([`QueueRules`]): so the mean
//!   latency is close to that of shortest-first, the 99th percentile to that of first come, first served, and no
//!   request starves. Requests that can no longer meet their objective go after those that can.
//! * Cost of a prefill instance: `max(wait, transfer) + prefill`, because transfers overlap with other prefills; with
//!   the best decode instance for it: the time to send the KV cache there, and what its steps take longer than those of
//!   the fastest; and the time to compute again what it would evict of sessions whose next turn is expected.
//!   Missing blocks are fetched from all their holders, several at a time, and are not kept: a copy would evict blocks
//!   without another replica. Only if NICs are busy, which means that the prefix is hot, copies are kept.
//! * Requests are rejected only at arrival, based on bookings, if the first token or the later ones would miss their
//!   objective.

use super::{Ask, Choice, Fetch, Placement, Policy, PrefillView, QueueRules, Refusal, View};

/// Default policy.
#[derive(Clone, Copy, Debug)]
pub struct LateBinding {
    /// Booked work up to which an instance accepts another request: it hides transfers and message latency.
    pub ahead_ns: u64,
    /// Order of the queue.
    pub order: QueueRules,
    /// Fetches booked on a NIC from which its blocks count as hot, so that fetched copies are kept.
    pub busy_ns: u64,
    /// True if requests that would miss the objectives of all are rejected; those with an objective of their own are
    /// always judged by it.
    pub refuses: bool,
    /// Fraction of an objective that a prediction may use.
    pub margin: f64,
}

impl Default for LateBinding {
    fn default() -> Self {
        Self { ahead_ns: 60_000_000, order: QueueRules::default(), busy_ns: 200_000_000, refuses: false, margin: 1.0 }
    }
}

impl LateBinding {
    /// Returns the cheapest placement on one instance.
    fn weigh(&self, ask: &Ask, view: &View<'_>, at: usize) -> Placement {
        let instance = &view.prefill[at];
        let mut best = view.stay(ask, at);
        if view.pooled > instance.held {
            let busy_ns = view.busiest_ns;
            let transfer_ns = busy_ns.saturating_add(view.move_ns(view.pooled - instance.held));
            let wait_ns = instance.wait_ns.max(transfer_ns);
            let prefill_ns = view.prefill_ns(instance, ask.tokens, view.pooled);
            let fetch = Fetch::Pool { keep: view.busiest_fetch_ns > self.busy_ns };
            let fetched = Placement { reuse: view.pooled, fetch, wait_ns, prefill_ns, ..best };
            if fetched.takes_ns() < best.takes_ns() {
                best = fetched;
            }
        }
        best
    }

    /// Returns the objective that a newly arrived request would miss.
    fn objection(&self, ask: &Ask, view: &View<'_>) -> Option<Refusal> {
        let ttft_ns = match ask.ttft_ns {
            None if !self.refuses => u64::MAX,
            own => own.unwrap_or(view.slo.ttft_ns),
        };
        let tbt_ns = if self.refuses { view.tbt_limit_ns } else { u64::MAX };
        let over = |ns: u64, promised: u64| promised < u64::MAX && ns as f64 > promised as f64 * self.margin;
        let best = view.alive().map(|(at, _)| self.weigh(ask, view, at));
        let best_ns = best.map(|placement| placement.takes_ns()).min().unwrap_or(0);
        if over(view.ahead_ns.saturating_add(best_ns), ttft_ns) {
            return Some(Refusal::Ttft);
        }
        let (_, step_ns) = view.fastest_decode?;
        over(step_ns, tbt_ns).then_some(Refusal::Tbt)
    }

    fn refusal(&self, ask: &Ask, view: &View<'_>) -> Option<Choice> {
        if view.alive().next().is_none() {
            return Some(View::nobody());
        }
        let why = self.objection(ask, view)?;
        Some(Choice::Refuse { why, retry_after_ns: view.ahead_ns.max(1_000_000_000) })
    }

    fn place(&self, ask: &Ask, view: &View<'_>, only_free: bool) -> Option<Placement> {
        let candidates = view.alive().filter(|(_, instance)| !only_free || self.takes(instance));
        let weighed = candidates.map(|(at, instance)| {
            let placement = self.weigh(ask, view, at);
            let takes_ns = placement.takes_ns();
            let decode = view.decode_for(ask, at, takes_ns);
            let claim_ns = view.claim_ns(ask, &placement);
            let cost_ns = takes_ns.saturating_add(decode.map_or(0, |(_, ns)| ns)).saturating_add(claim_ns);
            let placement = Placement { decode: decode.map(|(decode, _)| decode), ..placement };
            ((cost_ns, !instance.served_session, at), placement)
        });
        weighed.min_by_key(|(rank, _)| *rank).map(|(_, placement)| placement)
    }
}

impl Policy for LateBinding {
    fn name(&self) -> String {
        if self.refuses { "kvplane, admission".into() } else { "kvplane".into() }
    }

    fn choose(&self, ask: &Ask, view: &View<'_>, queued: bool) -> Choice {
        if queued {
            return self.place(ask, view, true).map_or(Choice::Wait, Choice::Place);
        }
        self.refusal(ask, view).unwrap_or(Choice::Wait)
    }

    fn choose_now(&self, ask: &Ask, view: &View<'_>) -> Choice {
        let refusal = self.refusal(ask, view);
        refusal.unwrap_or_else(|| self.place(ask, view, false).map_or_else(View::nobody, Choice::Place))
    }

    fn queue_rules(&self) -> QueueRules {
        self.order
    }

    fn queues(&self) -> bool {
        true
    }

    fn takes(&self, instance: &PrefillView) -> bool {
        instance.wait_ns <= self.ahead_ns && instance.requests < 2
    }
}
