//! Segments of TENT's interface: opening, closing and describing them.

use std::ffi::{c_char, c_int, c_void};

use kvplane::SegmentHandle;

use super::arrays::GivenArrays;
use super::error::{TentError, with_engine};
use super::types::{BufferInfo, LOCATION_BYTES, SegmentInfo, put_text};
use crate::rim::{guarded, text_within};

/// Longest name of a segment: that of a file contains its path.
const SEGMENT_NAME_BYTES: usize = 8192;
/// Location of memory whose location is unknown.
const ANYWHERE: &str = "*";

/// Buffers that C code has.
static BUFFERS: GivenArrays<BufferInfo> = GivenArrays::new();

/// Returns the handle of a number.
pub(super) fn handle(number: u64) -> Result<SegmentHandle, TentError> {
    let bits = u32::try_from(number).map_err(|_| TentError::Number {
        what: "the handle of a segment",
        number: number.try_into().unwrap_or(i64::MAX),
    })?;
    Ok(SegmentHandle::from_bits(bits))
}

/// Opens a segment and writes its handle; the engine's own for its own name, and for an empty one.
///
/// # Safety
/// A place for the handle and a string with a final zero, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_open_segment(
    engine: *mut c_void,
    handle: *mut u64,
    segment_name: *const c_char,
) -> c_int {
    with_engine("tent_open_segment", engine, |engine| {
        if handle.is_null() {
            return Err(TentError::Null { what: "the place for the handle" });
        }
        // SAFETY: by the caller's promise.
        let name = unsafe { text_within(segment_name, SEGMENT_NAME_BYTES) };
        let name = name.ok_or(TentError::Text { what: "the segment's name", most: SEGMENT_NAME_BYTES })?;
        let opened = if name.is_empty() { SegmentHandle::LOCAL } else { engine.engine.open_segment(name)? };
        // SAFETY: by the caller's promise.
        unsafe { handle.write(opened.to_bits().into()) };
        Ok(())
    })
}

/// Closes a segment.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn tent_close_segment(engine: *mut c_void, segment: u64) -> c_int {
    with_engine("tent_close_segment", engine, |engine| Ok(engine.engine.close_segment(handle(segment)?)?))
}

/// Writes the description of a segment, whose buffers are freed by [`tent_free_segment_info`].
///
/// # Safety
/// A place for the description, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_get_segment_info(
    engine: *mut c_void,
    segment: u64,
    info: *mut SegmentInfo,
) -> c_int {
    with_engine("tent_get_segment_info", engine, |engine| {
        if info.is_null() {
            return Err(TentError::Null { what: "the place for the description" });
        }
        let found = engine.engine.segment_info(handle(segment)?)?;
        let buffers: Vec<BufferInfo> = found
            .buffers
            .iter()
            .map(|buffer| {
                let mut location = [0; LOCATION_BYTES];
                put_text(&mut location, buffer.location.as_deref().unwrap_or(ANYWHERE));
                BufferInfo { base: buffer.address, length: buffer.bytes, location }
            })
            .collect();
        let kind = c_int::from(found.file.is_some());
        let num_buffers = buffers.len() as c_int;
        // SAFETY: by the caller's promise.
        unsafe { info.write(SegmentInfo { kind, num_buffers, buffers: BUFFERS.give(buffers) }) };
        Ok(())
    })
}

/// Frees the buffers of a description; null is ignored, and so are buffers that were freed.
///
/// # Safety
/// A description that [`tent_get_segment_info`] wrote, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_free_segment_info(info: *mut SegmentInfo) {
    guarded((), || {
        // SAFETY: by the caller's promise.
        if let Some(info) = unsafe { info.as_mut() } {
            BUFFERS.take_back(info.buffers);
            (info.num_buffers, info.buffers) = (0, std::ptr::null_mut());
        }
    });
}
