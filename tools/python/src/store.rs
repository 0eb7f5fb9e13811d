//! `_native.Store`: a connection to a cluster's store, for any number of threads.

pub(crate) mod arguments;
pub(crate) mod batches;
pub(crate) mod clients;
pub(crate) mod many;
pub(crate) mod ranges;
pub(crate) mod tasks;
pub(crate) mod values;

use std::sync::Arc;
use std::time::Duration;

use kvplane::{Client, ClientConfig, Control, DataTls};
use pyo3::exceptions::PyConnectionError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::control::{ControlArguments, seconds, seconds_or_none, tls_of};
use crate::cpython::{Keys, View, number_of, numbers, places, views};
use crate::memory::adopt;
use crate::outcome::{INTERNAL, INVALID, NO_NODE, NO_ROOM, NOT_FOUND, failed, store_code};
use crate::segment::{Segment, Segments};
use crate::store::arguments::{KeepArguments, matching, options, parts, several, single};
use crate::store::batches::check_key;
use crate::store::clients::{Call, Clients};
use crate::store::ranges::Sessions;
use crate::waiting::waiting;

/// Values from this length on are sent from where Python has them; shorter ones are copied first.
pub(crate) const DIRECT_BYTES: u64 = 64 << 10;

/// A connection to the store of a cluster. Numbers below zero are errors; `last_error()` says more.
#[pyclass(module = "kvplane._native", frozen)]
pub(crate) struct Store {
    pub(crate) clients: Clients,
    control: Control,
    data_tls: DataTls,
    sessions: Sessions,
    segments: Arc<Segments>,
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.clients.process() != std::process::id() {
            self.clients.leak();
            self.segments.leak();
        }
    }
}

#[pymethods]
impl Store {
    /// Connects; `ConnectionError` says why not. Returns within five seconds.
    #[new]
    #[pyo3(signature = (master=None, cluster=None, certificates=None, runtime_directory=None, tenant=String::new(),
        shared_memory=true, deadline=10.0, hedge=0.1, data_tls=None))]
    #[allow(clippy::too_many_arguments, reason = "keywords, as Python has them")]
    fn new(
        py: Python<'_>,
        master: Option<String>,
        cluster: Option<String>,
        certificates: Option<std::path::PathBuf>,
        runtime_directory: Option<std::path::PathBuf>,
        tenant: String,
        shared_memory: bool,
        deadline: f64,
        hedge: f64,
        data_tls: Option<&str>,
    ) -> PyResult<Self> {
        let data_tls = tls_of(data_tls)?;
        let (deadline, hedge) = (seconds("deadline", deadline, 3_600)?, seconds_or_none("hedge", hedge, 3_600)?);
        let wanted = ControlArguments { master, cluster, certificates, runtime_directory }.completed();
        let connected = waiting(py, || {
            wanted.connect(move |control| {
                let config = ClientConfig {
                    control,
                    tenant,
                    shared_memory,
                    deadline,
                    hedge,
                    data_tls,
                    ..ClientConfig::local("")
                };
                Client::connect(&config).map(|client| (config, client))
            })
        })?;
        let (config, client) = connected.map_err(PyConnectionError::new_err)?;
        Ok(Self {
            control: config.control.clone(),
            data_tls,
            clients: Clients::new(config, client),
            sessions: Sessions::default(),
            segments: Segments::new(),
        })
    }

    /// Registers memory of this process: 0, or an error's number.
    fn register(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number_of)] address: u64,
        #[pyo3(from_py_with = number_of)] bytes: u64,
    ) -> i64 {
        let registered = py.detach(|| self.clients.memory.register(address, bytes));
        registered.map_or_else(|why| failed(INVALID, why), |()| 0)
    }

    /// Forgets memory; when this returns, no call uses it.
    fn unregister(&self, py: Python<'_>, #[pyo3(from_py_with = number_of)] address: u64) -> PyResult<i64> {
        if self.clients.process() != std::process::id() {
            // A thread of the parent's may hold the locks for ever here.
            return Ok(failed(INTERNAL, "the process was forked after the setup: nothing is registered there"));
        }
        let gone = waiting(py, || (self.clients.memory.unregister(address), self.clients.sweep()).0)?;
        Ok(gone.map_or_else(|why| failed(INVALID, why), |()| 0))
    }

    /// Stores the bytes of an object with the buffer protocol.
    #[pyo3(signature = (key, value, kept=None))]
    fn put(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        kept: Option<KeepArguments>,
    ) -> PyResult<i64> {
        let keys = Keys::one(key)?;
        let view = View::of(value, false)?;
        if let Err(code) = check_key(keys.get(0)) {
            return Ok(code);
        }
        let keeping = options(kept);
        if view.bytes() < DIRECT_BYTES {
            let value = view.to_vec();
            return waiting(py, || self.put_copied(&keys, &value, &keeping));
        }
        let (address, bytes) = (view.address(), view.bytes());
        // SAFETY: `view` keeps the bytes where they are until after the call.
        let region = unsafe { adopt(address, bytes) };
        let Some(region) = region else { return Ok(failed(INVALID, "the value is no memory")) };
        let code = waiting(py, || {
            let put = self.clients.with(|member| {
                let buffer = member.client.register(region);
                let options = keeping.with(&mut member.client);
                let put = member.client.put_from_with(keys.get(0), buffer.slice(0, bytes as usize), options);
                member.client.unregister(buffer);
                put
            });
            put.map_or_else(|code| code, |put| put.map_or_else(|error| store_code(&error), |_| 0))
        })?;
        drop(view);
        Ok(code)
    }

    /// Stores the bytes of several such objects as one.
    #[pyo3(signature = (key, values, kept=None))]
    fn put_parts(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        kept: Option<KeepArguments>,
    ) -> PyResult<i64> {
        let keys = Keys::one(key)?;
        let mut value = Vec::new();
        for part in values.try_iter()? {
            value.extend_from_slice(&View::of(&part?, false)?.to_vec());
        }
        if let Err(code) = check_key(keys.get(0)) {
            return Ok(code);
        }
        let keeping = options(kept);
        waiting(py, || self.put_copied(&keys, &value, &keeping))
    }

    /// The bytes of an object, or an error's number.
    fn get<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.get_value(py, Keys::one(key)?.get(0))
    }

    /// The bytes of many objects in one batch, or the number of an error for each.
    fn get_many<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        self.get_values(py, &Keys::many(keys)?)
    }

    /// Stores the bytes of many objects with the buffer protocol in one batch.
    #[pyo3(signature = (keys, values, kept=None))]
    fn put_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        kept: Option<KeepArguments>,
    ) -> PyResult<Vec<i64>> {
        let (keys, views) = (Keys::many(keys)?, views(values, false)?);
        if keys.len() != views.len() {
            return Ok(vec![failed(INVALID, "there are not as many values as keys"); keys.len()]);
        }
        let (places, keeping) = (places(&views), options(kept));
        // SAFETY: `views` keep the bytes where they are until after the call.
        waiting(py, || unsafe { self.put_places(&keys, &places, &keeping) })
    }

    /// Receives many objects in one batch into writable objects with the buffer protocol: the length of each, or an
    /// error's number.
    fn receive_many(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, into: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        let (keys, views) = (Keys::many(keys)?, views(into, true)?);
        if keys.len() != views.len() {
            return Ok(vec![failed(INVALID, "there are not as many buffers as keys"); keys.len()]);
        }
        let places = places(&views);
        // SAFETY: `views` keep the bytes where they are until after the call; whose buffers they are lends them.
        waiting(py, || unsafe { self.get_places(&keys, &places) })
    }

    /// Receives an object into a writable object with the buffer protocol: its length, or an error's number.
    fn receive(&self, py: Python<'_>, key: &Bound<'_, PyAny>, into: &Bound<'_, PyAny>) -> PyResult<i64> {
        let keys = Keys::one(key)?;
        let view = View::of(into, true)?;
        if let Err(code) = check_key(keys.get(0)) {
            return Ok(code);
        }
        let (address, bytes) = (view.address(), view.bytes());
        // SAFETY: `view` keeps the bytes where they are until after the call.
        let region = unsafe { adopt(address, bytes) };
        let Some(region) = region else { return Ok(failed(INVALID, "nothing can be received into 0 bytes")) };
        let got = waiting(py, || self.get_whole(keys.get(0), region, bytes))?;
        drop(view);
        Ok(got.map_or_else(
            |code| code,
            |got| match got {
                Ok(Some(got)) => got.bytes as i64,
                Ok(None) => failed(NOT_FOUND, "no such object"),
                Err(error) => store_code(&error),
            },
        ))
    }

    /// Where the objects of these keys are: for each a list of `host:port` of the shards that have it.
    fn replicas(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<String>>> {
        let keys = Keys::many(keys)?;
        waiting(py, || tasks::replicas(&self.clients, &keys))
    }

    /// Has second owners give their copies of these objects up: 1 where one had it, 0 where none had, or a number.
    fn remove_copies(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        let keys = Keys::many(keys)?;
        waiting(py, || tasks::remove_copies(&self.clients, &keys))
    }

    /// Stores pieces of memory: for each object a list of addresses and one of lengths.
    #[pyo3(signature = (keys, addresses, sizes, kept=None))]
    fn put_from(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        kept: Option<KeepArguments>,
    ) -> PyResult<Vec<i64>> {
        let (keys, pieces) = (Keys::many(keys)?, single(addresses, sizes)?);
        let Some(pieces) = matching(&keys, pieces) else { return Ok(vec![INVALID; keys.len()]) };
        waiting(py, || batches::put(&self.clients, &keys, &pieces, &options(kept)))
    }

    /// As `put_from`, with several pieces for each object.
    #[pyo3(signature = (keys, addresses, sizes, kept=None))]
    fn put_from_pieces(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        kept: Option<KeepArguments>,
    ) -> PyResult<Vec<i64>> {
        let (keys, pieces) = (Keys::many(keys)?, several(addresses, sizes)?);
        let Some(pieces) = matching(&keys, pieces) else { return Ok(vec![INVALID; keys.len()]) };
        waiting(py, || batches::put(&self.clients, &keys, &pieces, &options(kept)))
    }

    /// Brings objects into registered memory: the length of each, or an error's number.
    fn get_into(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<i64>> {
        let (keys, pieces) = (Keys::many(keys)?, single(addresses, sizes)?);
        let Some(pieces) = matching(&keys, pieces) else { return Ok(vec![INVALID; keys.len()]) };
        waiting(py, || batches::get(&self.clients, &keys, &pieces))
    }

    /// As `get_into`, with several pieces for each object.
    fn get_into_pieces(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<i64>> {
        let (keys, pieces) = (Keys::many(keys)?, several(addresses, sizes)?);
        let Some(pieces) = matching(&keys, pieces) else { return Ok(vec![INVALID; keys.len()]) };
        waiting(py, || batches::get(&self.clients, &keys, &pieces))
    }

    /// Begins to read objects part by part: for each 0 and its version, or the number of an error and 0.
    fn open_ranges(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<(i64, u64)>> {
        let keys = Keys::many(keys)?;
        waiting(py, || ranges::open(&self.clients, &keys))
    }

    /// Brings parts of objects: numbers of keys, offsets in the objects, addresses and lengths; with versions, one for
    /// each key, only parts of those.
    #[pyo3(signature = (keys, which, offsets, addresses, sizes, versions=None))]
    #[allow(
        clippy::too_many_arguments,
        clippy::needless_pass_by_value,
        reason = "a table, column by column, as Python has it"
    )]
    fn get_ranges(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        which: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        versions: Option<Vec<u64>>,
    ) -> PyResult<Vec<i64>> {
        let keys = Keys::many(keys)?;
        let parts = parts(&keys, which, offsets, addresses, sizes)?;
        waiting(py, || ranges::get(&self.clients, &keys, &parts, versions.as_deref()))
    }

    /// Begins to write objects of these lengths.
    #[pyo3(signature = (keys, sizes, kept=None))]
    fn begin(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        kept: Option<KeepArguments>,
    ) -> PyResult<Vec<i64>> {
        let (keys, sizes) = (Keys::many(keys)?, numbers(sizes)?);
        if keys.len() != sizes.len() {
            return Ok(vec![INVALID; keys.len()]);
        }
        waiting(py, || self.sessions.begin(&self.clients, &keys, &sizes, options(kept).anywhere()))
    }

    /// Writes parts of objects that were begun.
    fn fill(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        which: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<i64>> {
        let keys = Keys::many(keys)?;
        let parts = parts(&keys, which, offsets, addresses, sizes)?;
        waiting(py, || self.sessions.fill(&self.clients, &keys, &parts))
    }

    /// Makes objects of what was written, or gives it up.
    fn end(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, commit: bool) -> PyResult<Vec<i64>> {
        let keys = Keys::many(keys)?;
        waiting(py, || self.sessions.end(&self.clients, &keys, commit))
    }

    /// 1 for each key that has an object, 0 for the others; an error's number for all when an owner cannot be asked.
    fn exists<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let (found, codes) = self.present(py, keys)?;
        if codes.is_empty() {
            return PyList::new(py, found.into_iter().map(i64::from));
        }
        PyList::new(py, codes)
    }

    /// Whether there is an object, for each key; or the number of the first error.
    fn has<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (found, codes) = self.present(py, keys)?;
        match codes.into_iter().find(|code| *code < 0) {
            Some(code) => Ok(code.into_pyobject(py)?.into_any()),
            None => Ok(PyList::new(py, found)?.into_any()),
        }
    }

    /// Lengths of objects; where there is none, the number that says so.
    fn sizes(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        self.ask(py, &Keys::many(keys)?, |client, keys| {
            let size = |size: Option<u64>| size.map_or(NOT_FOUND, |bytes| bytes as i64);
            Ok(client.batch_size(keys)?.into_iter().map(size).collect())
        })
    }

    /// Removes objects: 0 for each that was there.
    fn remove(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        self.ask(py, &Keys::many(keys)?, |client, keys| {
            Ok(client.batch_remove(keys)?.into_iter().map(|there| if there { 0 } else { NOT_FOUND }).collect())
        })
    }

    /// Removes the objects whose keys a pattern matches; how many.
    fn remove_matching(&self, py: Python<'_>, pattern: &str) -> PyResult<i64> {
        self.count(py, |client| client.remove_matching(pattern))
    }

    /// Removes all objects of this tenant; how many.
    fn remove_all(&self, py: Python<'_>) -> PyResult<i64> {
        self.count(py, |client| client.remove_all(false))
    }

    /// Whether the control plane answers and the connection is open: 0, or an error's number.
    fn check(&self, py: Python<'_>) -> PyResult<i64> {
        if !self.clients.is_served() {
            return Ok(failed(NO_ROOM, NO_NODE));
        }
        Ok(waiting(py, || self.clients.check())?.map_or_else(|code| code, |()| 0))
    }

    /// The first shards of the members of the cluster, as `host:port`.
    fn members(&self) -> Vec<String> {
        let map = self.clients.link().map();
        let shards = map.iter().flat_map(|map| &map.members).filter_map(|member| member.shards.first());
        shards.map(|shard| shard.tcp.to_string()).collect()
    }

    /// Has objects copied to a second node: the number of the task, or 0 and an error's number.
    fn create_copy_task(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, targets: Vec<String>) -> PyResult<(u64, i64)> {
        let keys = Keys::many(keys)?;
        waiting(py, move || tasks::create(&self.clients, &keys, &targets))
    }

    /// How a task is, or an error's number.
    fn task(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number_of)] id: u64,
    ) -> PyResult<(Option<tasks::TaskTuple>, i64)> {
        let seen = waiting(py, || match self.clients.with(|member| member.client.task(id)) {
            Ok(task) => task.map_err(|error| store_code(&error)).and_then(tasks::seen),
            Err(code) => Err(code),
        })?;
        Ok(seen.map_or_else(|code| (None, code), |seen| (Some(seen), 0)))
    }

    /// Gives memory to the cluster, as a node of one shard: its name, or an error's number. `host` is this host's name
    /// or address, where others reach it.
    #[pyo3(signature = (bytes, host=""))]
    fn join<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = number_of)] bytes: u64,
        host: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        if self.clients.process() != std::process::id() {
            let code = failed(INTERNAL, "the process was forked after the setup: set up anew there");
            return Ok(code.into_pyobject(py)?.into_any());
        }
        match waiting(py, || Segment::join(&self.control, self.data_tls, bytes, host))? {
            Ok(segment) => {
                let name = segment.name.clone();
                self.segments.lock().push(segment);
                Ok(name.into_pyobject(py)?.into_any())
            }
            Err(code) => Ok(code.into_pyobject(py)?.into_any()),
        }
    }

    /// Takes a node's memory back; its objects may go to others within the time given, in seconds.
    fn leave(&self, py: Python<'_>, name: &str, #[pyo3(from_py_with = number_of)] grace: u64) -> PyResult<i64> {
        let segment = {
            let mut segments = self.segments.lock();
            let position = segments.iter().position(|segment| segment.name == name);
            position.map(|position| segments.swap_remove(position))
        };
        match segment {
            Some(segment) => waiting(py, || segment.leave(Duration::from_secs(grace))),
            None => Ok(failed(-101, format!("no segment {name:?} of this process"))),
        }
    }

    /// What this process counted, and the shards of the memory that it gives, as Prometheus text.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        waiting(py, || {
            let Ok(_call) = Call::begin(self.clients.process()) else { return String::new() };
            let segments = self.segments.lock();
            self.clients.metrics_text() + &Segment::metrics_text(&segments)
        })
    }

    /// Ends it: calls under way end first, and those that come later are refused. What others put into its memory goes
    /// to other members, as far as some seconds and their room allow.
    fn close(&self, py: Python<'_>) {
        if self.clients.process() == std::process::id() {
            py.detach(|| {
                self.clients.close();
                self.segments.leave();
            });
        }
    }
}
