//! `_native.Scheduler`: client of the Conductor, for any number of threads.
//!
//! Each call returns an error code, or 0 and the result as tuples and dictionaries, which the package `kvplane`
//! converts to types of its own. Times are in seconds.

pub(crate) mod scheduling;

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use kvplane::rpc::conductor::{
    CacheBatch, CacheReport, DecodeSteps, DeregisterInstance, EventSource, ExplainPlacement, InstanceCapabilities,
    InstanceLoad, PipelineMembership, QueryPrefix, RegisterCapabilities, RegisterInstance, ReportCache, ReportLoad,
    RequestOutput, RequestTerms, Schedule, ScheduleMode,
};
use kvplane::rpc::{CallError, RefusalCode};
use kvplane::{Decision, Error};
use pyo3::exceptions::PyConnectionError;
use pyo3::prelude::*;

use crate::control::{ControlArguments, Discovery, seconds};
use crate::cpython::{Keys, numbers};
use crate::outcome::{INTERNAL, INVALID, NO_ROOM, NOT_FOUND, failed, store_code};
use crate::scheduler::scheduling::{
    Change, Context, DecisionDict, ExplanationDict, Holders, Table, nanoseconds, part_of, step_of, tier_of,
};
use crate::store::clients::Call;
use crate::waiting::waiting;

/// `OBJECT_ALREADY_EXISTS`: here, another prompt, incarnation or instance has the name.
const CONFLICT: i64 = -705;
/// `LEASE_EXPIRED` and similar: the deadline passed.
const LATE: i64 = -901;
/// The caller lacks the permission.
const NOT_PERMITTED: i64 = -601;

/// Request to schedule: its id, context, tokens, excluded instances, and terms; true if it may get a pipeline group.
type ScheduleArguments = (String, Context, u32, Vec<String>, TermsArguments, bool);

/// Terms of a request: flow, class, priority, objective for the first token in seconds, expected output tokens,
/// session.
type TermsArguments = (String, String, Option<i8>, Option<f64>, u32, String);

/// Decode steps: their number, seconds of all, means of resident tokens and of requests in the batch.
type StepsArguments = (u32, f64, u64, u32);

/// Instance to register: name, incarnation, tenant, model, tokens of a block, bytes of a token, part, decode capacity
/// in tokens, seconds between reports, address.
type RegisterArguments = (String, u64, String, String, u32, u64, String, u64, f64, String);

/// Capabilities of an instance: layer-wise overlap, layers, and its stage of a pipeline group: group, stage, stages,
/// tokens of a chunk, bytes of activations.
type CapabilityArguments = (bool, u32, Option<(String, u32, u32, u32, u32)>);

/// Client of the Conductor. Negative results are error codes; `last_error()` gives the message.
#[pyclass(module = "kvplane._native", frozen)]
pub(crate) struct Scheduler {
    /// `None` after `close`.
    line: RwLock<Option<Arc<kvplane::Scheduler>>>,
    process: u32,
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Its thread belongs to the parent process.
            core::mem::forget(self.line.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

/// Returns the code of a failed call to the Conductor.
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
    /// Connects; raises `ConnectionError` with the reason on failure. `budget`: time for the Conductor to answer, in
    /// seconds.
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
        let line = connected.map_err(|error| PyConnectionError::new_err(error.to_string()))?;
        Ok(Self { line: RwLock::new(Some(Arc::new(line))), process: std::process::id() })
    }

    /// Places a request; waits for an instance up to `patience`. With a reservation and its `failed` instances, places
    /// it again.
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
        let (request, context, tokens, barred, terms, groups) = asked;
        let (flow, class, priority, ttft, output_tokens, session) = terms;
        let hashes = numbers(hashes)?;
        let mode = match mode {
            "reserve" => ScheduleMode::Reserve,
            "now" => ScheduleMode::Now,
            "advise" => ScheduleMode::Advise,
            other => return Ok((invalid(format!("mode is {other:?}: it must be reserve, now or advise")), None)),
        };
        let context = context.out();
        let request = Schedule { client: 0, request, context, tokens, hashes, wait_ns: 0, mode, barred };
        let ttft_ns = ttft.map(nanoseconds);
        let terms = RequestTerms { class, flow, priority, ttft_ns, output_tokens, session };
        let patience = Duration::from_nanos(nanoseconds(patience));
        let decided = self.ask(py, |line| match failed {
            Some((reservation, failed)) => line.reschedule(reservation, &failed, request, patience),
            None if groups => line.schedule_with_groups(request, terms, patience),
            None => line.schedule_on_terms(request, terms, patience),
        })?;
        Ok(decided.map_or_else(|code| (code, None), |decision| (0, Some(DecisionDict::of(decision)))))
    }

    /// Reports the progress of a reserved request. Returns 0 or an error code.
    #[pyo3(signature = (reservation, step, reused_tokens=0, took=0.0))]
    fn update(&self, py: Python<'_>, reservation: u64, step: &str, reused_tokens: u32, took: f64) -> PyResult<i64> {
        let Some(step) = step_of(step, reused_tokens, took) else {
            return Ok(invalid(format!("unknown step {step:?}")));
        };
        Ok(self.ask(py, |line| line.update(reservation, step))?.map_or_else(|code| code, |()| 0))
    }

    /// Ends a reservation, with the next request or soon; with the tokens that its request generated, and the seconds
    /// from the first to the last, if these are known.
    #[pyo3(signature = (reservation, output=None))]
    fn release(&self, py: Python<'_>, reservation: u64, output: Option<(u32, f64)>) -> PyResult<i64> {
        let output = output.map(|(tokens, decode)| RequestOutput { tokens, decode_ns: nanoseconds(decode) });
        let told = self.ask(py, |line| {
            line.release(reservation, output);
            Ok(())
        })?;
        Ok(told.map_or_else(|code| code, |()| 0))
    }

    /// Ends a request that was placed on `prefill` by the local rule.
    fn ended(&self, py: Python<'_>, prefill: String) -> PyResult<i64> {
        let decision = Decision::Local { prefill, decode: None };
        let told = self.ask(py, |line| {
            line.ended(&decision);
            Ok(())
        })?;
        Ok(told.map_or_else(|code| code, |()| 0))
    }

    /// Returns the instances that hold a prefix of a prompt.
    fn query(
        &self,
        py: Python<'_>,
        context: Context,
        hashes: &Bound<'_, PyAny>,
        most: u32,
        tier: &str,
    ) -> PyResult<(i64, Option<Holders>)> {
        let hashes = numbers(hashes)?;
        let Some(tier) = tier_of(tier) else { return Ok((invalid(format!("unknown tier {tier:?}")), None)) };
        let question = QueryPrefix { context: context.out(), hashes, most, tier };
        let found = self.ask(py, |line| line.call(question))?;
        Ok(found.map_or_else(|code| (code, None), |found| (0, Some(Holders::of(found)))))
    }

    /// Explains the placement of a request.
    fn explain(&self, py: Python<'_>, request: String) -> PyResult<(i64, Option<ExplanationDict>)> {
        let found = self.ask(py, |line| line.call(ExplainPlacement { request }))?;
        Ok(found.map_or_else(|code| (code, None), |found| (0, Some(ExplanationDict::of(found)))))
    }

    /// Returns the first table of instances after `seen`, and its number; `None` when that takes longer than
    /// `patience`.
    fn table_after(&self, py: Python<'_>, seen: u64, patience: f64) -> PyResult<(i64, Option<(u64, Table)>)> {
        let patience = Duration::from_nanos(nanoseconds(patience));
        let told = self.ask(py, |line| Ok(line.table_after(seen, patience)))?;
        Ok(told.map_or_else(|code| (code, None), |told| (0, told.map(|(number, table)| (number, Table::of(table))))))
    }

    /// Replicates objects. Returns the number of the task, or an error code.
    fn replicate(&self, py: Python<'_>, tenant: &str, keys: &Bound<'_, PyAny>) -> PyResult<(i64, u64)> {
        let keys = Keys::many(keys)?;
        let keys: Vec<&[u8]> = keys.iter().collect();
        let task = self.ask(py, |line| line.replicate(tenant, &keys))?;
        Ok(task.map_or_else(|code| (code, 0), |task| (0, task)))
    }

    /// Registers an instance. Returns whether a snapshot of its cache is wanted, and the time without a report after
    /// which it is not chosen any more.
    fn register(
        &self,
        py: Python<'_>,
        instance: RegisterArguments,
        events: Option<(String, String, String)>,
        capabilities: CapabilityArguments,
    ) -> PyResult<(i64, bool, f64)> {
        let (instance, incarnation, tenant, model, block_tokens, token_bytes, part, capacity_tokens, report, address) =
            instance;
        let Some(part) = part_of(&part) else {
            return Ok((invalid(format!("part is {part:?}: it must be prefill, decode or mixed")), false, 0.0));
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
        let (layer_wise, layers, stage) = capabilities;
        let stage = stage.map(|(group, stage, stages, chunk_tokens, activation_bytes)| PipelineMembership {
            group,
            stage,
            stages,
            chunk_tokens,
            activation_bytes,
        });
        let capabilities = InstanceCapabilities { layer_wise, layers, stage };
        // An instance without capabilities can register with control planes of earlier versions, too.
        let told = self.ask(py, |line| match capabilities == InstanceCapabilities::default() {
            true => line.call(call),
            false => line.call(RegisterCapabilities { register: call, capabilities }),
        })?;
        Ok(told.map_or_else(
            |code| (code, false, 0.0),
            |told| (0, told.fresh, Duration::from_nanos(told.suspect_after_ns).as_secs_f64()),
        ))
    }

    /// Deregisters an instance.
    fn deregister(&self, py: Python<'_>, tenant: String, instance: String, incarnation: u64) -> PyResult<i64> {
        Ok(self
            .ask(py, |line| line.call(DeregisterInstance { tenant, instance, incarnation }))?
            .map_or_else(|code| code, |_| 0))
    }

    /// Reports the load of an instance: its tenant, name, incarnation and the report's number; tokens of queued
    /// prompts, tokens of decodes, number of decodes; and its decode steps since the last report.
    #[pyo3(signature = (of, load, steps=(0, 0.0, 0, 0)))]
    fn report_load(
        &self,
        py: Python<'_>,
        of: (String, String, u64, u64),
        load: (u64, u64, u32),
        steps: StepsArguments,
    ) -> PyResult<i64> {
        let (tenant, instance, incarnation, seq) = of;
        let (queued_tokens, decode_tokens, decodes) = load;
        let (steps, took, tokens, requests) = steps;
        let steps = DecodeSteps { steps, took_ns: nanoseconds(took), tokens, requests };
        let call = ReportLoad {
            tenant,
            instance,
            incarnation,
            load: InstanceLoad { seq, queued_tokens, decode_tokens, decodes, steps },
        };
        Ok(self.ask(py, |line| line.call(call))?.map_or_else(|code| code, |_| 0))
    }

    /// Reports changes of an instance's cache. Returns the number of the next batch, and what the Conductor wants:
    /// nothing, replay, snapshot.
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
            other => return Ok((invalid(format!("kind is {other:?}: it must be goes, snapshot or lost")), 0, "")),
        };
        let changes: Option<Vec<_>> = changes.into_iter().map(Change::out).collect();
        let Some(changes) = changes else { return Ok((invalid("a change names an unknown kind or tier"), 0, "")) };
        let told = self.ask(py, |line| {
            line.call(ReportCache { tenant, instance, incarnation, batch: CacheBatch { seq, kind, changes } })
        })?;
        Ok(told.map_or_else(
            |code| (code, 0, ""),
            |told| (0, told.next, crate::scheduler::scheduling::wanted_name(told.wanted)),
        ))
    }

    /// Returns the number by which the Conductor identifies this client; 0 after `close`.
    fn client(&self) -> u64 {
        self.open().map_or(0, |line| line.client())
    }

    /// Closes the client when the last call has returned.
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

    /// Makes a call without the GIL.
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
