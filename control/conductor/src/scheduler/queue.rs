//! Central queue: requests that wait for an instance, and the order in which they are served.
//!
//! The order is the policy's [`QueueRules`]. Requests are kept in the order of their deadlines. The shortest prefill
//! goes first as long as all requests with earlier deadlines can still meet theirs, behind each other and behind it; if
//! not, the one with the earliest deadline goes. Requests that are deferred, or late for their objective, go when there
//! are no others.
//!
//! Every service of another request earns the oldest one credit, a share of the served work; it goes when it has earned
//! its own. So a request waits at most until the work that was there at its arrival, its own included, is served within
//! that share: a bound that later arrivals cannot change.

use super::bookings::PrefillBook;
use super::request::Request;
use super::sizes::SizeWindow;
use crate::policy::{Placement, QueueRules, Refusal, Slo};

/// Largest credit of the oldest request, in nanoseconds of prefill: longer than the longest prefill.
const CREDIT_MOST_NS: u64 = 600_000_000_000;

/// Outcome for a queued request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    /// Returns true if there is an objective for the first token.
    const fn has_objective(&self) -> bool {
        self.slo.ttft_ns < u64::MAX
    }
}

/// Queued request.
struct WaitingRequest {
    request: Request,
    /// Predicted prefill duration with the best cache that any instance had when the request arrived.
    best_ns: u64,
    /// Time by which its prefill should be done.
    deadline_ns: u64,
    /// True if it goes after the requests that are not deferred.
    deferred: bool,
}

impl WaitingRequest {
    /// Returns true if it goes before deferred requests, and those that are late for their objective.
    const fn is_timely(&self, order: &QueueOrder) -> bool {
        let done_ns = order.now_ns.saturating_add(self.best_ns);
        let is_late = order.has_objective() && done_ns > self.deadline_ns;
        !self.deferred && !is_late
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
    /// Work of the requests that are not deferred.
    timely_ns: u64,
    /// Work that the oldest request has earned.
    credit_ns: u64,
}

impl CentralQueue {
    /// Creates an empty queue of at most `most` requests.
    pub(super) const fn new(most: usize) -> Self {
        Self { waiting: Vec::new(), most, sizes: SizeWindow::new(), timely_ns: 0, credit_ns: 0 }
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
        let (deadline_ns, deferred) = self.classify(request.arrival_ns, best_ns, order);
        self.sizes.add(best_ns);
        if !deferred {
            self.timely_ns = self.timely_ns.saturating_add(best_ns);
        }
        let waiting = WaitingRequest { request, best_ns, deadline_ns, deferred };
        let behind = self.waiting.partition_point(|other| other.deadline_ns <= deadline_ns);
        self.waiting.insert(behind, waiting);
    }

    /// Returns the deadline of a request that arrives now, and whether it is deferred.
    fn classify(&self, arrival_ns: u64, best_ns: u64, order: &QueueOrder) -> (u64, bool) {
        if order.has_objective() {
            return (arrival_ns.saturating_add(order.slo.ttft_ns), false);
        }
        let QueueRules { grace_ns, stretch, deferred, .. } = order.rules;
        let wait_ns = (order.share_ns(self.timely_ns) as f64 * stretch) as u64;
        let deadline_ns = arrival_ns.saturating_add(best_ns).saturating_add(grace_ns).saturating_add(wait_ns);
        (deadline_ns, self.sizes.is_among_longest(best_ns, deferred))
    }

    /// Removes the request of this number from the queue.
    pub(super) fn remove(&mut self, id: u64) -> Option<Request> {
        self.position(id).map(|at| self.remove_at(at))
    }

    pub(super) fn remove_at(&mut self, at: usize) -> Request {
        let WaitingRequest { request, best_ns, deferred, .. } = self.waiting.remove(at);
        if !deferred {
            self.timely_ns = self.timely_ns.saturating_sub(best_ns);
        }
        if self.waiting.is_empty() {
            self.credit_ns = 0;
        }
        request
    }

    /// Removes a request that starts.
    pub(super) fn serve_at(&mut self, at: usize, rules: &QueueRules) -> Request {
        let best_ns = self.waiting[at].best_ns;
        let is_oldest = self.waiting.iter().map(WaitingRequest::age_key).min() == Some(self.waiting[at].age_key());
        self.credit_ns = match is_oldest {
            true => self.credit_ns.saturating_sub(best_ns),
            false => {
                let earned_ns = (best_ns as f64 * rules.oldest_share) as u64;
                self.credit_ns.saturating_add(earned_ns).min(CREDIT_MOST_NS)
            }
        };
        self.remove_at(at)
    }

    /// Returns the position of the first request in order that an instance accepts: any of `takers`, or any instance at
    /// all.
    pub(super) fn first(&self, order: &QueueOrder, takers: Option<&[u32]>) -> Option<usize> {
        if takers.is_some_and(<[u32]>::is_empty) {
            return None;
        }
        let takes = |waiting: &WaitingRequest| match takers {
            Some(takers) => takers.iter().any(|at| !waiting.request.barred.prefill.contains(at)),
            None => true,
        };
        let candidates = || self.waiting.iter().enumerate().filter(|(_, waiting)| takes(waiting));
        let (oldest, waiting) = candidates().min_by_key(|(_, waiting)| waiting.age_key())?;
        if waiting.best_ns <= self.credit_ns {
            return Some(oldest);
        }
        let timely = || candidates().filter(|(_, waiting)| waiting.is_timely(order));
        let Some((shortest, short)) = timely().min_by_key(|(_, waiting)| waiting.size_key()) else {
            return candidates().min_by_key(|(_, waiting)| waiting.size_key()).map(|(at, _)| at);
        };
        // Work of those with earlier deadlines, if the shortest goes before them.
        let mut work_ns = short.best_ns;
        for (_, waiting) in timely().take_while(|(at, _)| *at < shortest) {
            let done_ns = order.now_ns.saturating_add(order.share_ns(work_ns)).saturating_add(waiting.best_ns);
            if done_ns > waiting.deadline_ns {
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
    /// their number, and the work of all. With an objective, those with earlier deadlines count as well, since they may
    /// have to go first.
    pub(super) fn before(&self, request: &Request, best_ns: u64, order: &QueueOrder) -> (usize, u64) {
        let (deadline_ns, deferred) = self.classify(request.arrival_ns, best_ns, order);
        let is_before = |other: &&WaitingRequest| {
            let is_timely = other.is_timely(order);
            let is_due = order.has_objective() && other.deadline_ns <= deadline_ns;
            if deferred {
                is_timely || other.best_ns <= best_ns
            } else {
                is_timely && (other.best_ns <= best_ns || is_due)
            }
        };
        self.waiting.iter().filter(is_before).fold((0, 0u64), |(count, sum_ns), other| {
            let is_other = other.request.id != request.id;
            (count + usize::from(is_other), sum_ns.saturating_add(other.best_ns))
        })
    }
}

#[cfg(test)]
mod tests;
