//! The central queue: those who wait for an instance, and who of them goes next.

use super::bookings::PrefillBook;
use super::request::Request;
use crate::policy::{Placement, Policy, QueuedRequest, Refusal, Slo};

/// What becomes of one of those who wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It goes there, and is booked.
    Goes {
        /// The request.
        id: u64,
        /// Where.
        placement: Placement,
    },
    /// It is not served, and waits no more.
    Refused {
        /// The request.
        id: u64,
        /// Why.
        why: Refusal,
        /// After how long it is worth trying again.
        retry_after_ns: u64,
    },
}

/// The order in which a policy serves those who wait, at one moment.
#[derive(Clone, Copy)]
pub(super) struct QueueOrder<'a> {
    pub(super) policy: &'a dyn Policy,
    pub(super) slo: Slo,
    pub(super) now_ns: u64,
}

impl QueueOrder<'_> {
    /// Lower is sooner.
    fn rank(&self, queued: &QueuedRequest) -> i64 {
        self.policy.rank(queued, self.now_ns, self.slo)
    }
}

/// A request that waits.
struct WaitingRequest {
    queued: QueuedRequest,
    request: Request,
}

/// Those who wait, in no order.
pub(super) struct CentralQueue {
    waiting: Vec<WaitingRequest>,
    most: usize,
}

impl CentralQueue {
    /// Nobody waits, and `most` may.
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

    /// The request of this number, if it waits.
    pub(super) fn get(&self, id: u64) -> Option<&Request> {
        self.position(id).map(|at| self.at(at))
    }

    /// The request at a place that [`Self::first`] or [`Self::excluded_from_all`] said.
    pub(super) fn at(&self, at: usize) -> &Request {
        &self.waiting[at].request
    }

    /// A request waits from now on, whose prefill takes `best_ns` with the most that anybody has cached.
    pub(super) fn push(&mut self, request: Request, best_ns: u64) {
        self.waiting.push(WaitingRequest { queued: QueuedRequest { ask: request.ask(), best_ns }, request });
    }

    /// The request of this number waits no more.
    pub(super) fn remove(&mut self, id: u64) -> Option<Request> {
        self.position(id).map(|at| self.remove_at(at))
    }

    pub(super) fn remove_at(&mut self, at: usize) -> Request {
        self.waiting.swap_remove(at).request
    }

    /// Where the first is by the policy's order for whom there is an instance that takes one: any of `takers`, or any
    /// at all.
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

    /// Where one is that was kept from instances, of which there are no others. One that is kept from none waits for
    /// the next to come, as long as it may.
    pub(super) fn excluded_from_all(&self, instances: &[PrefillBook]) -> Option<usize> {
        self.waiting.iter().position(|WaitingRequest { request, .. }| {
            let barred = &request.barred.prefill;
            let is_out = |(at, book): (usize, &PrefillBook)| !book.alive || barred.contains(&(at as u32));
            !barred.is_empty() && instances.iter().enumerate().all(is_out)
        })
    }

    /// Those who wait and would go before a request, itself not counted: how many, and the work of all.
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
