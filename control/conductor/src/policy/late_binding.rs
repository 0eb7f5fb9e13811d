//! Default policy: late binding from a central queue, shortest prefill first within deadlines, and placement by cost.
//!
//! * A request is bound only when an instance is about to be free, so it never waits behind another while a second
//!   instance idles, and the queue can be sorted.
//! * Order: shortest prefill first, with the best cache of any instance, within deadlines ([`QueueRules`]): so the mean
//!   latency is close to that of shortest-first, the 99th percentile to that of first come, first served, and no
//!   request starves. Those that can no longer meet their objective go as soon as no other misses its deadline by that.
//! * Cost of a prefill instance: `max(wait, transfer) + prefill`, because transfers overlap with other prefills; with
//!   layer-wise overlap, transfer and prefill overlap with each other, too ([`prefill_span`]); with the best decode
//!   instance for it: the time to send the KV cache there, and what its steps take longer than those of the fastest;
//!   and the time to compute again what it would evict of sessions whose next turn is expected.
//!   Missing blocks are fetched from all their holders, several at a time, and are not kept: a copy would evict blocks
//!   without another replica. Only if NICs are busy, which means that the prefix is hot, copies are kept.
//! * A queued request whose prefix an instance is computing lets others go before it until then, if that saves more
//!   work than it delays: otherwise prompts that begin alike and arrive together are computed several times.
//! * A pipeline group prefills a prompt if that costs less: the time to its first token, and the time for which others
//!   wait because all members are busy ([`View::total_cost_ns`]). One member is about to be free, the others have at
//!   most one request, and no other request is queued.
//! * Requests are rejected only at arrival: if their first token, or the later ones, or the first token of an admitted
//!   request, would miss their objective ([`Admission`]).

use super::{Admission, Ask, Choice, Fetch, GroupView, Placement, Policy, PrefillView, QueueRules, Refusal, View};
use crate::cost::pipeline::{PrefixLoad, prefill_span};

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
    /// Weight of the waits that a pipeline group causes, beside its gain: above 1, so that errors of the prediction do
    /// not harm requests that gain nothing.
    pub others: f64,
}

impl Default for LateBinding {
    fn default() -> Self {
        Self { ahead_ns: 60_000_000, order: QueueRules::default(), busy_ns: 200_000_000, refuses: false, others: 2.0 }
    }
}

impl LateBinding {
    /// Returns the cheapest placement on one instance.
    fn weigh(&self, ask: &Ask, view: &View<'_>, at: usize) -> Placement {
        let instance = &view.prefill[at];
        let mut best = view.stay(ask, at);
        if view.pooled > instance.held {
            let busy_ns = view.busiest_ns;
            let load = PrefixLoad { queued_ns: busy_ns, moves_ns: view.move_ns(view.pooled - instance.held) };
            let computes_ns = view.prefill_ns(instance, ask.tokens, view.pooled);
            let span = prefill_span(instance.wait_ns, load, computes_ns, instance.layer_wise);
            let (wait_ns, prefill_ns) = (span.begins_ns, span.length_ns());
            let fetch = Fetch::Pool { keep: view.busiest_fetch_ns > self.busy_ns };
            let fetched = Placement { reuse: view.pooled, fetch, wait_ns, prefill_ns, ..best.clone() };
            if fetched.takes_ns() < best.takes_ns() {
                best = fetched;
            }
        }
        best
    }

    /// Returns the objective that a newly arrived request would miss, its own or that of an admitted one, and the time
    /// after which it would miss none.
    fn objection(&self, ask: &Ask, view: &View<'_>, at_once: bool) -> Option<(Refusal, u64)> {
        if ask.admitted {
            return None;
        }
        let retry_after_ns = match self.ttft_ns(ask, view) {
            Some(ttft_ns) => self.in_time_after_ns(ask, view, ttft_ns),
            None if at_once => view.admission.after_ns,
            None => 0,
        };
        if retry_after_ns > 0 {
            return Some((Refusal::Ttft, retry_after_ns));
        }
        let (_, step_ns) = view.fastest_decode?;
        let is_slow = self.refuses && view.tbt_limit_ns < u64::MAX && step_ns > view.tbt_limit_ns;
        let unknown_ns = view.ahead_ns.max(1_000_000_000);
        let after_ns = if view.decode_after_ns > 0 { view.decode_after_ns } else { unknown_ns };
        is_slow.then_some((Refusal::Tbt, after_ns))
    }

    /// Returns the time after which a newly arrived request meets this objective for its first token, and lets those
    /// of admitted requests be met; 0: now.
    fn in_time_after_ns(&self, ask: &Ask, view: &View<'_>, ttft_ns: u64) -> u64 {
        let Admission { margin_ns, after_ns } = view.admission;
        let singles = view.alive().map(|(at, _)| self.weigh(ask, view, at).takes_ns());
        let group_ns = self.by_groups(ask, view, false).map(|placement| placement.takes_ns()).min();
        let best_ns = singles.chain(group_ns).min().unwrap_or(0);
        let done_ns = view.ahead_ns.saturating_add(best_ns).saturating_add(margin_ns);
        let behind_ns = done_ns.saturating_sub(ttft_ns);
        // The queue plans single instances. A group is there only while no other request is queued, whose promise it
        // could break.
        let is_kept_by_group = group_ns.is_some_and(|takes_ns| takes_ns.saturating_add(margin_ns) <= ttft_ns);
        if is_kept_by_group { behind_ns } else { behind_ns.max(after_ns) }
    }

    /// Returns the objective for the first token that a request is held to, if there is one.
    fn ttft_ns(&self, ask: &Ask, view: &View<'_>) -> Option<u64> {
        let ttft_ns = ask.ttft_ns.or_else(|| self.refuses.then_some(view.slo.ttft_ns));
        ttft_ns.filter(|ns| *ns < u64::MAX)
    }

    fn refusal(&self, ask: &Ask, view: &View<'_>, at_once: bool) -> Option<Choice> {
        if view.alive().next().is_none() {
            return Some(View::nobody());
        }
        let (why, retry_after_ns) = self.objection(ask, view, at_once)?;
        Some(Choice::Refuse { why, retry_after_ns })
    }

    fn place(&self, ask: &Ask, view: &View<'_>, only_free: bool) -> Option<Placement> {
        let candidates = view.alive().filter(|(_, instance)| !only_free || self.takes(instance));
        let weighed = candidates.map(|(at, instance)| {
            let (placement, costs_ns) = view.with_decode(ask, self.weigh(ask, view, at));
            ((placement.takes_ns().saturating_add(costs_ns), !instance.served_session, at), costs_ns, placement)
        });
        let (_, costs_ns, single) = weighed.min_by_key(|(rank, ..)| *rank)?;
        let single_ns = view.total_cost_ns(&single, self.others).saturating_add(costs_ns);
        let groups = self.by_groups(ask, view, only_free).filter(|placement| placement.takes_ns() < single.takes_ns());
        let weighed = groups.map(|placement| {
            let (placement, costs_ns) = view.with_decode(ask, placement);
            (view.total_cost_ns(&placement, self.others).saturating_add(costs_ns), placement)
        });
        let deadline_ns = self.ttft_ns(ask, view).map(|ttft_ns| ask.arrival_ns.saturating_add(ttft_ns));
        let misses = |placement: &Placement| {
            deadline_ns.is_some_and(|deadline_ns| view.now_ns.saturating_add(placement.takes_ns()) > deadline_ns)
        };
        match weighed.min_by_key(|(cost_ns, placement)| (misses(placement), *cost_ns, placement.prefill)) {
            Some((cost_ns, group)) if cost_ns < single_ns || (misses(&single) && !misses(&group)) => Some(group),
            _ => Some(single),
        }
    }

    /// Returns the time until which a queued request awaits a prefix instead of this placement: an instance is
    /// computing more of its prompt than any has, and the work that this saves is worth the delay. With a full queue,
    /// work that is saved serves others, with an empty one nobody; so a request alone waits only if it is done no
    /// later.
    fn computed_until_ns(&self, ask: &Ask, view: &View<'_>, placement: &Placement) -> Option<u64> {
        let busy = view.alive().filter(|(_, instance)| !self.takes(instance) && instance.held > placement.reuse);
        let (at, later) = busy.map(|(at, _)| (at, view.stay(ask, at))).min_by_key(|(_, later)| later.takes_ns())?;
        let saved_ns = placement.prefill_ns.saturating_sub(later.prefill_ns);
        let servers = view.alive().count().max(1);
        let worth = (view.queued.saturating_sub(1) as f64 / servers as f64).min(1.0);
        let delay_ns = later.takes_ns().saturating_sub(placement.takes_ns());
        let until_ns = view.now_ns.saturating_add(view.prefill[at].wait_ns.saturating_sub(self.ahead_ns));
        (delay_ns as f64 <= saved_ns as f64 * worth && until_ns > view.now_ns).then_some(until_ns)
    }

    /// Returns the placements on pipeline groups: with the prefix that all holders can provide, and without any. With
    /// `only_free`, one member accepts queued requests, and the others have at most one request each.
    fn by_groups(&self, ask: &Ask, view: &View<'_>, only_free: bool) -> impl Iterator<Item = Placement> {
        let is_free = move |group: &&GroupView| {
            let members = || group.members.iter().map(|at| &view.prefill[*at]);
            !only_free || (members().any(|member| self.takes(member)) && members().all(|member| member.requests < 2))
        };
        let reuses = std::iter::once(view.pooled).chain((view.pooled > 0).then_some(0));
        let placements = move |group| reuses.clone().filter_map(move |reuse| view.by_group(ask, group, reuse));
        view.groups.iter().filter(is_free).flat_map(placements)
    }
}

impl Policy for LateBinding {
    fn name(&self) -> String {
        if self.refuses { "kvplane, admission".into() } else { "kvplane".into() }
    }

    fn choose(&self, ask: &Ask, view: &View<'_>, queued: bool) -> Choice {
        if queued {
            let placement = self.place(ask, view, true);
            let until_ns = placement.as_ref().and_then(|placement| self.computed_until_ns(ask, view, placement));
            return match until_ns {
                Some(until_ns) => Choice::AwaitPrefix { until_ns },
                None => placement.map_or(Choice::Wait, Choice::Place),
            };
        }
        self.refusal(ask, view, false).unwrap_or(Choice::Wait)
    }

    fn choose_now(&self, ask: &Ask, view: &View<'_>) -> Choice {
        let refusal = self.refusal(ask, view, true);
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
