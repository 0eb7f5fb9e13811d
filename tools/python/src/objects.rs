//! `_native.Objects`: P2P store, for any number of threads: objects are copied from peer to peer, in Python's memory.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use kvplane::rpc::{CallError, RefusalCode};
use kvplane::{
    Error, GetOptions, NamedPart, P2pConfig, P2pStore, Progress, PublishOptions, Ranks, ReadOptions, Region,
    ReshardNames, interrupt,
};
use pyo3::exceptions::{PyConnectionError, PyValueError};
use pyo3::prelude::*;

use crate::control::{ControlArguments, Discovery};
use crate::cpython::{number_of, numbers};
use crate::memory::{RangeAccess, adopt, mapped};
use crate::outcome::{INTERNAL, INVALID, NO_ROOM, NOT_FOUND, failed, store_code};
use crate::store::clients::Call;
use crate::waiting::waiting;

/// `OBJECT_ALREADY_EXISTS`.
const EXISTS: i64 = -705;

/// Listed object: name, version, bytes, shard size in bytes, shards, members.
type ListedObject = (String, u64, u64, u64, u32, u32);
/// Object: version, sizes of its buffers, shard size in bytes, shards, description.
type ObjectInfo = (u64, Vec<u64>, u64, u32, Vec<u8>);
/// Member: segment, whether it is the origin, number of shards that it has, reason of its exclusion.
type Member = (String, bool, u32, String);

/// Location of a rank's bytes: rank, object, version, buffer, and the offset of each of its fragments.
type Part = (String, String, Option<u64>, usize, Option<Vec<u64>>);

/// P2P store. Negative results are error codes; `last_error()` gives the message.
#[pyclass(module = "kvplane._native", frozen)]
pub(crate) struct Objects {
    /// `None` after `close`.
    store: RwLock<Option<Arc<P2pStore>>>,
    process: u32,
}

impl Drop for Objects {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Its threads belong to the parent process.
            core::mem::forget(self.store.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

/// Result of a call: a value, or an error code.
#[derive(IntoPyObject)]
enum Answer<T> {
    Done(T),
    Failed(i64),
}

impl<T> From<Result<T, i64>> for Answer<T> {
    fn from(result: Result<T, i64>) -> Self {
        result.map_or_else(Self::Failed, Self::Done)
    }
}

/// Returns the code of an error; a refusal of the control plane differs from its absence.
fn code_of(error: &Error) -> i64 {
    let Error::Call(CallError::Refused(refusal)) = error else { return store_code(error) };
    let is = |code: RefusalCode| refusal.code == code as u16;
    let code = if is(RefusalCode::NotFound) {
        NOT_FOUND
    } else if is(RefusalCode::AlreadyExists) {
        EXISTS
    } else if is(RefusalCode::BadRequest) {
        INVALID
    } else if is(RefusalCode::LimitReached) {
        NO_ROOM
    } else {
        return store_code(error);
    };
    failed(code, error.to_string())
}

/// Converts memory of this process into regions, checked to be mapped, and writable if `written`.
fn regions(addresses: &[u64], sizes: &[u64], written: bool) -> Result<Vec<Arc<Region>>, i64> {
    if addresses.len() != sizes.len() {
        return Err(failed(INVALID, format!("{} addresses and {} lengths", addresses.len(), sizes.len())));
    }
    let region = |(&address, &bytes): (&u64, &u64)| {
        let rights = mapped(address, bytes);
        if rights == RangeAccess::No || written && rights != RangeAccess::Writable {
            let what = if written { "writable" } else { "readable" };
            let why = format!("{bytes} bytes at {address:#x} are not all {what} memory of this process");
            return Err(failed(INVALID, why));
        }
        // SAFETY: the range is mapped, as checked; that it stays mapped until it is unregistered is the contract of
        // registering.
        let region = unsafe { adopt(address, bytes) };
        region.ok_or_else(|| {
            failed(INVALID, format!("{bytes} bytes at {address:#x} are no range of memory: at least 1 byte"))
        })
    };
    addresses.iter().zip(sizes).map(region).collect()
}

fn deadline_of(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| PyValueError::new_err(format!("deadline is {seconds} s: it must be 0 or more")))
}

#[pymethods]
impl Objects {
    /// Starts a store; raises `ConnectionError` with the reason on failure.
    #[new]
    #[pyo3(signature = (master=None, cluster=None, certificates=None, runtime_directory=None, tenant=String::new(),
        listen=None, host=None, rack=String::new(), shared_memory=true))]
    #[allow(clippy::too_many_arguments, reason = "keywords, as Python has them")]
    fn new(
        py: Python<'_>,
        master: Option<String>,
        cluster: Option<String>,
        certificates: Option<PathBuf>,
        runtime_directory: Option<PathBuf>,
        tenant: String,
        listen: Option<&str>,
        host: Option<String>,
        rack: String,
        shared_memory: bool,
    ) -> PyResult<Self> {
        let address = |text: &str| {
            text.parse::<SocketAddr>().map_err(|_| PyValueError::new_err(format!("{text:?} is not ip:port")))
        };
        let listen = listen.map(address).transpose()?;
        let wanted = ControlArguments { master, cluster, certificates, runtime_directory }.completed();
        let no_connection = |error: &dyn std::error::Error| PyConnectionError::new_err(error.to_string());
        let start = move || {
            let mut config = P2pConfig::new(wanted.found().map_err(|error| no_connection(&error))?);
            config.tenant = tenant;
            config.by_route = listen.is_none();
            if let Some(listen) = listen {
                config.engine.listen = SocketAddr::new(listen.ip(), 0);
                config.engine.data_port = listen.port();
            }
            config.engine.shared_memory = shared_memory;
            config.engine.runtime_directory = wanted.runtime_directory;
            config.host = host.unwrap_or(config.host);
            config.rack = rack;
            P2pStore::connect(config).map_err(|error| no_connection(&error))
        };
        let interrupted = || Err(PyConnectionError::new_err("the start was interrupted"));
        let store = waiting(py, || interrupt::aside("kvplane-setup", start).unwrap_or_else(interrupted))??;
        Ok(Self { store: RwLock::new(Some(Arc::new(store))), process: std::process::id() })
    }

    /// Returns the name by which peers open its memory.
    fn name(&self) -> String {
        self.read().map_or_else(|_| String::new(), |store| store.name().to_owned())
    }

    /// Publishes memory as an object. Returns its version or an error code.
    #[pyo3(signature = (name, addresses, sizes, version, shard_bytes, about))]
    #[allow(clippy::too_many_arguments, reason = "the columns of a call, as Python has them")]
    fn register(
        &self,
        py: Python<'_>,
        name: &str,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        version: Option<u64>,
        shard_bytes: Option<&Bound<'_, PyAny>>,
        about: Vec<u8>,
    ) -> PyResult<i64> {
        let (addresses, sizes) = (numbers(addresses)?, numbers(sizes)?);
        // The result is a version, or a negative code.
        if let Some(version) = version.filter(|version| i64::try_from(*version).is_err()) {
            return Ok(failed(INVALID, format!("version {version}: give one from 1 to {}", i64::MAX)));
        }
        let shard_bytes = shard_bytes.map(number_of).transpose()?;
        let options = PublishOptions { version, shard_bytes, about };
        let done = waiting(py, || {
            let regions = regions(&addresses, &sizes, false)?;
            self.call(|store| store.register(name, &regions, &options).map_err(|error| code_of(&error)))
        })?;
        Ok(done.map_or_else(|code| code, |version| version as i64))
    }

    /// Stops serving an object and waits for its readers. Returns 0, or an error code: then the memory must not be
    /// freed.
    #[pyo3(signature = (name, version))]
    fn unregister(&self, py: Python<'_>, name: &str, version: Option<u64>) -> PyResult<i64> {
        let done = waiting(py, || self.call(|store| store.unregister(name, version).map_err(|error| code_of(&error))))?;
        Ok(done.map_or_else(|code| code, |()| 0))
    }

    /// Looks up an object.
    #[pyo3(signature = (name, version))]
    fn find(&self, py: Python<'_>, name: &str, version: Option<u64>) -> PyResult<Answer<ObjectInfo>> {
        let found = waiting(py, || self.call(|store| store.find(name, version).map_err(|error| code_of(&error))))?;
        let tell = |object: kvplane::Object| {
            let layout = &object.layout;
            let (sizes, shards) = (layout.sizes().to_vec(), layout.shards());
            (object.version, sizes, layout.shard_bytes(), shards, object.about)
        };
        Ok(found.map(tell).into())
    }

    /// Returns the objects whose names begin with this prefix.
    fn list(&self, py: Python<'_>, prefix: &str) -> PyResult<Answer<Vec<ListedObject>>> {
        let found = waiting(py, || self.call(|store| store.list(prefix).map_err(|error| code_of(&error))))?;
        let tell = |one: kvplane::rpc::p2p::ObjectSummary| {
            (one.name, one.version, one.total_bytes, one.shard_bytes, one.shards, one.members)
        };
        Ok(found.map(|objects| objects.into_iter().map(tell).collect::<Vec<ListedObject>>()).into())
    }

    /// Returns the members of an object.
    #[pyo3(signature = (name, version))]
    fn members(&self, py: Python<'_>, name: &str, version: Option<u64>) -> PyResult<Answer<Vec<Member>>> {
        let found = waiting(py, || self.call(|store| store.describe(name, version).map_err(|error| code_of(&error))))?;
        let tell = |one: kvplane::rpc::p2p::ObjectMember| (one.segment, one.origin, one.have, one.excluded);
        Ok(found.map(|found| found.members.into_iter().map(tell).collect::<Vec<Member>>()).into())
    }

    /// Returns the shards that cover a range of a buffer: the first, and their number.
    #[pyo3(signature = (name, version, place))]
    fn covering(
        &self,
        py: Python<'_>,
        name: &str,
        version: Option<u64>,
        place: (usize, u64, u64),
    ) -> PyResult<Answer<(u32, u32)>> {
        let (buffer, offset, bytes) = place;
        let found = waiting(py, || self.call(|store| store.find(name, version).map_err(|error| code_of(&error))))?;
        let cover = |object: kvplane::Object| {
            object.layout.covering(buffer, offset, bytes).ok_or_else(|| {
                let sizes = object.layout.sizes();
                failed(
                    INVALID,
                    match sizes.get(buffer) {
                        Some(size) => format!("{bytes} bytes from {offset} on exceed buffer {buffer} of {size}"),
                        None => format!("buffer {buffer} of an object with {}", sizes.len()),
                    },
                )
            })
        };
        Ok(found.and_then(cover).into())
    }

    /// Fetches an object into memory and serves it. Returns the number of bytes that were fetched, or an error code.
    /// `progress` is called with the numbers of present and missing shards; its first exception is raised at the end.
    #[pyo3(signature = (name, version, addresses, sizes, shards, resume, ranks, deadline, progress))]
    #[allow(clippy::too_many_arguments, reason = "the columns of a call, as Python has them")]
    fn get(
        &self,
        py: Python<'_>,
        name: &str,
        version: Option<u64>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        shards: Option<Vec<(u32, u32)>>,
        resume: bool,
        ranks: Option<(String, u32, u32, f64)>,
        deadline: Option<f64>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i64> {
        let deadline = deadline.map(deadline_of).transpose()?;
        let ranks = match ranks {
            Some((job, rank, ranks, patience)) => Some(Ranks { job, rank, ranks, patience: deadline_of(patience)? }),
            None => None,
        };
        let (addresses, sizes) = (numbers(addresses)?, numbers(sizes)?);
        let progress = progress.map(|progress| progress.clone().unbind());
        let raised: Mutex<Option<PyErr>> = Mutex::new(None);
        let each = |arrived: Progress| {
            let Some(progress) = &progress else { return };
            // During the interpreter's exit, threads cannot attach, and progress is not reported.
            let told = Python::try_attach(|py| progress.call1(py, (arrived.have, arrived.missing)).err());
            if let Some(Some(error)) = told {
                raised.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        };
        let done = waiting(py, || {
            let regions = regions(&addresses, &sizes, true)?;
            let each: Option<&(dyn Fn(Progress) + Sync)> = if progress.is_some() { Some(&each) } else { None };
            let options = GetOptions { shards, resume, ranks, deadline, each };
            self.call(|store| {
                let object = store.find(name, version).map_err(|error| code_of(&error))?;
                let held = store.holds(name, Some(object.version));
                let bytes = store.get_replica(&object, &regions, &options).map_err(|error| code_of(&error))?;
                // As after any failed get, the object is then not held, unless some of it was held before.
                if !held && raised.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
                    store.unregister(name, Some(object.version)).map_err(|error| code_of(&error))?;
                }
                Ok(bytes)
            })
        })?;
        match raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(done.map_or_else(|code| code, |bytes| bytes as i64)),
        }
    }

    /// Reads the fragments of a rank of another layout into memory, by manifests. Returns the number of all bytes, and
    /// of those verified against hashes.
    #[pyo3(signature = (manifests, participant, parts, place, offsets, deadline))]
    #[allow(clippy::too_many_arguments, reason = "the columns of a call, as Python has them")]
    fn reshard(
        &self,
        py: Python<'_>,
        manifests: (String, String),
        participant: &str,
        parts: Vec<Part>,
        place: (u64, u64),
        offsets: Option<Vec<u64>>,
        deadline: Option<f64>,
    ) -> PyResult<Answer<(u64, u64)>> {
        let deadline = deadline.map(deadline_of).transpose()?;
        let named = |(participant, object, version, buffer, offsets): Part| NamedPart {
            participant,
            object,
            version,
            buffer,
            offsets,
        };
        let parts: Vec<NamedPart> = parts.into_iter().map(named).collect();
        let read = waiting(py, move || {
            let memory = regions(&[place.0], &[place.1], true)?;
            let names = ReshardNames { source: &manifests.0, target: &manifests.1, participant };
            let options = ReadOptions { deadline, each: None };
            self.call(|store| {
                let read = store.reshard_named(names, &parts, &memory[0], offsets.as_deref(), &options);
                read.map_err(|error| code_of(&error))
            })
        })?;
        Ok(read.map(|read| (read.bytes, read.checked)).into())
    }

    /// Returns the number of bytes of a rank of a manifest, or an error code.
    #[staticmethod]
    fn packed_bytes(py: Python<'_>, manifest: &str, participant: &str) -> Answer<u64> {
        py.detach(|| kvplane::packed_bytes(manifest, participant).map_err(|error| code_of(&error))).into()
    }

    /// Stops serving all objects. Returns true if nothing accesses their memory any more: false while a call of another
    /// thread is in progress, whose end releases it.
    fn close(&self, py: Python<'_>) -> bool {
        self.process != std::process::id()
            || py.detach(|| {
                let store = self.store.write().unwrap_or_else(PoisonError::into_inner).take();
                store.is_none_or(|store| Arc::into_inner(store).is_some())
            })
    }
}

impl Objects {
    fn read(&self) -> Result<Arc<P2pStore>, i64> {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner).clone();
        store.ok_or_else(|| failed(INTERNAL, "the store was closed"))
    }

    /// Runs `work` on the store as a call that the interpreter's exit waits for.
    fn call<T>(&self, work: impl FnOnce(&P2pStore) -> Result<T, i64>) -> Result<T, i64> {
        let _call = Call::begin(self.process)?;
        work(&*self.read()?)
    }
}
