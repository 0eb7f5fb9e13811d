//! Central queue: requests that wait for an instance, and the order in which they are served.

use super::bookings::PrefillBook;
use super::request::Request;
use crate::policy::{Placement, Policy, QueuedRequest, Refusal, Slo};

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

/// Order in which a policy serves queued requests, at one moment.
#[derive(Clone, Copy)]
pub(super) struct QueueOrder<'a> {
    pub(super) policy: &'a dyn Policy,
    pub(super) slo: Slo,
    pub(super) now_ns: u64,
}

impl QueueOrder<'_> {
    /// Returns the rank of a request: lower is served sooner.
    fn rank(&self, queued: &QueuedRequest) -> i64 {
        self.policy.rank(queued, self.now_ns, self.slo)
    }
}

/// Queued request.
struct WaitingRequest {
    queued: QueuedRequest,
    request: Request,
}

/// Queued requests, unsorted.
pub(super) struct CentralQueue {
    waiting: Vec<WaitingRequest>,
    most: usize,
}

impl CentralQueue {
    /// Creates an empty queue of at most `most` requests.
    pub(super) const fn new(most: usize) -> Self {
        Self { waiting: Vec::new(), most }
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
    pub(super) fn push(&mut self, request: Request, best_ns: u64) {
        self.waiting.push(WaitingRequest { queued: QueuedRequest { ask: request.ask(), best_ns }, request });
    }

    /// Removes the request of this number from the queue.
    pub(super) fn remove(&mut self, id: u64) -> Option<Request> {
        self.position(id).map(|at| self.remove_at(at))
    }

    pub(super) fn remove_at(&mut self, at: usize) -> Request {
        self.waiting.swap_remove(at).request
    }

    /// Returns the position of the first request in the policy's order that an instance accepts: any of `takers`, or
    /// any instance at all.
    pub(super) fn first(&self, order: QueueOrder<'_>, takers: Option<&[u32]>) -> Option<usize> {
        let takes = |request: &Request| match takers {
            Some(takers) => takers.iter().any(|at| !request.barred.prefill.contains(at)),
            None => true,
        };
        let rank = |at: &usize| {
            let WaitingRequest { queued, .. } = &self.waiting[*at];
            (order.rank(queued), queued.ask.arrival_ns, queued.ask.id)
        };
        (0..self.waiting.len()).filter(|at| takes(&self.waiting[*at].request)).min_by_key(rank)
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

    /// Returns the queued requests that are served before a request, not counting itself: their number, and the work of
    /// all.
    pub(super) fn before(&self, queued: &QueuedRequest, order: QueueOrder<'_>) -> (usize, u64) {
        if self.is_empty() {
            return (0, 0);
        }
        let own = order.rank(queued);
        let before = self.waiting.iter().map(|other| &other.queued).filter(|other| order.rank(other) <= own);
        before.fold((0, 0u64), |(count, sum_ns), other| {
            let is_other = other.ask.id != queued.ask.id;
            (count + usize::from(is_other), sum_ns.saturating_add(other.best_ns))
        })
    }
}
