//! `_native.Scheduler`: a scheduler's line to the Conductor, for any number of threads.
//!
//! Each call gives the number of an error, or 0 and what was asked for, as tuples and dictionaries that the package
//! `kvplane` makes its own types of. Times are in seconds.

pub(crate) mod scheduling;

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use kvplane::rpc::conductor::{
    CacheReport, DeregisterInstance, EventSource, ExplainRequest, QueryPrefix, RegisterInstance, ReportCache,
    ReportLoad, Schedule, ScheduleMode,
};
use kvplane::rpc::{CallError, RefusalCode};
use kvplane::{Decision, Error};
use pyo3::exceptions::PyConnectionError;
use pyo3::prelude::*;

use crate::control::{ControlArguments, seconds};
use crate::cpython::{Keys, numbers};
use crate::outcome::{INTERNAL, INVALID, NO_ROOM, NOT_FOUND, failed, store_code};
use crate::scheduler::scheduling::{
    Change, Context, DecisionDict, ExplanationDict, Holders, Table, nanoseconds, part_of, step_of, tier_of,
};
use crate::store::clients::Call;
use crate::waiting::waiting;

/// `OBJECT_ALREADY_EXISTS`: here, another prompt, incarnation or instance has the name.
const CONFLICT: i64 = -705;
/// `LEASE_EXPIRED` and the like: the deadline passed.
const LATE: i64 = -901;
/// The caller may not do this.
const NOT_PERMITTED: i64 = -601;

/// A request to schedule: its id, context, tokens, and instances that it must not go to.
type ScheduleArguments = (String, Context, u32, Vec<String>);

/// An instance that registers: name, incarnation, tenant, model, tokens of a block, bytes of a token, part, room for
/// decodes in tokens, seconds between reports, address.
type RegisterArguments = (String, u64, String, String, u32, u64, String, u64, f64, String);

/// A line to the Conductor. Numbers below zero are errors; `last_error()` says more.
#[pyclass(module = "kvplane._native", frozen)]
pub(crate) struct Scheduler {
    /// Nothing once it was closed.
    line: RwLock<Option<Arc<kvplane::Scheduler>>>,
    process: u32,
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Its thread is the parent's.
            core::mem::forget(self.line.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

/// The number for why a call of the Conductor failed.
fn code_of(error: &Error) -> i64 {
    let refusal = match error {
        Error::Call(CallError::Refused(refusal)) => refusal,
        Error::Call(CallError::Deadline { .. }) => return failed(LATE, error.to_string()),
        _ => return store_code(error),
    };
    let code = match refusal.known_code() {
        Some(RefusalCode::BadRequest | RefusalCode::TooLarge) => INVALID,
        Some(RefusalCode::NotFound) => NOT_FOUND,
        Some(RefusalCode::AlreadyExists | RefusalCode::StaleIncarnation) => CONFLICT,
        Some(RefusalCode::LimitReached) => NO_ROOM,
        Some(RefusalCode::NotPermitted) => NOT_PERMITTED,
        _ => INTERNAL,
    };
    failed(code, refusal.reason.clone())
}

fn invalid(why: impl Into<String>) -> i64 {
    failed(INVALID, why)
}

#[pymethods]
impl Scheduler {
    /// Connects; `ConnectionError` says why not. `budget`: how long the Conductor may take to answer, in seconds.
    #[new]
    #[pyo3(signature = (master=None, cluster=None, certificates=None, runtime_directory=None, budget=1.0))]
    fn new(
        py: Python<'_>,
        master: Option<String>,
        cluster: Option<String>,
        certificates: Option<std::path::PathBuf>,
        runtime_directory: Option<std::path::PathBuf>,
        budget: f64,
    ) -> PyResult<Self> {
        let budget = seconds("budget", budget, 60)?;
        let wanted = ControlArguments { master, cluster, certificates, runtime_directory }.completed();
        let connected = waiting(py, || wanted.connect(move |control| kvplane::Scheduler::connect(&control, budget)))?;
        let line = connected.map_err(PyConnectionError::new_err)?;
        Ok(Self { line: RwLock::new(Some(Arc::new(line))), process: std::process::id() })
    }

    /// Where a request goes; waits for an instance up to `patience`. With a reservation and its instances that
    /// `failed`, where it goes instead.
    #[pyo3(signature = (asked, hashes, mode, patience, failed=None))]
    fn schedule(
        &self,
        py: Python<'_>,
        asked: ScheduleArguments,
        hashes: &Bound<'_, PyAny>,
        mode: &str,
        patience: f64,
        failed: Option<(u64, Vec<String>)>,
    ) -> PyResult<(i64, Option<DecisionDict>)> {
        let (request, context, tokens, barred) = asked;
        let hashes = numbers(hashes)?;
        let mode = match mode {
            "reserve" => ScheduleMode::Reserve,
            "now" => ScheduleMode::Now,
            "advise" => ScheduleMode::Advise,
            other => return Ok((invalid(format!("mode {other:?}: reserve, now or advise")), None)),
        };
        let context = context.out();
        let request = Schedule { client: 0, request, context, tokens, hashes, wait_ns: 0, mode, barred };
        let patience = Duration::from_nanos(nanoseconds(patience));
        let decided = self.ask(py, |line| match failed {
            Some((reservation, failed)) => line.reschedule(reservation, &failed, request, patience),
            None => line.schedule(request, patience),
        })?;
        Ok(decided.map_or_else(|code| (code, None), |decision| (0, Some(DecisionDict::of(decision)))))
    }

    /// How a booked request fares: 0, or an error's number.
    #[pyo3(signature = (reservation, step, reused_tokens=0, took=0.0))]
    fn update(&self, py: Python<'_>, reservation: u64, step: &str, reused_tokens: u32, took: f64) -> PyResult<i64> {
        let Some(step) = step_of(step, reused_tokens, took) else {
            return Ok(invalid(format!("there is no step {step:?}")));
        };
        Ok(self.ask(py, |line| line.update(reservation, step))?.map_or_else(|code| code, |()| 0))
    }

    /// A request that went to `prefill` by the local rule has ended.
    fn ended(&self, py: Python<'_>, prefill: String) -> PyResult<i64> {
        let decision = Decision::Local { prefill, decode: None };
        let told = self.ask(py, |line| {
            line.ended(&decision);
            Ok(())
        })?;
        Ok(told.map_or_else(|code| code, |()| 0))
    }

    /// Who has how much of the beginning of a prompt.
    fn query(
        &self,
        py: Python<'_>,
        context: Context,
        hashes: &Bound<'_, PyAny>,
        most: u32,
        tier: &str,
    ) -> PyResult<(i64, Option<Holders>)> {
        let hashes = numbers(hashes)?;
        let Some(tier) = tier_of(tier) else { return Ok((invalid(format!("there is no tier {tier:?}")), None)) };
        let question = QueryPrefix { context: context.out(), hashes, most, tier };
        let found = self.ask(py, |line| line.call(question))?;
        Ok(found.map_or_else(|code| (code, None), |found| (0, Some(Holders::of(found)))))
    }

    /// Why a request went where it went.
    fn explain(&self, py: Python<'_>, request: String) -> PyResult<(i64, Option<ExplanationDict>)> {
        let found = self.ask(py, |line| line.call(ExplainRequest { request }))?;
        Ok(found.map_or_else(|code| (code, None), |found| (0, Some(ExplanationDict::of(found)))))
    }

    /// The first table of instances after the `seen` that came, and its number; none when that takes longer.
    fn table_after(&self, py: Python<'_>, seen: u64, patience: f64) -> PyResult<(i64, Option<(u64, Table)>)> {
        let patience = Duration::from_nanos(nanoseconds(patience));
        let told = self.ask(py, |line| Ok(line.table_after(seen, patience)))?;
        Ok(told.map_or_else(|code| (code, None), |told| (0, told.map(|(number, table)| (number, Table::of(table))))))
    }

    /// Has objects copied to a second node each: the task's number, or an error's.
    fn replicate(&self, py: Python<'_>, tenant: &str, keys: &Bound<'_, PyAny>) -> PyResult<(i64, u64)> {
        let keys = Keys::many(keys)?;
        let keys: Vec<&[u8]> = keys.iter().collect();
        let task = self.ask(py, |line| line.replicate(tenant, &keys))?;
        Ok(task.map_or_else(|code| (code, 0), |task| (0, task)))
    }

    /// An instance comes: whether a snapshot of its cache is wanted, and after how long without a report it is not
    /// chosen any more.
    fn register(
        &self,
        py: Python<'_>,
        instance: RegisterArguments,
        events: Option<(String, String, String)>,
    ) -> PyResult<(i64, bool, f64)> {
        let (instance, incarnation, tenant, model, block_tokens, token_bytes, part, capacity_tokens, report, address) =
            instance;
        let Some(part) = part_of(&part) else {
            return Ok((invalid(format!("part {part:?}: prefill, decode or mixed")), false, 0.0));
        };
        let events = events.map(|(publisher, replay, topic)| EventSource { publisher, replay, topic });
        let report_ns = nanoseconds(report);
        let call = RegisterInstance {
            instance,
            incarnation,
            tenant,
            model,
            block_tokens,
            token_bytes,
            part,
            capacity_tokens,
            report_ns,
            address,
            events,
        };
        let told = self.ask(py, |line| line.call(call))?;
        Ok(told.map_or_else(
            |code| (code, false, 0.0),
            |told| (0, told.fresh, Duration::from_nanos(told.doubted_after_ns).as_secs_f64()),
        ))
    }

    /// An instance goes.
    fn deregister(&self, py: Python<'_>, tenant: String, instance: String, incarnation: u64) -> PyResult<i64> {
        Ok(self
            .ask(py, |line| line.call(DeregisterInstance { tenant, instance, incarnation }))?
            .map_or_else(|code| code, |_| 0))
    }

    /// How busy an instance is: its tenant, name, incarnation and the report's number; prompts' tokens, decodes'
    /// tokens, decodes.
    fn report_load(&self, py: Python<'_>, of: (String, String, u64, u64), load: (u64, u64, u32)) -> PyResult<i64> {
        let (tenant, instance, incarnation, seq) = of;
        let (queued_tokens, decode_tokens, decodes) = load;
        let call = ReportLoad { tenant, instance, incarnation, seq, queued_tokens, decode_tokens, decodes };
        Ok(self.ask(py, |line| line.call(call))?.map_or_else(|code| code, |_| 0))
    }

    /// What became of an instance's cache: the number of the next batch, and what is wanted: nothing, replay, snapshot.
    fn report_cache(
        &self,
        py: Python<'_>,
        of: (String, String, u64, u64),
        kind: &str,
        changes: Vec<Change>,
    ) -> PyResult<(i64, u64, &'static str)> {
        let (tenant, instance, incarnation, seq) = of;
        let kind = match kind {
            "goes" => CacheReport::Goes,
            "snapshot" => CacheReport::Snapshot,
            "lost" => CacheReport::Lost,
            other => return Ok((invalid(format!("kind {other:?}: goes, snapshot or lost")), 0, "")),
        };
        let changes: Option<Vec<_>> = changes.into_iter().map(Change::out).collect();
        let Some(changes) = changes else { return Ok((invalid("a change of a tier that there is not"), 0, "")) };
        let told = self.ask(py, |line| line.call(ReportCache { tenant, instance, incarnation, seq, kind, changes }))?;
        Ok(told.map_or_else(
            |code| (code, 0, ""),
            |told| (0, told.next, crate::scheduler::scheduling::wanted_name(told.wanted)),
        ))
    }

    /// The number under which the Conductor knows this client; 0 once closed.
    fn client(&self) -> u64 {
        self.open().map_or(0, |line| line.client())
    }

    /// Ends the line when the last call has returned.
    fn close(&self, py: Python<'_>) {
        let line = self.line.write().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(line));
    }
}

impl Scheduler {
    fn open(&self) -> Result<Arc<kvplane::Scheduler>, i64> {
        let line = self.line.read().unwrap_or_else(PoisonError::into_inner);
        line.clone().ok_or_else(|| failed(INTERNAL, "the scheduler was closed"))
    }

    /// Makes a call without the interpreter's lock.
    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&kvplane::Scheduler) -> Result<T, Error> + Send,
    ) -> PyResult<Result<T, i64>> {
        waiting(py, || {
            let _call = Call::begin(self.process)?;
            let line = self.open()?;
            call(&line).map_err(|error| code_of(&error))
        })
    }
}
