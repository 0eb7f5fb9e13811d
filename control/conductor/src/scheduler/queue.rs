//! Central queue: requests that wait for an instance, and the order in which they are served.
//!
//! The order is the policy's [`QueueRules`]. First comes fairness: only flows whose turn it is ([`Flows`]) are served.
//! Among their requests those of the highest priority go first. Of these the shortest prefill goes first as long as all
//! requests with earlier deadlines can still meet theirs, behind each other and behind it; if not, the one with the
//! earliest deadline goes. Requests that are deferred, or late for their objective, go when there are no others.
//!
//! Every service of another request of its flow earns the oldest one of the flow credit, a share of the served work; it
//! goes when it has earned its own. So a request waits at most until its flow has had the work that was there at the
//! request's arrival, its own included, divided by that share. Neither later arrivals nor other flows' requests change
//! that bound, and a flow with requests always gets its weight's part of all work, but for a constant.

use super::bookings::PrefillBook;
use super::flows::{FlowNumber, Flows};
use super::request::Request;
use super::sizes::SizeWindow;
use crate::policy::{Placement, QueueRules, Refusal, Slo};

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
pub(super) struct QueueOrder {
    pub(super) rules: QueueRules,
    pub(super) slo: Slo,
    pub(super) now_ns: u64,
    /// Number of instances that serve the queue; at least 1.
    pub(super) servers: u64,
}

impl QueueOrder {
    /// Returns the time in which all servers do so much work.
    fn share_ns(&self, work_ns: u64) -> u64 {
        work_ns / self.servers
    }

    /// Returns a request's objective for the first token: its own, or that of all requests.
    fn objective_ns(&self, request: &Request) -> Option<u64> {
        let common_ns = (self.slo.ttft_ns < u64::MAX).then_some(self.slo.ttft_ns);
        request.terms.ttft_ns.or(common_ns)
    }
}

/// Position of a request in the order of its flow.
#[derive(Clone, Copy, Debug)]
struct QueueRank {
    /// Time by which its prefill should be done.
    deadline_ns: u64,
    /// True if the deadline is an objective.
    is_objective: bool,
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
}

impl WaitingRequest {
    /// Returns true if it goes before deferred requests, and those that are late for their objective.
    const fn is_timely(&self, order: &QueueOrder) -> bool {
        let done_ns = order.now_ns.saturating_add(self.best_ns);
        let is_late = self.rank.is_objective && done_ns > self.rank.deadline_ns;
        !self.rank.deferred && !is_late
    }

    /// Returns true if one of these instances serves it, or if any instance does.
    fn is_taken_by(&self, takers: Option<&[u32]>) -> bool {
        takers.is_none_or(|takers| takers.iter().any(|at| !self.request.barred.prefill.contains(at)))
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
}

impl CentralQueue {
    /// Creates an empty queue of at most `most` requests, and of `most_flows` flows with a share of their own.
    pub(super) const fn new(most: usize, most_flows: usize) -> Self {
        Self { waiting: Vec::new(), most, sizes: SizeWindow::new(), flows: Flows::new(most_flows) }
    }

    /// Returns the flows, to charge them for work that was never queued.
    pub(super) const fn flows(&mut self) -> &mut Flows {
        &mut self.flows
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
    pub(super) fn push(&mut self, request: Request, best_ns: u64, order: &QueueOrder) {
        let rank = self.rank(&request, best_ns, order);
        self.sizes.add(best_ns);
        let flow = self.flows.enter(&request.terms, best_ns, rank.deferred, order.now_ns);
        let waiting = WaitingRequest { request, best_ns, rank, flow };
        let behind = self.waiting.partition_point(|other| other.rank.deadline_ns <= rank.deadline_ns);
        self.waiting.insert(behind, waiting);
    }

    /// Ranks a request that arrives now.
    fn rank(&self, request: &Request, best_ns: u64, order: &QueueOrder) -> QueueRank {
        if let Some(objective_ns) = order.objective_ns(request) {
            let deadline_ns = request.arrival_ns.saturating_add(objective_ns);
            return QueueRank { deadline_ns, is_objective: true, deferred: false };
        }
        let QueueRules { grace_ns, stretch, deferred, .. } = order.rules;
        let timely_ns = self.flows.timely_before_ns(&request.terms);
        let wait_ns = (order.share_ns(timely_ns) as f64 * stretch) as u64;
        let deadline_ns = request.arrival_ns.saturating_add(best_ns).saturating_add(grace_ns).saturating_add(wait_ns);
        let deferred = self.sizes.is_among_longest(best_ns, deferred);
        QueueRank { deadline_ns, is_objective: false, deferred }
    }

    /// Removes the request of this number from the queue.
    pub(super) fn remove(&mut self, id: u64) -> Option<Request> {
        self.position(id).map(|at| self.remove_at(at))
    }

    pub(super) fn remove_at(&mut self, at: usize) -> Request {
        let WaitingRequest { request, best_ns, rank, flow } = self.waiting.remove(at);
        self.flows.leave(flow, best_ns, rank.deferred);
        request
    }

    /// Removes a request that starts, with a prefill of `work_ns`, on an instance of `takers`.
    pub(super) fn serve_at(&mut self, at: usize, takers: Option<&[u32]>, work_ns: u64, rules: &QueueRules) -> Request {
        let flow = self.waiting[at].flow;
        let of_flow = self.waiting.iter().filter(|waiting| waiting.flow == flow && waiting.is_taken_by(takers));
        let is_oldest = of_flow.map(WaitingRequest::age_key).min() == Some(self.waiting[at].age_key());
        self.flows.serve(flow, work_ns, is_oldest, rules);
        self.remove_at(at)
    }

    /// Returns the position of the first request in order that an instance accepts: any of `takers`, or any instance at
    /// all.
    pub(super) fn first(&self, order: &QueueOrder, takers: Option<&[u32]>) -> Option<usize> {
        if takers.is_some_and(<[u32]>::is_empty) {
            return None;
        }
        let takeable = || self.waiting.iter().enumerate().filter(|(_, waiting)| waiting.is_taken_by(takers));
        let mut oldest: Vec<Option<usize>> = vec![None; self.flows.count()];
        for (at, waiting) in takeable() {
            let of_flow = &mut oldest[waiting.flow];
            if of_flow.is_none_or(|other| waiting.age_key() < self.waiting[other].age_key()) {
                *of_flow = Some(at);
            }
        }
        let of_flows = || oldest.iter().enumerate().filter_map(|(flow, at)| Some((flow, (*at)?)));
        let candidates: Vec<bool> = oldest.iter().map(Option::is_some).collect();
        let turns = self.flows.turns(&candidates, &order.rules, order.now_ns);
        let has_turn = |flow: FlowNumber| turns[flow];
        let earned =
            of_flows().filter(|(flow, at)| has_turn(*flow) && self.waiting[*at].best_ns <= self.flows.credit_ns(*flow));
        if let Some((_, at)) = earned.min_by_key(|(_, at)| self.waiting[*at].age_key()) {
            return Some(at);
        }
        let of_turn = || takeable().filter(|(_, waiting)| has_turn(waiting.flow));
        let priority = of_turn().map(|(_, waiting)| waiting.request.terms.priority).max()?;
        let candidates = || of_turn().filter(|(_, waiting)| waiting.request.terms.priority == priority);
        let timely = || candidates().filter(|(_, waiting)| waiting.is_timely(order));
        let Some((shortest, short)) = timely().min_by_key(|(_, waiting)| waiting.size_key()) else {
            return candidates().min_by_key(|(_, waiting)| waiting.size_key()).map(|(at, _)| at);
        };
        // Work of those with earlier deadlines, if the shortest goes before them.
        let mut work_ns = short.best_ns;
        for (_, waiting) in timely().take_while(|(at, _)| *at < shortest) {
            let done_ns = order.now_ns.saturating_add(order.share_ns(work_ns)).saturating_add(waiting.best_ns);
            if done_ns > waiting.rank.deadline_ns {
                return timely().next().map(|(at, _)| at);
            }
            work_ns = work_ns.saturating_add(waiting.best_ns);
        }
        Some(shortest)
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

    /// Returns the queued requests that are served before a request whose prefill takes `best_ns`, not counting itself:
    /// their number, and the work of all. Of its own flow these are the requests of a higher priority, and those of the
    /// same one that are shorter; with an objective, those with earlier deadlines count as well, since they may have to
    /// go first. Of other flows it is the work that they are given until this flow has had as much.
    pub(super) fn before(&self, request: &Request, best_ns: u64, order: &QueueOrder) -> (usize, u64) {
        let rank = self.rank(request, best_ns, order);
        let terms = &request.terms;
        let is_before = |other: &&WaitingRequest| {
            let theirs = &other.request.terms;
            let (is_timely, is_shorter) = (other.is_timely(order), other.best_ns <= best_ns);
            let is_due = rank.is_objective && other.rank.deadline_ns <= rank.deadline_ns;
            let is_first = if rank.deferred { is_timely || is_shorter } else { is_timely && (is_shorter || is_due) };
            theirs.priority > terms.priority || (theirs.priority == terms.priority && is_first)
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
