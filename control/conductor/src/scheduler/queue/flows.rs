//! Flows of the central queue: how much prefill time each has had, and whose turn it is.
//!
//! Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) by predicted prefill time. Each flow has a *virtual
//! time*, the prefill time that it has had, divided by its weight. The flow that is furthest behind has its turn. A
//! flow that begins to wait starts there, or at a clock that runs as for all flows with requests, so that it neither
//! saves up turns while it has no requests, nor holds up those that wait already.
//!
//! One order for the requests of all flows serves short requests sooner than turns do, so flows that are *saturated*
//! have their turn together, as long as none of them is too far ahead ([`QueueRules::lead_ns`]). Flows that had no
//! queued requests shortly before go before them: those that keep to their share.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::policy::QueueRules;
use crate::scheduler::request::ServiceTerms;

/// Weight of a flow whose weight nobody has set.
pub const DEFAULT_FLOW_WEIGHT: u32 = 100;
/// Largest weight of a flow.
pub const MAX_FLOW_WEIGHT: u32 = 10_000;

/// Number of a flow, valid while the flow has queued requests.
pub(in crate::scheduler) type FlowNumber = usize;

/// One flow.
struct Flow {
    name: Arc<str>,
    weight: u32,
    /// Virtual time: prefill time for each [`DEFAULT_FLOW_WEIGHT`] of weight.
    virtual_ns: u64,
    /// Time since which it has queued requests.
    since_ns: u64,
    /// Queued requests, and the work of all of them.
    waiting: usize,
    work_ns: u64,
    /// Work of those that are not deferred.
    timely_ns: u64,
    /// Work that the oldest request of the flow has earned.
    credit_ns: u64,
}

impl Flow {
    const fn new(name: Arc<str>, weight: u32) -> Self {
        Self { name, weight, virtual_ns: 0, since_ns: 0, waiting: 0, work_ns: 0, timely_ns: 0, credit_ns: 0 }
    }
}

/// Virtual time that work takes of a flow of this weight.
fn virtual_of(work_ns: u64, weight: u32) -> u64 {
    scale(work_ns, DEFAULT_FLOW_WEIGHT, weight)
}

/// Work of a flow of this weight in a virtual time.
fn work_of(virtual_ns: u64, weight: u32) -> u64 {
    scale(virtual_ns, weight, DEFAULT_FLOW_WEIGHT)
}

fn scale(ns: u64, by: u32, of: u32) -> u64 {
    u64::try_from(u128::from(ns) * u128::from(by) / u128::from(of.max(1))).unwrap_or(u64::MAX)
}

/// Flows with queued requests, and those that had some since the queue was empty.
pub(in crate::scheduler) struct Flows {
    flows: Vec<Flow>,
    numbers: BTreeMap<Arc<str>, FlowNumber>,
    most: usize,
    /// Queued requests of all flows.
    waiting: usize,
    /// Virtual time at which a flow starts at least: it never goes back.
    floor_ns: u64,
    /// Work since the queue was empty, divided among the flows that had queued requests then.
    clock_ns: u64,
}

impl Flows {
    /// Creates an empty table. Flows beyond `most` share the default flow.
    pub(in crate::scheduler) const fn new(most: usize) -> Self {
        Self { flows: Vec::new(), numbers: BTreeMap::new(), most, waiting: 0, floor_ns: 0, clock_ns: 0 }
    }

    /// Returns the number of flow numbers in use: all are below it.
    pub(in crate::scheduler) const fn count(&self) -> usize {
        self.flows.len()
    }

    /// Returns the number that a flow has, or would have: that of the default flow if the table is full.
    pub(in crate::scheduler) fn number_of(&self, terms: &ServiceTerms) -> Option<FlowNumber> {
        let is_full = || self.flows.len() >= self.most && !self.flows.iter().skip(1).any(|flow| flow.waiting == 0);
        self.numbers.get(&terms.flow).copied().or_else(|| is_full().then_some(0))
    }

    /// Returns for each flow number true if the flow is a candidate and has its turn.
    pub(in crate::scheduler) fn turns(&self, candidates: &[bool], rules: &QueueRules, now_ns: u64) -> Vec<bool> {
        let is_saturated = |flow: &Flow| now_ns.saturating_sub(flow.since_ns) >= rules.saturated_ns;
        let numbered = || (0..self.flows.len()).filter(|at| candidates[*at]);
        // Of those that are equally far behind, the one that waits longest: newcomers start there, too.
        let key = |at: FlowNumber| (self.flows[at].virtual_ns, self.flows[at].since_ns, at);
        let first =
            |saturated: bool| numbered().filter(|at| is_saturated(&self.flows[*at]) == saturated).map(key).min();
        let (fresh, saturated) = (first(false), first(true));
        let has_turn = |at: FlowNumber| match (fresh, saturated) {
            (Some(fresh), saturated) if saturated.is_none_or(|saturated| fresh.0 < saturated.0) => at == fresh.2,
            (Some((fresh_ns, ..)), Some((saturated_ns, ..))) if fresh_ns == saturated_ns => {
                is_saturated(&self.flows[at]) && self.flows[at].virtual_ns == saturated_ns
            }
            (_, Some((saturated_ns, ..))) => self.flows[at].virtual_ns <= saturated_ns.saturating_add(rules.lead_ns),
            (_, None) => false,
        };
        (0..self.flows.len()).map(|at| candidates[at] && has_turn(at)).collect()
    }

    /// Returns the work that the oldest request of a flow has earned.
    pub(in crate::scheduler) fn credit_ns(&self, flow: FlowNumber) -> u64 {
        self.flows[flow].credit_ns
    }

    /// Adds a queued request to its flow, which has the weight of its latest request. Returns the flow's number.
    pub(in crate::scheduler) fn enter(
        &mut self,
        terms: &ServiceTerms,
        work_ns: u64,
        deferred: bool,
        now_ns: u64,
    ) -> FlowNumber {
        let at = self.find_or_begin(terms);
        let flow = &mut self.flows[at];
        if flow.waiting == 0 {
            flow.since_ns = now_ns;
        }
        flow.waiting += 1;
        self.waiting += 1;
        flow.work_ns = flow.work_ns.saturating_add(work_ns);
        if !deferred {
            flow.timely_ns = flow.timely_ns.saturating_add(work_ns);
        }
        at
    }

    /// Removes a queued request from its flow.
    pub(in crate::scheduler) fn leave(&mut self, at: FlowNumber, work_ns: u64, deferred: bool) {
        self.waiting -= 1;
        let flow = &mut self.flows[at];
        flow.waiting -= 1;
        flow.work_ns = flow.work_ns.saturating_sub(work_ns);
        if !deferred {
            flow.timely_ns = flow.timely_ns.saturating_sub(work_ns);
        }
        if flow.waiting > 0 {
            return;
        }
        flow.credit_ns = 0;
        if self.waiting == 0 {
            self.flows.clear();
            self.numbers.clear();
            (self.floor_ns, self.clock_ns) = (0, 0);
        }
    }

    /// Charges a flow for work that starts while other requests wait. Of that, `oldest_share` is earned by its oldest
    /// request; if the work is that of the oldest, it uses up what it had earned.
    pub(in crate::scheduler) fn serve(&mut self, at: FlowNumber, work_ns: u64, is_oldest: bool, rules: &QueueRules) {
        let served_ns = self.flows[at].virtual_ns;
        // A flow that no free instance serves holds up neither the others nor their start.
        let reach_ns = served_ns.saturating_sub(rules.lead_ns);
        let waiting = self.flows.iter().filter(|flow| flow.waiting > 0 && flow.virtual_ns >= reach_ns);
        let least_ns = waiting.map(|flow| flow.virtual_ns).min().unwrap_or(served_ns);
        self.floor_ns = self.floor_ns.max(least_ns);
        let flow = &mut self.flows[at];
        flow.virtual_ns = flow.virtual_ns.max(self.floor_ns).saturating_add(virtual_of(work_ns, flow.weight));
        flow.credit_ns = if is_oldest {
            flow.credit_ns.saturating_sub(work_ns)
        } else {
            flow.credit_ns.saturating_add((work_ns as f64 * rules.oldest_share) as u64)
        };
        self.tick(work_ns);
    }

    /// Lets the oldest requests of `waiting` flows that are behind the one served earn their part of its work, because
    /// a target went before them: so they are counted by admission as soon as shares alone would have served them.
    pub(in crate::scheduler) fn give_way(&mut self, at: FlowNumber, work_ns: u64, waiting: &[bool]) {
        let total = self.waiting_weight();
        let served_ns = self.flows[at].virtual_ns;
        let others = self.flows.iter_mut().zip(waiting).filter(|(flow, waits)| **waits && flow.virtual_ns < served_ns);
        for (flow, _) in others {
            flow.credit_ns = flow.credit_ns.saturating_add(scale(work_ns, flow.weight, total));
        }
    }

    /// Charges a flow for work that was placed without waiting, while requests of other flows wait.
    pub(in crate::scheduler) fn charge(&mut self, terms: &ServiceTerms, work_ns: u64) {
        if self.waiting == 0 {
            return;
        }
        let at = self.find_or_begin(terms);
        let flow = &mut self.flows[at];
        flow.virtual_ns = flow.virtual_ns.saturating_add(virtual_of(work_ns, flow.weight));
        self.tick(work_ns);
    }

    /// Advances the clock by work, divided among all flows with queued requests.
    fn tick(&mut self, work_ns: u64) {
        self.clock_ns = self.clock_ns.saturating_add(virtual_of(work_ns, self.waiting_weight()));
    }

    /// Returns the weight of all flows with queued requests.
    fn waiting_weight(&self) -> u32 {
        let waiting = self.flows.iter().filter(|flow| flow.waiting > 0);
        let weight: u64 = waiting.map(|flow| u64::from(flow.weight)).sum();
        u32::try_from(weight).unwrap_or(u32::MAX)
    }

    /// Returns the virtual time at which a flow begins to wait: that of the flow that is furthest behind, or the
    /// clock's. Without the clock a stream of new flows would always be the furthest behind.
    fn entry_ns(&self) -> u64 {
        self.floor_ns.max(self.clock_ns).max(self.furthest_behind_ns().unwrap_or(0))
    }

    /// Returns the work of requests that are not deferred, which first come, first served would do before a new request
    /// of this flow: that of its own, and as much of each other flow's as is served meanwhile.
    pub(in crate::scheduler) fn timely_before_ns(&self, terms: &ServiceTerms) -> u64 {
        let own = self.number_of(terms);
        let own_ns = own.map_or(0, |at| self.flows[at].timely_ns);
        let span_ns = virtual_of(own_ns, terms.weight);
        let others = self.flows.iter().enumerate().filter(|(at, _)| Some(*at) != own);
        others
            .fold(own_ns, |sum_ns, (_, flow)| sum_ns.saturating_add(flow.timely_ns.min(work_of(span_ns, flow.weight))))
    }

    /// Returns the requests and the work of the other flows that are served before a flow has had `work_ns` more.
    pub(in crate::scheduler) fn others_before(&self, terms: &ServiceTerms, work_ns: u64) -> (usize, u64) {
        let own = self.number_of(terms);
        let waits = own.is_some_and(|at| self.flows[at].waiting > 0);
        let own_ns = own.map_or(0, |at| self.flows[at].virtual_ns);
        let from_ns = if waits { own_ns } else { own_ns.max(self.entry_ns()) };
        let until_ns = from_ns.saturating_add(virtual_of(work_ns, terms.weight));
        let others = self.flows.iter().enumerate().filter(|(at, flow)| flow.waiting > 0 && Some(*at) != own);
        others.fold((0, 0), |(count, sum_ns), (_, flow)| {
            let turns_ns = work_of(until_ns.saturating_sub(flow.virtual_ns), flow.weight);
            let before_ns = flow.work_ns.min(turns_ns);
            let part = before_ns as f64 / flow.work_ns.max(1) as f64;
            (count + (flow.waiting as f64 * part) as usize, before_ns.saturating_add(sum_ns))
        })
    }

    /// Returns the least virtual time of the flows with queued requests.
    fn furthest_behind_ns(&self) -> Option<u64> {
        self.flows.iter().filter(|flow| flow.waiting > 0).map(|flow| flow.virtual_ns).min()
    }

    /// Returns the number of a flow that uses prefill time from now on. One without queued requests begins where a flow
    /// begins to wait.
    fn find_or_begin(&mut self, terms: &ServiceTerms) -> FlowNumber {
        let at = self.find_or_add(terms);
        if self.flows[at].waiting == 0 {
            self.flows[at].virtual_ns = self.flows[at].virtual_ns.max(self.entry_ns());
        }
        at
    }

    fn find_or_add(&mut self, terms: &ServiceTerms) -> FlowNumber {
        if self.flows.is_empty() {
            // The default flow has number 0, and is always there: flows beyond the limit share it.
            self.add(Arc::from(""), DEFAULT_FLOW_WEIGHT);
        }
        if let Some(at) = self.numbers.get(&terms.flow) {
            self.flows[*at].weight = terms.weight;
            return *at;
        }
        if self.flows.len() < self.most {
            return self.add(Arc::clone(&terms.flow), terms.weight);
        }
        self.replace(terms).unwrap_or(0)
    }

    fn add(&mut self, name: Arc<str>, weight: u32) -> FlowNumber {
        let at = self.flows.len();
        self.numbers.insert(Arc::clone(&name), at);
        self.flows.push(Flow::new(name, weight));
        at
    }

    /// Gives the number of a flow without requests to another flow: that of the one with the least virtual time, which
    /// loses least by being forgotten.
    fn replace(&mut self, terms: &ServiceTerms) -> Option<FlowNumber> {
        let idle = self.flows.iter().enumerate().skip(1).filter(|(_, flow)| flow.waiting == 0);
        let (at, _) = idle.min_by_key(|(_, flow)| flow.virtual_ns)?;
        self.numbers.remove(&self.flows[at].name);
        self.numbers.insert(Arc::clone(&terms.flow), at);
        self.flows[at] = Flow::new(Arc::clone(&terms.flow), terms.weight);
        Some(at)
    }
}

#[cfg(test)]
mod tests;
