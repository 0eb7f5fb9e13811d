//! Models of other routers, after their documentation and sources, with their defaults.

use std::cmp::Reverse;

use kvplane_conductor::policy::{Ask, Choice, Policy, PrefillView, View};

/// Cost function of NVIDIA Dynamo's router at temperature 0: booked prefill tokens plus this prompt's, minus cached
/// ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct DynamoLike;

impl Policy for DynamoLike {
    fn name(&self) -> String {
        "Dynamo-like".into()
    }

    fn choose(&self, ask: &Ask, view: &View<'_>, _queued: bool) -> Choice {
        let cost = |(at, instance): &(usize, &PrefillView)| {
            ((instance.queued_tokens + u64::from(ask.tokens)).saturating_sub(u64::from(instance.held)), *at)
        };
        let best = view.alive().min_by_key(cost);
        best.map_or_else(View::nobody, |(at, _)| Choice::Place(view.stay(ask, at)))
    }
}

/// SGLang's cache-aware router: if loads differ too much, the shortest queue; else the longest prefix that was ever
/// routed to an instance if it is long enough, and among several instances the one with the fewest requests; else the
/// instance to which the least was routed. (Its tree returns any of several instances. Always choosing the first would
/// send all prompts with a common prefix to one.)
#[derive(Clone, Copy, Debug)]
pub struct SglangLike {
    /// Fraction of the prompt from which a match counts.
    pub match_least: f64,
    /// Absolute difference of queue lengths that is tolerated.
    pub balance_abs: u32,
    /// Ratio of queue lengths that is tolerated.
    pub balance_rel: f64,
}

impl Default for SglangLike {
    fn default() -> Self {
        Self { match_least: 0.3, balance_abs: 64, balance_rel: 1.5 }
    }
}

impl Policy for SglangLike {
    fn name(&self) -> String {
        "SGLang-like".into()
    }

    fn looks_at_routes(&self) -> bool {
        true
    }

    fn choose(&self, ask: &Ask, view: &View<'_>, _queued: bool) -> Choice {
        let queues = || view.alive().map(|(_, instance)| instance.requests);
        let (Some(most), Some(least)) = (queues().max(), queues().min()) else { return View::nobody() };
        let uneven = most - least > self.balance_abs && f64::from(most) > self.balance_rel * f64::from(least);
        let rest = |(at, instance): &(usize, &PrefillView)| (instance.routed, Reverse((instance.requests, *at)));
        let longest = view.alive().max_by_key(rest);
        let at = match longest {
            _ if uneven => view.alive().min_by_key(|(at, instance)| (instance.requests, *at)),
            Some((at, instance)) if f64::from(instance.routed) > self.match_least * f64::from(ask.tokens) => {
                Some((at, instance))
            }
            _ => view.alive().min_by_key(|(at, instance)| (instance.routed_size, *at)),
        };
        at.map_or_else(View::nobody, |(at, _)| Choice::Place(view.stay(ask, at)))
    }
}
