//! Policies without knowledge of caches: random, round-robin, least loaded.

use kvplane_proto::rng::mix64;

use super::{Ask, Choice, Policy, View};

/// Random policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spread {
    /// Seed of the random choices.
    pub seed: u64,
}

impl Policy for Spread {
    fn name(&self) -> String {
        "random".into()
    }

    fn choose(&self, ask: &Ask, view: &View<'_>, _queued: bool) -> Choice {
        nth(ask, view, mix64(self.seed ^ mix64(ask.id)))
    }
}

/// Round-robin policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundRobin;

impl Policy for RoundRobin {
    fn name(&self) -> String {
        "round robin".into()
    }

    fn choose(&self, ask: &Ask, view: &View<'_>, _queued: bool) -> Choice {
        nth(ask, view, view.placed)
    }
}

fn nth(ask: &Ask, view: &View<'_>, number: u64) -> Choice {
    let alive: Vec<usize> = view.alive().map(|(at, _)| at).collect();
    match alive.len() {
        0 => View::nobody(),
        count => Choice::Place(view.stay(ask, alive[(number % count as u64) as usize])),
    }
}

/// Least-loaded policy: the shortest wait.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadBalance;

impl Policy for LoadBalance {
    fn name(&self) -> String {
        "load balance".into()
    }

    fn choose(&self, ask: &Ask, view: &View<'_>, _queued: bool) -> Choice {
        let least = view.alive().min_by_key(|(at, instance)| (instance.wait_ns, *at));
        least.map_or_else(View::nobody, |(at, _)| Choice::Place(view.stay(ask, at)))
    }
}
