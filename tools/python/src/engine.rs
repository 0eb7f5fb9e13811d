//! `_native.Engine`: transfer engine, for any number of threads.

mod pages;
pub(crate) mod transfers;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use kvplane::device::{DeviceId, StreamHandle};
use kvplane::memory_map::MemoryMap;
use kvplane::{
    Batch, Notice, Opcode, Region, RegisterOptions, SegmentHandle, Status, SubmitOptions, TaskState, TransferEngine,
    interrupt,
};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::cpython::{number_of, numbers};
use crate::memory::adopt_any;
use crate::memory::device_memory::{StreamQueues, stream_at};
use crate::memory::host_memory::allocate;
use crate::outcome::{INTERNAL, engine_code, failed};
use crate::store::clients::Call;
use crate::waiting::waiting;

/// State of a batch whose number is unknown, because its outcome was fetched or there never was one.
pub(crate) const NO_BATCH: i64 = -3;

/// Limit of batches that are in flight or whose outcome was not fetched, about 600 bytes each.
const BATCHES: usize = 65_536;
/// Number of these that are checked for an ended one.
const LOOKED_AT: usize = 64;

/// Batches whose outcome was not fetched yet, by number: the oldest first.
#[derive(Default)]
struct Batches {
    last: u64,
    open: BTreeMap<u64, Arc<Batch>>,
}

/// Records that a batch is unknown, and returns its state.
fn no_batch(number: u64) -> i64 {
    failed(NO_BATCH, format!("there is no batch {number}"))
}

impl Batches {
    /// Makes room for one more batch: if the limit is reached, an ended one is dropped, the oldest first.
    fn make_room(&mut self) -> Result<(), i64> {
        if self.open.len() < BATCHES {
            return Ok(());
        }
        let ended = |batch: &Batch| !matches!(batch.poll().state, TaskState::Waiting | TaskState::Pending);
        let oldest = self.open.iter().take(LOOKED_AT).find(|(_, batch)| ended(batch)).map(|(number, _)| *number);
        let why = || failed(-2, format!("{BATCHES} batches are in flight: wait for some"));
        self.open.remove(&oldest.ok_or_else(why)?);
        Ok(())
    }

    fn add(&mut self, batch: Arc<Batch>) -> u64 {
        self.last += 1;
        self.open.insert(self.last, batch);
        self.last
    }
}

/// Transfer engine. Negative results are error codes; `last_error()` gives the message.
#[pyclass(module = "kvplane._native", frozen)]
pub(crate) struct Engine {
    /// `None` after `close`.
    engine: RwLock<Option<Arc<TransferEngine>>>,
    segments: Mutex<HashMap<String, SegmentHandle>>,
    batches: Mutex<Batches>,
    managed: Mutex<HashMap<u64, Arc<Region>>>,
    streams: StreamQueues,
    process: u32,
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Its threads belong to the parent process.
            let engine = self.engine.get_mut().unwrap_or_else(PoisonError::into_inner);
            core::mem::forget(engine.take());
            core::mem::forget(core::mem::take(self.batches.get_mut().unwrap_or_else(PoisonError::into_inner)));
        }
    }
}

/// Transfer as passed from Python.
struct TransferArguments {
    target: String,
    opcode: Opcode,
    ours: Vec<u64>,
    theirs: Vec<u64>,
    lengths: Vec<u64>,
    notice: Option<Notice>,
    /// Stream of the caller, whose work is done before bytes are moved.
    stream: Option<StreamHandle>,
}

impl TransferArguments {
    fn of(
        target: &str,
        write: bool,
        ours: &Bound<'_, PyAny>,
        theirs: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        notice: Option<(String, String)>,
    ) -> PyResult<Self> {
        Ok(Self {
            target: target.to_owned(),
            opcode: if write { Opcode::Write } else { Opcode::Read },
            ours: numbers(ours)?,
            theirs: numbers(theirs)?,
            lengths: numbers(lengths)?,
            notice: notice.map(|(name, message)| Notice { name, message }),
            stream: None,
        })
    }

    /// Orders the transfers behind the work on a stream: the location of its device, and its handle.
    fn on(self, stream: Option<(String, u64)>) -> PyResult<Self> {
        let stream = stream.map(|(location, handle)| stream_at(&location, handle)).transpose()?;
        Ok(Self { stream: stream.map(|(_, stream)| stream), ..self })
    }
}

#[pymethods]
impl Engine {
    /// Starts an engine; raises `RuntimeError` with the reason on failure.
    #[new]
    #[pyo3(signature = (host, metadata, shared_memory=true, tcp=true))]
    fn new(py: Python<'_>, host: &str, metadata: &str, shared_memory: bool, tcp: bool) -> PyResult<Self> {
        let (host, metadata) = (host.to_owned(), metadata.to_owned());
        let start = move || {
            let config = transfers::config(&host, &metadata)?;
            let config = kvplane::TransferEngineConfig { shared_memory, tcp, ..config };
            TransferEngine::start(config).map_err(|error| PyRuntimeError::new_err(error.to_string()))
        };
        let interrupted = || Err(PyRuntimeError::new_err("the start was interrupted"));
        let engine = waiting(py, || interrupt::aside("kvplane-setup", start).unwrap_or_else(interrupted))??;
        Ok(Self {
            engine: RwLock::new(Some(Arc::new(engine))),
            segments: Mutex::default(),
            batches: Mutex::default(),
            managed: Mutex::default(),
            streams: StreamQueues::default(),
            process: std::process::id(),
        })
    }

    /// Returns the address of its handshake daemon, `ip:port`.
    fn address(&self) -> String {
        self.read().map_or_else(|_| String::new(), |engine| engine.directory().address().to_string())
    }

    /// Returns the name by which peers open its segment.
    fn name(&self) -> String {
        self.read().map_or_else(|_| String::new(), |engine| engine.name().to_owned())
    }

    /// Registers ranges of this process's memory, all or none; without `remote_accessible`, for transfers of this
    /// engine only, which peers cannot read or write. Peers cannot write without `writable`, or where the memory is
    /// mapped read-only. Returns 0 or an error code.
    #[pyo3(signature = (addresses, sizes, location, remote_accessible=true, writable=true))]
    fn register(
        &self,
        py: Python<'_>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        location: &str,
        remote_accessible: bool,
        writable: bool,
    ) -> PyResult<i64> {
        let (addresses, sizes) = (numbers(addresses)?, numbers(sizes)?);
        // Other locations are meaningless here: the memory is where it is found.
        let is_known = location.starts_with("cpu:") || DeviceId::parse(location).is_some();
        let location = if is_known { location } else { "*" }.to_owned();
        let options = RegisterOptions { location, remote_accessible, writable };
        Ok(py.detach(|| self.register_ranges(&addresses, &sizes, &options).unwrap_or_else(|code| code)))
    }

    /// Unregisters memory. When this returns 0, nothing accesses it any more.
    fn unregister(&self, py: Python<'_>, addresses: &Bound<'_, PyAny>) -> PyResult<i64> {
        let addresses = numbers(addresses)?;
        Ok(py.detach(|| {
            self.call(|engine| engine.unregister_batch(&addresses).map_err(|error| engine_code(&error)))
                .map_or_else(|code| code, |()| 0)
        }))
    }

    /// Allocates registered memory that peers on this host can map. Returns its address or an error code.
    fn allocate(&self, py: Python<'_>, #[pyo3(from_py_with = number_of)] bytes: u64) -> PyResult<i64> {
        let region = allocate(bytes)?;
        let address = region.address();
        let registered = py.detach(|| {
            let register = |engine: &TransferEngine| engine.register(Arc::clone(&region), &RegisterOptions::default());
            self.call(|engine| register(engine).map_err(|error| engine_code(&error)))
        });
        match registered {
            Ok(()) => {
                self.managed.lock().unwrap_or_else(PoisonError::into_inner).insert(address, region);
                Ok(address as i64)
            }
            Err(code) => Ok(code),
        }
    }

    /// Frees memory from `allocate`.
    fn free(&self, py: Python<'_>, #[pyo3(from_py_with = number_of)] address: u64) -> i64 {
        let Some(region) = self.managed.lock().unwrap_or_else(PoisonError::into_inner).remove(&address) else {
            return failed(-1, format!("nothing was allocated at {address:#x}"));
        };
        let gone = py.detach(|| self.call(|engine| engine.unregister(address).map_err(|error| engine_code(&error))));
        if let Err(code) = gone {
            // The memory is still in use, so it must stay.
            self.managed.lock().unwrap_or_else(PoisonError::into_inner).insert(address, region);
            return code;
        }
        0
    }

    /// Waits until the work that is on a caller's stream of a device now is done. Returns 0 or an error code.
    fn await_stream(&self, py: Python<'_>, location: &str, handle: u64) -> PyResult<i64> {
        let (id, stream) = stream_at(location, handle)?;
        waiting(py, || self.call(|_| Ok(self.streams.wait(id, stream))).unwrap_or_else(|code| code))
    }

    /// Transfers and waits. Returns 0 when all bytes were moved, else an error code. Nothing is in flight afterwards.
    #[pyo3(signature = (target, write, ours, theirs, lengths, notice=None, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "the columns of a batch, as Python has them")]
    fn transfer(
        &self,
        py: Python<'_>,
        target: &str,
        write: bool,
        ours: &Bound<'_, PyAny>,
        theirs: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        notice: Option<(String, String)>,
        stream: Option<(String, u64)>,
    ) -> PyResult<i64> {
        let asked = TransferArguments::of(target, write, ours, theirs, lengths, notice)?.on(stream)?;
        waiting(py, || {
            let done = self.call(|engine| {
                let batch = self.start(engine, &asked, false)?;
                outcome(&batch)
            });
            done.map_or_else(|code| code, |()| 0)
        })
    }

    /// Transfers fields of pages and waits: for each row (base here, stride here, base there, stride there, length) of
    /// `fields`, five numbers each, and each page, that length between `base + page * stride` at both ends. Batches
    /// have at most `most` transfers, 0 for the default. Returns 0 when all bytes were moved, else an error code.
    /// Nothing is in flight afterwards.
    #[allow(clippy::too_many_arguments, reason = "the columns of a batch, as Python has them")]
    fn transfer_pages(
        &self,
        py: Python<'_>,
        target: &str,
        write: bool,
        ours: &Bound<'_, PyAny>,
        theirs: &Bound<'_, PyAny>,
        fields: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number_of)] most: u64,
    ) -> PyResult<i64> {
        let opcode = if write { Opcode::Write } else { Opcode::Read };
        let pages = pages::Pages::of(numbers(ours)?, numbers(theirs)?, &numbers(fields)?);
        waiting(py, || {
            let moved = self.call(|engine| {
                let (pages, handle) = (pages?, self.open(engine, target)?);
                pages.batches(opcode, handle, most).try_for_each(|requests| {
                    let batch = engine.submit(&requests?, &SubmitOptions::default());
                    outcome(&batch.map_err(|error| engine_code(&error))?)
                })
            });
            moved.map_or_else(|code| code, |()| 0)
        })
    }

    /// Starts a transfer. Returns its number, from 1 on, or an error code.
    #[pyo3(signature = (target, write, ours, theirs, lengths, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "the columns of a batch, as Python has them")]
    fn submit(
        &self,
        py: Python<'_>,
        target: &str,
        write: bool,
        ours: &Bound<'_, PyAny>,
        theirs: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        stream: Option<(String, u64)>,
    ) -> PyResult<i64> {
        let asked = TransferArguments::of(target, write, ours, theirs, lengths, None)?.on(stream)?;
        waiting(py, || {
            let started = self.call(|engine| {
                self.batches.lock().unwrap_or_else(PoisonError::into_inner).make_room()?;
                let batch = Arc::new(self.start(engine, &asked, true)?);
                if interrupt::is_ended() {
                    // Its number would be lost: the batch is cancelled here.
                    return Err(INTERNAL);
                }
                Ok(self.batches.lock().unwrap_or_else(PoisonError::into_inner).add(batch) as i64)
            });
            started.unwrap_or_else(|code| code)
        })
    }

    /// Returns the state of a transfer, over all of its parts: 1 complete, 0 in flight, -1 failed, -2 timed out. A
    /// transfer that has ended is forgotten. Returns [`NO_BATCH`] for an unknown number.
    fn status(&self, py: Python<'_>, #[pyo3(from_py_with = number_of)] number: u64) -> i64 {
        let found = self.batch(number);
        let Some(batch) = found else { return no_batch(number) };
        let code = py.detach(|| self.call(|_| Ok(state_code(&batch, batch.poll().state))).unwrap_or_else(|code| code));
        if code != 0 {
            self.batches.lock().unwrap_or_else(PoisonError::into_inner).open.remove(&number);
        }
        code
    }

    /// Waits until a transfer has ended, for at most so many milliseconds. Returns its state and forgets it when it has
    /// ended, as [`Self::status`] does.
    fn wait_for(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number_of)] number: u64,
        timeout_ms: u64,
    ) -> PyResult<i64> {
        let Some(batch) = self.batch(number) else { return Ok(no_batch(number)) };
        let code = waiting(py, || {
            let ended = self.call(|_| Ok(ended_within(&batch, Duration::from_millis(timeout_ms))));
            ended.map_or_else(|code| code, |state| state.map_or(0, |state| state_code(&batch, state)))
        })?;
        if code != 0 {
            self.batches.lock().unwrap_or_else(PoisonError::into_inner).open.remove(&number);
        }
        Ok(code)
    }

    /// Has the owner of memory answer a request that follows all earlier ones of this engine, for at most so many
    /// milliseconds. Returns 0 if it did, or has ended: it writes nothing any more of a transfer that failed before.
    /// Else an error code.
    fn fence(
        &self,
        py: Python<'_>,
        target: &str,
        #[pyo3(from_py_with = number_of)] address: u64,
        limit_ms: u64,
    ) -> PyResult<i64> {
        let scratch = allocate(1)?;
        waiting(py, || {
            let answered = self.call(|engine| {
                let options = RegisterOptions { remote_accessible: false, ..RegisterOptions::default() };
                engine.register(Arc::clone(&scratch), &options).map_err(|error| engine_code(&error))?;
                let ended = self.read_byte(engine, target, scratch.address(), address, limit_ms);
                engine.unregister(scratch.address()).map_err(|error| engine_code(&error))?;
                match ended {
                    Ok(Some(
                        Status::Ok | Status::OutOfRange | Status::Stale | Status::NotFound | Status::BadRequest,
                    )) => Ok(true),
                    Ok(Some(Status::Unreachable)) | Err(_) if has_ended(engine, target) => Ok(true),
                    Ok(_) => Ok(false),
                    Err(code) => Err(code),
                }
            });
            match answered {
                Ok(true) => 0,
                Ok(false) => failed(-2, format!("{target} has not answered a request within {limit_ms} ms")),
                Err(code) => code,
            }
        })
    }

    /// Waits for transfers. Returns 0 when all succeeded. A signal handler that raises cancels them all.
    fn wait(&self, py: Python<'_>, numbers: &Bound<'_, PyAny>) -> PyResult<i64> {
        let wanted = crate::cpython::numbers(numbers)?;
        waiting(py, || {
            let mut code = 0;
            for number in wanted {
                let Some(batch) = self.batch(number) else {
                    code = no_batch(number);
                    continue;
                };
                if self.call(|_| outcome(&batch)).is_err() {
                    code = -1;
                }
                self.batches.lock().unwrap_or_else(PoisonError::into_inner).open.remove(&number);
            }
            code
        })
    }

    /// Checks that the engine of this name lives. Returns 0 or an error code.
    fn probe(&self, py: Python<'_>, name: &str) -> PyResult<i64> {
        let probed =
            waiting(py, || self.call(|engine| engine.directory().probe(name).map_err(|error| engine_code(&error))))?;
        Ok(probed.map_or_else(|code| code, |_| 0))
    }

    /// Delivers a message to the engine of this name.
    fn notify(&self, py: Python<'_>, target: &str, name: String, message: String) -> PyResult<i64> {
        let notice = Notice { name, message };
        let told = waiting(py, || {
            self.call(|engine| {
                let handle = self.open(engine, target)?;
                engine.notify(handle, &notice).map_err(|error| engine_code(&error))
            })
        })?;
        Ok(told.map_or_else(|code| code, |()| 0))
    }

    /// Returns the messages that peers delivered here, oldest first, and removes them.
    fn notices(&self) -> Vec<(String, String)> {
        let taken = self.call(|engine| Ok(engine.take_notices()));
        taken.unwrap_or_default().into_iter().map(|notice| (notice.name, notice.message)).collect()
    }

    /// Returns the address of the first buffer of a segment, or an error code.
    fn first_buffer(&self, py: Python<'_>, target: &str) -> PyResult<i64> {
        let found = waiting(py, || {
            self.call(|engine| {
                let handle = self.open(engine, target)?;
                let info = engine.segment_info(handle).map_err(|error| engine_code(&error))?;
                let first = info.buffers.first().map(|buffer| buffer.address as i64);
                first.ok_or_else(|| failed(-3, format!("{target} has registered no memory")))
            })
        })?;
        Ok(found.unwrap_or_else(|code| code))
    }

    /// Closes the engine: cancels transfers in flight, and returns when nothing accesses their memory any more.
    fn close(&self, py: Python<'_>) {
        if self.process == std::process::id() {
            py.detach(|| {
                // A batch is listed until it has ended: its status meanwhile is that it is in flight.
                let batches: Vec<Arc<Batch>> = {
                    let batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
                    batches.open.values().cloned().collect()
                };
                batches.iter().for_each(|batch| batch.cancel());
                for batch in batches {
                    batch.wait();
                }
                drop(self.engine.write().unwrap_or_else(PoisonError::into_inner).take());
                drop(core::mem::take(&mut self.batches.lock().unwrap_or_else(PoisonError::into_inner).open));
                self.streams.clear();
                self.managed.lock().unwrap_or_else(PoisonError::into_inner).clear();
            });
        }
    }
}

impl Engine {
    fn read(&self) -> Result<Arc<TransferEngine>, i64> {
        let engine = self.engine.read().unwrap_or_else(PoisonError::into_inner).clone();
        engine.ok_or_else(|| failed(INTERNAL, "the transfer engine was closed"))
    }

    /// Runs `work` on the engine as a call that the interpreter's exit waits for.
    fn call<T>(&self, work: impl FnOnce(&TransferEngine) -> Result<T, i64>) -> Result<T, i64> {
        let _call = Call::begin(self.process)?;
        work(&*self.read()?)
    }

    fn batch(&self, number: u64) -> Option<Arc<Batch>> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner).open.get(&number).cloned()
    }

    fn register_ranges(&self, addresses: &[u64], sizes: &[u64], options: &RegisterOptions) -> Result<i64, i64> {
        if addresses.len() != sizes.len() {
            return Err(failed(-1, format!("{} addresses and {} lengths", addresses.len(), sizes.len())));
        }
        let map = MemoryMap::read().ok();
        let mut memory = Vec::with_capacity(addresses.len());
        for (&address, &bytes) in addresses.iter().zip(sizes) {
            let own = self.managed.lock().unwrap_or_else(PoisonError::into_inner).get(&address).cloned();
            let adopted = match own {
                Some(region) => Ok(region.into()),
                // SAFETY: that the range stays what it is until it is unregistered is the contract of registering.
                None => unsafe { adopt_any(address, bytes, map.as_ref()) },
            };
            memory.push(adopted.map_err(|error| failed(-1, error.to_string()))?);
        }
        self.call(|engine| engine.register_batch(&memory, options).map_err(|error| engine_code(&error)))?;
        Ok(0)
    }

    fn open(&self, engine: &TransferEngine, target: &str) -> Result<SegmentHandle, i64> {
        let known = self.segments.lock().unwrap_or_else(PoisonError::into_inner).get(target).copied();
        if let Some(handle) = known {
            return Ok(handle);
        }
        let handle = engine.open_segment(target).map_err(|error| engine_code(&error))?;
        self.segments.lock().unwrap_or_else(PoisonError::into_inner).insert(target.to_owned(), handle);
        Ok(handle)
    }

    /// Reads one byte of a peer's memory, between addresses here and there, within a limit. Returns the outcome.
    fn read_byte(
        &self,
        engine: &TransferEngine,
        target: &str,
        here: u64,
        there: u64,
        limit_ms: u64,
    ) -> Result<Option<Status>, i64> {
        let handle = self.open(engine, target)?;
        let requests = transfers::requests(Opcode::Read, handle, &[here], &[there], &[1])?;
        let batch = engine.submit(&requests, &SubmitOptions::default()).map_err(|error| engine_code(&error))?;
        if ended_within(&batch, Duration::from_millis(limit_ms)).is_none() {
            batch.cancel();
            batch.wait();
        }
        Ok(batch.task_status(0).outcome)
    }

    fn start(&self, engine: &TransferEngine, asked: &TransferArguments, background: bool) -> Result<Batch, i64> {
        let handle = self.open(engine, &asked.target)?;
        let requests = transfers::requests(asked.opcode, handle, &asked.ours, &asked.theirs, &asked.lengths)?;
        // A notice goes with the first request, which may be one of no bytes.
        let options = SubmitOptions {
            background,
            notice: asked.notice.clone(),
            stream: asked.stream,
            ..SubmitOptions::default()
        };
        engine.submit(&requests, &options).map_err(|error| engine_code(&error))
    }
}

/// Returns true if nobody listens at the address of an engine any more: its process has ended, and its memory with it.
fn has_ended(engine: &TransferEngine, target: &str) -> bool {
    engine.directory().probe(target).is_err_and(|error| error.is_refused())
}

/// Waits until a batch has ended, for at most so long, or until a signal handler has raised. Returns its state, or
/// `None` while it is in flight.
fn ended_within(batch: &Batch, timeout: Duration) -> Option<TaskState> {
    let until = Instant::now().checked_add(timeout);
    loop {
        let left = until.map_or(timeout, |until| until.saturating_duration_since(Instant::now()));
        if let Some(status) = batch.wait_for(interrupt::step(left)) {
            return Some(status.state);
        }
        if left.is_zero() || interrupt::ended() {
            return None;
        }
    }
}

/// Waits for a batch to complete.
fn outcome(batch: &Batch) -> Result<(), i64> {
    match batch.wait().state {
        TaskState::Completed => Ok(()),
        state => Err(state_code(batch, state)),
    }
}

fn state_code(batch: &Batch, state: TaskState) -> i64 {
    let why = || batch.problem().map_or_else(|| format!("the transfer ended as {state:?}"), str::to_owned);
    match state {
        TaskState::Completed => 1,
        TaskState::Waiting | TaskState::Pending => 0,
        TaskState::Timeout => failed(-2, why()),
        TaskState::Invalid | TaskState::Canceled | TaskState::Failed => failed(-1, why()),
    }
}
