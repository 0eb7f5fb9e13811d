//! Those who wait in the central queue: who of them goes next, and who need not wait any more.

use super::{Conductor, ConductorError, Request, Scratch};
use crate::policy::{Choice, Placement, PrefillView, Refusal};

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

/// When it is worth trying again for one that is kept from every instance there is.
const AGAIN_NS: u64 = 1_000_000_000;

impl Conductor {
    /// The next of those who wait that should go now, and where; it is booked. Or one that will not be served: kept
    /// from every instance that there is, or refused by the policy, which may be another than when it came. To be asked
    /// after every change until it answers nothing.
    ///
    /// One whom nobody takes that it may go to stays where it is, and keeps nobody behind it from going.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub fn poll(&mut self, now_ns: u64, scratch: &mut Scratch) -> Result<Option<Next>, ConductorError> {
        self.expire(now_ns);
        if let Some(at) = self.queue.iter().position(|(_, request)| self.kept_from_all(request)) {
            let (waiting, _) = self.queue.swap_remove(at);
            let refused = Next::Refused { id: waiting.ask.id, why: Refusal::NoInstance, retry_after_ns: AGAIN_NS };
            return Ok(Some(refused));
        }
        let Some(at) = self.first(now_ns) else { return Ok(None) };
        let request = &self.queue[at].1;
        let views = self.views(request, now_ns, scratch);
        match self.policy.choose(&request.ask(), &self.view(&views, now_ns), true) {
            Choice::Place(placement) => {
                // Booked first: one that cannot be booked stays in the queue.
                let request = request.clone();
                let id = request.id;
                self.book(request, placement, now_ns)?;
                self.queue.swap_remove(at);
                Ok(Some(Next::Goes { id, placement }))
            }
            Choice::Refuse { why, retry_after_ns } => {
                let (waiting, _) = self.queue.swap_remove(at);
                Ok(Some(Next::Refused { id: waiting.ask.id, why, retry_after_ns }))
            }
            // Somebody takes it, so the policy has none better among those who wait either.
            Choice::Wait => Ok(None),
        }
    }

    /// Which of those who wait goes next: the first by the policy's order for whom there is an instance that takes one.
    fn first(&self, now_ns: u64) -> Option<usize> {
        if self.queue.is_empty() {
            return None;
        }
        let takers = if self.policy.queues() { Some(self.takers(now_ns)) } else { None };
        let takes = |request: &Request| match &takers {
            Some(takers) => takers.iter().any(|at| !request.barred.prefill.contains(at)),
            None => true,
        };
        let rank = |at: &usize| {
            let (waiting, _) = &self.queue[*at];
            (self.policy.rank(waiting, now_ns, self.config.slo), waiting.ask.arrival_ns, waiting.ask.id)
        };
        (0..self.queue.len()).filter(|at| takes(&self.queue[*at].1)).min_by_key(rank)
    }

    /// Instances that take one of those who wait.
    fn takers(&self, now_ns: u64) -> Vec<u32> {
        let takes = |at: &usize| {
            let book = &self.prefill[*at];
            let view = || PrefillView {
                alive: true,
                wait_ns: book.wait_ns(now_ns),
                requests: book.jobs.len() as u32,
                ..PrefillView::default()
            };
            book.alive && book.takes && self.policy.takes(&view())
        };
        (0..self.prefill.len()).filter(takes).map(|at| at as u32).collect()
    }

    /// Whether a request was kept from instances, and there are no others. One that is kept from none waits for the
    /// next to come, as long as it may.
    fn kept_from_all(&self, request: &Request) -> bool {
        let barred = &request.barred.prefill;
        !barred.is_empty()
            && self.prefill.iter().enumerate().all(|(at, book)| !book.alive || barred.contains(&(at as u32)))
    }
}
