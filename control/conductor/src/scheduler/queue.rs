//! Central queue: requests that wait for an instance, and the order in which they are served.
//!
//! The order is the policy's [`QueueRules`]. First comes fairness: only flows whose turn it is ([`Flows`]) are served.
//! Among their requests those of the highest priority go first. Of these the shortest prefill goes first as long as all
//! requests with earlier deadlines can still meet theirs, behind each other and behind it; if not, the one with the
//! earliest deadline goes. Requests that are deferred go when there are no others.
//!
//! An admitted request has a target ([`Promise`]), and the queue admits a request with an objective only if with it all
//! targets can be met in the order of their deadlines ([`CentralQueue::admission`], earliest deadline first on the
//! instances as they get free). Before that, the order above, priorities and fairness give way: a request goes only if
//! behind it all targets can still be met in the order of their deadlines; if not, the one with the earliest deadline
//! goes. A request that is late for its objective, because a prediction was wrong, goes as soon as no other
//! misses its deadline behind it, and admission counts it before new requests: so those that are admitted after it was
//! late do not hold it up.
//!
//! Every service of another request of its flow earns the oldest one of the flow credit, a share of the served work; it
//! goes when it has earned its own. So a request waits at most until its flow has had the work that was there at the
//! request's arrival, its own included, divided by that share. Neither later arrivals nor other flows' requests change
//! that bound, and a flow with requests always gets its weight's part of all work, but for a constant. The oldest one
//! gives way to targets as well, and admission counts it once it has earned its work: so targets defer it by the
//! longest objective at most.

pub(super) mod admission;
pub(super) mod flows;
pub(super) mod plan;
pub(super) mod promise;

use std::cell::RefCell;

use admission::{KeptPlan, Newcomer, PromisedPrefill};
use flows::{FlowNumber, Flows};
use plan::{Plan, PlannedInstance, PlannedPrefill};
use promise::{Margins, Promise};

use super::bookings::PrefillBook;
use super::request::Request;
use super::sizes::SizeWindow;
use crate::policy::{Admission, Placement, QueueRules, Refusal, Slo};

/// Outcome for a queued request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Next {
    /// The request starts, and is booked.
    Goes { id: u64, placement: Placement },
    /// The request is rejected, and leaves the queue.
    Refused {
        id: u64,
        why: Refusal,
        /// Delay before a retry is worthwhile.
        retry_after_ns: u64,
    },
}

/// Conditions under which queued requests are ordered, at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueOrder<'a> {
    pub(super) rules: QueueRules,
    pub(super) slo: Slo,
    pub(super) now_ns: u64,
    /// Number of instances that serve the queue; at least 1.
    pub(super) servers: u64,
    /// Instances that take requests.
    pub(super) instances: &'a [PlannedInstance],
}

impl QueueOrder<'_> {
    /// Returns the time in which all servers do so much work.
    fn share_ns(&self, work_ns: u64) -> u64 {
        work_ns / self.servers
    }
}

/// Position of a request in the order of its flow.
#[derive(Clone, Copy, Debug)]
struct QueueRank {
    /// Time by which its prefill should be done.
    deadline_ns: u64,
    /// Promise of a request with an objective, which is its deadline.
    promise: Option<Promise>,
    /// True if it goes after the requests that are not deferred.
    deferred: bool,
}

/// Queued request.
struct WaitingRequest {
    request: Request,
    /// Predicted prefill duration with the best cache that any instance had when the request arrived.
    best_ns: u64,
    rank: QueueRank,
    flow: FlowNumber,
    /// Time before which it is not served: an instance computes a prefix of its prompt until then.
    after_ns: u64,
}

impl WaitingRequest {
    /// Returns true if it can no longer meet its objective.
    const fn is_late(&self, order: &QueueOrder<'_>) -> bool {
        let done_ns = order.now_ns.saturating_add(self.best_ns);
        self.rank.promise.is_some() && done_ns > self.rank.deadline_ns
    }

    /// Returns true if it goes before deferred requests, and those that are late for their objective.
    const fn is_timely(&self, order: &QueueOrder<'_>) -> bool {
        !self.rank.deferred && !self.is_late(order)
    }

    /// Returns its promise, if it was admitted for an objective that it can still meet.
    fn open_promise(&self, order: &QueueOrder<'_>) -> Option<Promise> {
        self.rank.promise.filter(|_| !self.is_late(order))
    }

    /// Returns what admission counts before a new request.
    fn promised_prefill(&self, order: &QueueOrder<'_>) -> PromisedPrefill {
        let target = self.open_promise(order).map(|promise| (self.rank.deadline_ns, promise));
        PromisedPrefill { best_ns: self.best_ns, excluded: self.request.barred.prefill.clone(), target }
    }

    /// Adds it to a plan.
    fn plan(&self, plan: &mut Plan<'_>, order: &QueueOrder<'_>) -> Option<PlannedPrefill> {
        plan.add(self.best_ns, order.now_ns, &self.request.barred.prefill)
    }

    /// Returns true if one of these instances serves it now, or if any instance does.
    fn is_taken_by(&self, takers: Option<&[u32]>, now_ns: u64) -> bool {
        self.after_ns <= now_ns
            && takers.is_none_or(|takers| takers.iter().any(|at| !self.request.barred.prefill.contains(at)))
    }

    const fn age_key(&self) -> (u64, u64) {
        (self.request.arrival_ns, self.request.id)
    }

    const fn size_key(&self) -> (u64, u64) {
        (self.best_ns, self.request.id)
    }
}

/// Queued requests, in the order of their deadlines.
pub(super) struct CentralQueue {
    waiting: Vec<WaitingRequest>,
    most: usize,
    /// Sizes of the last requests.
    sizes: SizeWindow,
    flows: Flows,
    margins: Margins,
    /// Plan of the promised requests: a test for admission does not change the queue.
    plan: RefCell<KeptPlan>,
}

impl CentralQueue {
    /// Creates an empty queue of at most `most` requests, and of `most_flows` flows with a share of their own.
    pub(super) fn new(most: usize, most_flows: usize) -> Self {
        Self {
            waiting: Vec::new(),
            most,
            sizes: SizeWindow::new(),
            flows: Flows::new(most_flows),
            margins: Margins::new(),
            plan: RefCell::default(),
        }
    }

    /// Returns the flows, to charge them for work that was never queued.
    pub(super) fn flows(&mut self) -> &mut Flows {
        self.plan.get_mut().discard();
        &mut self.flows
    }

    /// Returns the margins, to report how late admitted requests were.
    pub(super) const fn margins(&mut self) -> &mut Margins {
        &mut self.margins
    }

    pub(super) const fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) const fn is_full(&self) -> bool {
        self.waiting.len() >= self.most
    }

    /// Returns the tokens of all queued prompts.
    pub(super) fn tokens(&self) -> u64 {
        self.waiting.iter().map(|waiting| u64::from(waiting.request.tokens)).sum()
    }

    fn position(&self, id: u64) -> Option<usize> {
        self.waiting.iter().position(|waiting| waiting.request.id == id)
    }

    /// Returns the request of this number, if it is queued.
    pub(super) fn get(&self, id: u64) -> Option<&Request> {
        self.position(id).map(|at| self.at(at))
    }

    /// Returns the request at a position that [`Self::first`] or [`Self::excluded_from_all`] returned.
    pub(super) fn at(&self, at: usize) -> &Request {
        &self.waiting[at].request
    }

    /// Enqueues a request whose prefill takes `best_ns` with the best cache of any instance.
    pub(super) fn push(&mut self, request: Request, best_ns: u64, order: &QueueOrder<'_>) {
        let rank = self.rank(&request, best_ns, order);
        self.sizes.add(best_ns);
        let flow = self.flows.enter(&request.terms, best_ns, rank.deferred, order.now_ns);
        let waiting = WaitingRequest { request, best_ns, rank, flow, after_ns: 0 };
        // One that was admitted before may be the oldest of its flow, and one that is late goes before others.
        let goes_by_deadline = waiting.open_promise(order).is_some() && !waiting.request.admitted;
        let plan = self.plan.get_mut();
        if goes_by_deadline {
            plan.queued_last(waiting.promised_prefill(order));
        } else {
            plan.discard();
        }
        let behind = self.waiting.partition_point(|other| other.rank.deadline_ns <= rank.deadline_ns);
        self.waiting.insert(behind, waiting);
    }

    /// Returns the promise that a request gets if it is admitted now: for its own objective, or for that of all
    /// requests. `None` without any.
    pub(super) fn promise(&self, request: &Request, slo: &Slo) -> Option<Promise> {
        let common_ns = (slo.ttft_ns < u64::MAX).then_some(slo.ttft_ns);
        let objective_ns = request.terms.ttft_ns.or(common_ns)?;
        let margin_ns = self.margins.margin_ns(objective_ns, slo.probability);
        let target_ns = request.arrival_ns.saturating_add(objective_ns - margin_ns);
        Some(Promise { objective_ns, target_ns })
    }

    /// Returns the promise of a queued request.
    pub(super) fn promise_at(&self, at: usize) -> Option<Promise> {
        self.waiting[at].rank.promise
    }

    /// Ranks a request that arrives now.
    fn rank(&self, request: &Request, best_ns: u64, order: &QueueOrder<'_>) -> QueueRank {
        if let Some(promise) = self.promise(request, &order.slo) {
            let deadline_ns = request.arrival_ns.saturating_add(promise.objective_ns);
            return QueueRank { deadline_ns, promise: Some(promise), deferred: false };
        }
        // Later than under first come, first served by the longest prefill that is not deferred: the slowest requests
        // need that long in any order.
        let deferred = order.rules.deferred;
        let wait_ns = order.share_ns(self.flows.timely_before_ns(&request.terms));
        let longest_ns = self.sizes.quantile(1.0 - deferred).unwrap_or(0).max(best_ns);
        let deadline_ns = request.arrival_ns.saturating_add(best_ns).saturating_add(longest_ns).saturating_add(wait_ns);
        let deferred = self.sizes.is_among_longest(best_ns, deferred);
        QueueRank { deadline_ns, promise: None, deferred }
    }

    /// Lets others go before a request until `after_ns`, when a prefix of its prompt is computed.
    pub(super) fn await_prefix(&mut self, at: usize, after_ns: u64) {
        self.waiting[at].after_ns = after_ns;
    }

    /// Removes the request of this number from the queue.
    pub(super) fn remove(&mut self, id: u64) -> Option<Request> {
        self.position(id).map(|at| self.remove_at(at))
    }

    pub(super) fn remove_at(&mut self, at: usize) -> Request {
        self.plan.get_mut().discard();
        let WaitingRequest { request, best_ns, rank, flow, .. } = self.waiting.remove(at);
        self.flows.leave(flow, best_ns, rank.deferred);
        request
    }

    /// Removes a request that starts, with a prefill of `work_ns`, on an instance of `takers`.
    pub(super) fn serve_at(
        &mut self,
        at: usize,
        takers: Option<&[u32]>,
        work_ns: u64,
        rules: &QueueRules,
        now_ns: u64,
    ) -> Request {
        let flow = self.waiting[at].flow;
        let of_flow = self.waiting.iter().filter(|waiting| waiting.flow == flow && waiting.is_taken_by(takers, now_ns));
        let is_oldest = of_flow.map(WaitingRequest::age_key).min() == Some(self.waiting[at].age_key());
        let is_promised = self.waiting[at].rank.promise.is_some();
        self.flows.serve(flow, work_ns, is_oldest, rules);
        let request = self.remove_at(at);
        if is_promised && !self.is_empty() {
            let mut without_promise = vec![false; self.flows.count()];
            let others = self.waiting.iter().filter(|waiting| waiting.rank.promise.is_none());
            others.for_each(|waiting| without_promise[waiting.flow] = true);
            self.flows.give_way(flow, work_ns, &without_promise);
        }
        request
    }

    /// Returns the position of the first request in order that an instance accepts: any of `takers`, or any instance at
    /// all.
    pub(super) fn first(&self, order: &QueueOrder<'_>, takers: Option<&[u32]>) -> Option<usize> {
        if takers.is_some_and(<[u32]>::is_empty) {
            return None;
        }
        let takeable =
            || self.waiting.iter().enumerate().filter(|(_, waiting)| waiting.is_taken_by(takers, order.now_ns));
        let oldest = self.oldest_of_flows(takeable());
        let of_flows = || oldest.iter().enumerate().filter_map(|(flow, at)| Some((flow, (*at)?)));
        let candidates: Vec<bool> = oldest.iter().map(Option::is_some).collect();
        let turns = self.flows.turns(&candidates, &order.rules, order.now_ns);
        let has_turn = |flow: FlowNumber| turns[flow];
        let late = takeable().find(|(_, waiting)| waiting.is_late(order)).map(|(at, _)| at);
        let earned =
            of_flows().filter(|(flow, at)| has_turn(*flow) && self.waiting[*at].best_ns <= self.flows.credit_ns(*flow));
        let earned = earned.min_by_key(|(_, at)| self.waiting[*at].age_key()).map(|(_, at)| at);
        let due = takeable().find(|(_, waiting)| waiting.open_promise(order).is_some()).map(|(at, _)| at);
        let goes_before = |at: usize, limit: fn(&QueueRank, Promise) -> u64| {
            due.is_none_or(|due| due == at) || self.keeps(at, limit, order)
        };
        let may_go = |at: &usize| goes_before(*at, |_, promise| promise.target_ns);
        // A late request may use the margins of the others, which are there for wrong predictions.
        let late = late.filter(|at| goes_before(*at, |rank, _| rank.deadline_ns));
        if let Some(at) = late.or_else(|| earned.filter(may_go)) {
            return Some(at);
        }
        let of_turn = takeable().filter(|(_, waiting)| has_turn(waiting.flow));
        let chosen = Self::shortest_within_deadlines(&of_turn.collect::<Vec<_>>(), order);
        chosen.filter(may_go).or(due).or(chosen)
    }

    /// Returns, for each flow number, the position of the oldest of these requests, if the flow has one.
    fn oldest_of_flows<'a>(&self, requests: impl Iterator<Item = (usize, &'a WaitingRequest)>) -> Vec<Option<usize>> {
        let mut oldest: Vec<Option<usize>> = vec![None; self.flows.count()];
        for (at, waiting) in requests {
            let of_flow = &mut oldest[waiting.flow];
            if of_flow.is_none_or(|other| waiting.age_key() < self.waiting[other].age_key()) {
                *of_flow = Some(at);
            }
        }
        oldest
    }

    /// Returns the position, among these in the order of their deadlines, of the shortest request of the highest
    /// priority; or of the one with the earliest deadline, if one that was not promised would be missed.
    fn shortest_within_deadlines(requests: &[(usize, &WaitingRequest)], order: &QueueOrder<'_>) -> Option<usize> {
        let priority = requests.iter().map(|(_, waiting)| waiting.request.terms.priority).max()?;
        let candidates = || requests.iter().filter(|(_, waiting)| waiting.request.terms.priority == priority);
        let timely = || candidates().filter(|(_, waiting)| waiting.is_timely(order));
        let Some((shortest, short)) = timely().min_by_key(|(_, waiting)| waiting.size_key()) else {
            return candidates().min_by_key(|(_, waiting)| waiting.size_key()).map(|(at, _)| *at);
        };
        // Work of those with earlier deadlines, if the shortest goes before them.
        let mut work_ns = short.best_ns;
        for (_, waiting) in timely().take_while(|(at, _)| at < shortest) {
            let done_ns = order.now_ns.saturating_add(order.share_ns(work_ns)).saturating_add(waiting.best_ns);
            if waiting.rank.promise.is_none() && done_ns > waiting.rank.deadline_ns {
                return timely().next().map(|(at, _)| *at);
            }
            work_ns = work_ns.saturating_add(waiting.best_ns);
        }
        Some(*shortest)
    }

    /// Returns true if all promised requests are done by a limit, their targets or their deadlines, in the order of
    /// their deadlines, behind the request at a position.
    fn keeps(&self, first: usize, limit_ns: fn(&QueueRank, Promise) -> u64, order: &QueueOrder<'_>) -> bool {
        let mut plan = Plan::new(order.instances);
        self.waiting[first].plan(&mut plan, order);
        let others = self.waiting.iter().enumerate().filter(|(at, _)| *at != first);
        let mut promised = others.filter_map(|(_, waiting)| Some((waiting, waiting.open_promise(order)?)));
        promised.all(|(waiting, promise)| {
            let planned = waiting.plan(&mut plan, order);
            planned.is_none_or(|planned| planned.done_ns <= limit_ns(&waiting.rank, promise))
        })
    }

    /// Returns the queued requests that admission counts before a new one, in the order in which they go: late ones,
    /// the oldest of flows that have earned their work, and those with a target, by deadline.
    fn promised(&self, order: &QueueOrder<'_>) -> Vec<PromisedPrefill> {
        let late = self.waiting.iter().filter(|waiting| waiting.is_late(order));
        let oldest = self.oldest_of_flows(self.waiting.iter().enumerate());
        let has_earned = |waiting: &&WaitingRequest| {
            waiting.rank.promise.is_none() && waiting.best_ns <= self.flows.credit_ns(waiting.flow)
        };
        let earned = oldest.into_iter().flatten().map(|at| &self.waiting[at]).filter(has_earned);
        let targeted = self.waiting.iter().filter(|waiting| waiting.open_promise(order).is_some());
        late.chain(earned).chain(targeted).map(|waiting| waiting.promised_prefill(order)).collect()
    }

    /// Tests whether a request whose prefill takes `best_ns` can be admitted: queued, or booked at once, behind which
    /// queued requests wait. It can if it meets its own target, and no queued request misses its target because of it,
    /// where those with targets go in the order of their deadlines. A request without an objective is admitted if it is
    /// queued, since it goes only when no target is missed.
    pub(super) fn admission(
        &self,
        request: &Request,
        best_ns: u64,
        at_once: bool,
        order: &QueueOrder<'_>,
    ) -> Admission {
        let promise = self.promise(request, &order.slo);
        let window_ns =
            promise.map(|promise| (promise.objective_ns, promise.target_ns.saturating_sub(request.arrival_ns)));
        let margin_ns = window_ns.map_or(0, |(objective_ns, until_target_ns)| objective_ns - until_target_ns);
        if order.instances.is_empty() || promise.is_none() && !at_once {
            return Admission { margin_ns, after_ns: 0 };
        }
        let newcomer = Newcomer { request, best_ns, window_ns, at_once };
        let mut plan = self.plan.borrow_mut();
        plan.renew(order, || self.promised(order));
        Admission { margin_ns, after_ns: plan.admits_after_ns(&newcomer, order.now_ns) }
    }

    /// Returns the position of a request that excludes every existing instance. A request that excludes none waits for
    /// the next instance, as long as it may.
    pub(super) fn excluded_from_all(&self, instances: &[PrefillBook]) -> Option<usize> {
        self.waiting.iter().position(|WaitingRequest { request, .. }| {
            let barred = &request.barred.prefill;
            let is_out = |(at, book): (usize, &PrefillBook)| !book.alive || barred.contains(&(at as u32));
            !barred.is_empty() && instances.iter().enumerate().all(is_out)
        })
    }

    /// Returns the queued requests that are served before a request whose prefill takes `best_ns`, not counting
    /// itself: their number, and the work of all. Of its own flow these are requests of a higher priority, those of
    /// the same one that are shorter, and late ones; with an objective, those with earlier deadlines count as well,
    /// since they may have to go first. Of other flows it is the work that they are given until this flow has had as
    /// much.
    pub(super) fn before(&self, request: &Request, best_ns: u64, order: &QueueOrder<'_>) -> (usize, u64) {
        let rank = self.rank(request, best_ns, order);
        let terms = &request.terms;
        let is_before = |other: &&WaitingRequest| {
            let theirs = &other.request.terms;
            let (is_timely, is_shorter) = (other.is_timely(order), other.best_ns <= best_ns);
            let is_due = rank.promise.is_some() && other.rank.deadline_ns <= rank.deadline_ns;
            let is_first = if rank.deferred { is_timely || is_shorter } else { is_timely && (is_shorter || is_due) };
            other.is_late(order) || theirs.priority > terms.priority || (theirs.priority == terms.priority && is_first)
        };
        let number = self.flows.number_of(terms);
        let own = self.waiting.iter().filter(|other| Some(other.flow) == number);
        let (count, own_ns) = own.filter(is_before).fold((0, 0u64), |(count, sum_ns), other| {
            let is_other = other.request.id != request.id;
            (count + usize::from(is_other), sum_ns.saturating_add(other.best_ns))
        });
        let (others, others_ns) = self.flows.others_before(terms, own_ns);
        (count + others, own_ns.saturating_add(others_ns))
    }
}

#[cfg(test)]
mod tests;
