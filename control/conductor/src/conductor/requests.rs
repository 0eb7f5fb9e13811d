//! Ledger of open requests: identified by an id of the scheduler, answered once, notified later, and ended by an update
//! or an expired lease.

mod due;
pub(super) mod service;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use due::Due;
use kvplane_proto::rng::mix64;

use super::calls::{
    AssignedGroup, Assignment, ClientNotice, MOST_BARRED, RequestStep, Schedule, ScheduleMode, ScheduleRefusal,
    ScheduleReply,
};
use super::config::ConductorConfig;
use super::error::{ConductorError, bad};
use super::pools::Pools;
use crate::index::ContextId;
use crate::policy::{Choice, Placement};
use crate::scheduler::{ExcludedInstances, Next, Progress, Request, RequestOutput, SchedulerError, ServiceTerms};

/// Delay before a retry after a table was full.
const AGAIN_NS: u64 = 1_000_000_000;
/// Interval at which waiting requests are examined again.
const AGAIN_SOON_NS: u64 = 5_000_000;
/// Maximum plausible duration of a prefill.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// State of a request.
pub(super) enum RequestState {
    Waiting,
    Placed(Assignment, Option<AssignedGroup>),
    /// The instance of the request was lost.
    Orphan(Request),
}

/// Open request.
pub(super) struct TrackedRequest {
    name: Arc<str>,
    pub(super) pool: u32,
    client: u64,
    mark: u64,
    blocks: usize,
    /// True if the request was placed after a wait, and its client has not updated it since.
    late: bool,
    pub(super) state: RequestState,
}

/// Counters of requests.
#[derive(Clone, Copy, Default)]
pub(super) struct RequestCounts {
    pub(super) placed: u64,
    pub(super) queued: u64,
    pub(super) placed_later: u64,
    pub(super) refused: u64,
    pub(super) queue_full: u64,
    pub(super) requests_full: u64,
    pub(super) repeated: u64,
    pub(super) expired: u64,
    pub(super) orphaned: u64,
}

/// Limits of requests: their number, and their duration.
struct RequestLimits {
    requests: usize,
    blocks: usize,
    wait_ns: u64,
    lease_ns: u64,
    claim_ns: u64,
}

/// Service and excluded instances of a request, as the Conductor knows them.
pub(super) struct RequestService {
    /// Instances that it excludes, by number.
    pub(super) excluded: ExcludedInstances,
    /// Service that it gets.
    pub(super) terms: ServiceTerms,
}

/// Report of a finished prefill: the assignment, and the tokens reused.
pub(super) struct PrefillReport {
    pub(super) pool: u32,
    pub(super) assigned: Assignment,
    pub(super) reused_tokens: u32,
}

/// All requests that wait, are booked, or have lost their instance.
pub(super) struct RequestLedger {
    limits: RequestLimits,
    requests: BTreeMap<u64, TrackedRequest>,
    /// Reservation numbers, by tenant, then by id.
    by_name: BTreeMap<String, BTreeMap<Arc<str>, u64>>,
    due: Due,
    notices: VecDeque<ClientNotice>,
    /// Blocks of all prompts.
    blocks: usize,
    /// Greatest number of a reservation so far.
    last: u64,
    counts: RequestCounts,
}

impl RequestLedger {
    /// Creates an empty ledger; numbers of reservations begin after `last`.
    pub(super) fn new(config: &ConductorConfig, last: u64) -> Self {
        let limits = RequestLimits {
            requests: config.max_requests,
            blocks: config.max_request_blocks,
            wait_ns: config.wait_ns,
            lease_ns: config.lease_ns,
            claim_ns: config.claim_ns,
        };
        Self {
            limits,
            requests: BTreeMap::new(),
            by_name: BTreeMap::new(),
            due: Due::default(),
            notices: VecDeque::new(),
            blocks: 0,
            last,
            counts: RequestCounts::default(),
        }
    }

    pub(super) const fn counts(&self) -> RequestCounts {
        self.counts
    }

    /// Returns the number of open requests, and of the blocks in their prompts.
    pub(super) fn open(&self) -> (usize, usize) {
        (self.requests.len(), self.blocks)
    }

    /// Returns the lease of a booked request without an update.
    pub(super) const fn lease_ns(&self) -> u64 {
        self.limits.lease_ns
    }

    /// Takes the oldest notice for a waiting client.
    pub(super) fn take_notice(&mut self) -> Option<ClientNotice> {
        self.notices.pop_front()
    }

    /// Returns the request of this id. Ids are per tenant: if several tenants use this one, it is the request of the
    /// first tenant by name, so the default tenant's before all others.
    pub(super) fn named(&self, name: &str) -> Option<(u64, &TrackedRequest)> {
        let id = *self.by_name.values().find_map(|names| names.get(name))?;
        Some((id, self.requests.get(&id)?))
    }

    /// Chooses the instances of a request, none of the excluded ones, and books it. Idempotent: a repeated request
    /// with the same id gets the same answer.
    pub(super) fn schedule(
        &mut self,
        asked: &Schedule,
        pool: u32,
        service: RequestService,
        now_ns: u64,
        pools: &mut Pools,
    ) -> Result<ScheduleReply, ConductorError> {
        let full = self.requests.len() >= self.limits.requests || self.blocks + asked.hashes.len() > self.limits.blocks;
        let (context, hashes) = match pools.get_mut(pool) {
            Some(pool) => pool.context(&asked.context, Arc::from(asked.hashes.as_slice()))?,
            None => return Err(bad("the pool was removed")),
        };
        // The hashes that the index knows the blocks by may have changed since the request was first made.
        let mark = fingerprint(asked.tokens, context, &hashes);
        let names = self.by_name.get(asked.context.tenant.as_str());
        if let Some(id) = names.and_then(|names| names.get(asked.request.as_str())).copied() {
            return self.again(id, pool, mark, asked, now_ns, pools);
        }
        if full && asked.mode != ScheduleMode::Advise {
            self.counts.refused += 1;
            self.counts.requests_full += 1;
            return Ok(ScheduleReply::Refused { why: ScheduleRefusal::Full, retry_after_ns: AGAIN_NS });
        }
        let id = self.last + 1;
        let hashes = match pools.get(pool) {
            Some(pool) => pool.request_hashes(context, hashes),
            None => hashes,
        };
        let RequestService { excluded: barred, terms } = service;
        let (arrival_ns, tokens) = (now_ns, asked.tokens);
        let request = Request { id, arrival_ns, tokens, context, hashes, barred, terms, admitted: false };
        if asked.mode == ScheduleMode::Advise {
            return Ok(self.advise(pool, &request, now_ns, pools));
        }
        self.last = id;
        let kept = TrackedRequest {
            name: asked.request.as_str().into(),
            pool,
            client: asked.client,
            mark,
            blocks: request.hashes.len(),
            late: false,
            state: RequestState::Waiting,
        };
        self.offer(kept, &request, asked.mode, asked.wait_ns, now_ns, pools)
    }

    /// Answers a repeated request.
    fn again(
        &mut self,
        id: u64,
        pool: u32,
        mark: u64,
        asked: &Schedule,
        now_ns: u64,
        pools: &Pools,
    ) -> Result<ScheduleReply, ConductorError> {
        let Some(kept) = self.requests.get_mut(&id) else { return Err(bad("the ledger has no such request")) };
        // Fingerprints of two models may be equal: each model numbers its contexts separately.
        if (kept.pool, kept.mark) != (pool, mark) {
            let other = if kept.pool == pool { "with another prompt" } else { "for another model or block size" };
            let what = format!("request {:?} is in flight {other}; use another id", asked.request);
            return Err(ConductorError::Conflict { what });
        }
        kept.client = asked.client;
        self.counts.repeated += 1;
        Ok(self.answer_of(id, now_ns, pools))
    }

    fn answer_of(&self, id: u64, now_ns: u64, pools: &Pools) -> ScheduleReply {
        match self.requests.get(&id).map(|kept| (&kept.state, kept.pool)) {
            Some((RequestState::Placed(assigned, group), _)) => ScheduleReply::placed(assigned.clone(), group.clone()),
            Some((RequestState::Waiting, number)) => {
                let ahead = pools.get(number).and_then(|pool| {
                    let request = pool.scheduler.request(id)?;
                    Some(pool.scheduler.ahead(request, now_ns))
                });
                let (position, eta_ns) = ahead.unwrap_or_default();
                ScheduleReply::Queued { reservation: id, position: position as u32, eta_ns }
            }
            Some((RequestState::Orphan(_), _)) | None => {
                ScheduleReply::Refused { why: ScheduleRefusal::Lost, retry_after_ns: 0 }
            }
        }
    }

    /// Returns the answer that a request would get now, without booking it.
    fn advise(&self, pool: u32, request: &Request, now_ns: u64, pools: &mut Pools) -> ScheduleReply {
        let Some((pool, scratch)) = pools.with_scratch(pool) else {
            return ScheduleReply::Refused { why: ScheduleRefusal::NoInstance, retry_after_ns: AGAIN_NS };
        };
        match pool.scheduler.schedule_now(request, now_ns, scratch) {
            Choice::Place(placement) => {
                let assigned = pool.assigned(0, request, &placement, self.limits.lease_ns, scratch);
                ScheduleReply::placed(assigned, pool.assigned_group(&placement))
            }
            Choice::Refuse { why, retry_after_ns } => {
                ScheduleReply::Refused { why: ScheduleRefusal::of(why), retry_after_ns }
            }
            Choice::Wait | Choice::AwaitPrefix { .. } => {
                let (position, eta_ns) = pool.scheduler.ahead(request, now_ns);
                ScheduleReply::Queued { reservation: 0, position: position as u32, eta_ns }
            }
        }
    }

    /// Lets the pool's scheduler decide, and books the decision.
    fn offer(
        &mut self,
        kept: TrackedRequest,
        request: &Request,
        mode: ScheduleMode,
        wait_ns: u64,
        now_ns: u64,
        pools: &mut Pools,
    ) -> Result<ScheduleReply, ConductorError> {
        let (id, number) = (request.id, kept.pool);
        let Some((pool, scratch)) = pools.with_scratch(number) else { return Err(bad("the pool was removed")) };
        let choice = match mode {
            ScheduleMode::Now => pool.scheduler.schedule_now(request, now_ns, scratch),
            _ => pool.scheduler.schedule(request, now_ns, scratch),
        };
        let refused = |why, retry_after_ns| Ok(ScheduleReply::Refused { why, retry_after_ns });
        let booked = pool.scheduler.commit(request.clone(), &choice, now_ns);
        if let Choice::Refuse { why, retry_after_ns } = choice {
            self.counts.refused += 1;
            return refused(ScheduleRefusal::of(why), retry_after_ns);
        }
        match booked {
            Ok(()) => {}
            Err(error @ (SchedulerError::QueueFull { .. } | SchedulerError::TooManyReservations { .. })) => {
                self.counts.refused += 1;
                match error {
                    SchedulerError::QueueFull { .. } => self.counts.queue_full += 1,
                    _ => self.counts.requests_full += 1,
                }
                return refused(ScheduleRefusal::Full, AGAIN_NS);
            }
            Err(error) => return Err(error.into()),
        }
        pool.requests += 1;
        self.blocks += kept.blocks;
        let tenant = pool.key.tenant.clone();
        self.by_name.entry(tenant).or_default().insert(Arc::clone(&kept.name), id);
        self.requests.insert(id, kept);
        let wait_ns = if wait_ns == 0 { self.limits.wait_ns } else { wait_ns.min(self.limits.wait_ns) };
        self.due.set(id, now_ns.saturating_add(wait_ns));
        match choice {
            Choice::Place(placement) => self.place(number, id, &placement, false, now_ns, pools),
            _ => {
                if let Some(refused) = self.poll_for(number, Some(id), now_ns, pools) {
                    return Ok(refused);
                }
            }
        }
        match self.requests.get(&id).map(|kept| &kept.state) {
            Some(RequestState::Placed(..)) => self.counts.placed += 1,
            _ => self.counts.queued += 1,
        }
        Ok(self.answer_of(id, now_ns, pools))
    }

    /// Enters a placement that the pool's scheduler has booked.
    fn place(&mut self, pool: u32, id: u64, placement: &Placement, later: bool, now_ns: u64, pools: &mut Pools) {
        let Some((pool, scratch)) = pools.with_scratch(pool) else { return };
        let Some(request) = pool.scheduler.request(id).cloned() else { return };
        let assigned = pool.assigned(id, &request, placement, self.limits.lease_ns, scratch);
        let group = pool.assigned_group(placement);
        pool.note_placement(&request, &assigned, placement.fetch, now_ns);
        let Some(kept) = self.requests.get_mut(&id) else { return };
        kept.state = RequestState::Placed(assigned.clone(), group.clone());
        kept.late = later;
        let answer = ScheduleReply::placed(assigned, group);
        let notice = ClientNotice::new(kept.client, Arc::clone(&kept.name), answer);
        let lasts_ns = if later { self.limits.claim_ns } else { self.limits.lease_ns };
        self.due.set(id, now_ns.saturating_add(lasts_ns));
        if later {
            self.counts.placed_later += 1;
            self.notices.push_back(notice);
        }
    }

    /// Places the waiting requests of a pool that can start now.
    pub(super) fn poll(&mut self, pool: u32, now_ns: u64, pools: &mut Pools) {
        let _ = self.poll_for(pool, None, now_ns, pools);
    }

    /// Places waiting requests as [`Self::poll`] does, but without a notice for the request `asking`, which gets its
    /// answer directly. Returns the rejection of that request, if it is rejected.
    fn poll_for(&mut self, number: u32, asking: Option<u64>, now_ns: u64, pools: &mut Pools) -> Option<ScheduleReply> {
        let mut answer = None;
        loop {
            let Some((pool, scratch)) = pools.with_scratch(number) else { return answer };
            // A request that cannot be booked stays in the queue, and is retried with the next change.
            let Ok(Some(next)) = pool.scheduler.poll(now_ns, scratch) else { return answer };
            let (id, why, retry_after_ns) = match next {
                Next::Goes { id, placement } => {
                    self.place(number, id, &placement, asking != Some(id), now_ns, pools);
                    continue;
                }
                Next::Refused { id, why, retry_after_ns } => (id, why, retry_after_ns),
            };
            self.counts.refused += 1;
            let refused = ScheduleReply::Refused { why: ScheduleRefusal::of(why), retry_after_ns };
            let Some(kept) = self.end(id, None, now_ns, pools) else { continue };
            if asking == Some(id) {
                answer = Some(refused);
            } else {
                self.notices.push_back(ClientNotice::new(kept.client, kept.name, refused));
            }
        }
    }

    /// Ends a request, of whose output its pool learns, if there is one; others of the pool are placed then.
    pub(super) fn release(
        &mut self,
        reservation: u64,
        output: Option<RequestOutput>,
        now_ns: u64,
        pools: &mut Pools,
    ) -> Result<(), ConductorError> {
        let kept =
            self.end(reservation, output, now_ns, pools).ok_or(ConductorError::UnknownReservation { reservation })?;
        self.poll(kept.pool, now_ns, pools);
        Ok(())
    }

    /// Notes the progress of a booked request; returns the report of its prefill, if that is done. Does not renew the
    /// lease: see [`Self::renew`].
    pub(super) fn progress(
        &mut self,
        reservation: u64,
        step: RequestStep,
        now_ns: u64,
        pools: &mut Pools,
    ) -> Result<Option<PrefillReport>, ConductorError> {
        let unknown = ConductorError::UnknownReservation { reservation };
        let Some(kept) = self.requests.get_mut(&reservation) else { return Err(unknown) };
        let RequestState::Placed(assigned, group) = &kept.state else {
            let what = format!("reservation {reservation} waits, or its instance was lost: it can be rescheduled");
            return Err(ConductorError::Conflict { what });
        };
        let Some(pool) = pools.get_mut(kept.pool) else { return Err(unknown) };
        let progress = match step {
            RequestStep::PrefillStarted => Some(Progress::PrefillStarted),
            RequestStep::PrefillDone { reused_tokens, took_ns } => {
                let most = pool.scheduler.request(reservation).map_or(0, |request| request.tokens);
                let reused = reused_tokens.min(most);
                Some(Progress::PrefillDone { reused, took_ns: took_ns.min(LONGEST_NS) })
            }
            RequestStep::Decoding => Some(Progress::Decoding),
            RequestStep::Alive | RequestStep::Ended | RequestStep::Finished(_) => None,
        };
        if let Some(progress) = progress {
            pool.scheduler.update(reservation, progress, now_ns)?;
        }
        kept.late = false;
        let Some(Progress::PrefillDone { reused, .. }) = progress else { return Ok(None) };
        // The stages of a group have parts of blocks that are reported of none of them.
        if group.is_some() {
            return Ok(None);
        }
        Ok(Some(PrefillReport { pool: kept.pool, assigned: assigned.clone(), reused_tokens: reused }))
    }

    /// Renews the lease of a booked request; returns its pool.
    pub(super) fn renew(&mut self, reservation: u64, now_ns: u64) -> Option<u32> {
        let kept = self.requests.get(&reservation)?;
        self.due.set(reservation, now_ns.saturating_add(self.limits.lease_ns));
        Some(kept.pool)
    }

    /// Returns the pool of a request.
    pub(super) fn pool_of(&self, reservation: u64) -> Result<u32, ConductorError> {
        let kept = self.requests.get(&reservation).ok_or(ConductorError::UnknownReservation { reservation })?;
        Ok(kept.pool)
    }

    /// Places a request on instances other than `failed`, and other than those that it excludes already. It keeps its
    /// place in the queue.
    pub(super) fn reschedule(
        &mut self,
        reservation: u64,
        failed: &ExcludedInstances,
        now_ns: u64,
        pools: &mut Pools,
    ) -> Result<ScheduleReply, ConductorError> {
        let unknown = || ConductorError::UnknownReservation { reservation };
        let mut kept = self.requests.remove(&reservation).ok_or_else(unknown)?;
        let number = kept.pool;
        self.forget(reservation, &kept, pools);
        let Some(pool) = pools.get_mut(number) else { return Err(unknown()) };
        let request = match std::mem::replace(&mut kept.state, RequestState::Waiting) {
            RequestState::Orphan(request) => request,
            _ => pool.scheduler.withdraw(reservation)?,
        };
        let both = |one: &[u32], other: &[u32]| one.iter().chain(other).copied().take(MOST_BARRED).collect();
        let barred = ExcludedInstances {
            prefill: both(&failed.prefill, &request.barred.prefill),
            decode: both(&failed.decode, &request.barred.decode),
        };
        let answer = self.offer(kept, &Request { barred, ..request }, ScheduleMode::Reserve, 0, now_ns, pools);
        self.poll(number, now_ns, pools);
        pools.drop_unused(number);
        answer
    }

    /// Returns the assignments of a client's requests that had waited, and that may not have reached the client.
    pub(super) fn unclaimed(&self, client: u64) -> Vec<ClientNotice> {
        let mine = self.requests.values().filter(|kept| kept.client == client && kept.late);
        let notices = mine.filter_map(|kept| match &kept.state {
            RequestState::Placed(assigned, group) => {
                let answer = ScheduleReply::placed(assigned.clone(), group.clone());
                Some(ClientNotice::new(client, Arc::clone(&kept.name), answer))
            }
            RequestState::Waiting | RequestState::Orphan(_) => None,
        });
        notices.collect()
    }

    /// Notes that the instance of a request was lost, and notifies its client.
    pub(super) fn orphan(&mut self, request: Request) {
        let Some(kept) = self.requests.get_mut(&request.id) else { return };
        self.counts.orphaned += 1;
        let answer = ScheduleReply::Refused { why: ScheduleRefusal::Lost, retry_after_ns: 0 };
        self.notices.push_back(ClientNotice::new(kept.client, Arc::clone(&kept.name), answer));
        kept.state = RequestState::Orphan(request);
    }

    /// Removes a request from the tables of names and deadlines.
    fn forget(&mut self, id: u64, kept: &TrackedRequest, pools: &mut Pools) {
        self.due.clear(id);
        self.blocks -= kept.blocks;
        // A pool exists as long as its requests.
        let Some(pool) = pools.get_mut(kept.pool) else { return };
        pool.requests -= 1;
        if let Some(names) = self.by_name.get_mut(&pool.key.tenant) {
            names.remove(&kept.name);
            if names.is_empty() {
                self.by_name.remove(&pool.key.tenant);
            }
        }
    }

    fn end(
        &mut self,
        id: u64,
        output: Option<RequestOutput>,
        now_ns: u64,
        pools: &mut Pools,
    ) -> Option<TrackedRequest> {
        let kept = self.requests.remove(&id)?;
        self.forget(id, &kept, pools);
        if let Some(pool) = pools.get_mut(kept.pool) {
            // The scheduler does not have a request whose instance was lost.
            let _ = pool.scheduler.release(id, output, now_ns);
        }
        pools.drop_unused(kept.pool);
        Some(kept)
    }

    /// Returns the time at which [`Self::expire`] or [`Self::poll`] may have work.
    pub(super) fn soon_ns(&self, now_ns: u64, pools: &Pools) -> Option<u64> {
        let waits = pools.iter().any(|(_, pool)| pool.scheduler.waiting() > 0);
        // A waiting request may become placeable as soon as others have made progress.
        let soon_ns = waits.then(|| now_ns.saturating_add(AGAIN_SOON_NS));
        [self.due.first_ns(), soon_ns].into_iter().flatten().min()
    }

    /// Ends the requests whose deadline has passed.
    pub(super) fn expire(&mut self, now_ns: u64, pools: &mut Pools) {
        while let Some(id) = self.due.next(now_ns) {
            let Some(kept) = self.end(id, None, now_ns, pools) else { continue };
            match kept.state {
                RequestState::Waiting => {
                    let answer = ScheduleReply::Refused { why: ScheduleRefusal::Waited, retry_after_ns: AGAIN_NS };
                    self.notices.push_back(ClientNotice::new(kept.client, kept.name, answer));
                }
                RequestState::Placed(..) | RequestState::Orphan(_) => self.counts.expired += 1,
            }
        }
    }
}

/// Returns a fingerprint of a prompt, for telling a repeated request from another one.
fn fingerprint(tokens: u32, context: ContextId, hashes: &[u64]) -> u64 {
    let last = hashes.last().copied().unwrap_or(0);
    mix64(last ^ mix64(u64::from(tokens) << 32 | hashes.len() as u64)) ^ mix64(u64::from(context.number()))
}
