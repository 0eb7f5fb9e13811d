//! Conversion of keys, numbers and buffers from Python objects.
//!
//! Declares three functions that every CPython since 3.3 exports, but that its stable ABI contains only since 3.10 and
//! 3.11: the UTF-8 of a string, and the buffer protocol. The layout of `Py_buffer` is the same in all of them.

use std::ffi::{c_char, c_int, c_void};

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

/// CPython's `Py_buffer`.
#[repr(C)]
struct PyBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: ffi::Py_ssize_t,
    itemsize: ffi::Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut ffi::Py_ssize_t,
    strides: *mut ffi::Py_ssize_t,
    suboffsets: *mut ffi::Py_ssize_t,
    internal: *mut c_void,
}

/// Flags of contiguous bytes, as in `PyBUF_SIMPLE`, of writable ones, as in `PyBUF_WRITABLE`, and of a contiguous array
/// with the type of its elements, as in `PyBUF_ND` and `PyBUF_FORMAT`.
const SIMPLE: c_int = 0;
const WRITABLE: c_int = 1;
const TYPED: c_int = 0x0008 | 0x0004;

// SAFETY: these are CPython's own functions, with the signatures of its headers.
unsafe extern "C" {
    fn PyUnicode_AsUTF8AndSize(text: *mut ffi::PyObject, bytes: *mut ffi::Py_ssize_t) -> *const c_char;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut PyBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut PyBuffer);
}

/// Bytes of an object with the buffer protocol, held until this is dropped, which needs the GIL.
pub(crate) struct View<'py> {
    // Boxed: some exporters keep the address of the view that they filled in.
    buffer: Box<PyBuffer>,
    _object: Bound<'py, PyAny>,
}

impl<'py> View<'py> {
    /// Returns the contiguous bytes of `object`, writable if `writable`.
    ///
    /// # Errors
    /// Python's error for objects without a buffer (`TypeError`) or without a suitable one (`BufferError`).
    pub(crate) fn of(object: &Bound<'py, PyAny>, writable: bool) -> PyResult<Self> {
        Self::with(object, if writable { WRITABLE } else { SIMPLE })
    }

    fn with(object: &Bound<'py, PyAny>, flags: c_int) -> PyResult<Self> {
        let mut buffer = Box::new(PyBuffer {
            buf: std::ptr::null_mut(),
            obj: std::ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 0,
            ndim: 0,
            format: std::ptr::null_mut(),
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            suboffsets: std::ptr::null_mut(),
            internal: std::ptr::null_mut(),
        });
        // SAFETY: a live object, under the GIL, and a view to fill in.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *buffer, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self { buffer, _object: object.clone() })
    }

    /// Returns the address of the bytes.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.buf as u64
    }

    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.buffer.len as u64
    }

    /// Returns a copy of the elements of a contiguous array of integers of 64 bits, in one dimension; `None` for
    /// objects that are no such array, and for arrays with a negative element.
    fn words(object: &Bound<'py, PyAny>) -> Option<Vec<u64>> {
        let view = Self::with(object, TYPED).ok()?;
        let (bytes, format) = (usize::try_from(view.buffer.len).ok()?, view.buffer.format);
        if view.buffer.itemsize != 8 || view.buffer.ndim != 1 || format.is_null() {
            return None;
        }
        // SAFETY: the exporter's text, which ends with a zero, and lives as long as the view.
        let format = unsafe { std::ffi::CStr::from_ptr(format) }.to_bytes();
        let kind = format.strip_prefix(b"@").or_else(|| format.strip_prefix(b"=")).unwrap_or(format);
        let kind = kind.strip_prefix(b"<").filter(|_| cfg!(target_endian = "little")).unwrap_or(kind);
        if !matches!(kind, b"Q" | b"q" | b"L" | b"l" | b"N" | b"n") {
            return None;
        }
        let mut words = vec![0_u64; bytes / 8];
        if bytes > 0 {
            // SAFETY: so many bytes at both ends; the exporter holds its own for this view, and they do not change
            // under the GIL, except by code that writes without it, whose race it is.
            unsafe { std::ptr::copy_nonoverlapping(view.buffer.buf.cast::<u8>(), words.as_mut_ptr().cast(), bytes) };
        }
        let is_signed = matches!(kind, b"q" | b"l" | b"n");
        (!is_signed || words.iter().all(|word| word >> 63 == 0)).then_some(words)
    }

    /// Returns a copy of the bytes.
    pub(crate) fn to_vec(&self) -> Vec<u8> {
        if self.buffer.len == 0 {
            return Vec::new();
        }
        // SAFETY: the exporter holds these bytes for this view, and they do not change under the GIL, except by code
        // that writes without it, whose race it is: then the copy is a mix.
        unsafe { std::slice::from_raw_parts(self.buffer.buf.cast::<u8>(), self.buffer.len as usize) }.to_vec()
    }
}

impl Drop for View<'_> {
    fn drop(&mut self) {
        // SAFETY: it was filled in by `PyObject_GetBuffer` and is released once.
        unsafe { PyBuffer_Release(&raw mut *self.buffer) };
    }
}

/// Keys, copied from Python: its list may change during the call.
#[derive(Default)]
pub(crate) struct Keys {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Keys {
    /// Converts one key: a `str`, taken as UTF-8, or `bytes`.
    ///
    /// # Errors
    /// `TypeError` for anything else.
    pub(crate) fn one(key: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut keys = Self::default();
        keys.add(key_bytes(key)?);
        Ok(keys)
    }

    /// Converts a sequence of keys.
    ///
    /// # Errors
    /// `TypeError` for a single `str`, and for any element that is not a key.
    pub(crate) fn many(list: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut keys = Self::default();
        each_key(list, |key| keys.add(key))?;
        Ok(keys)
    }

    /// Appends a key.
    pub(crate) fn add(&mut self, key: &[u8]) {
        self.bytes.extend_from_slice(key);
        self.ends.push(self.bytes.len());
    }

    /// Returns the number of keys.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the key at `index`.
    pub(crate) fn get(&self, index: usize) -> &[u8] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start..self.ends[index]]
    }

    /// Returns an iterator over the keys.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).map(|index| self.get(index))
    }
}

/// Calls `each` with each key of a sequence.
///
/// # Errors
/// Errors of [`Keys::many`].
pub(crate) fn each_key(list: &Bound<'_, PyAny>, mut each: impl FnMut(&[u8])) -> PyResult<()> {
    if list.is_instance_of::<PyString>() || list.is_instance_of::<PyBytes>() {
        return Err(PyTypeError::new_err("keys is a single key: pass a list of keys"));
    }
    if let Ok(list) = list.cast::<PyList>() {
        for key in list {
            each(key_bytes(&key)?);
        }
        return Ok(());
    }
    for key in list.try_iter()? {
        each(key_bytes(&key?)?);
    }
    Ok(())
}

/// Returns the bytes of a key in Python's memory.
fn key_bytes<'a>(key: &'a Bound<'_, PyAny>) -> PyResult<&'a [u8]> {
    if let Ok(text) = key.cast::<PyString>() {
        let mut bytes = 0;
        // SAFETY: a live string, under the GIL.
        let start = unsafe { PyUnicode_AsUTF8AndSize(text.as_ptr(), &raw mut bytes) };
        if start.is_null() {
            return Err(PyErr::fetch(key.py()));
        }
        // SAFETY: the length is CPython's; the string keeps the bytes unchanged as long as it lives.
        Ok(unsafe { std::slice::from_raw_parts(start.cast::<u8>(), bytes as usize) })
    } else if let Ok(bytes) = key.cast::<PyBytes>() {
        Ok(bytes.as_bytes())
    } else {
        let name = key.get_type().name()?;
        Err(PyTypeError::new_err(format!("a key is str or bytes, not {name}")))
    }
}

/// Returns views of a sequence of objects with the buffer protocol.
///
/// # Errors
/// Errors of [`View::of`].
pub(crate) fn views<'py>(list: &Bound<'py, PyAny>, writable: bool) -> PyResult<Vec<View<'py>>> {
    list.try_iter()?.map(|object| View::of(&object?, writable)).collect()
}

/// Returns the addresses and lengths of views.
pub(crate) fn places(views: &[View<'_>]) -> Vec<(u64, u64)> {
    views.iter().map(|view| (view.address(), view.bytes())).collect()
}

/// Converts a sequence of numbers that are addresses, lengths or offsets: a list, or an array of integers of 64 bits,
/// which is copied as a whole.
///
/// # Errors
/// `TypeError` for anything that is not such a number, including negative numbers and those above 2^64 - 1.
pub(crate) fn numbers(list: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let is_sequence = list.is_instance_of::<PyList>() || list.is_instance_of::<PyTuple>();
    if let Some(words) = (!is_sequence).then(|| View::words(list)).flatten() {
        return Ok(words);
    }
    let mut numbers = Vec::with_capacity(list.len().unwrap_or(0));
    for number in list.try_iter()? {
        numbers.push(number_of(&number?)?);
    }
    Ok(numbers)
}

/// Converts sequences of numbers.
///
/// # Errors
/// Errors of [`numbers`].
pub(crate) fn number_lists(lists: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u64>>> {
    lists.try_iter()?.map(|list| numbers(&list?)).collect()
}

/// Converts a number that is an address, a length or an offset.
///
/// # Errors
/// Errors of [`numbers`].
pub(crate) fn number_of(number: &Bound<'_, PyAny>) -> PyResult<u64> {
    number.extract::<u64>().map_err(|error| {
        if error.is_instance_of::<PyOverflowError>(number.py()) {
            return PyTypeError::new_err(format!("{number} is not an address or length: these go from 0 to 2^64 - 1"));
        }
        error
    })
}
