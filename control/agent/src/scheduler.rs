//! Scheduler: client of the Conductor that returns the placement of a request, also while the Conductor is away.
//!
//! A request that has to wait for an instance waits here; its placement arrives over a stream. While the Conductor is
//! unreachable, or takes longer than the budget of the call, requests are placed by the last table of instances and a
//! local rule ([`kvplane_conductor::fallback`]); the Conductor is tried again after a backoff.

mod ended;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvplane_conductor::conductor::MOST_ENDED;
use kvplane_conductor::fallback;
use kvplane_proto::Digest;
use kvplane_rpc::Role;
use kvplane_rpc::conductor::{
    Assignment, GroupAssignment, InstancePart, InstanceStatus, InstanceTable, RequestOutput, RequestStep, RequestTerms,
    Reschedule, Schedule, ScheduleOnTerms, ScheduleRefusal, ScheduleReply, ScheduleWithGroups, UpdateRequest,
    WatchAssignments, WatchInstances,
};
use kvplane_rpc::message::{CreateTask, Request};
use kvplane_sys::interrupt;
use kvplane_sys::random::random_u64;

use crate::error::Error;
use crate::link::ControlLink;
use crate::which::Control;
use ended::{EndedReservation, EndedReservations};

/// Backoff after the Conductor could not be reached.
const LEAVE_ALONE: Duration = Duration::from_millis(500);
/// Interval at which a waiting call checks that its stream still lives.
const LOOK: Duration = Duration::from_millis(100);
/// Number of blocks of a request from which no ended reservations are sent with it.
const LONG_PROMPT_BLOCKS: usize = 100_000;

/// Placement of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Placed and reserved by the Conductor: report its progress ([`Scheduler::update`]), and its end.
    Booked(Assignment),
    /// Placed on a pipeline group and reserved by the Conductor, as the answer to [`Scheduler::schedule_with_groups`]
    /// only.
    BookedGroup(GroupAssignment),
    /// Placed by the local rule, because the Conductor is unreachable.
    Local {
        /// Instance that prefills.
        prefill: String,
        /// Instance that decodes, where there is one that serves decode.
        decode: Option<String>,
    },
    /// Rejected; retry after a delay.
    Refused {
        /// Reason of the rejection.
        why: ScheduleRefusal,
        /// Delay before a retry.
        retry_after: Duration,
    },
}

#[derive(Default)]
struct Inner {
    table: InstanceTable,
    /// Number of tables received.
    tables: u64,
    /// Answers that callers wait for, by request: the stream also tells of requests that nobody waits for, such as
    /// those that have ended here already.
    awaited: HashMap<Arc<str>, AwaitedAnswer>,
    /// Number of requests placed by the local rule, by instance.
    local: HashMap<String, u32>,
    left_alone_until: Option<Instant>,
}

impl Inner {
    /// Keeps an answer for a caller that waits for it.
    fn tell(&mut self, request: &str, answer: ScheduleReply) {
        if let Some(awaited) = self.awaited.get_mut(request) {
            awaited.told = Some(answer);
        }
    }
}

/// Answer that callers wait for.
#[derive(Default)]
struct AwaitedAnswer {
    callers: usize,
    /// Received answer that no caller has fetched.
    told: Option<ScheduleReply>,
}

#[derive(Default)]
struct SchedulerState {
    inner: Mutex<Inner>,
    changed: Condvar,
    watches: AtomicBool,
    assignments: AtomicBool,
}

impl SchedulerState {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Every change under the lock is complete.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Caller that waits for the answer to a request, until it is dropped.
struct WaitingCaller<'a> {
    shared: &'a SchedulerState,
    request: Arc<str>,
}

impl<'a> WaitingCaller<'a> {
    fn new(shared: &'a SchedulerState, request: &str) -> Self {
        let request: Arc<str> = request.into();
        shared.inner().awaited.entry(Arc::clone(&request)).or_default().callers += 1;
        Self { shared, request }
    }
}

impl Drop for WaitingCaller<'_> {
    fn drop(&mut self) {
        let mut inner = self.shared.inner();
        if let Some(awaited) = inner.awaited.get_mut(&self.request) {
            awaited.callers -= 1;
            if awaited.callers == 0 {
                inner.awaited.remove(&self.request);
            }
        }
    }
}

/// Marks a stream as ended when it is dropped.
struct Stream(Arc<SchedulerState>, fn(&SchedulerState) -> &AtomicBool);

impl Drop for Stream {
    fn drop(&mut self) {
        self.1(&self.0).store(false, Ordering::Release);
        self.0.changed.notify_all();
    }
}

/// Client of the Conductor. Any thread may use it.
pub struct Scheduler {
    link: ControlLink,
    client: u64,
    shared: Arc<SchedulerState>,
    ended_reservations: Arc<EndedReservations>,
    budget: Duration,
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.ended_reservations.close(self.budget);
    }
}

impl Scheduler {
    /// Connects to the Conductor of this control plane. A call that the Conductor does not answer within `budget` is
    /// placed locally. A control plane that is away is waited for as long as clients do ([`ControlLink::RESTART`]).
    ///
    /// # Errors
    /// When the control plane is not found, is unreachable, or rejects this process.
    pub fn connect(control: &Control, budget: Duration) -> Result<Self, Error> {
        let link = ControlLink::to_within(control, Role::Scheduler, ControlLink::RESTART)?;
        let scheduler =
            Self { link, client: random_u64()?, shared: Arc::default(), ended_reservations: Arc::default(), budget };
        scheduler.follow()?;
        Ok(scheduler)
    }

    /// Opens the streams that are not open.
    fn follow(&self) -> Result<(), Error> {
        if !self.shared.watches.swap(true, Ordering::AcqRel) {
            let stream = Stream(Arc::clone(&self.shared), |shared| &shared.watches);
            self.link.stream(WatchInstances, move |table| {
                let mut inner = stream.0.inner();
                inner.table = table;
                inner.tables += 1;
                drop(inner);
                stream.0.changed.notify_all();
                true
            })?;
        }
        if !self.shared.assignments.swap(true, Ordering::AcqRel) {
            let stream = Stream(Arc::clone(&self.shared), |shared| &shared.assignments);
            self.link.stream(WatchAssignments { client: self.client }, move |assigned| {
                let mut inner = stream.0.inner();
                inner.tell(&assigned.request, assigned.answer);
                drop(inner);
                stream.0.changed.notify_all();
                true
            })?;
        }
        Ok(())
    }

    /// Replicates objects of a tenant, such as those of a hot prefix, to the replica owners of their slots. Returns the
    /// number of the task, which `kvplane ctl tasks` shows. The destination follows from the key.
    ///
    /// # Errors
    /// When a key is empty or too long, or the control plane refuses the task.
    pub fn replicate(&self, tenant: &str, keys: &[impl AsRef<[u8]>]) -> Result<u64, Error> {
        let digest = |key: &[u8]| crate::client::digest_of(tenant.as_bytes(), key).map(|digest| digest.0);
        let digests: Result<Vec<u128>, Error> = keys.iter().map(|key| digest(key.as_ref())).collect();
        let name = format!("{} keys of a prefix", keys.len());
        let call = CreateTask { tenant: tenant.to_owned(), name, digests: digests?, targets: Vec::new() };
        Ok(self.link.call(call)?.id)
    }

    /// Returns the number by which the Conductor identifies this client.
    #[must_use]
    pub const fn client(&self) -> u64 {
        self.client
    }

    /// Returns the last table of instances.
    #[must_use]
    pub fn table(&self) -> InstanceTable {
        self.shared.inner().table.clone()
    }

    /// Waits until the last table satisfies `good`; returns false when that takes longer than `patience`.
    #[must_use]
    pub fn wait_for_table(&self, patience: Duration, good: impl Fn(&InstanceTable) -> bool) -> bool {
        let until = Instant::now() + patience;
        loop {
            // A failure to open a stream shows in the next call.
            let _ = self.follow();
            let inner = self.shared.inner();
            if good(&inner.table) {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            drop(self.shared.changed.wait_timeout(inner, interrupt::step(LOOK)));
            if interrupt::ended() {
                return false;
            }
        }
    }

    /// Waits for a table newer than number `seen`, and returns it with its number. Tables are numbered from 1 since
    /// this client connected; pass 0 at first. `None` when that takes longer than `patience`.
    #[must_use]
    pub fn table_after(&self, seen: u64, patience: Duration) -> Option<(u64, InstanceTable)> {
        let until = Instant::now() + patience;
        loop {
            // A failure to open a stream shows in the next call.
            let _ = self.follow();
            let inner = self.shared.inner();
            if inner.tables > seen {
                return Some((inner.tables, inner.table.clone()));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            drop(self.shared.changed.wait_timeout(inner, interrupt::step(LOOK.min(left))));
            if interrupt::ended() {
                return None;
            }
        }
    }

    /// Returns the placement of a request; waits up to `patience` if it is queued for an instance. The request's client
    /// number is set here.
    ///
    /// # Errors
    /// When the Conductor rejects the request as malformed, or is unreachable and no instance is known.
    pub fn schedule(&self, request: Schedule, patience: Duration) -> Result<Decision, Error> {
        self.schedule_on_terms(request, RequestTerms::default(), patience)
    }

    /// Returns the placement of a request with terms: its flow, class, priority, objective and expected output.
    ///
    /// # Errors
    /// Those of [`Self::schedule`], and when the terms are out of range or no operator has set the class.
    pub fn schedule_on_terms(
        &self,
        request: Schedule,
        terms: RequestTerms,
        patience: Duration,
    ) -> Result<Decision, Error> {
        self.schedule_by(request, terms, patience, Self::place)
    }

    /// Returns the placement of a request with terms as [`Self::schedule_on_terms`] does, on an instance or on a
    /// pipeline group ([`Decision::BookedGroup`]): for a caller that can drive the stages of one.
    ///
    /// # Errors
    /// Those of [`Self::schedule_on_terms`]. A control plane of an earlier version does not know this call.
    pub fn schedule_with_groups(
        &self,
        request: Schedule,
        terms: RequestTerms,
        patience: Duration,
    ) -> Result<Decision, Error> {
        self.schedule_by(request, terms, patience, Self::place_with_groups)
    }

    /// Obtains the placement of a request by the calls that `ask` makes; it may be queued for `patience`.
    fn schedule_by(
        &self,
        mut request: Schedule,
        terms: RequestTerms,
        patience: Duration,
        ask: impl FnMut(&Self, &ScheduleOnTerms) -> Result<ScheduleReply, Error>,
    ) -> Result<Decision, Error> {
        request.client = self.client;
        let until = Instant::now() + patience;
        if request.wait_ns == 0 {
            request.wait_ns = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        }
        let call = ScheduleOnTerms { schedule: request, terms, ended: Vec::new(), finished: Vec::new() };
        self.settle(&call, until, ask)
    }

    /// Places a reserved request again whose instances `failed`; it keeps its position in the queue. `request` is the
    /// one that was scheduled, for when it is queued or the Conductor is away.
    ///
    /// # Errors
    /// When the reservation no longer exists; otherwise the same as [`Self::schedule`].
    pub fn reschedule(
        &self,
        reservation: u64,
        failed: &[String],
        mut request: Schedule,
        patience: Duration,
    ) -> Result<Decision, Error> {
        request.client = self.client;
        request.barred.extend_from_slice(failed);
        // The Conductor keeps the terms of the reservation.
        let terms = RequestTerms::default();
        let again = ScheduleOnTerms { schedule: request, terms, ended: Vec::new(), finished: Vec::new() };
        let call = Reschedule { reservation, failed: failed.to_vec() };
        let mut first = Some(call);
        self.settle(&again, Instant::now() + patience, move |line, again| match first.take() {
            Some(call) => line.ask(call),
            None => line.place(again),
        })
    }

    /// Obtains the outcome of a request until then; by the local rule while the Conductor does not answer.
    fn settle(
        &self,
        call: &ScheduleOnTerms,
        until: Instant,
        mut ask: impl FnMut(&Self, &ScheduleOnTerms) -> Result<ScheduleReply, Error>,
    ) -> Result<Decision, Error> {
        let request = &call.schedule;
        if self.shared.inner().left_alone_until.is_some_and(|until| Instant::now() < until) {
            return self.decide(request);
        }
        let id = request.request.as_str();
        // Before the call: its answer may be told before this thread waits for it.
        let _caller = WaitingCaller::new(&self.shared, id);
        let mut asked = ask(self, call);
        loop {
            match asked {
                Err(error) if error.is_unanswered() => return self.decide(request),
                Err(error) => return Err(error),
                Ok(ScheduleReply::Assigned(assignment)) => return Ok(Decision::Booked(assignment)),
                Ok(ScheduleReply::AssignedGroup(assignment)) => return Ok(Decision::BookedGroup(assignment)),
                Ok(ScheduleReply::Refused { why, retry_after_ns }) => {
                    return Ok(Decision::Refused { why, retry_after: Duration::from_nanos(retry_after_ns) });
                }
                Ok(ScheduleReply::Queued { reservation, .. }) => {
                    asked = match self.wait_told(id, until) {
                        Some(told) => Ok(told),
                        None if Instant::now() < until && !interrupt::is_ended() => ask(self, call),
                        None => {
                            // The reservation may have ended at the same moment.
                            let _ = self.update(reservation, RequestStep::Ended);
                            Ok(ScheduleReply::Refused { why: ScheduleRefusal::Waited, retry_after_ns: 0 })
                        }
                    };
                }
            }
        }
    }

    /// Requests a placement; the call contains reservations that have ended. Without these and without terms it is a
    /// call that earlier control planes know, too.
    fn place(&self, call: &ScheduleOnTerms) -> Result<ScheduleReply, Error> {
        self.end_and_ask(call, |on_terms| {
            let ends_none = on_terms.ended.is_empty() && on_terms.finished.is_empty();
            if ends_none && on_terms.terms == RequestTerms::default() {
                return self.ask(on_terms.schedule);
            }
            self.ask(on_terms)
        })
    }

    /// Requests a placement on an instance or a pipeline group; the call contains reservations that have ended.
    fn place_with_groups(&self, call: &ScheduleOnTerms) -> Result<ScheduleReply, Error> {
        self.end_and_ask(call, |on_terms| self.ask(ScheduleWithGroups { on_terms }))
    }

    /// Makes a call with reservations that have ended; these are sent again if the call fails.
    fn end_and_ask(
        &self,
        call: &ScheduleOnTerms,
        ask: impl FnOnce(ScheduleOnTerms) -> Result<ScheduleReply, Error>,
    ) -> Result<ScheduleReply, Error> {
        // A prompt may take nearly all of a message.
        let most = if call.schedule.hashes.len() > LONG_PROMPT_BLOCKS { 0 } else { MOST_ENDED };
        let all = self.ended_reservations.take(most);
        let (schedule, terms) = (call.schedule.clone(), call.terms.clone());
        let (mut ended, mut finished) = (Vec::new(), Vec::new());
        for EndedReservation { reservation, output } in &all {
            match output {
                None => ended.push(*reservation),
                Some(output) => finished.push((*reservation, *output)),
            }
        }
        let asked = ask(ScheduleOnTerms { schedule, terms, ended, finished });
        if asked.is_err() && self.ended_reservations.put_back(all) {
            self.start_releases();
        }
        asked
    }

    fn ask<R>(&self, request: R) -> Result<ScheduleReply, Error>
    where
        R: Request<Reply = ScheduleReply> + Send + 'static,
    {
        self.follow()?;
        let asked = self.link.call_within(request, self.budget);
        if asked.as_ref().is_err_and(Error::is_unanswered) {
            self.shared.inner().left_alone_until = Some(Instant::now() + LEAVE_ALONE);
        }
        asked
    }

    /// Makes any other call to the Conductor within the budget: prefix lookups, explanations of placements, and the
    /// calls of instances (register, report, leave).
    ///
    /// # Errors
    /// The Conductor's refusal, or when it is not reached in time: the call may then take effect nevertheless.
    pub fn call<R>(&self, request: R) -> Result<R::Reply, Error>
    where
        R: Request + Send + 'static,
        R::Reply: Send + 'static,
    {
        self.link.call_within(request, self.budget)
    }

    /// Waits for the placement of a request; `None` when the stream has ended, so that the request must be sent again,
    /// or at the deadline.
    fn wait_told(&self, request: &str, until: Instant) -> Option<ScheduleReply> {
        let mut inner = self.shared.inner();
        loop {
            if let Some(told) = inner.awaited.get_mut(request).and_then(|awaited| awaited.told.take()) {
                return Some(told);
            }
            let now = Instant::now();
            if now >= until || !self.shared.assignments.load(Ordering::Acquire) {
                return None;
            }
            let waited = self.shared.changed.wait_timeout(inner, interrupt::step(LOOK.min(until - now)));
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
            if interrupt::is_watched() {
                drop(inner);
                if interrupt::ended() {
                    return None;
                }
                inner = self.shared.inner();
            }
        }
    }

    /// Places a request by the local rule, with the last table.
    fn decide(&self, request: &Schedule) -> Result<Decision, Error> {
        let mut inner = self.shared.inner();
        let (context, barred) = (&request.context, &request.barred);
        let serves = |row: &&InstanceStatus| {
            row.tenant == context.tenant
                && row.model == context.model
                && row.block_tokens == context.block_tokens
                && !row.suspect
                && !barred.iter().any(|name| **name == *row.instance)
        };
        let rows: Vec<&InstanceStatus> = inner.table.instances.iter().filter(serves).collect();
        let pick = |part: InstancePart| {
            let able = |row: &&&InstanceStatus| row.part == part || row.part == InstancePart::Mixed;
            let rows: Vec<&InstanceStatus> = rows.iter().filter(able).copied().collect();
            let weighed: Vec<(u64, u32)> = rows
                .iter()
                .map(|row| {
                    let number = Digest::of(b"", row.instance.as_bytes()).0 as u64;
                    (number, inner.local.get(&*row.instance).copied().unwrap_or(0))
                })
                .collect();
            fallback::choose(&weighed, &request.hashes).map(|at| rows[at].instance.to_string())
        };
        let Some(prefill) = pick(InstancePart::Prefill) else {
            return Err(Error::NoInstance { model: context.model.clone() });
        };
        let decode = pick(InstancePart::Decode);
        *inner.local.entry(prefill.clone()).or_default() += 1;
        Ok(Decision::Local { prefill, decode })
    }

    /// Ends a request, whatever its outcome: its reservation as [`Self::release`] does, or its count among those that
    /// were placed by the local rule.
    pub fn ended(&self, decision: &Decision) {
        self.end(decision, None);
    }

    /// Ends a request as [`Self::ended`] does, after it has generated its whole output: the Conductor expects outputs
    /// and decode times of later requests by it.
    pub fn finished(&self, decision: &Decision, output: RequestOutput) {
        self.end(decision, Some(output));
    }

    fn end(&self, decision: &Decision, output: Option<RequestOutput>) {
        let prefill = match decision {
            Decision::Booked(assignment) | Decision::BookedGroup(GroupAssignment { assignment, .. }) => {
                return self.release(assignment.reservation, output);
            }
            Decision::Local { prefill, .. } => prefill,
            Decision::Refused { .. } => return,
        };
        let mut inner = self.shared.inner();
        let left = inner.local.get(prefill).map_or(0, |requests| requests.saturating_sub(1));
        if left == 0 {
            inner.local.remove(prefill);
        } else {
            inner.local.insert(prefill.clone(), left);
        }
    }

    /// Ends a reservation, with the output of its request if that is known, without a call of its own: the Conductor
    /// learns of it with the next request, or within some 20 ms if none follows.
    pub fn release(&self, reservation: u64, output: Option<RequestOutput>) {
        // Nothing was booked.
        if reservation == 0 {
            return;
        }
        if self.ended_reservations.add(EndedReservation { reservation, output }) {
            self.start_releases();
        }
    }

    /// Starts the thread that releases reservations which no request follows.
    fn start_releases(&self) {
        let (link, budget) = (self.link.clone(), self.budget);
        self.ended_reservations.start(move |EndedReservation { reservation, output }| {
            let step = output.map_or(RequestStep::Ended, RequestStep::Finished);
            let ended = link.call_within(UpdateRequest { reservation, step }, budget);
            !ended.is_err_and(|error| error.is_unanswered())
        });
    }

    /// Reports the progress of a reserved request.
    ///
    /// # Errors
    /// When its reservation no longer exists, or the Conductor is unreachable.
    pub fn update(&self, reservation: u64, step: RequestStep) -> Result<(), Error> {
        self.call(UpdateRequest { reservation, step }).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_nobody_waits_for_are_not_kept() {
        let shared = SchedulerState::default();
        let lost = || ScheduleReply::Refused { why: ScheduleRefusal::Lost, retry_after_ns: 0 };
        (0..10).for_each(|at| shared.inner().tell(&format!("r{at}"), lost()));
        assert!(shared.inner().awaited.is_empty());
        let (one, other) = (WaitingCaller::new(&shared, "r"), WaitingCaller::new(&shared, "r"));
        shared.inner().tell("r", lost());
        drop(one);
        assert!(shared.inner().awaited["r"].told.is_some(), "another caller waits");
        drop(other);
        assert!(shared.inner().awaited.is_empty());
    }
}
