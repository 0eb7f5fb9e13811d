//! FFI boundary: conversion of C's strings, arrays and engine pointers; no panic unwinds into C.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::engine::Engine;
use crate::handles::ProcessLocal;

/// `ERR_INVALID_ARGUMENT`.
pub(crate) const INVALID_ARGUMENT: c_int = -1;
/// Result of a panic, and of a call in a forked child: `ERR_CONTEXT`.
const INTERNAL: c_int = -202;

/// Runs `work` on the engine behind a pointer; a null pointer, a panic, and a fork of its process are errors.
///
/// # Safety
/// `engine` is null, or came from `createTransferEngine` and was not destroyed.
pub(crate) unsafe fn with_engine(engine: *mut c_void, work: impl FnOnce(&Engine) -> Result<c_int, c_int>) -> c_int {
    // SAFETY: a pointer that is not null is a live engine, by the caller's promise.
    let Some(engine) = (unsafe { engine.cast::<ProcessLocal<Engine>>().as_ref() }) else { return INVALID_ARGUMENT };
    let Some(engine) = engine.get() else { return INTERNAL };
    guarded(INTERNAL, || work(engine).unwrap_or_else(|error| error))
}

/// Runs `work`; returns `otherwise` if it panics, which must not unwind into C.
pub(crate) fn guarded<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(otherwise)
}

/// Converts a string from C; `None` when it is null or not UTF-8.
///
/// # Safety
/// `text` is null or points to bytes with a final zero that do not change during the call.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: by the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

/// Converts a string from C of at most `most` bytes, reading no further; `None` when it is null, longer or not UTF-8.
///
/// # Safety
/// `text` is null or points to bytes up to a final zero, or to more than `most` bytes, that do not change during the
/// call.
pub(crate) unsafe fn text_within<'a>(text: *const c_char, most: usize) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: by the caller's promise: every byte before this one was not zero, and within the limit.
    let length = (0..=most).find(|&at| unsafe { *text.add(at) } == 0)?;
    // SAFETY: as above.
    std::str::from_utf8(unsafe { std::slice::from_raw_parts(text.cast(), length) }).ok()
}

/// Converts an array from C; empty for no elements, `None` for a null pointer with some.
///
/// # Safety
/// `first` is null or points to `count` initialised elements that do not change during the call.
pub(crate) unsafe fn array<'a, T>(first: *const T, count: usize) -> Option<&'a [T]> {
    if count == 0 {
        return Some(&[]);
    }
    if first.is_null() || count > isize::MAX as usize / size_of::<T>().max(1) {
        return None;
    }
    // SAFETY: by the caller's promise.
    Some(unsafe { std::slice::from_raw_parts(first, count) })
}

/// Writes a text and a final zero, truncated to `bytes`.
///
/// # Safety
/// `out` points to `bytes` writable bytes, at least one.
pub(crate) unsafe fn write_text(out: *mut c_char, bytes: usize, text: &str) {
    let kept = text.len().min(bytes - 1);
    // SAFETY: at most `bytes` are written, the final zero included; a Rust string and C's buffer do not overlap.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), out, kept);
        *out.add(kept) = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_do_not_unwind_into_c() {
        assert_eq!(guarded(7, || panic!("on purpose")), 7);
    }

    #[test]
    fn texts_are_truncated_and_terminated() {
        let mut out = [b'x' as c_char; 6];
        // SAFETY: five writable bytes.
        unsafe { write_text(out.as_mut_ptr(), 5, "abcdefgh") };
        assert_eq!(out.map(|byte| byte as u8), *b"abcd\0x");
    }

    #[test]
    fn texts_are_read_up_to_their_limit() {
        let text = c"abc".as_ptr();
        // SAFETY: a text with a final zero, the beginning of one, and null.
        unsafe {
            assert_eq!(text_within(text, 3), Some("abc"));
            assert_eq!(text_within(text, 2), None);
            assert_eq!(text_within(text.add(3), 0), Some(""));
            assert_eq!(text_within(c"\xff".as_ptr(), 3), None);
            assert_eq!(text_within(std::ptr::null(), 3), None);
        }
    }

    #[test]
    fn null_pointers_are_rejected() {
        // SAFETY: null is allowed in all of these.
        unsafe {
            assert!(text(std::ptr::null()).is_none());
            assert!(array::<u64>(std::ptr::null(), 1).is_none());
            assert_eq!(array::<u64>(std::ptr::null(), 0), Some(&[][..]));
            assert_eq!(with_engine(std::ptr::null_mut(), |_| Ok(0)), INVALID_ARGUMENT);
        }
    }
}
