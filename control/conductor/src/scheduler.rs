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
//! * `sessions`: conversations whose next turn is expected;
//! * `decode`: lengths of the outputs of finished requests, and whether requests are being rejected because of decode
//!   load;
//! * `reservations`: booked requests, with their leases;
//! * `queue`: requests that wait for an instance, and their flows;
//! * `groups`: pipeline groups, of instances that prefill one prompt together;
//! * `arrivals`: rate and work of the requests of the last minute.
//!
//! [`SchedulerConfig`] bounds all state; times are nanoseconds of one monotonic clock, supplied by the caller.

mod arrivals;
mod bookings;
mod caches;
mod config;
mod decode;
mod error;
mod groups;
mod instances;
mod queue;
mod request;
mod reservations;
mod restored;
mod sessions;
mod sizes;
mod views;

use crate::cost::{DecodeSteps, PrefillModel};
use crate::index::{ContextId, PrefixIndex, PrefixMatches, PromptContext};
use crate::policy::{Choice, Fetch, Placement, Policy, Refusal, Slo};

use arrivals::Arrivals;
use bookings::Bookings;
use caches::Caches;
pub use config::SchedulerConfig;
use decode::DecodeJob;
pub use decode::{Decodes, OutputErrors};
pub use error::SchedulerError;
use groups::PipelineGroups;
pub use groups::{
    CHUNK_TOKENS, CapabilityError, InstanceCapabilities, MAX_ACTIVATION_BYTES, MAX_GROUP_NAME_BYTES, MAX_LAYERS,
    PIPELINE_STAGES, PipelineMembership,
};
pub use instances::{Foreign, InstanceNumbers};
pub use queue::Next;
pub use queue::flows::{DEFAULT_FLOW_WEIGHT, MAX_FLOW_WEIGHT};
use queue::plan::PlannedInstance;
use queue::promise::Promise;
use queue::{CentralQueue, QueueOrder};
pub use request::{ExcludedInstances, Progress, Request, RequestOutput, ServiceTerms};
use reservations::{Reservation, Reservations};
pub use restored::adopt_index;
use sessions::Sessions;
use views::Binding;

/// Delay before a retry of a request that excludes every instance.
const AGAIN_NS: u64 = 1_000_000_000;

/// Time by which a prefill is predicted to take longer than its computation, from which on it counts as stalled by a
/// transfer.
const STALL_NS: u64 = 1_000_000;

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
    decodes: Decodes,
    sessions: Sessions,
    caches: Caches,
    bookings: Bookings,
    reservations: Reservations,
    queue: CentralQueue,
    groups: PipelineGroups,
    arrivals: Arrivals,
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
            decodes: Decodes::new(config.decode_model, config.learns),
            sessions: Sessions::new(),
            reservations: Reservations::new(config.max_reservations, config.lease_ns),
            queue: CentralQueue::new(config.max_queue, config.max_flows),
            groups: PipelineGroups::default(),
            arrivals: Arrivals::default(),
            placed: 0,
            config,
            policy,
        })
    }

    /// Changes the policy and the objectives: bookings stay, and queued requests must be examined again
    /// ([`Self::poll`]).
    pub fn set_policy(&mut self, policy: Box<dyn Policy>, slo: Slo) {
        (self.policy, self.config.slo) = (policy, slo);
        self.decodes.gate.open();
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

    /// Returns what is learned of decodes.
    #[must_use]
    pub const fn decodes(&self) -> &Decodes {
        &self.decodes
    }

    /// Returns the number of sessions whose next turn is expected.
    #[must_use]
    pub const fn sessions(&self) -> usize {
        self.sessions.expected()
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
            return Choice::Place(known.placement.clone());
        }
        let views = self.views(request, Binding::Later, now_ns, scratch);
        self.policy.choose(&request.ask(), &self.view(&views, now_ns), false)
    }

    /// Decides as [`Self::schedule`] does, but binds the request at once, to an instance that may have other requests
    /// before it.
    #[must_use]
    pub fn schedule_now(&self, request: &Request, now_ns: u64, scratch: &mut Scratch) -> Choice {
        if let Some(known) = self.reservations.get(request.id) {
            return Choice::Place(known.placement.clone());
        }
        let views = self.views(request, Binding::AtOnce, now_ns, scratch);
        self.policy.choose_now(&request.ask(), &self.view(&views, now_ns))
    }

    /// Books the decision of [`Self::schedule`]; a rejection books nothing, but the next requests are judged by it.
    ///
    /// # Errors
    /// When a limit is reached, or the decision names an unknown instance.
    pub fn commit(&mut self, request: Request, choice: &Choice, now_ns: u64) -> Result<(), SchedulerError> {
        if self.reservations.get(request.id).is_some() {
            return Ok(());
        }
        // One that is scheduled again was not tested against the decode load.
        if !request.admitted {
            self.decodes.gate.note(if let Choice::Refuse { why, .. } = choice { Some(*why) } else { None });
        }
        match choice {
            Choice::Refuse { .. } => Ok(()),
            Choice::Place(placement) => {
                let computes_ns = self.model.predict_ns(request.tokens, placement.reuse);
                let promise = self.queue.promise(&request, &self.config.slo);
                let (terms, turn) = (request.terms.clone(), request.terms.session.is_some().then(|| request.clone()));
                // Booked first: a flow is not charged for a request that cannot be booked.
                self.book(request, placement.clone(), promise, now_ns)?;
                self.queue.flows().charge(&terms, placement.work_ns());
                if let Some(turn) = turn {
                    self.sessions.begin(&turn, now_ns);
                }
                self.arrivals.add(computes_ns, now_ns);
                Ok(())
            }
            Choice::Wait | Choice::AwaitPrefix { .. } => {
                if self.queue.get(request.id).is_some() {
                    return Ok(());
                }
                if self.queue.is_full() {
                    return Err(SchedulerError::QueueFull { most: self.config.max_queue });
                }
                let best_ns = self.best_ns(&request);
                let order = self.order(self.bookings.serving(&request.barred.prefill), &[], now_ns);
                self.sessions.begin(&request, now_ns);
                self.queue.push(request, best_ns, &order);
                self.arrivals.add(best_ns, now_ns);
                Ok(())
            }
        }
    }

    /// Books a placement.
    fn book(
        &mut self,
        request: Request,
        placement: Placement,
        promise: Option<Promise>,
        now_ns: u64,
    ) -> Result<(), SchedulerError> {
        if self.reservations.is_full() {
            return Err(SchedulerError::TooManyReservations { most: self.config.max_reservations });
        }
        let source = if let Fetch::One(source) = placement.fetch { source } else { placement.prefill };
        let decode_known = placement.decode.is_none_or(|decode| self.bookings.decode(decode).is_ok());
        if !decode_known || source >= self.bookings.prefills().len() {
            return Err(SchedulerError::UnknownInstance { instance: source });
        }
        let factor = self.bookings.prefill(placement.prefill)?.factor;
        let computes_ns = factor.of(self.model.predict_ns(request.tokens, placement.reuse));
        let stalls = placement.group.is_some() || placement.prefill_ns > computes_ns.saturating_add(STALL_NS);
        let uncached = request.tokens.saturating_sub(placement.reuse);
        self.bookings.book_prefill(request.id, &placement, uncached)?;
        // Blocks that are fetched and not kept are there for this request only.
        let passes = matches!(placement.fetch, Fetch::Pool { keep } if !(keep && self.config.keeps_fetched));
        let block_tokens = self.config.block_tokens;
        let passing = if passes { (placement.reuse / block_tokens) as usize } else { 0 };
        let held_blocks = self.caches.place(placement.prefill, &request, passing, block_tokens)?;
        let fetched = placement.reuse.saturating_sub(held_blocks.saturating_mul(block_tokens));
        // All stages of a group but the last fetch the KV cache of their layers.
        let stage_bytes = placement.group.as_ref().map_or(0, |plan| plan.loads_bytes(self.config.token_bytes));
        let bytes = (u64::from(fetched) * self.config.token_bytes).saturating_add(stage_bytes);
        let took_ns = crate::cost::transfer_ns(bytes, self.config.nic_bytes_s);
        self.bookings.book_transfer(placement.fetch, took_ns, now_ns);
        if let Some(decode) = placement.decode {
            let expected_ns = now_ns.saturating_add(placement.takes_ns());
            let (id, prompt, output) = (request.id, request.tokens, self.decodes.expected(&request.terms));
            self.bookings.decode_at(decode).expect(DecodeJob { id, prompt, output, start_ns: expected_ns });
        }
        self.placed += 1;
        let touched_ns = now_ns;
        let (prefilled, batch) = (false, None);
        self.reservations.insert(Reservation { request, placement, promise, prefilled, batch, stalls, touched_ns });
        Ok(())
    }

    /// Notes the progress of a booked request.
    ///
    /// # Errors
    /// When the request is not booked.
    pub fn update(&mut self, id: u64, progress: Progress, now_ns: u64) -> Result<(), SchedulerError> {
        let reservation = self.reservations.get_mut(id).ok_or(SchedulerError::UnknownRequest { id })?;
        reservation.touched_ns = now_ns;
        let (placement, tokens) = (&reservation.placement, reservation.request.tokens);
        let bytes = u64::from(tokens) * self.config.token_bytes;
        let handover_ns = crate::cost::transfer_ns(bytes, self.config.nic_bytes_s);
        match progress {
            Progress::PrefillStarted => self.bookings.each_prefill(placement, |book| book.started(id, now_ns)),
            Progress::PrefillDone { reused, took_ns } if !reservation.prefilled => {
                reservation.prefilled = true;
                self.bookings.each_prefill(placement, |book| book.done(id));
                if let Some(promise) = reservation.promise {
                    self.queue.margins().report(promise, now_ns);
                }
                // A duration of 0 is none.
                if self.config.learns && !reservation.stalls && took_ns > 0 {
                    let book = self.bookings.prefill_at(placement.prefill);
                    let factor = book.factor.0;
                    book.factor.report(self.model.predict_ns(tokens, reused), took_ns);
                    self.model.report(tokens, reused, took_ns, factor);
                }
                if let Some(decode) = placement.decode.filter(|_| self.config.hands_over) {
                    self.bookings.book_handover(placement.prefill, decode, handover_ns, now_ns);
                }
                let until_ns = now_ns.saturating_add(self.config.promise_ns);
                self.caches.expect_blocks(placement.prefill, &reservation.request, until_ns);
            }
            Progress::PrefillDone { .. } => {}
            Progress::Decoding => {
                if let Some(decode) = placement.decode.filter(|_| reservation.batch.is_none()) {
                    let book = self.bookings.decode_at(decode);
                    book.begin(id, now_ns);
                    reservation.batch = Some(book.resident(now_ns, self.decodes.model()));
                }
            }
        }
        Ok(())
    }

    /// Ends a request, successful or not, and frees its bookings; learns from its output, if it has generated that. The
    /// next turn of its session is expected from now on.
    ///
    /// # Errors
    /// When the request is neither booked nor queued.
    pub fn release(&mut self, id: u64, output: Option<RequestOutput>, now_ns: u64) -> Result<(), SchedulerError> {
        if let (Some(reservation), Some(output)) = (self.reservations.get(id), output) {
            self.decodes.finished(&reservation.request.terms, output);
            if let Some(decode) = reservation.placement.decode {
                let usual = self.bookings.usual_decode_factor();
                let book = self.bookings.decode_at(decode);
                let after = book.resident(now_ns, self.decodes.model());
                let before = reservation.batch.unwrap_or(after);
                let steps = DecodeSteps {
                    // The prefill generates the first token.
                    steps: output.tokens.saturating_sub(1),
                    took_ns: output.decode_ns,
                    tokens: u64::midpoint(before.0, after.0),
                    requests: u32::midpoint(before.1, after.1).max(1),
                };
                self.decodes.learn_steps(book, usual, &steps, false);
            }
        }
        let (request, served) = self.take_out(id)?;
        self.sessions.end(&request, served, now_ns);
        Ok(())
    }

    /// Frees the bookings of a request, and returns it, to be scheduled again: it counts as admitted.
    ///
    /// # Errors
    /// When the request is neither booked nor queued.
    pub fn withdraw(&mut self, id: u64) -> Result<Request, SchedulerError> {
        let (request, _) = self.take_out(id)?;
        self.sessions.withdraw(&request);
        Ok(Request { admitted: true, ..request })
    }

    /// Removes a request with its bookings; returns it with the instance that prefilled it and the tokens of its full
    /// blocks, if it was prefilled.
    fn take_out(&mut self, id: u64) -> Result<(Request, Option<(usize, u64)>), SchedulerError> {
        if let Some(request) = self.queue.remove(id) {
            return Ok((request, None));
        }
        let reservation = self.reservations.remove(id).ok_or(SchedulerError::UnknownRequest { id })?;
        let placement = &reservation.placement;
        if let Some(decode) = placement.decode {
            self.bookings.decode_at(decode).forget(id);
        }
        if !reservation.prefilled {
            self.bookings.each_prefill(placement, |book| book.done(id));
            self.caches.withdraw(placement.prefill, &reservation.request)?;
        }
        let held = reservation.request.hashes.len() as u64 * u64::from(self.config.block_tokens);
        let prefill = placement.prefill;
        let is_there = reservation.prefilled && self.caches.holder(prefill).is_ok();
        Ok((reservation.request, is_there.then_some((prefill, held))))
    }

    /// Returns true if the decode instance still accepts a request whose prefill is done.
    #[must_use]
    pub fn takes_decode(&self, id: u64, now_ns: u64) -> bool {
        let Some(reservation) = self.reservations.get(id) else { return false };
        let Some(decode) = reservation.placement.decode else { return true };
        let (model, slo) = (self.decodes.model(), self.config.slo);
        let view = self.bookings.decodes()[decode].view(now_ns, now_ns, model);
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
        self.caches.expire(now_ns);
        self.sessions.expire(now_ns);
        if let Some(over) = self.reservations.over(now_ns) {
            for id in over {
                // The instance may be gone; then nothing is left to free.
                let _ = self.release(id, None, now_ns);
            }
            self.reservations.rearm(now_ns);
        }
        if self.queue.is_empty() {
            return Ok(None);
        }
        if let Some(at) = self.queue.excluded_from_all(self.bookings.prefills()) {
            let request = self.queue.remove_at(at);
            self.sessions.end(&request, None, now_ns);
            let (id, why) = (request.id, Refusal::NoInstance);
            return Ok(Some(Next::Refused { id, why, retry_after_ns: AGAIN_NS }));
        }
        let takers = if self.policy.queues() { Some(self.bookings.takers(self.policy.as_ref(), now_ns)) } else { None };
        let instances = self.bookings.planned(now_ns);
        loop {
            let order = self.order(self.bookings.serving(&[]), &instances, now_ns);
            let Some(at) = self.queue.first(&order, takers.as_deref()) else { return Ok(None) };
            let request = self.queue.at(at);
            let views = self.views(request, Binding::Queued, now_ns, scratch);
            match self.policy.choose(&request.ask(), &self.view(&views, now_ns), true) {
                Choice::Place(placement) => {
                    // Booked first: a request that cannot be booked stays in the queue.
                    let request = request.clone();
                    let id = request.id;
                    self.book(request, placement.clone(), self.queue.promise_at(at), now_ns)?;
                    let rules = self.policy.queue_rules();
                    self.queue.serve_at(at, takers.as_deref(), placement.work_ns(), &rules, now_ns);
                    return Ok(Some(Next::Goes { id, placement }));
                }
                Choice::Refuse { why, retry_after_ns } => {
                    let request = self.queue.remove_at(at);
                    self.sessions.end(&request, None, now_ns);
                    return Ok(Some(Next::Refused { id: request.id, why, retry_after_ns }));
                }
                // Each request awaits a prefix at most once at a time, so this ends.
                Choice::AwaitPrefix { until_ns } => self.queue.await_prefix(at, until_ns.max(now_ns + 1)),
                // An instance accepts requests, so the policy has no better candidate in the queue either.
                Choice::Wait => return Ok(None),
            }
        }
    }

    /// Returns the order of queued requests, as of now, with so many instances. Plans need `instances`, those that take
    /// requests.
    fn order<'a>(&self, servers: u64, instances: &'a [PlannedInstance], now_ns: u64) -> QueueOrder<'a> {
        QueueOrder { rules: self.policy.queue_rules(), slo: self.config.slo, now_ns, servers, instances }
    }
}
