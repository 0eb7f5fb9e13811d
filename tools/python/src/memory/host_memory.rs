//! Host memory for Python: allocations that peers on the same host can map, and checked access to any memory, which
//! cannot crash the process.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvplane::{HugePages, Region, RegionOptions};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::cpython::{View, number_of};
use crate::memory::{peek, poke};
use crate::store::clients;

/// Allocated regions by address, until they are freed or this is dropped.
#[pyclass(module = "kvplane._native", frozen)]
#[derive(Default)]
pub(crate) struct HostMemory {
    regions: Mutex<Vec<Arc<Region>>>,
}

/// Allocates zeroed memory that peers on this host can map.
pub(crate) fn allocate(bytes: u64) -> PyResult<Arc<Region>> {
    let length = usize::try_from(bytes).ok().filter(|bytes| (1..=isize::MAX as usize / 2).contains(bytes));
    let length = length.ok_or_else(|| PyValueError::new_err(format!("{bytes} bytes cannot be allocated")))?;
    let options = RegionOptions { shared: true, huge: HugePages::Try, ..RegionOptions::new("kvplane-python", length) };
    Region::allocate(&options).map_err(|error| PyMemoryError::new_err(error.to_string()))
}

#[pymethods]
impl HostMemory {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Allocates memory. Returns its address.
    fn alloc(&self, #[pyo3(from_py_with = number_of)] bytes: u64) -> PyResult<u64> {
        let region = allocate(bytes)?;
        let address = region.address();
        self.regions.lock().unwrap_or_else(PoisonError::into_inner).push(region);
        Ok(address)
    }

    /// Frees memory that was allocated here. Returns false if there was none at this address.
    fn free(&self, #[pyo3(from_py_with = number_of)] address: u64) -> bool {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let position = regions.iter().position(|region| region.address() == address);
        position.map(|position| regions.swap_remove(position)).is_some()
    }
}

/// Returns bytes of this process's memory. Raises `ValueError` where it is not mapped.
#[pyfunction]
pub(crate) fn read_memory(
    py: Python<'_>,
    #[pyo3(from_py_with = number_of)] address: u64,
    #[pyo3(from_py_with = number_of)] bytes: u64,
) -> PyResult<Bound<'_, PyBytes>> {
    let mapped = crate::memory::mapped(address, bytes);
    if bytes > 0 && mapped == crate::memory::RangeAccess::No {
        return Err(outside(address, bytes));
    }
    // The length cannot exceed the mapped memory.
    PyBytes::new_with(py, bytes as usize, |into| peek(address, into).map_err(|_| outside(address, into.len() as u64)))
}

/// Writes the first `bytes` bytes of an object to this process's memory. Raises `ValueError` where it is not writable.
#[pyfunction]
pub(crate) fn write_memory(
    #[pyo3(from_py_with = number_of)] address: u64,
    value: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = number_of)] bytes: u64,
) -> PyResult<()> {
    let value = View::of(value, false)?.to_vec();
    let value = usize::try_from(bytes).ok().and_then(|bytes| value.get(..bytes)).ok_or_else(|| {
        PyValueError::new_err(format!("{bytes} bytes are to be written, but the value has {}", value.len()))
    })?;
    if value.is_empty() {
        return Ok(());
    }
    poke(address, value).map_err(|_| outside(address, bytes))
}

fn outside(address: u64, bytes: u64) -> PyErr {
    PyValueError::new_err(format!("{bytes} bytes at {address:#x} are not all memory of this process"))
}

/// Returns address and length of the bytes of an object with the buffer protocol. They are valid as long as the object
/// lives and is not resized.
#[pyfunction]
pub(crate) fn buffer_address(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<(u64, u64)> {
    let view = View::of(object, writable)?;
    Ok((view.address(), view.bytes()))
}

/// Returns the machine's NUMA nodes and RDMA devices: names of locations, and for each device its name and its node, -1
/// if the kernel does not report it.
#[pyfunction]
pub(crate) fn topology(py: Python<'_>) -> PyResult<crate::engine::transfers::Topology> {
    py.detach(crate::engine::transfers::topology)
}

/// Prepares the exit of the interpreter: no call begins any more; waits up to `longest` seconds for calls in progress,
/// and lets the segments of this process leave the cluster. Returns true if all calls have ended.
#[pyfunction]
pub(crate) fn settle(py: Python<'_>, longest: f64) -> bool {
    let longest = Duration::try_from_secs_f64(longest).unwrap_or(Duration::ZERO);
    py.detach(|| {
        let settled = clients::settle(longest);
        crate::segment::leave_all();
        settled
    })
}
