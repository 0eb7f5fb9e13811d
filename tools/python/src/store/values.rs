//! Store calls on Python values, and queries of keys.

use std::sync::Arc;

use kvplane::{Client, Digest, Got, KeysOf, Region};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::cpython::{Keys, each_key};
use crate::memory::adopt;
use crate::outcome::{INTERNAL, NOT_FOUND, failed, store_code};
use crate::store::Store;
use crate::store::arguments::KeepOptions;
use crate::store::batches::check_key;
use crate::waiting::waiting;

impl Store {
    /// Stores a copy of a value.
    pub(crate) fn put_copied(&self, keys: &Keys, value: &[u8], keeping: &KeepOptions) -> i64 {
        let put = self.clients.with(|member| {
            let options = keeping.with(&mut member.client);
            member.client.put_with(keys.get(0), value, options)
        });
        put.map_or_else(|code| code, |put| put.map_or_else(|error| store_code(&error), |_| 0))
    }

    /// Reads an object into memory that is registered for this call.
    pub(crate) fn get_whole(
        &self,
        key: &[u8],
        region: Arc<Region>,
        bytes: u64,
    ) -> Result<Result<Option<Got>, kvplane::Error>, i64> {
        self.clients.with(|member| {
            let buffer = member.client.register(region);
            let got = member.client.get_into(key, buffer.slice(0, bytes as usize));
            member.client.unregister(buffer);
            got
        })
    }

    /// Returns the bytes of an object, or an error code.
    pub(crate) fn get_value<'py>(&self, py: Python<'py>, key: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        let first = match check_key(key) {
            Ok(()) => waiting(py, || self.get_short(key))?,
            Err(code) => Err(code),
        };
        match first {
            Ok(Some(value)) => Ok(PyBytes::new(py, &value).into_any()),
            Ok(None) => self.get_long(py, key),
            Err(code) => Ok(code.into_pyobject(py)?.into_any()),
        }
    }

    /// Returns the bytes of a short object; `None` for a long one.
    fn get_short(&self, key: &[u8]) -> Result<Option<Vec<u8>>, i64> {
        self.clients.with(|member| {
            let bounce = member.bounce().map_err(|error| store_code(&error))?;
            let whole = bounce.slice(0, bounce.region().bytes());
            match member.client.get_into(key, whole) {
                Ok(Some(got)) => {
                    let mut value = vec![0; got.bytes as usize];
                    bounce.region().copy_out(0, &mut value);
                    Ok(Some(value))
                }
                Ok(None) => Err(failed(NOT_FOUND, "no such object")),
                Err(error) if error.status() == Some(kvplane::Status::BufferTooSmall) => Ok(None),
                Err(error) => Err(store_code(&error)),
            }
        })?
    }

    /// Returns the bytes of a long object, received directly into the memory of the Python value.
    fn get_long<'py>(&self, py: Python<'py>, key: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        // An object may be replaced by a longer one between the two requests; repeatedly, that is not to be expected.
        for _ in 0..4 {
            let size = waiting(py, || self.clients.with(|member| member.client.size(key)))?;
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
            let got = waiting(py, || self.get_whole(key, region, bytes))?;
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
        &self,
        py: Python<'_>,
        keys: &Keys,
        question: impl FnOnce(&mut Client, &[&[u8]]) -> Result<Vec<i64>, kvplane::Error> + Send,
    ) -> PyResult<Vec<i64>> {
        let mut codes: Vec<i64> = keys.iter().map(|key| check_key(key).err().unwrap_or(0)).collect();
        let good: Vec<&[u8]> = keys.iter().zip(&codes).filter(|(_, code)| **code == 0).map(|(key, _)| key).collect();
        if good.is_empty() {
            return Ok(codes);
        }
        let answers = waiting(py, || {
            let asked = self.clients.with(|member| question(&mut member.client, &good));
            let all = |code| vec![code; good.len()];
            asked.map_or_else(all, |answers| answers.unwrap_or_else(|error| all(store_code(&error))))
        })?;
        let mut answers = answers.into_iter();
        for code in codes.iter_mut().filter(|code| **code == 0) {
            *code = answers.next().unwrap_or(INTERNAL);
        }
        Ok(codes)
    }

    /// Returns for each key whether there is an object; or a code for each, if one at least is an error.
    pub(crate) fn present(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<(Vec<bool>, Vec<i64>)> {
        let mut names = KeysOf::new(self.clients.tenant());
        let (mut digests, mut bad) = (Vec::with_capacity(keys.len().unwrap_or(0)), Vec::new());
        each_key(keys, |key| {
            // The digest of an invalid key is not queried.
            if let Err(code) = check_key(key) {
                bad.push((digests.len(), code));
            }
            digests.push(names.digest(key));
        })?;
        if !bad.is_empty() {
            return Ok((Vec::new(), self.present_of_good(py, &digests, &bad)?));
        }
        let asked = waiting(py, || self.clients.with(|member| member.client.batch_exists_by_digest(&digests)))?;
        let asked = asked.and_then(|found| found.map_err(|error| store_code(&error)));
        Ok(asked.map_or_else(|code| (Vec::new(), vec![code; digests.len()]), |found| (found, Vec::new())))
    }

    /// Like [`Self::present`], where some keys are invalid.
    fn present_of_good(&self, py: Python<'_>, digests: &[Digest], bad: &[(usize, i64)]) -> PyResult<Vec<i64>> {
        let mut codes = vec![0; digests.len()];
        bad.iter().for_each(|(at, code)| codes[*at] = *code);
        let good: Vec<Digest> =
            digests.iter().zip(&codes).filter(|(_, code)| **code == 0).map(|(one, _)| *one).collect();
        let asked = waiting(py, || self.clients.with(|member| member.client.batch_exists_by_digest(&good)))?;
        let asked = asked.and_then(|found| found.map_err(|error| store_code(&error)));
        let mut answers = asked
            .map_or_else(|code| vec![code; good.len()], |found| found.into_iter().map(i64::from).collect::<Vec<i64>>())
            .into_iter();
        for code in codes.iter_mut().filter(|code| **code == 0) {
            *code = answers.next().unwrap_or(INTERNAL);
        }
        Ok(codes)
    }

    /// Runs a removal of many objects. Returns their number, or an error code.
    pub(crate) fn count(
        &self,
        py: Python<'_>,
        remove: impl FnOnce(&mut Client) -> Result<u64, kvplane::Error> + Send,
    ) -> PyResult<i64> {
        let removed = waiting(py, || self.clients.with(|member| remove(&mut member.client)))?;
        Ok(removed
            .map_or_else(|code| code, |count| count.map_or_else(|error| store_code(&error), |count| count as i64)))
    }
}
