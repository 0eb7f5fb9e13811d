//! `_native.Store`: client of a cluster's store, for any number of threads.

pub(crate) mod arguments;
pub(crate) mod batches;
pub(crate) mod clients;
pub(crate) mod codes;
pub(crate) mod many;
pub(crate) mod member;
pub(crate) mod pins;
pub(crate) mod ranges;
pub(crate) mod tasks;
pub(crate) mod values;

use std::sync::Arc;
use std::time::Duration;

use kvplane::{Client, ClientConfig, Control, DataTls};
use pyo3::exceptions::PyConnectionError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::control::{ControlArguments, Discovery, seconds, seconds_or_none, tls_of};
use crate::cpython::{Keys, View, number_of, numbers, places, views};
use crate::memory::adopt;
use crate::memory::device_memory::{StreamQueues, stream_at};
use crate::outcome::{INTERNAL, INVALID, NO_NODE, NO_ROOM, NOT_FOUND, failed, store_code};
use crate::segment::{Segment, Segments};
use crate::store::arguments::{KeepArguments, matching, options, parts, priority, several, single};
use crate::store::batches::check_key;
use crate::store::clients::{Call, Clients};
use crate::store::ranges::Sessions;
use crate::waiting::waiting;

/// Length from which values are sent from Python's memory; shorter ones are copied first.
pub(crate) const DIRECT_BYTES: u64 = 64 << 10;

/// Client of the store of a cluster. Negative results are error codes; `last_error()` gives the message.
#[pyclass(module = "kvplane._native", frozen)]
pub(crate) struct Store {
    pub(crate) clients: Clients,
    control: Control,
    data_tls: DataTls,
    sessions: Sessions,
    segments: Arc<Segments>,
    streams: StreamQueues,
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
    /// Connects; raises `ConnectionError` with the reason on failure. Returns within five seconds.
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
        let (config, client) = connected.map_err(|error| PyConnectionError::new_err(error.to_string()))?;
        Ok(Self {
            control: config.control.clone(),
            data_tls,
            clients: Clients::new(config, client),
            sessions: Sessions::default(),
            segments: Segments::new(),
            streams: StreamQueues::default(),
        })
    }

    /// Registers memory of this process. Returns 0 or an error code.
    fn register(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number_of)] address: u64,
        #[pyo3(from_py_with = number_of)] bytes: u64,
    ) -> i64 {
        if self.clients.process() != std::process::id() {
            // A thread of the parent may hold the locks forever here.
            return failed(INTERNAL, "the process was forked after the setup: nothing can be registered in it");
        }
        let registered = py.detach(|| self.clients.memory.register(address, bytes));
        registered.map_or_else(|error| failed(INVALID, error.to_string()), |()| 0)
    }

    /// Unregisters memory. When this returns 0, no call uses it.
    fn unregister(&self, py: Python<'_>, #[pyo3(from_py_with = number_of)] address: u64) -> PyResult<i64> {
        if self.clients.process() != std::process::id() {
            // A thread of the parent may hold the locks forever here.
            return Ok(failed(INTERNAL, "the process was forked after the setup: nothing is registered in it"));
        }
        let gone = waiting(py, || (self.clients.memory.unregister(address), self.clients.sweep()).0)?;
        Ok(gone.map_or_else(|error| failed(INVALID, error.to_string()), |()| 0))
    }

    /// Waits until the work that is on a caller's stream of a device now is done. Returns 0 or an error code.
    fn await_stream(&self, py: Python<'_>, location: &str, handle: u64) -> PyResult<i64> {
        let (id, stream) = stream_at(location, handle)?;
        waiting(py, || match Call::begin(self.clients.process()) {
            Ok(_call) => self.streams.wait(id, stream),
            Err(code) => code,
        })
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
        let keeping = options(kept)?;
        if view.bytes() < DIRECT_BYTES {
            let value = view.to_vec();
            return waiting(py, || {
                let put = self.clients.with(|member| member.put_copied(keys.get(0), &value, &keeping));
                put.unwrap_or_else(|code| code)
            });
        }
        let (address, bytes) = (view.address(), view.bytes());
        // SAFETY: `view` keeps the bytes where they are until after the call.
        let region = unsafe { adopt(address, bytes) };
        let Some(region) = region else { return Ok(failed(INVALID, "the value has no memory")) };
        let code = waiting(py, || {
            let put = self.clients.with(|member| member.put_region(keys.get(0), region, bytes, &keeping));
            put.unwrap_or_else(|code| code)
        })?;
        drop(view);
        Ok(code)
    }

    /// Stores the bytes of several objects with the buffer protocol as one object.
    #[pyo3(signature = (key, values, kept=None))]
    fn put_parts(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        kept: Option<KeepArguments>,
    ) -> PyResult<i64> {
        let keys = Keys::one(key)?;
        let views = views(values, false)?;
        if let Err(code) = check_key(keys.get(0)) {
            return Ok(code);
        }
        let (places, keeping) = (places(&views), options(kept)?);
        // SAFETY: `views` keep the bytes where they are until after the call.
        waiting(py, || unsafe { many::put_parts(&self.clients, keys.get(0), &places, &keeping) })
    }

    /// Returns the bytes of an object, or an error code.
    fn get<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        values::get(py, &self.clients, Keys::one(key)?.get(0))
    }

    /// Returns the bytes of many objects in one batch, or an error code for each.
    fn get_many<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        many::get_values(py, &self.clients, &Keys::many(keys)?)
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
            return Ok(vec![failed(INVALID, "the lists of keys and values differ in length"); keys.len()]);
        }
        let (places, keeping) = (places(&views), options(kept)?);
        // SAFETY: `views` keep the bytes where they are until after the call.
        waiting(py, || unsafe { many::put(&self.clients, &keys, &places, &keeping) })
    }

    /// Receives many objects in one batch into writable objects with the buffer protocol. Returns the length of each,
    /// or an error code.
    fn receive_many(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, into: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        let (keys, views) = (Keys::many(keys)?, views(into, true)?);
        if keys.len() != views.len() {
            return Ok(vec![failed(INVALID, "the lists of keys and buffers differ in length"); keys.len()]);
        }
        let places = places(&views);
        // SAFETY: `views` keep the bytes where they are until after the call; the owner of the buffers lends them.
        waiting(py, || unsafe { many::get(&self.clients, &keys, &places) })
    }

    /// Receives an object into a writable object with the buffer protocol. Returns its length or an error code.
    fn receive(&self, py: Python<'_>, key: &Bound<'_, PyAny>, into: &Bound<'_, PyAny>) -> PyResult<i64> {
        let keys = Keys::one(key)?;
        let view = View::of(into, true)?;
        if let Err(code) = check_key(keys.get(0)) {
            return Ok(code);
        }
        let (address, bytes) = (view.address(), view.bytes());
        // SAFETY: `view` keeps the bytes where they are until after the call.
        let region = unsafe { adopt(address, bytes) };
        let Some(region) = region else { return Ok(failed(INVALID, "cannot receive into a buffer of 0 bytes")) };
        let got = waiting(py, || self.clients.with(|member| member.get_region(keys.get(0), region, bytes)))?;
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

    /// Returns the locations of the objects under these keys: for each a list of `host:port` of the shards that hold
    /// it.
    fn replicas(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<String>>> {
        let keys = Keys::many(keys)?;
        waiting(py, || tasks::replicas(&self.clients, &keys))
    }

    /// Removes the replicas of these objects. Returns for each 1 if there was one, 0 if not, or an error code.
    fn remove_copies(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        let keys = Keys::many(keys)?;
        waiting(py, || tasks::remove_copies(&self.clients, &keys))
    }

    /// Stores objects from memory: for each object an address and a length.
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
        let keeping = options(kept)?;
        waiting(py, || batches::put(&self.clients, &keys, &pieces, &keeping))
    }

    /// Like `put_from`, with several pieces for each object.
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
        let keeping = options(kept)?;
        waiting(py, || batches::put(&self.clients, &keys, &pieces, &keeping))
    }

    /// Reads objects into registered memory. Returns the length of each, or an error code.
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

    /// Like `get_into`, with several pieces for each object.
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

    /// Opens objects for range reads. Returns for each 0 and its version, or an error code and 0.
    fn open_ranges(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<(i64, u64)>> {
        let keys = Keys::many(keys)?;
        waiting(py, || ranges::open(&self.clients, &keys))
    }

    /// Reads ranges of objects: indices of keys, offsets in the objects, addresses and lengths; with versions, one for
    /// each key, only ranges of those.
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

    /// Opens put sessions for objects of these lengths.
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
        let keeping = options(kept)?;
        waiting(py, || self.sessions.begin(&self.clients, &keys, &sizes, keeping.anywhere()))
    }

    /// Writes ranges of open put sessions.
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

    /// Commits or aborts put sessions.
    fn end(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, commit: bool) -> PyResult<Vec<i64>> {
        let keys = Keys::many(keys)?;
        waiting(py, || self.sessions.end(&self.clients, &keys, commit))
    }

    /// Returns 1 for each key that has an object, 0 for the others; an error code for all when an owner does not
    /// answer. With `ahead`, nodes prefetch the objects that only their SSDs have.
    #[pyo3(signature = (keys, ahead=false))]
    fn exists<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>, ahead: bool) -> PyResult<Bound<'py, PyList>> {
        if ahead {
            let codes = values::ask(py, &self.clients, &Keys::many(keys)?, |client, keys| {
                Ok(client.batch_exists_ahead(keys)?.into_iter().map(i64::from).collect())
            })?;
            return PyList::new(py, codes);
        }
        let (found, codes) = values::present(py, &self.clients, keys)?;
        if codes.is_empty() {
            return PyList::new(py, found.into_iter().map(i64::from));
        }
        PyList::new(py, codes)
    }

    /// Returns for each key whether there is an object; or the code of the first error.
    fn has<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (found, codes) = values::present(py, &self.clients, keys)?;
        match codes.into_iter().find(|code| *code < 0) {
            Some(code) => Ok(code.into_pyobject(py)?.into_any()),
            None => Ok(PyList::new(py, found)?.into_any()),
        }
    }

    /// Returns the lengths of objects, or an error code where there is none.
    fn sizes(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        values::ask(py, &self.clients, &Keys::many(keys)?, |client, keys| {
            let size = |size: Option<u64>| size.map_or(NOT_FOUND, |bytes| bytes as i64);
            Ok(client.batch_size(keys)?.into_iter().map(size).collect())
        })
    }

    /// Removes objects. Returns 0 for each that existed.
    fn remove(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        values::ask(py, &self.clients, &Keys::many(keys)?, |client, keys| {
            Ok(client.batch_remove(keys)?.into_iter().map(|there| if there { 0 } else { NOT_FOUND }).collect())
        })
    }

    /// Removes the objects whose keys match a pattern. Returns their number.
    fn remove_matching(&self, py: Python<'_>, pattern: &str) -> PyResult<i64> {
        values::count(py, &self.clients, |client| client.keys().remove_matching(pattern))
    }

    /// Removes all objects of this tenant. Returns their number.
    fn remove_all(&self, py: Python<'_>) -> PyResult<i64> {
        values::count(py, &self.clients, |client| client.keys().remove_all(false))
    }

    /// Gives objects soft pins of this duration in milliseconds, or ends them if it is 0. Returns for each key 1, 0 if
    /// the object is not in memory, or an error code; so do the two calls below.
    fn soft_pin(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, duration_ms: u64) -> PyResult<Vec<i64>> {
        let (keys, duration) = (Keys::many(keys)?, Duration::from_millis(duration_ms));
        waiting(py, || pins::soft_pin(&self.clients, &keys, duration))
    }

    /// Sets the priorities of objects.
    fn set_priority(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, number: i64) -> PyResult<Vec<i64>> {
        let (keys, priority) = (Keys::many(keys)?, priority(number)?);
        waiting(py, || pins::set_priority(&self.clients, &keys, priority))
    }

    /// Adds objects to a retention, which lasts for this duration in milliseconds at least.
    fn retain(&self, py: Python<'_>, number: u64, keys: &Bound<'_, PyAny>, duration_ms: u64) -> PyResult<Vec<i64>> {
        let (keys, duration) = (Keys::many(keys)?, Duration::from_millis(duration_ms));
        waiting(py, || pins::retain(&self.clients, number, &keys, duration))
    }

    /// Adds the objects of a group to the retention of its number, or extends a retention, for this duration in
    /// milliseconds from now at least; a duration of 0 ends a retention. Returns the number of objects, or an
    /// error code.
    fn extend(&self, py: Python<'_>, number: u64, duration_ms: u64, group: bool) -> PyResult<i64> {
        let duration = Duration::from_millis(duration_ms);
        values::count(py, &self.clients, |client| {
            let mut pins = client.keys().pins();
            match (group, duration_ms) {
                (true, _) => pins.retain_group(number, duration),
                (false, 0) => pins.release(number),
                (false, _) => pins.renew(number, duration),
            }
        })
    }

    /// Checks that the control plane answers and the store serves requests. Returns 0 or an error code.
    fn check(&self, py: Python<'_>) -> PyResult<i64> {
        if !self.clients.is_served() {
            return Ok(failed(NO_ROOM, NO_NODE));
        }
        Ok(waiting(py, || self.clients.check())?.map_or_else(|code| code, |()| 0))
    }

    /// Returns the first shard of each member of the cluster, as `host:port`.
    fn members(&self) -> Vec<String> {
        let map = self.clients.link().map();
        let shards = map.iter().flat_map(|map| &map.members).filter_map(|member| member.shards.first());
        shards.map(|shard| shard.tcp.to_string()).collect()
    }

    /// Replicates objects. Returns the number of the task, or 0 and an error code.
    fn create_copy_task(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, targets: Vec<String>) -> PyResult<(u64, i64)> {
        let keys = Keys::many(keys)?;
        waiting(py, move || tasks::create(&self.clients, &keys, &targets))
    }

    /// Returns the state of a task, or an error code.
    fn task(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number_of)] id: u64,
    ) -> PyResult<(Option<tasks::TaskTuple>, i64)> {
        let seen = waiting(py, || match self.clients.with(|member| member.client.replicas().task(id)) {
            Ok(task) => task.map_err(|error| store_code(&error)).and_then(tasks::seen),
            Err(code) => Err(code),
        })?;
        Ok(seen.map_or_else(|code| (None, code), |seen| (Some(seen), 0)))
    }

    /// Provides memory to the cluster, as a node of one shard. Returns its name or an error code. `host` is this host's
    /// name or address, where other hosts reach it.
    #[pyo3(signature = (bytes, host=""))]
    fn join<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = number_of)] bytes: u64,
        host: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        if self.clients.process() != std::process::id() {
            let code = failed(INTERNAL, "the process was forked after the setup: call setup again in it");
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

    /// Takes a node's memory back; its objects may migrate to other nodes within the given time, in seconds.
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

    /// Returns the counters of this process, and of the shards of its segments, as Prometheus text.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        waiting(py, || {
            let Ok(_call) = Call::begin(self.clients.process()) else { return String::new() };
            let segments = self.segments.lock();
            self.clients.metrics_text() + &Segment::metrics_text(&segments)
        })
    }

    /// Closes the store: calls in progress end first, and later ones are rejected. Objects in its segments migrate to
    /// other members, as far as a few seconds and their memory allow.
    fn close(&self, py: Python<'_>) {
        if self.clients.process() == std::process::id() {
            py.detach(|| {
                self.clients.close();
                self.streams.clear();
                self.segments.leave();
            });
        }
    }
}
