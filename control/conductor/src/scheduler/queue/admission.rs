//! Admission test of the central queue, on a plan of the promised requests that is kept between calls.
//!
//! The plan is that of the queue without the request that is tested. A test adds the request at its place, and plans
//! the requests behind it again: none where all have the same objective, since the last one has the latest deadline.
//! The plan is made anew when the queue has changed, when a request has become late, or when an instance is free at
//! another time than planned; a promised request that is queued last is added to it.

#[cfg(test)]
use std::cell::Cell;
use std::sync::Arc;

use super::QueueOrder;
use super::plan::{Plan, PlanState, PlannedInstance, PlannedPrefill};
use super::promise::Promise;
use crate::scheduler::request::Request;

/// Delay before a retry of a request whose own prefill leaves no room for its objective: nothing but other contents of
/// the caches could help it.
const HOPELESS_NS: u64 = 3_600_000_000_000;
/// Precision of the delay before a retry.
pub(super) const RETRY_STEP_NS: u64 = 1_000_000;
/// Time by which an instance may be free earlier or later than in a plan that is kept: where a booked prefill has not
/// begun, or takes longer than predicted, it is free later with each moment.
const DRIFT_NS: u64 = 10_000_000;
/// Number of planned requests from one kept state of the instances to the next.
const STATE_EVERY: usize = 64;

/// Queued request that admission counts before a new one.
pub(super) struct PromisedPrefill {
    pub(super) best_ns: u64,
    /// Numbers of the instances that it excludes.
    pub(super) excluded: Arc<[u32]>,
    /// Its deadline and its promise, if it has a target; none of a late one, and of one that has earned its work.
    pub(super) target: Option<(u64, Promise)>,
}

/// Request that is tested for admission.
pub(super) struct Newcomer<'a> {
    pub(super) request: &'a Request,
    pub(super) best_ns: u64,
    /// Its objective, and the time up to its target.
    pub(super) window_ns: Option<(u64, u64)>,
    /// True if it is booked at once, before all queued requests.
    pub(super) at_once: bool,
}

impl Newcomer<'_> {
    /// Returns true if it goes before a queued request, when it arrives at `then_ns`.
    fn goes_before(&self, other: &PromisedPrefill, then_ns: u64) -> bool {
        let is_due = |(deadline_ns, _): (u64, Promise)| {
            self.window_ns.is_some_and(|(objective_ns, _)| then_ns.saturating_add(objective_ns) < deadline_ns)
        };
        self.at_once || other.target.is_some_and(is_due)
    }

    /// Adds it to a plan, arriving at `then_ns`; returns true if it is done by its target.
    fn plan(&self, plan: &mut Plan<'_>, then_ns: u64) -> bool {
        let planned = plan.add(self.best_ns, then_ns, &self.request.barred.prefill);
        let target_ns = self.window_ns.map(|(_, until_target_ns)| then_ns.saturating_add(until_target_ns));
        planned.zip(target_ns).is_none_or(|(planned, target_ns)| planned.done_ns <= target_ns)
    }
}

/// Plan of the promised requests, in the order in which they go: late ones, the oldest of flows that have earned their
/// work, and those with a target, by deadline.
#[derive(Default)]
pub(super) struct KeptPlan {
    /// True if the queue has not changed since.
    is_of_queue: bool,
    /// Time of the plan, and the time up to which none of its requests becomes late.
    from_ns: u64,
    until_ns: u64,
    instances: Vec<PlannedInstance>,
    steps: Vec<(PromisedPrefill, Option<PlannedPrefill>)>,
    /// States of the instances before every [`STATE_EVERY`] steps, and after the last one.
    states: Vec<PlanState>,
    end: PlanState,
    /// Time at which all bookings and steps are done.
    drained_ns: u64,
    /// Number of prefills that were planned for all calls so far: what admission costs.
    #[cfg(test)]
    planned: Cell<u64>,
}

impl KeptPlan {
    /// Notes that the queue has changed.
    pub(super) const fn discard(&mut self) {
        self.is_of_queue = false;
    }

    /// Returns the number of prefills that were planned for all calls so far: what admission costs.
    #[cfg(test)]
    pub(super) const fn planned(&self) -> u64 {
        self.planned.get()
    }

    /// Returns true if the plan is that of the queue and these instances.
    fn is_current(&self, order: &QueueOrder<'_>) -> bool {
        let is_same = |(one, other): (&PlannedInstance, &PlannedInstance)| {
            one.number == other.number && one.factor == other.factor && one.free_ns.abs_diff(other.free_ns) <= DRIFT_NS
        };
        self.is_of_queue
            && (self.from_ns..=self.until_ns).contains(&order.now_ns)
            && self.instances.len() == order.instances.len()
            && self.instances.iter().zip(order.instances).all(is_same)
    }

    /// Makes the plan that of the queue and these instances, with the requests that `promised` returns unless it is
    /// already.
    pub(super) fn renew(&mut self, order: &QueueOrder<'_>, promised: impl FnOnce() -> Vec<PromisedPrefill>) {
        if self.is_current(order) {
            return;
        }
        self.is_of_queue = true;
        (self.from_ns, self.until_ns) = (order.now_ns, u64::MAX);
        self.instances.clear();
        self.instances.extend_from_slice(order.instances);
        self.steps.clear();
        self.states.clear();
        self.end = Plan::new(order.instances).into_state();
        self.drained_ns = order.instances.iter().map(|instance| instance.free_ns).max().unwrap_or(order.now_ns);
        self.add(promised());
    }

    /// Adds promised requests behind the others.
    fn add(&mut self, promised: Vec<PromisedPrefill>) {
        let mut plan = Plan::resume(&self.instances, std::mem::take(&mut self.end));
        for one in promised {
            if self.steps.len().is_multiple_of(STATE_EVERY) {
                self.states.push(plan.state().clone());
            }
            let planned = self.planned_by(&mut plan, &one);
            self.drained_ns = self.drained_ns.max(planned.map_or(0, |planned| planned.done_ns));
            if let Some((deadline_ns, _)) = one.target {
                self.until_ns = self.until_ns.min(deadline_ns.saturating_sub(one.best_ns));
            }
            self.steps.push((one, planned));
        }
        self.end = plan.into_state();
    }

    /// Adds a request with a target that has been queued, if the plan was that of the queue before, and it goes last;
    /// else the plan is not that of the queue any more.
    pub(super) fn queued_last(&mut self, one: PromisedPrefill) {
        let deadline_ns = |one: &PromisedPrefill| one.target.map_or(0, |(deadline_ns, _)| deadline_ns);
        let is_last = self.steps.last().is_none_or(|(last, _)| deadline_ns(last) <= deadline_ns(&one));
        if self.is_of_queue && is_last { self.add(vec![one]) } else { self.discard() }
    }

    fn planned_by(&self, plan: &mut Plan<'_>, one: &PromisedPrefill) -> Option<PlannedPrefill> {
        #[cfg(test)]
        self.planned.set(self.planned.get() + 1);
        plan.add(one.best_ns, self.from_ns, &one.excluded)
    }

    /// Returns the place of a request that arrives `after_ns` from now, when those that were planned to begin before
    /// have begun.
    fn place(&self, newcomer: &Newcomer<'_>, after_ns: u64, now_ns: u64) -> usize {
        let then_ns = now_ns.saturating_add(after_ns);
        let has_begun = |planned: Option<PlannedPrefill>| {
            after_ns > 0 && planned.is_some_and(|planned| planned.begins_ns < then_ns)
        };
        // Those with a target are behind the others, in the order of their deadlines.
        let due = self.steps.partition_point(|(one, _)| !newcomer.goes_before(one, then_ns));
        let begun = self.steps[due..].iter().take_while(|(_, planned)| has_begun(*planned)).count();
        due + begun
    }

    /// Returns the plan of the requests before a place.
    fn before(&self, place: usize) -> Plan<'_> {
        if place == self.steps.len() {
            return Plan::resume(&self.instances, self.end.clone());
        }
        let state = place / STATE_EVERY;
        let mut plan = Plan::resume(&self.instances, self.states[state].clone());
        for (one, _) in &self.steps[state * STATE_EVERY..place] {
            self.planned_by(&mut plan, one);
        }
        plan
    }

    /// Returns true if a request that arrives `after_ns` from now, and no other before, meets its own target.
    fn is_in_time(&self, newcomer: &Newcomer<'_>, after_ns: u64, now_ns: u64) -> bool {
        let mut plan = self.before(self.place(newcomer, after_ns, now_ns));
        newcomer.plan(&mut plan, now_ns.saturating_add(after_ns))
    }

    /// Returns true if it meets its own target, and no queued request misses its target because of it.
    fn fits(&self, newcomer: &Newcomer<'_>, after_ns: u64, now_ns: u64) -> bool {
        let place = self.place(newcomer, after_ns, now_ns);
        let mut plan = self.before(place);
        if !newcomer.plan(&mut plan, now_ns.saturating_add(after_ns)) {
            return false;
        }
        self.steps[place..].iter().all(|(one, alone)| {
            let done_ns = self.planned_by(&mut plan, one).map(|planned| planned.done_ns);
            let misses = done_ns.zip(one.target).is_some_and(|(done_ns, (_, promise))| done_ns > promise.target_ns);
            // A target that is missed without the newcomer, as behind a request that has earned its work and will give
            // way, is not missed by more.
            !misses || done_ns <= alone.map(|alone| alone.done_ns)
        })
    }

    /// Returns the time after which a request can be admitted; 0: now.
    pub(super) fn admits_after_ns(&self, newcomer: &Newcomer<'_>, now_ns: u64) -> u64 {
        if self.fits(newcomer, 0, now_ns) {
            return 0;
        }
        let drained_ns = self.drained_ns.saturating_sub(now_ns);
        if !self.fits(newcomer, drained_ns, now_ns) {
            return HOPELESS_NS;
        }
        // Its own target costs least to test, and is what most rejected requests would miss.
        let in_time_ns = least_ns(0, drained_ns, RETRY_STEP_NS, |after_ns| self.is_in_time(newcomer, after_ns, now_ns));
        if self.fits(newcomer, in_time_ns, now_ns) {
            return in_time_ns;
        }
        least_ns(in_time_ns, drained_ns, RETRY_STEP_NS, |after_ns| self.fits(newcomer, after_ns, now_ns))
    }
}

/// Returns the least time from which on a request `fits`, to a step, between one at which it does not and one at which
/// it does.
pub(in crate::scheduler) fn least_ns(
    mut too_early_ns: u64,
    mut enough_ns: u64,
    step_ns: u64,
    fits: impl Fn(u64) -> bool,
) -> u64 {
    while enough_ns.saturating_sub(too_early_ns) > step_ns {
        let middle_ns = too_early_ns + (enough_ns - too_early_ns) / 2;
        *(if fits(middle_ns) { &mut enough_ns } else { &mut too_early_ns }) = middle_ns;
    }
    enough_ns
}
