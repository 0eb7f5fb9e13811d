//! `_native.GroupProcess`, `_native.ProcessGroup` and `_native.GroupWork`: process groups, for any number of threads.
//!
//! A call that fails raises `RuntimeError` with a code, the reason and the group ranks that it concerns, which the
//! package `kvplane` converts to exceptions of its own. Memory is passed by address; the caller keeps it until the work
//! has ended. Times are in seconds.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use kvplane::group::{
    self, Change, Collective, DataType, Failure, FailureMode, GroupError, GroupProcessConfig, GroupRank, GroupSpec,
    MemberState, Operation, Outcome, ProcessState, RankSet, Reduction, WorldRank,
};
use kvplane::rpc::{CallError, RefusalCode};
use kvplane::{Error, IoBuf};
use pyo3::exceptions::{PyConnectionError, PyRuntimeError};
use pyo3::prelude::*;

use crate::control::{ControlArguments, Discovery, seconds};
use crate::memory::adopt;
use crate::outcome::{INTERNAL, INVALID, NOT_FOUND, store_code};
use crate::waiting::waiting;

/// Another process has the rank, or another group has the name.
const CONFLICT: i64 = -705;
/// A deadline passed.
const LATE: i64 = -901;
/// Ranks call different operations, or differ about the group.
const MISMATCH: i64 = -1800;
/// The process is in the group's view no longer.
const EXCLUDED: i64 = -1801;
/// Of collectives whose arrays have one part.
const EVERY_PART: u64 = group::MAX_RANKS as u64;
/// Longest deadline, in seconds.
const LONGEST_S: u64 = 86_400;

/// Makes the exception of a failed call.
fn raised(error: &GroupError) -> PyErr {
    let (code, ranks) = match error {
        GroupError::Control(error) => (control_code(error), RankSet::EMPTY),
        GroupError::BufferSize { .. } | GroupError::Overlap { .. } => (INVALID, RankSet::EMPTY),
        GroupError::Failed(failure) => code_of(failure),
        GroupError::Late { .. } | GroupError::NotActivated { .. } => (LATE, RankSet::EMPTY),
        GroupError::Ended => (EXCLUDED, RankSet::EMPTY),
        _ => (INTERNAL, RankSet::EMPTY),
    };
    let ranks: Vec<u8> = ranks.iter().map(|rank| rank.0).collect();
    PyRuntimeError::new_err((code, error.to_string(), ranks))
}

/// Returns the code of a call that the control plane refused, or did not answer.
fn control_code(error: &Error) -> i64 {
    let Error::Call(CallError::Refused(refusal)) = error else { return store_code(error) };
    match refusal.known_code() {
        Some(RefusalCode::BadRequest | RefusalCode::TooLarge) => INVALID,
        Some(RefusalCode::NotFound) => NOT_FOUND,
        Some(RefusalCode::AlreadyExists) => CONFLICT,
        Some(RefusalCode::IncarnationEnded) => EXCLUDED,
        _ => store_code(error),
    }
}

/// Returns the code of a failure, and the ranks that it concerns.
fn code_of(failure: &Failure) -> (i64, RankSet<GroupRank>) {
    match failure {
        Failure::Malformed(_) | Failure::NoPeer { .. } | Failure::TooMany { .. } => (INVALID, RankSet::EMPTY),
        Failure::Mismatch { rank, other, .. } => (MISMATCH, [*rank, *other].into_iter().collect()),
        Failure::MessageSize { rank, .. } => (MISMATCH, RankSet::single(*rank)),
        Failure::Deadline { awaited } => (LATE, *awaited),
        Failure::OthersDeadline { awaited, .. } => (LATE, RankSet::single(*awaited)),
        Failure::NotActive | Failure::EndedElsewhere => (LATE, RankSet::EMPTY),
        Failure::RootGone { root } => (EXCLUDED, RankSet::single(*root)),
        Failure::PeerLost { rank } => (EXCLUDED, RankSet::single(*rank)),
        Failure::Excluded { .. } | Failure::Closed => (EXCLUDED, RankSet::EMPTY),
        _ => (INTERNAL, RankSet::EMPTY),
    }
}

fn invalid(why: impl Into<String>) -> PyErr {
    PyRuntimeError::new_err((INVALID, why.into(), Vec::<u8>::new()))
}

fn deadline_of(value: f64) -> PyResult<Duration> {
    seconds("deadline", value, LONGEST_S)
}

/// Makes a buffer of memory that the caller keeps until the work has ended; `None` if it is empty.
fn buffer(address: u64, bytes: u64) -> PyResult<Option<IoBuf>> {
    if bytes == 0 {
        return Ok(None);
    }
    // SAFETY: the package keeps the array until the work has ended, and a work buffer is never the caller's.
    let region = unsafe { adopt(address, bytes) };
    region.map(|region| Some(IoBuf::whole(region))).ok_or_else(|| invalid(format!("{bytes} bytes at {address:#x}")))
}

/// One run of the process of a rank in a world.
#[pyclass(module = "kvplane._native", frozen)]
pub(crate) struct GroupProcess {
    /// `None` after `close`.
    process: RwLock<Option<Arc<group::GroupProcess>>>,
    /// The process that joined: its threads do not live in a fork of it.
    pid: u32,
}

impl Drop for GroupProcess {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            core::mem::forget(self.process.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

#[pymethods]
impl GroupProcess {
    /// Joins a world. Raises `ConnectionError` if no control plane is found.
    #[new]
    #[pyo3(signature = (
        control, world, rank, host=None, cluster=None, certificates=None, runtime_directory=None, devices=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "the package passes them by name")]
    fn new(
        py: Python<'_>,
        control: Option<String>,
        world: String,
        rank: u8,
        host: Option<String>,
        cluster: Option<String>,
        certificates: Option<std::path::PathBuf>,
        runtime_directory: Option<std::path::PathBuf>,
        devices: Option<Vec<String>>,
    ) -> PyResult<Self> {
        let host = host.unwrap_or_else(|| "127.0.0.1".to_owned());
        let kvplane::OwnAddress { listen, announce, .. } = kvplane::OwnAddress::resolve(&host, None);
        let wanted = ControlArguments { master: control, cluster, certificates, runtime_directory }.completed();
        let control = waiting(py, || wanted.found())?;
        let control = control.map_err(|error| PyConnectionError::new_err(error.to_string()))?;
        let mut config = GroupProcessConfig::new(control, world, rank);
        (config.listen, config.announce) = (listen, announce);
        let opened = group::open_devices(&devices.unwrap_or_default());
        config.rdma = opened.map_err(|error| invalid(format!("devices: {error}")))?;
        let joined = waiting(py, move || group::GroupProcess::join(config))?;
        let process = joined.map_err(|error| raised(&error))?;
        Ok(Self { process: RwLock::new(Some(Arc::new(process))), pid: std::process::id() })
    }

    /// Becomes a member of a group.
    fn attach(
        &self,
        py: Python<'_>,
        name: String,
        order: Vec<u8>,
        max_size: u8,
        failure_mode: &str,
        joining: bool,
    ) -> PyResult<ProcessGroup> {
        let failure_mode = match failure_mode {
            "automatic" => FailureMode::Automatic,
            "deferred" => FailureMode::Deferred,
            "manual" => FailureMode::Manual,
            other => return Err(invalid(format!("{other:?} is no treatment of members that fail"))),
        };
        let order = order.into_iter().map(WorldRank).collect();
        let spec = GroupSpec { name, order, max_size, failure_mode, is_joining: joining };
        let process = self.read()?;
        let group = waiting(py, || process.attach(spec))?.map_err(|error| raised(&error))?;
        Ok(ProcessGroup { group, pid: self.pid })
    }

    /// Leaves the world. Idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let process = self.process.write().unwrap_or_else(PoisonError::into_inner).take();
        if self.pid != std::process::id() {
            // Its threads, and its part in the world, are the parent's.
            core::mem::forget(process);
            return Ok(());
        }
        if let Some(process) = process {
            // Without an answer, the control plane finds the process silent.
            drop(waiting(py, move || process.close())?);
        }
        Ok(())
    }
}

impl GroupProcess {
    fn read(&self) -> PyResult<Arc<group::GroupProcess>> {
        let process = self.process.read().unwrap_or_else(PoisonError::into_inner).clone();
        process.filter(|_| self.pid == std::process::id()).ok_or_else(|| raised(&GroupError::Ended))
    }
}

/// Membership of a group. See the package's `kvplane.group.Group` for the calls.
#[pyclass(module = "kvplane._native", frozen)]
pub(crate) struct ProcessGroup {
    group: group::ProcessGroup,
    /// The process that attached: a fork of it has no part in the group.
    pid: u32,
}

impl ProcessGroup {
    fn member(&self) -> PyResult<&group::ProcessGroup> {
        if self.pid == std::process::id() { Ok(&self.group) } else { Err(raised(&GroupError::Ended)) }
    }

    fn data_type(name: &str) -> PyResult<DataType> {
        name.parse().map_err(|error| invalid(format!("{error}")))
    }

    fn reduction(name: &str) -> PyResult<Reduction> {
        name.parse().map_err(|error| invalid(format!("{error}")))
    }

    /// Submits a collective on arrays with room for so many parts. Of a collective in place, the target is the source.
    #[allow(clippy::too_many_arguments, reason = "the package passes numbers")]
    fn submit(
        &self,
        py: Python<'_>,
        collective: Collective,
        count: u64,
        data_type: DataType,
        source: u64,
        target: u64,
        parts: u64,
        deadline: f64,
    ) -> PyResult<GroupWork> {
        let (deadline, member) = (deadline_of(deadline)?, self.member()?);
        // The group may have grown since the caller made its arrays. A root that is dead is beyond the size, and no
        // place of it is used.
        let mut operation = Operation { collective, data_type, count, places: parts.min(member.size() as u64) as u8 };
        if let Some(root) = operation.root().filter(|root| root.0 < self.max_size() && operation.is_in_place()) {
            operation.places = operation.places.max(root.0 + 1);
        }
        operation.check().map_err(|error| invalid(error.to_string()))?;
        let (source_bytes, target_bytes) = operation.buffer_bytes(self.group.rank());
        let source = buffer(source, source_bytes)?;
        let target = if operation.is_in_place() { source.clone() } else { buffer(target, target_bytes)? };
        let work = py.detach(|| member.submit(operation, source, target, deadline));
        Ok(GroupWork { work: work.map_err(|error| raised(&error))?, group: self.group.clone(), pid: self.pid })
    }
}

#[pymethods]
#[allow(clippy::too_many_arguments, reason = "the package passes numbers")]
impl ProcessGroup {
    #[getter]
    fn rank(&self) -> u8 {
        self.group.rank().0
    }

    #[getter]
    fn max_size(&self) -> u8 {
        self.group.spec().max_size
    }

    #[getter]
    fn name(&self) -> &str {
        &self.group.spec().name
    }

    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        let member = self.member()?;
        Ok(py.detach(|| member.view().epoch))
    }

    fn size(&self, py: Python<'_>) -> PyResult<usize> {
        let member = self.member()?;
        Ok(py.detach(|| member.size()))
    }

    /// Participants of the view, by rank; a joiner that is not active yet is alone.
    fn active(&self, py: Python<'_>) -> PyResult<Vec<bool>> {
        let member = self.member()?;
        let participants = py.detach(|| member.participants());
        Ok(group::mask(participants, usize::from(self.max_size())))
    }

    /// States of the members, by rank.
    fn member_states(&self, py: Python<'_>) -> PyResult<Vec<&'static str>> {
        let member = self.member()?;
        let state = |state: MemberState| match state {
            MemberState::Absent => "absent",
            MemberState::Inactive => "inactive",
            MemberState::AwaitingActivation => "awaiting",
            MemberState::Active => "active",
        };
        let mut states: Vec<_> = py.detach(|| member.members()).into_iter().map(|(member, _)| state(member)).collect();
        states.resize(usize::from(self.max_size()), "absent");
        Ok(states)
    }

    /// True for each rank whose process is alive and connected.
    fn peer_states(&self, py: Python<'_>) -> PyResult<Vec<bool>> {
        let member = self.member()?;
        let members = py.detach(|| member.members());
        let mut states: Vec<_> = members.into_iter().map(|(_, state)| state == ProcessState::Healthy).collect();
        states.resize(usize::from(self.max_size()), false);
        Ok(states)
    }

    fn all_reduce(
        &self,
        py: Python<'_>,
        address: u64,
        count: u64,
        data_type: &str,
        reduction: &str,
        deadline: f64,
    ) -> PyResult<GroupWork> {
        let collective = Collective::AllReduce { reduction: Self::reduction(reduction)? };
        self.submit(py, collective, count, Self::data_type(data_type)?, address, address, EVERY_PART, deadline)
    }

    fn reduce(
        &self,
        py: Python<'_>,
        address: u64,
        count: u64,
        data_type: &str,
        reduction: &str,
        root: u8,
        deadline: f64,
    ) -> PyResult<GroupWork> {
        let collective = Collective::Reduce { reduction: Self::reduction(reduction)?, root: GroupRank(root) };
        self.submit(py, collective, count, Self::data_type(data_type)?, address, address, EVERY_PART, deadline)
    }

    fn broadcast(
        &self,
        py: Python<'_>,
        address: u64,
        count: u64,
        data_type: &str,
        root: u8,
        deadline: f64,
    ) -> PyResult<GroupWork> {
        let collective = Collective::Broadcast { root: GroupRank(root) };
        self.submit(py, collective, count, Self::data_type(data_type)?, address, address, EVERY_PART, deadline)
    }

    fn all_gather(
        &self,
        py: Python<'_>,
        source: u64,
        target: u64,
        count: u64,
        parts: u64,
        data_type: &str,
        deadline: f64,
    ) -> PyResult<GroupWork> {
        self.submit(py, Collective::AllGather, count, Self::data_type(data_type)?, source, target, parts, deadline)
    }

    fn gather(
        &self,
        py: Python<'_>,
        source: u64,
        target: u64,
        count: u64,
        parts: u64,
        data_type: &str,
        root: u8,
        deadline: f64,
    ) -> PyResult<GroupWork> {
        let collective = Collective::Gather { root: GroupRank(root) };
        self.submit(py, collective, count, Self::data_type(data_type)?, source, target, parts, deadline)
    }

    fn scatter(
        &self,
        py: Python<'_>,
        source: u64,
        target: u64,
        count: u64,
        parts: u64,
        data_type: &str,
        root: u8,
        deadline: f64,
    ) -> PyResult<GroupWork> {
        let collective = Collective::Scatter { root: GroupRank(root) };
        self.submit(py, collective, count, Self::data_type(data_type)?, source, target, parts, deadline)
    }

    fn reduce_scatter(
        &self,
        py: Python<'_>,
        source: u64,
        target: u64,
        count: u64,
        parts: u64,
        data_type: &str,
        reduction: &str,
        deadline: f64,
    ) -> PyResult<GroupWork> {
        let collective = Collective::ReduceScatter { reduction: Self::reduction(reduction)? };
        self.submit(py, collective, count, Self::data_type(data_type)?, source, target, parts, deadline)
    }

    fn all_to_all(
        &self,
        py: Python<'_>,
        source: u64,
        target: u64,
        source_counts: Vec<u64>,
        target_counts: Vec<u64>,
        data_type: &str,
        deadline: f64,
    ) -> PyResult<GroupWork> {
        let parts = source_counts.len() as u64;
        let collective = Collective::AllToAll { sources: source_counts, targets: target_counts };
        self.submit(py, collective, 0, Self::data_type(data_type)?, source, target, parts, deadline)
    }

    fn barrier(&self, py: Python<'_>, deadline: f64) -> PyResult<GroupWork> {
        self.submit(py, Collective::Barrier, 0, DataType::U8, 0, 0, EVERY_PART, deadline)
    }

    fn send(
        &self,
        py: Python<'_>,
        address: u64,
        count: u64,
        data_type: &str,
        peer: u8,
        tag: i32,
        deadline: f64,
    ) -> PyResult<GroupWork> {
        let (deadline, bytes) = (deadline_of(deadline)?, message_bytes(count, data_type)?);
        let source = buffer(address, bytes)?;
        let member = self.member()?;
        let work = py.detach(|| member.send(source, GroupRank(peer), tag, deadline));
        Ok(GroupWork { work: work.map_err(|error| raised(&error))?, group: self.group.clone(), pid: self.pid })
    }

    fn receive(
        &self,
        py: Python<'_>,
        address: u64,
        count: u64,
        data_type: &str,
        peer: Option<u8>,
        tag: i32,
        deadline: f64,
    ) -> PyResult<GroupWork> {
        let (deadline, bytes) = (deadline_of(deadline)?, message_bytes(count, data_type)?);
        let target = buffer(address, bytes)?;
        let member = self.member()?;
        let work = py.detach(|| member.receive(target, peer.map(GroupRank), tag, deadline));
        Ok(GroupWork { work: work.map_err(|error| raised(&error))?, group: self.group.clone(), pid: self.pid })
    }

    /// Makes this member ready, and waits until it is active.
    fn join(&self, py: Python<'_>, deadline: f64) -> PyResult<()> {
        let member = self.member()?;
        let deadline = deadline_of(deadline)?;
        waiting(py, || member.join(deadline))?.map_err(|error| raised(&error))
    }

    /// Proposes to activate or deactivate ranks: the outcome, the epoch, ranks that were dropped, and the reason of a
    /// rejection.
    fn propose(
        &self,
        py: Python<'_>,
        activate: bool,
        ranks: Vec<u8>,
        deadline: f64,
    ) -> PyResult<(&'static str, u64, Vec<u8>, String)> {
        let member = self.member()?;
        let deadline = deadline_of(deadline)?;
        let ranks: RankSet<GroupRank> = ranks.into_iter().map(GroupRank).collect();
        let change = if activate { Change::Activate(ranks) } else { Change::Deactivate(ranks) };
        let outcome = waiting(py, || member.propose(change, deadline))?.map_err(|error| raised(&error))?;
        let epoch = py.detach(|| member.view().epoch);
        Ok(match outcome {
            Outcome::Applied { epoch, dropped } if dropped.is_empty() => ("applied", epoch, Vec::new(), String::new()),
            Outcome::Applied { epoch, dropped } => {
                ("applied_with_dropped", epoch, dropped.iter().map(|rank| rank.0).collect(), String::new())
            }
            Outcome::Unchanged { epoch } => ("applied", epoch, Vec::new(), String::new()),
            other => ("rejected", epoch, Vec::new(), other.to_string()),
        })
    }

    /// Waits until the failed ranks are deactivated: the outcome, and the reason of a rejection.
    fn sync_after_failure(&self, py: Python<'_>, deadline: f64) -> PyResult<(&'static str, String)> {
        let member = self.member()?;
        let deadline = deadline_of(deadline)?;
        let change = Change::DeactivateFailed;
        let outcome = waiting(py, || member.propose(change, deadline))?.map_err(|error| raised(&error))?;
        Ok(match outcome {
            Outcome::Applied { .. } => ("reconciled", String::new()),
            // Failed ranks that the caller deactivates take part no longer, and stay members.
            Outcome::Unchanged { .. } | Outcome::NotAutomatic => ("none_pending", String::new()),
            other => ("rejected", other.to_string()),
        })
    }

    /// Leaves the group.
    fn detach(&self, py: Python<'_>) -> PyResult<()> {
        let member = self.member()?;
        waiting(py, || member.detach())?.map_err(|error| raised(&error))
    }
}

fn message_bytes(count: u64, data_type: &str) -> PyResult<u64> {
    let data_type = ProcessGroup::data_type(data_type)?;
    count.checked_mul(data_type.bytes() as u64).ok_or_else(|| invalid(format!("{count} elements of {data_type}")))
}

/// A collective or a message in flight.
#[pyclass(module = "kvplane._native", frozen)]
pub(crate) struct GroupWork {
    work: group::Work,
    group: group::ProcessGroup,
    /// The process that began it.
    pid: u32,
}

#[pymethods]
impl GroupWork {
    /// Waits until it has ended; False if it has not by then. A rank that failed is no error: see `failed`.
    #[pyo3(signature = (deadline=None))]
    fn wait(&self, py: Python<'_>, deadline: Option<f64>) -> PyResult<bool> {
        let longest = Duration::from_secs(LONGEST_S);
        let deadline = match deadline {
            Some(deadline) if deadline <= 0.0 => Duration::ZERO,
            Some(deadline) => deadline_of(deadline)?,
            None => longest,
        };
        if self.pid != std::process::id() {
            return Err(raised(&GroupError::Ended));
        }
        let outcome = waiting(py, || self.work.wait(deadline))?;
        match outcome {
            None => Ok(false),
            Some(Ok(_) | Err(GroupError::Failed(Failure::RootGone { .. } | Failure::PeerLost { .. }))) => Ok(true),
            Some(Err(error)) => Err(raised(&error)),
        }
    }

    fn is_done(&self) -> bool {
        self.work.has_ended()
    }

    /// Ranks that failed while it ran, by rank.
    fn failed(&self) -> Vec<bool> {
        let failed = match self.work.outcome() {
            Some(Ok(completion)) => completion.failed,
            Some(Err(GroupError::Failed(failure))) => code_of(&failure).1,
            _ => RankSet::EMPTY,
        };
        group::mask(failed, usize::from(self.group.spec().max_size))
    }

    /// Epoch of the view whose participants contributed; 0 before the end.
    fn epoch(&self) -> u64 {
        self.work.outcome().and_then(Result::ok).map_or(0, |completion| completion.epoch)
    }

    /// Rank that a message came from, or went to; `None` before the end, and for a collective.
    fn source(&self) -> Option<u8> {
        Some(self.work.outcome()?.ok()?.peer?.0)
    }
}
