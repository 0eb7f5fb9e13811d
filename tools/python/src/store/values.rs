//! Store calls on Python values, and queries of keys.

use kvplane::{Client, Digest, KeysOf};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::cpython::{Keys, each_key};
use crate::memory::adopt;
use crate::outcome::{NOT_FOUND, failed, store_code};
use crate::store::batches::check_key;
use crate::store::clients::Clients;
use crate::store::codes::Codes;
use crate::waiting::waiting;

/// Returns the bytes of an object, or an error code.
pub(crate) fn get<'py>(py: Python<'py>, clients: &Clients, key: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let first = match check_key(key) {
        Ok(()) => waiting(py, || clients.with(|member| member.get_short(key)).flatten())?,
        Err(code) => Err(code),
    };
    match first {
        Ok(Some(value)) => Ok(PyBytes::new(py, &value).into_any()),
        Ok(None) => get_long(py, clients, key),
        Err(code) => Ok(code.into_pyobject(py)?.into_any()),
    }
}

/// Returns the bytes of a long object, received directly into the memory of the Python value.
fn get_long<'py>(py: Python<'py>, clients: &Clients, key: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    // An object may be replaced by a longer one between the two requests; repeatedly, that is not to be expected.
    for _ in 0..4 {
        let size = waiting(py, || clients.with(|member| member.client.size(key)))?;
        let size = size.and_then(|size| size.map_err(|error| store_code(&error)));
        let bytes = match size {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Ok(failed(NOT_FOUND, "no such object").into_pyobject(py)?.into_any()),
            Err(code) => return Ok(code.into_pyobject(py)?.into_any()),
        };
        // SAFETY: a new object of so many bytes that no other code refers to; an error is the null pointer.
        let value = unsafe {
            let value = ffi::PyBytes_FromStringAndSize(std::ptr::null(), bytes as ffi::Py_ssize_t);
            Bound::from_owned_ptr_or_err(py, value)?
        };
        // SAFETY: it is such an object.
        let address = unsafe { ffi::PyBytes_AsString(value.as_ptr()) } as u64;
        // SAFETY: `value` keeps the bytes until after the call, and no code reads them before it has ended.
        let Some(region) = (unsafe { adopt(address, bytes) }) else { break };
        let got = waiting(py, || clients.with(|member| member.get_region(key, region, bytes)))?;
        match got {
            Ok(Ok(Some(got))) if got.bytes == bytes => return Ok(value),
            Ok(Ok(None)) => return Ok(failed(NOT_FOUND, "no such object").into_pyobject(py)?.into_any()),
            Ok(Ok(Some(_))) => {}
            Ok(Err(error)) if error.status() == Some(kvplane::Status::BufferTooSmall) => {}
            Ok(Err(error)) => return Ok(store_code(&error).into_pyobject(py)?.into_any()),
            Err(code) => return Ok(code.into_pyobject(py)?.into_any()),
        }
    }
    Ok(failed(-707, "the object was replaced repeatedly").into_pyobject(py)?.into_any())
}

/// Runs a query of many keys; invalid keys have an outcome of their own.
pub(crate) fn ask(
    py: Python<'_>,
    clients: &Clients,
    keys: &Keys,
    question: impl FnOnce(&mut Client, &[&[u8]]) -> Result<Vec<i64>, kvplane::Error> + Send,
) -> PyResult<Vec<i64>> {
    let codes = Codes::of(keys.iter().map(check_key));
    let good: Vec<&[u8]> = codes.good().map(|index| keys.get(index)).collect();
    if good.is_empty() {
        return Ok(codes.answered(Vec::new()));
    }
    let answers = waiting(py, || {
        let asked = clients.with(|member| question(&mut member.client, &good));
        let all = |code| vec![code; good.len()];
        asked.map_or_else(all, |answers| answers.unwrap_or_else(|error| all(store_code(&error))))
    })?;
    Ok(codes.answered(answers))
}

/// Runs a call about the objects under these keys. Returns for each 1 for true, 0 for false, or an error code.
pub(crate) fn each(
    clients: &Clients,
    keys: &Keys,
    call: impl FnOnce(&mut Client, &[&[u8]]) -> Result<Vec<Result<bool, kvplane::Error>>, kvplane::Error>,
) -> Vec<i64> {
    let keys: Vec<&[u8]> = keys.iter().collect();
    match clients.with(|member| call(&mut member.client, &keys)) {
        Ok(Ok(found)) => found.into_iter().map(|one| one.map_or_else(|why| store_code(&why), i64::from)).collect(),
        Ok(Err(why)) => vec![store_code(&why); keys.len()],
        Err(code) => vec![code; keys.len()],
    }
}

/// Returns for each key whether there is an object; or a code for each, if one at least is an error.
pub(crate) fn present(py: Python<'_>, clients: &Clients, keys: &Bound<'_, PyAny>) -> PyResult<(Vec<bool>, Vec<i64>)> {
    let mut names = KeysOf::new(clients.tenant());
    let (mut digests, mut bad) = (Vec::with_capacity(keys.len().unwrap_or(0)), Vec::new());
    each_key(keys, |key| {
        // The digest of an invalid key is not queried.
        if let Err(code) = check_key(key) {
            bad.push((digests.len(), code));
        }
        digests.push(names.digest(key));
    })?;
    if !bad.is_empty() {
        return Ok((Vec::new(), present_of_good(py, clients, &digests, &bad)?));
    }
    let asked = waiting(py, || clients.with(|member| member.client.batch_exists_by_digest(&digests)))?;
    let asked = asked.and_then(|found| found.map_err(|error| store_code(&error)));
    Ok(asked.map_or_else(|code| (Vec::new(), vec![code; digests.len()]), |found| (found, Vec::new())))
}

/// Like [`present`], where some keys are invalid: `bad` has the index and the code of each.
fn present_of_good(py: Python<'_>, clients: &Clients, digests: &[Digest], bad: &[(usize, i64)]) -> PyResult<Vec<i64>> {
    let mut checked = vec![Ok(()); digests.len()];
    bad.iter().for_each(|(at, code)| checked[*at] = Err(*code));
    let codes = Codes::of(checked.into_iter());
    let good: Vec<Digest> = codes.good().map(|index| digests[index]).collect();
    let asked = waiting(py, || clients.with(|member| member.client.batch_exists_by_digest(&good)))?;
    let asked = asked.and_then(|found| found.map_err(|error| store_code(&error)));
    let found = |found: Vec<bool>| found.into_iter().map(i64::from).collect();
    Ok(codes.answered(asked.map_or_else(|code| vec![code; good.len()], found)))
}

/// Runs a call about many objects. Returns their number, or an error code.
pub(crate) fn count(
    py: Python<'_>,
    clients: &Clients,
    call: impl FnOnce(&mut Client) -> Result<u64, kvplane::Error> + Send,
) -> PyResult<i64> {
    let objects = waiting(py, || clients.with(|member| call(&mut member.client)))?;
    Ok(objects.map_or_else(|code| code, |count| count.map_or_else(|error| store_code(&error), |count| count as i64)))
}
