//! Segments of peers: opening and closing.

use std::ffi::{c_char, c_int, c_void};

use std::sync::atomic::Ordering;

use kvplane::SegmentHandle;

use crate::engine::Engine;
use crate::rim::{INVALID_ARGUMENT, text, with_engine};

fn handle(id: i32) -> Result<SegmentHandle, c_int> {
    u32::try_from(id).map(SegmentHandle::from_bits).map_err(|_| INVALID_ARGUMENT)
}

/// Converts a handle. Handles are small numbers; one that does not fit is a bug.
fn number(handle: SegmentHandle) -> Result<c_int, c_int> {
    i32::try_from(handle.to_bits()).map_err(|_| INVALID_ARGUMENT)
}

/// Returns the name of a segment; the name of a file only where the file transport is installed.
///
/// # Safety
/// A string with a final zero, or null.
unsafe fn segment(engine: &Engine, name: *const c_char) -> Result<&str, c_int> {
    // SAFETY: by the caller's promise.
    let name = unsafe { text(name) }.ok_or(INVALID_ARGUMENT)?.trim_start_matches('/');
    let allowed = engine.files.load(Ordering::Relaxed) || !name.starts_with("file:");
    if allowed { Ok(name) } else { Err(INVALID_ARGUMENT) }
}

/// Opens a peer's segment, or a file, by name and returns its handle, or a negative code.
///
/// # Safety
/// A live engine and a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn openSegment(engine: *mut c_void, segment_name: *const c_char) -> i32 {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            let name = segment(engine, segment_name)?;
            number(engine.engine.open_segment(name).map_err(|error| error.code())?)
        })
    }
}

/// Opens a segment like [`openSegment`], and requests its description from the peer even if it is open.
///
/// # Safety
/// A live engine and a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn openSegmentNoCache(engine: *mut c_void, segment_name: *const c_char) -> i32 {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            let name = segment(engine, segment_name)?;
            number(engine.engine.segments().open_no_cache(name).map_err(|error| error.code())?)
        })
    }
}

/// Closes a segment.
///
/// # Safety
/// A live engine.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn closeSegment(engine: *mut c_void, segment_id: i32) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            engine.engine.close_segment(handle(segment_id)?).map_err(|error| error.code())?;
            Ok(0)
        })
    }
}

/// Opens a segment, and returns 0 or a negative code. Opening connects, which is all the warm-up there is.
///
/// # Safety
/// A live engine and a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn warmupEfaSegment(engine: *mut c_void, segment_name: *const c_char) -> c_int {
    // SAFETY: by the caller's promise.
    let opened = unsafe { openSegment(engine, segment_name) };
    opened.min(0)
}

/// Removes the engine's own descriptor from the metadata store, whatever name is passed.
///
/// # Safety
/// A live engine and a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn removeLocalSegment(engine: *mut c_void, segment_name: *const c_char) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            text(segment_name).ok_or(INVALID_ARGUMENT)?;
            engine.engine.directory().withdraw();
            Ok(0)
        })
    }
}

/// Refreshes the descriptions of all open segments.
///
/// # Safety
/// A live engine.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn syncSegmentCache(engine: *mut c_void) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            engine.engine.segments().refresh().map_err(|error| error.code())?;
            Ok(0)
        })
    }
}
