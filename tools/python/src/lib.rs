//! Native part of the Python packages: one stable-ABI module, `kvplane._native`, for CPython 3.9 and later.
//!
//! Its interface is small and numeric: addresses, lengths, lists of outcomes. The packages that users import, `kvplane`
//! and `mooncake`, are written in Python on top of it (`tools/python/package`).
//!
//! Every call that may block releases the GIL meanwhile. Nothing of Python is touched without it: keys are copied
//! before, and memory is passed by address.

mod control;
mod cpython;
mod engine;
mod group;
mod memory;
mod objects;
mod outcome;
mod scheduler;
mod segment;
mod store;
mod waiting;

use pyo3::prelude::*;

/// Returns the message of the last call of this thread that failed; empty when there was none.
#[pyfunction]
fn last_error() -> String {
    outcome::last()
}

/// Returns the hashes of a prompt's full blocks as vLLM computes them (`sha256_cbor`), the last 64 bits of each. `seed`
/// is the engines' `PYTHONHASHSEED`. Without it, returns the token hashes.
#[pyfunction]
fn block_hashes(
    py: Python<'_>,
    tokens: &Bound<'_, PyAny>,
    block_tokens: usize,
    seed: Option<&str>,
    lora: &str,
    salt: &str,
) -> PyResult<Vec<u64>> {
    let tokens: Vec<u32> = tokens.extract()?;
    if block_tokens == 0 || tokens.len() > kvplane::MAX_HASHED_TOKENS {
        let (count, most) = (tokens.len(), kvplane::MAX_HASHED_TOKENS);
        let why = format!("{count} tokens in blocks of {block_tokens}: at most {most} tokens, in blocks of at least 1");
        return Err(pyo3::exceptions::PyValueError::new_err(why));
    }
    Ok(py.detach(|| match seed {
        Some(seed) => kvplane::vllm_block_hashes(&tokens, block_tokens, seed, lora, salt),
        None => kvplane::TokenPrompt::new(&tokens, block_tokens, lora, salt).hashes().to_vec(),
    }))
}

/// Returns the locations of the visible devices of a family (`cuda`, `hip`, `npu`), for which its driver is loaded; an
/// empty list where there is no driver, and its reason as the last error.
#[pyfunction]
fn devices(py: Python<'_>, family: &str) -> Vec<String> {
    let found = py.detach(kvplane::device::open_families).into_iter().find(|(found, _)| found.prefix() == family);
    match found {
        Some((_, Ok(devices))) => devices.into_iter().map(|info| info.id.to_string()).collect(),
        Some((_, Err(error))) => {
            outcome::failed(-1, error.to_string());
            Vec::new()
        }
        None => Vec::new(),
    }
}

/// Initializes the module.
#[pymodule]
#[pyo3(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("NO_BATCH", engine::NO_BATCH)?;
    module.add_class::<store::Store>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<objects::Objects>()?;
    module.add_class::<memory::host_memory::HostMemory>()?;
    module.add_class::<scheduler::Scheduler>()?;
    module.add_class::<group::GroupProcess>()?;
    module.add_class::<group::ProcessGroup>()?;
    module.add_class::<group::GroupWork>()?;
    module.add_function(wrap_pyfunction!(last_error, module)?)?;
    module.add_function(wrap_pyfunction!(block_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(devices, module)?)?;
    module.add_function(wrap_pyfunction!(store::tasks::has_segment, module)?)?;
    module.add_function(wrap_pyfunction!(memory::device_memory::location, module)?)?;
    module.add_function(wrap_pyfunction!(memory::host_memory::read_memory, module)?)?;
    module.add_function(wrap_pyfunction!(memory::host_memory::write_memory, module)?)?;
    module.add_function(wrap_pyfunction!(memory::host_memory::buffer_address, module)?)?;
    module.add_function(wrap_pyfunction!(memory::host_memory::topology, module)?)?;
    module.add_function(wrap_pyfunction!(memory::host_memory::settle, module)?)?;
    Ok(())
}
