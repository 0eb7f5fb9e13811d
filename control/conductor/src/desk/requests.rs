//! Requests: asked for by an id of the scheduler's, answered once, told of later, ended by an update or a lease.

use std::sync::Arc;

use super::asked::{Answer, AssignedInstances, Mode, ScheduleRequest, Source, Step, Why};
use super::cache::pool_key;
use super::error::bad;
use super::{ClientNotice, Desk, DeskError, MAX_ID_BYTES, MAX_PROMPT_BLOCKS, fingerprint, request_of};
use crate::index::{ContextKey, Tiers};
use crate::policy::{Choice, Fetch, Placement};
use crate::scheduler::{ExcludedInstances, Next, Progress, Request, SchedulerError};

/// Sources named in an answer at most.
const SOURCES: usize = 4;
/// The most instances that a request may be kept from.
const MOST_BARRED: usize = 256;
/// When it is worth trying again after a table was full.
const AGAIN_NS: u64 = 1_000_000_000;
/// How soon it is looked again whether somebody who waits can go.
const AGAIN_SOON_NS: u64 = 5_000_000;
/// The longest prefill that is believed.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// How often in a row an instance may have much less cached than it said.
const BROKEN: u32 = 4;

pub(super) enum State {
    Waiting,
    Placed(AssignedInstances),
    /// Its instance was lost.
    Orphan(Request),
}

/// A request that is not over.
pub(super) struct TrackedRequest {
    pub name: Arc<str>,
    pub pool: u32,
    pub client: u64,
    mark: u64,
    blocks: usize,
    /// Whether it was placed after it had waited, and nobody has spoken of it since.
    late: bool,
    pub state: State,
}

impl Desk {
    /// Decides where a request runs, and books it. A request that comes again with the same id gets the same answer.
    ///
    /// # Errors
    /// When it makes no sense, nobody serves the model, or the id is another request's.
    pub fn schedule(&mut self, asked: &ScheduleRequest, now_ns: u64) -> Result<Answer, DeskError> {
        let number = self.check(asked)?;
        let most_requests = self.requests.len() >= self.config.max_requests;
        let full = most_requests || self.blocks + asked.hashes.len() > self.config.max_request_blocks;
        let Some(pool) = self.pools.get_mut(&number) else { return Err(unknown_model(&asked.context)) };
        let (context, hashes) = pool.context(&asked.context, Arc::from(asked.hashes.as_slice()))?;
        let mark = fingerprint(asked.tokens, context, &hashes);
        let names = self.by_name.get(asked.context.tenant.as_str());
        if let Some(id) = names.and_then(|names| names.get(asked.request.as_str())).copied() {
            return self.again(id, (number, mark), asked, now_ns);
        }
        if full && asked.mode != Mode::Advise {
            self.counts.refused += 1;
            return Ok(Answer::Refused { why: Why::Full, retry_after_ns: AGAIN_NS });
        }
        let id = self.next_request + 1;
        let mut request = request_of(id, asked, context, hashes, now_ns);
        request.barred = self.barred(number, &asked.barred);
        if asked.mode == Mode::Advise {
            return Ok(self.advise(number, &request, now_ns));
        }
        self.next_request = id;
        let kept = TrackedRequest {
            name: asked.request.as_str().into(),
            pool: number,
            client: asked.client,
            mark,
            blocks: request.hashes.len(),
            late: false,
            state: State::Waiting,
        };
        self.offer(id, kept, &request, asked.mode, asked.wait_ns, now_ns)
    }

    fn check(&self, asked: &ScheduleRequest) -> Result<u32, DeskError> {
        let name = asked.request.len();
        if name == 0 || name > MAX_ID_BYTES {
            return Err(bad(format!("a request's id has 1 to {MAX_ID_BYTES} bytes, not {name}")));
        }
        let (blocks, tokens, of) = (asked.hashes.len(), asked.tokens, asked.context.block_tokens);
        if blocks > MAX_PROMPT_BLOCKS {
            return Err(bad(format!("a prompt of {blocks} blocks; at most {MAX_PROMPT_BLOCKS}: use larger blocks")));
        }
        if tokens == 0 || (blocks as u64).saturating_sub(1) * u64::from(of) >= u64::from(tokens) {
            return Err(bad(format!("{blocks} blocks of {of} tokens are more than a prompt of {tokens} tokens")));
        }
        let most = MAX_PROMPT_BLOCKS as u64 * u64::from(of);
        if u64::from(tokens) > most {
            return Err(bad(format!(
                "a prompt of {tokens} tokens; at most {most} in blocks of {of}: use larger blocks"
            )));
        }
        if asked.barred.len() > MOST_BARRED {
            return Err(bad(format!("kept from {} instances; at most {MOST_BARRED}", asked.barred.len())));
        }
        self.pool_of(&pool_key(&asked.context)).ok_or_else(|| unknown_model(&asked.context))
    }

    /// The answer to a request that was asked before.
    fn again(&mut self, id: u64, of: (u32, u64), asked: &ScheduleRequest, now_ns: u64) -> Result<Answer, DeskError> {
        let Some(kept) = self.requests.get_mut(&id) else { return Err(bad("a request without an entry")) };
        // Marks of two models may be alike: each counts its contexts for itself.
        if (kept.pool, kept.mark) != of {
            let other = if kept.pool == of.0 { "with another prompt" } else { "for another model or block size" };
            let what = format!("request {:?} is under way {other}; use an id of its own", asked.request);
            return Err(DeskError::Conflict { what });
        }
        kept.client = asked.client;
        self.counts.repeated += 1;
        Ok(self.answer_of(id, now_ns))
    }

    fn answer_of(&self, id: u64, now_ns: u64) -> Answer {
        match self.requests.get(&id).map(|kept| (&kept.state, kept.pool)) {
            Some((State::Placed(assigned), _)) => Answer::Assigned(assigned.clone()),
            Some((State::Waiting, number)) => {
                let ahead = self.pools.get(&number).and_then(|pool| {
                    let request = pool.conductor.request(id)?;
                    Some(pool.conductor.ahead(request, now_ns))
                });
                let (position, eta_ns) = ahead.unwrap_or_default();
                Answer::Queued { reservation: id, position: position as u32, eta_ns }
            }
            Some((State::Orphan(_), _)) | None => Answer::Refused { why: Why::Lost, retry_after_ns: 0 },
        }
    }

    fn advise(&mut self, number: u32, request: &Request, now_ns: u64) -> Answer {
        let Some(pool) = self.pools.get(&number) else {
            return Answer::Refused { why: Why::NoInstance, retry_after_ns: AGAIN_NS };
        };
        match pool.conductor.schedule_now(request, now_ns, &mut self.scratch) {
            Choice::Place(placement) => Answer::Assigned(self.assigned(number, 0, request, &placement)),
            Choice::Refuse { why, retry_after_ns } => Answer::Refused { why: Why::of(why), retry_after_ns },
            Choice::Wait => {
                let (position, eta_ns) = pool.conductor.ahead(request, now_ns);
                Answer::Queued { reservation: 0, position: position as u32, eta_ns }
            }
        }
    }

    /// Asks the books, and enters what they say.
    fn offer(
        &mut self,
        id: u64,
        kept: TrackedRequest,
        request: &Request,
        mode: Mode,
        wait_ns: u64,
        now_ns: u64,
    ) -> Result<Answer, DeskError> {
        let number = kept.pool;
        let Some(pool) = self.pools.get_mut(&number) else { return Err(bad("the pool is gone")) };
        let conductor = &mut pool.conductor;
        let choice = match mode {
            Mode::Now => conductor.schedule_now(request, now_ns, &mut self.scratch),
            _ => conductor.schedule(request, now_ns, &mut self.scratch),
        };
        let refused = |why, retry_after_ns| Ok(Answer::Refused { why, retry_after_ns });
        if let Choice::Refuse { why, retry_after_ns } = choice {
            self.counts.refused += 1;
            return refused(Why::of(why), retry_after_ns);
        }
        match conductor.commit(request.clone(), &choice, now_ns) {
            Ok(()) => {}
            Err(SchedulerError::QueueFull { .. } | SchedulerError::TooManyReservations { .. }) => {
                self.counts.refused += 1;
                return refused(Why::Full, AGAIN_NS);
            }
            Err(error) => return Err(error.into()),
        }
        pool.requests += 1;
        self.blocks += kept.blocks;
        let tenant = pool.key.tenant.clone();
        self.by_name.entry(tenant).or_default().insert(Arc::clone(&kept.name), id);
        self.requests.insert(id, kept);
        let wait_ns = if wait_ns == 0 { self.config.wait_ns } else { wait_ns.min(self.config.wait_ns) };
        self.due.set(id, now_ns.saturating_add(wait_ns));
        match choice {
            Choice::Place(placement) => self.place(number, id, &placement, false, now_ns),
            _ => {
                if let Some(refused) = self.poll_for(number, Some(id), now_ns) {
                    return Ok(refused);
                }
            }
        }
        match self.requests.get(&id).map(|kept| &kept.state) {
            Some(State::Placed(_)) => self.counts.placed += 1,
            _ => self.counts.queued += 1,
        }
        Ok(self.answer_of(id, now_ns))
    }

    fn barred(&self, number: u32, names: &[String]) -> ExcludedInstances {
        if names.is_empty() {
            return ExcludedInstances::default();
        }
        let known = names.iter().filter_map(|name| self.instances.get(name.as_str()));
        let known: Vec<_> = known.filter(|known| known.pool == number).collect();
        ExcludedInstances {
            prefill: known.iter().filter_map(|known| known.prefill).map(|at| at as u32).collect(),
            decode: known.iter().filter_map(|known| known.decode).map(|at| at as u32).collect(),
        }
    }

    /// A placement by names.
    pub(super) fn assigned(
        &mut self,
        number: u32,
        id: u64,
        request: &Request,
        placement: &Placement,
    ) -> AssignedInstances {
        let lease_ns = self.config.lease_ns;
        let mut answer = AssignedInstances {
            reservation: id,
            prefill: "".into(),
            decode: None,
            reuse_tokens: placement.reuse,
            sources: Vec::new(),
            keep: !matches!(placement.fetch, Fetch::Pool { keep: false }),
            wait_ns: placement.wait_ns,
            prefill_ns: placement.prefill_ns,
            lease_ns,
        };
        let Some(pool) = self.pools.get_mut(&number) else { return answer };
        answer.prefill = pool.prefill_name(placement.prefill);
        answer.decode = placement.decode.and_then(|at| pool.decode.get(at).cloned());
        let block_tokens = pool.key.block_tokens;
        let tokens = |blocks: u32| blocks.saturating_mul(block_tokens).min(request.tokens);
        match placement.fetch {
            Fetch::Nothing => {}
            Fetch::One(source) => {
                let instance = Some(pool.prefill_name(source));
                answer.sources.push(Source { instance, tokens: placement.reuse });
            }
            Fetch::Pool { .. } => {
                let (context, hashes) = (request.context, &request.hashes);
                let found = self.scratch.found_mut();
                if pool.conductor.index().find(context, hashes, SOURCES, Tiers::SHARED, found).is_ok() {
                    for found in self.scratch.found().matches() {
                        let at = pool.conductor.instance_of(found.holder);
                        let instance = at.map(|at| pool.prefill_name(at));
                        let stored = || pool.store.values().any(|holder| *holder == found.holder);
                        if at != Some(placement.prefill) && (instance.is_some() || stored()) {
                            answer.sources.push(Source { instance, tokens: tokens(found.blocks) });
                        }
                    }
                }
            }
        }
        answer
    }

    /// Enters a placement that the books have.
    fn place(&mut self, number: u32, id: u64, placement: &Placement, later: bool, now_ns: u64) {
        let Some(request) = self.pools.get(&number).and_then(|pool| pool.conductor.request(id)).cloned() else {
            return;
        };
        let assigned = self.assigned(number, id, &request, placement);
        if let Some(pool) = self.pools.get_mut(&number) {
            pool.hits.tokens += u64::from(request.tokens);
            pool.hits.reused += u64::from(assigned.reuse_tokens);
            let blocks = (assigned.reuse_tokens / pool.key.block_tokens) as usize;
            pool.hot.note(request.context, &request.hashes[..blocks.min(request.hashes.len())], now_ns);
            pool.note_fetch(&request, &assigned, placement.fetch, now_ns);
        }
        let Some(kept) = self.requests.get_mut(&id) else { return };
        kept.state = State::Placed(assigned.clone());
        kept.late = later;
        let told =
            ClientNotice { client: kept.client, request: Arc::clone(&kept.name), answer: Answer::Assigned(assigned) };
        let lasts_ns = if later { self.config.claim_ns } else { self.config.lease_ns };
        self.due.set(id, now_ns.saturating_add(lasts_ns));
        if later {
            self.counts.placed_later += 1;
            self.told.push_back(told);
        }
    }

    /// Lets those who wait go whose time has come.
    pub(super) fn poll(&mut self, now_ns: u64) {
        let numbers: Vec<u32> = self.pools.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.poll_pool(number, now_ns));
    }

    pub(super) fn poll_pool(&mut self, number: u32, now_ns: u64) {
        let _ = self.poll_for(number, None, now_ns);
    }

    /// As [`Self::poll_pool`]; what is said of the one that is asking goes into its answer. The refusal of that one.
    fn poll_for(&mut self, number: u32, asking: Option<u64>, now_ns: u64) -> Option<Answer> {
        let mut answer = None;
        loop {
            let Some(pool) = self.pools.get_mut(&number) else { return answer };
            // One that cannot be booked stays in the queue, and is tried again with the next change.
            let Ok(Some(next)) = pool.conductor.poll(now_ns, &mut self.scratch) else { return answer };
            let (id, why, retry_after_ns) = match next {
                Next::Goes { id, placement } => {
                    self.place(number, id, &placement, asking != Some(id), now_ns);
                    continue;
                }
                Next::Refused { id, why, retry_after_ns } => (id, why, retry_after_ns),
            };
            self.counts.refused += 1;
            let refused = Answer::Refused { why: Why::of(why), retry_after_ns };
            let Some(kept) = self.end(id) else { continue };
            if asking == Some(id) {
                answer = Some(refused);
            } else {
                self.told.push_back(ClientNotice { client: kept.client, request: kept.name, answer: refused });
            }
        }
    }

    /// How a request fares.
    ///
    /// # Errors
    /// When there is no such reservation, or its instance was lost.
    pub fn update(&mut self, reservation: u64, step: Step, now_ns: u64) -> Result<(), DeskError> {
        let unknown = DeskError::UnknownReservation { reservation };
        let Some(kept) = self.requests.get(&reservation) else { return Err(unknown) };
        let number = kept.pool;
        if step == Step::Ended {
            self.end(reservation);
            self.poll_pool(number, now_ns);
            return Ok(());
        }
        let State::Placed(assigned) = &kept.state else {
            let what = format!("reservation {reservation} waits, or its instance was lost: it can be rescheduled");
            return Err(DeskError::Conflict { what });
        };
        let assigned = assigned.clone();
        let Some(pool) = self.pools.get_mut(&number) else { return Err(unknown) };
        let progress = match step {
            Step::PrefillStarted => Some(Progress::PrefillStarted),
            Step::PrefillDone { reused_tokens, took_ns } => {
                let most = pool.conductor.request(reservation).map_or(0, |request| request.tokens);
                let reused = reused_tokens.min(most);
                Some(Progress::PrefillDone { reused, took_ns: took_ns.min(LONGEST_NS) })
            }
            Step::Decoding => Some(Progress::Decoding),
            Step::Alive | Step::Ended => None,
        };
        if let Some(progress) = progress {
            pool.conductor.update(reservation, progress, now_ns)?;
        }
        if let Some(kept) = self.requests.get_mut(&reservation) {
            kept.late = false;
        }
        if let Some(Progress::PrefillDone { reused, .. }) = progress {
            self.compare(number, &assigned, reused)?;
        }
        self.due.set(reservation, now_ns.saturating_add(self.config.lease_ns));
        self.poll_pool(number, now_ns);
        Ok(())
    }

    /// What was cached beside what had been said: an instance that never has what it says is not believed; where it
    /// has much of which nobody said so, hashes of events and of requests are not of one kind.
    fn compare(&mut self, number: u32, assigned: &AssignedInstances, reused: u32) -> Result<(), DeskError> {
        let Some(pool) = self.pools.get_mut(&number) else { return Ok(()) };
        let block_tokens = pool.key.block_tokens;
        if assigned.reuse_tokens > 0 || reused < block_tokens.saturating_mul(2) {
            pool.surprises = if assigned.reuse_tokens > 0 && reused > 0 { 0 } else { pool.surprises };
        } else {
            pool.surprises = pool.surprises.saturating_add(1);
        }
        let Some(instance) = self.instances.get_mut(&*assigned.prefill) else { return Ok(()) };
        if !assigned.sources.is_empty() || assigned.reuse_tokens < block_tokens {
            return Ok(());
        }
        instance.broken = if reused < assigned.reuse_tokens / 2 { instance.broken + 1 } else { 0 };
        if instance.broken < BROKEN {
            return Ok(());
        }
        (instance.broken, instance.degraded) = (0, true);
        let at = instance.prefill;
        self.counts.disbelieved += 1;
        self.version += 1;
        at.map_or(Ok(()), |at| self.clear(number, at))
    }

    /// A request goes elsewhere, for those named have failed. It keeps its place among those who wait.
    ///
    /// # Errors
    /// When there is no such reservation.
    pub fn reschedule(&mut self, reservation: u64, failed: &[String], now_ns: u64) -> Result<Answer, DeskError> {
        let unknown = || DeskError::UnknownReservation { reservation };
        if failed.len() > MOST_BARRED {
            return Err(bad(format!("{} instances have failed; at most {MOST_BARRED}", failed.len())));
        }
        let mut kept = self.requests.remove(&reservation).ok_or_else(unknown)?;
        self.forget(reservation, &kept);
        let number = kept.pool;
        let Some(pool) = self.pools.get_mut(&number) else { return Err(unknown()) };
        let request = match std::mem::replace(&mut kept.state, State::Waiting) {
            State::Orphan(request) => request,
            _ => pool.conductor.withdraw(reservation)?,
        };
        let barred = self.barred(number, failed);
        let both = |one: &[u32], other: &[u32]| one.iter().chain(other).copied().take(MOST_BARRED).collect();
        let barred = ExcludedInstances {
            prefill: both(&barred.prefill, &request.barred.prefill),
            decode: both(&barred.decode, &request.barred.decode),
        };
        let answer = self.offer(reservation, kept, &Request { barred, ..request }, Mode::Reserve, 0, now_ns);
        self.poll_pool(number, now_ns);
        self.drop_pool(number);
        answer
    }

    /// What was assigned to a client's requests after they had waited, and may not have reached it.
    #[must_use]
    pub fn unclaimed(&self, client: u64) -> Vec<ClientNotice> {
        let mine = self.requests.values().filter(|kept| kept.client == client && kept.late);
        let told = mine.filter_map(|kept| match &kept.state {
            State::Placed(assigned) => {
                let answer = Answer::Assigned(assigned.clone());
                Some(ClientNotice { client, request: Arc::clone(&kept.name), answer })
            }
            State::Waiting | State::Orphan(_) => None,
        });
        told.collect()
    }

    /// A request's instance was lost.
    pub(super) fn orphan(&mut self, request: Request) {
        let Some(kept) = self.requests.get_mut(&request.id) else { return };
        self.counts.orphaned += 1;
        let answer = Answer::Refused { why: Why::Lost, retry_after_ns: 0 };
        self.told.push_back(ClientNotice { client: kept.client, request: Arc::clone(&kept.name), answer });
        kept.state = State::Orphan(request);
    }

    /// Takes a request out of the tables of names and times.
    fn forget(&mut self, id: u64, kept: &TrackedRequest) {
        self.due.clear(id);
        self.blocks -= kept.blocks;
        // A pool lasts as long as its requests.
        let Some(pool) = self.pools.get_mut(&kept.pool) else { return };
        pool.requests -= 1;
        if let Some(names) = self.by_name.get_mut(&pool.key.tenant) {
            names.remove(&kept.name);
            if names.is_empty() {
                self.by_name.remove(&pool.key.tenant);
            }
        }
    }

    fn end(&mut self, id: u64) -> Option<TrackedRequest> {
        let kept = self.requests.remove(&id)?;
        self.forget(id, &kept);
        if let Some(pool) = self.pools.get_mut(&kept.pool) {
            // The books do not have one whose instance was lost.
            let _ = pool.conductor.release(id);
        }
        self.drop_pool(kept.pool);
        Some(kept)
    }

    /// When [`Self::tick`] is to be called for the sake of requests, as far as can be said without looking at
    /// instances.
    #[must_use]
    pub fn soon_ns(&self, now_ns: u64) -> Option<u64> {
        let waits = self.pools.values().any(|pool| pool.conductor.waiting() > 0);
        // Who waits may go as soon as others have worked for a while.
        let soon_ns = waits.then(|| now_ns.saturating_add(AGAIN_SOON_NS));
        [self.due.first_ns(), soon_ns].into_iter().flatten().min()
    }

    /// Time has passed: ends what is over, doubts who is silent, lets those go whose time has come. When to be called
    /// again, if anything waits for that.
    pub fn tick(&mut self, now_ns: u64) -> Option<u64> {
        while let Some(id) = self.due.next(now_ns) {
            let Some(kept) = self.end(id) else { continue };
            match kept.state {
                State::Waiting => {
                    let answer = Answer::Refused { why: Why::Waited, retry_after_ns: AGAIN_NS };
                    self.told.push_back(ClientNotice { client: kept.client, request: kept.name, answer });
                }
                State::Placed(_) | State::Orphan(_) => self.counts.expired += 1,
            }
        }
        let instances_ns = self.look_at_instances(now_ns);
        self.poll(now_ns);
        [instances_ns, self.soon_ns(now_ns)].into_iter().flatten().min()
    }
}

pub(super) fn unknown_model(context: &ContextKey) -> DeskError {
    DeskError::UnknownModel {
        model: context.model.clone(),
        tenant: context.tenant.clone(),
        block_tokens: context.block_tokens,
    }
}
