//! Scheduler of one model's instances: placements, bookings of each instance, and the central queue.
//!
//! [`Scheduler::schedule`] returns a decision without side effects. [`Scheduler::commit`] books the decision: work,
//! decode capacity, the source's NIC, and in the index the blocks that the instance will have; or it puts the request
//! into the central queue. [`Scheduler::poll`] then returns the queued requests that can start, with their placements.
//! [`Scheduler::update`] notes the progress of requests, which corrects the bookings and the cost model;
//! [`Scheduler::release`] ends a request, successful or not. Reservations that are never released expire with their
//! lease. A request retried with the same id gets the same answer.
//!
//! Each part keeps its own state; the scheduler combines them:
//!
//! * `caches`: blocks that prefill instances hold, will hold, and were ever sent;
//! * `bookings`: work, transfers and decode capacity booked on instances;
//! * `reservations`: booked requests, with their leases;
//! * `queue`: requests that wait for an instance, and their flows.
//!
//! [`SchedulerConfig`] bounds all state; times are nanoseconds of one monotonic clock, supplied by the caller.

mod bookings;
mod caches;
mod config;
mod error;
mod flows;
mod instances;
mod queue;
mod request;
mod reservations;
mod restored;
mod sizes;
mod views;

use crate::cost::PrefillModel;
use crate::index::{ContextId, PrefixIndex, PrefixMatches, PromptContext};
use crate::policy::{Choice, Fetch, Placement, Policy, Refusal, Slo};

use bookings::Bookings;
use caches::Caches;
pub use config::SchedulerConfig;
pub use error::SchedulerError;
pub use flows::{DEFAULT_FLOW_WEIGHT, MAX_FLOW_WEIGHT};
pub use instances::{Foreign, InstanceNumbers};
pub use queue::Next;
use queue::{CentralQueue, QueueOrder};
pub use request::{ExcludedInstances, Progress, Request, ServiceTerms};
use reservations::{Reservation, Reservations};
pub use restored::adopt_index;

/// Delay before a retry of a request that excludes every instance.
const AGAIN_NS: u64 = 1_000_000_000;

/// Scratch memory of a lookup, kept by the caller.
#[derive(Default)]
pub struct Scratch {
    found: PrefixMatches,
}

impl Scratch {
    /// Returns the result of the last lookup.
    #[must_use]
    pub const fn found(&self) -> &PrefixMatches {
        &self.found
    }

    /// Returns the result of the last lookup, to be reused by the next one.
    pub const fn found_mut(&mut self) -> &mut PrefixMatches {
        &mut self.found
    }
}

/// Scheduler of one model's instances.
pub struct Scheduler {
    config: SchedulerConfig,
    policy: Box<dyn Policy>,
    model: PrefillModel,
    caches: Caches,
    bookings: Bookings,
    reservations: Reservations,
    queue: CentralQueue,
    placed: u64,
}

impl Scheduler {
    /// Creates a scheduler without instances.
    ///
    /// # Errors
    /// When a limit of the index is out of range.
    pub fn new(config: SchedulerConfig, policy: Box<dyn Policy>) -> Result<Self, SchedulerError> {
        Ok(Self {
            caches: Caches::new(config.index)?,
            bookings: Bookings::default(),
            model: config.model.clone(),
            reservations: Reservations::new(config.max_reservations, config.lease_ns),
            queue: CentralQueue::new(config.max_queue, config.max_flows),
            placed: 0,
            config,
            policy,
        })
    }

    /// Changes the policy and the objectives: bookings stay, and queued requests must be examined again
    /// ([`Self::poll`]).
    pub fn set_policy(&mut self, policy: Box<dyn Policy>, slo: Slo) {
        (self.policy, self.config.slo) = (policy, slo);
    }

    /// Returns the index, to create contexts and for lookups.
    pub const fn index(&mut self) -> &mut PrefixIndex {
        self.caches.index()
    }

    /// Returns the cost model as fitted so far.
    #[must_use]
    pub const fn model(&self) -> &PrefillModel {
        &self.model
    }

    /// Returns the number of requests in the central queue.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Returns a context of both indexes.
    ///
    /// # Errors
    /// When there are too many contexts.
    pub fn context(&mut self, key: &PromptContext) -> Result<ContextId, SchedulerError> {
        Ok(self.caches.context(key)?)
    }

    /// Decides about `request`, without side effects.
    #[must_use]
    pub fn schedule(&self, request: &Request, now_ns: u64, scratch: &mut Scratch) -> Choice {
        if let Some(known) = self.reservations.get(request.id) {
            return Choice::Place(known.placement);
        }
        let views = self.views(request, now_ns, scratch);
        self.policy.choose(&request.ask(), &self.view(&views, now_ns), false)
    }

    /// Decides as [`Self::schedule`] does, but binds the request at once, to an instance that may have other requests
    /// before it.
    #[must_use]
    pub fn schedule_now(&self, request: &Request, now_ns: u64, scratch: &mut Scratch) -> Choice {
        if let Some(known) = self.reservations.get(request.id) {
            return Choice::Place(known.placement);
        }
        let views = self.views(request, now_ns, scratch);
        self.policy.choose_now(&request.ask(), &self.view(&views, now_ns))
    }

    /// Books the decision of [`Self::schedule`]; a rejection books nothing.
    ///
    /// # Errors
    /// When a limit is reached, or the decision names an unknown instance.
    pub fn commit(&mut self, request: Request, choice: &Choice, now_ns: u64) -> Result<(), SchedulerError> {
        if self.reservations.get(request.id).is_some() {
            return Ok(());
        }
        match choice {
            Choice::Refuse { .. } => Ok(()),
            Choice::Place(placement) => {
                self.queue.flows().charge(&request.terms, placement.prefill_ns);
                self.book(request, *placement, now_ns)
            }
            Choice::Wait => {
                if self.queue.get(request.id).is_some() {
                    return Ok(());
                }
                if self.queue.is_full() {
                    return Err(SchedulerError::QueueFull { most: self.config.max_queue });
                }
                let best_ns = self.best_ns(&request);
                let order = self.order(self.serving(&request), now_ns);
                self.queue.push(request, best_ns, &order);
                Ok(())
            }
        }
    }

    /// Books a placement.
    fn book(&mut self, request: Request, placement: Placement, now_ns: u64) -> Result<(), SchedulerError> {
        if self.reservations.is_full() {
            return Err(SchedulerError::TooManyReservations { most: self.config.max_reservations });
        }
        let source = if let Fetch::One(source) = placement.fetch { source } else { placement.prefill };
        let decode_known = placement.decode.is_none_or(|decode| self.bookings.decode(decode).is_ok());
        if !decode_known || source >= self.bookings.prefills().len() {
            return Err(SchedulerError::UnknownInstance { instance: source });
        }
        let book = self.bookings.prefill(placement.prefill)?;
        book.add(request.id, placement.prefill_ns, request.tokens.saturating_sub(placement.reuse));
        // Blocks that are fetched and not kept are there for this request only.
        let passes = matches!(placement.fetch, Fetch::Pool { keep } if !(keep && self.config.keeps_fetched));
        let block_tokens = self.config.block_tokens;
        let passing = if passes { (placement.reuse / block_tokens) as usize } else { 0 };
        let held_blocks = self.caches.place(placement.prefill, &request, passing, block_tokens)?;
        let fetched = placement.reuse.saturating_sub(held_blocks.saturating_mul(block_tokens));
        let bytes = u64::from(fetched) * self.config.token_bytes;
        let took_ns = crate::cost::transfer_ns(bytes, self.config.nic_bytes_s);
        self.bookings.book_transfer(placement.fetch, took_ns, now_ns);
        if let Some(decode) = placement.decode {
            let expected_ns = now_ns.saturating_add(placement.takes_ns());
            self.bookings.decode_at(decode).expect(request.id, request.decode_tokens(), expected_ns);
        }
        self.placed += 1;
        let touched_ns = now_ns;
        self.reservations.insert(Reservation { request, placement, prefilled: false, decoding: false, touched_ns });
        Ok(())
    }

    /// Notes the progress of a booked request.
    ///
    /// # Errors
    /// When the request is not booked.
    pub fn update(&mut self, id: u64, progress: Progress, now_ns: u64) -> Result<(), SchedulerError> {
        let reservation = self.reservations.get_mut(id).ok_or(SchedulerError::UnknownRequest { id })?;
        reservation.touched_ns = now_ns;
        let (placement, tokens) = (reservation.placement, reservation.request.tokens);
        let decode_tokens = reservation.request.decode_tokens();
        let book = self.bookings.prefill_at(placement.prefill);
        match progress {
            Progress::PrefillStarted => book.started(id, now_ns),
            Progress::PrefillDone { reused, took_ns } if !reservation.prefilled => {
                reservation.prefilled = true;
                book.done(id);
                if self.config.learns {
                    let factor = book.factor.0;
                    book.factor.report(self.model.predict_ns(tokens, reused), took_ns);
                    self.model.report(tokens, reused, took_ns, factor);
                }
                let until_ns = now_ns.saturating_add(self.config.promise_ns);
                self.caches.expect_blocks(placement.prefill, &reservation.request, until_ns);
            }
            Progress::PrefillDone { .. } => {}
            Progress::Decoding => {
                if let Some(decode) = placement.decode
                    && !std::mem::replace(&mut reservation.decoding, true)
                {
                    self.bookings.decode_at(decode).begin(id, decode_tokens, now_ns);
                }
            }
        }
        Ok(())
    }

    /// Ends a request, successful or not, and frees its bookings.
    ///
    /// # Errors
    /// When the request is neither booked nor queued.
    pub fn release(&mut self, id: u64) -> Result<(), SchedulerError> {
        self.withdraw(id).map(|_| ())
    }

    /// Ends a request as [`Self::release`] does, and returns it, to be scheduled again.
    ///
    /// # Errors
    /// When the request is neither booked nor queued.
    pub fn withdraw(&mut self, id: u64) -> Result<Request, SchedulerError> {
        if let Some(request) = self.queue.remove(id) {
            return Ok(request);
        }
        let reservation = self.reservations.remove(id).ok_or(SchedulerError::UnknownRequest { id })?;
        let Placement { prefill, decode, .. } = reservation.placement;
        if let Some(decode) = decode {
            self.bookings.decode_at(decode).forget(id);
        }
        if !reservation.prefilled {
            self.bookings.prefill_at(prefill).done(id);
            self.caches.withdraw(prefill, &reservation.request)?;
        }
        Ok(reservation.request)
    }

    /// Ends expired promises, and the reservations whose lease has expired.
    fn expire(&mut self, now_ns: u64) {
        self.caches.expire(now_ns);
        let Some(over) = self.reservations.over(now_ns) else { return };
        for id in over {
            // The instance may be gone; then nothing is left to free.
            let _ = self.release(id);
        }
        self.reservations.rearm(now_ns);
    }

    /// Returns true if the decode instance still accepts a request whose prefill is done.
    #[must_use]
    pub fn takes_decode(&self, id: u64, now_ns: u64) -> bool {
        let Some(reservation) = self.reservations.get(id) else { return false };
        let Some(decode) = reservation.placement.decode else { return true };
        let view = self.bookings.decodes()[decode].view(now_ns);
        let (model, slo) = (&self.config.decode_model, self.config.slo);
        self.policy.takes_decode(reservation.request.tokens, &view, model, slo)
    }

    /// Returns the next queued request that can start now, with its placement, which is booked. Or one that is
    /// rejected: it excludes every existing instance, or the policy rejects it, which may have changed since the
    /// request arrived. To be called after every change until it returns `None`.
    ///
    /// A request that no instance accepts stays in the queue, and does not block the requests behind it.
    ///
    /// # Errors
    /// Errors of [`Self::commit`].
    pub fn poll(&mut self, now_ns: u64, scratch: &mut Scratch) -> Result<Option<Next>, SchedulerError> {
        self.expire(now_ns);
        if self.queue.is_empty() {
            return Ok(None);
        }
        if let Some(at) = self.queue.excluded_from_all(self.bookings.prefills()) {
            let id = self.queue.remove_at(at).id;
            let refused = Next::Refused { id, why: Refusal::NoInstance, retry_after_ns: AGAIN_NS };
            return Ok(Some(refused));
        }
        let takers = if self.policy.queues() { Some(self.bookings.takers(self.policy.as_ref(), now_ns)) } else { None };
        let Some(at) = self.first(takers.as_deref(), now_ns) else { return Ok(None) };
        let request = self.queue.at(at);
        let views = self.views(request, now_ns, scratch);
        match self.policy.choose(&request.ask(), &self.view(&views, now_ns), true) {
            Choice::Place(placement) => {
                // Booked first: a request that cannot be booked stays in the queue.
                let request = request.clone();
                let id = request.id;
                self.book(request, placement, now_ns)?;
                self.queue.serve_at(at, takers.as_deref(), placement.prefill_ns, &self.policy.queue_rules());
                Ok(Some(Next::Goes { id, placement }))
            }
            Choice::Refuse { why, retry_after_ns } => {
                let id = self.queue.remove_at(at).id;
                Ok(Some(Next::Refused { id, why, retry_after_ns }))
            }
            // An instance accepts requests, so the policy has no better candidate in the queue either.
            Choice::Wait => Ok(None),
        }
    }

    /// Returns the queue position of the request that one of `takers` serves next.
    fn first(&self, takers: Option<&[u32]>, now_ns: u64) -> Option<usize> {
        if self.queue.is_empty() {
            return None;
        }
        self.queue.first(&self.order(self.bookings.serving(&[]), now_ns), takers)
    }

    /// Returns the number of instances that serve a queued request.
    fn serving(&self, request: &Request) -> u64 {
        self.bookings.serving(&request.barred.prefill)
    }

    /// Returns the order of queued requests, as of now, with so many instances.
    fn order(&self, servers: u64, now_ns: u64) -> QueueOrder {
        QueueOrder { rules: self.policy.queue_rules(), slo: self.config.slo, now_ns, servers }
    }
}
