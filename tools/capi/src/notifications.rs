//! Named messages between engines.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;

use kvplane::{Notice, SegmentHandle};

use crate::rim::{INVALID_ARGUMENT, guarded, text, with_engine};
use crate::types::NotifyMessage;

/// Converts a message from C; `None` when a string of it is null or not UTF-8.
///
/// # Safety
/// The strings are null or have a final zero.
pub(crate) unsafe fn message(message: &NotifyMessage) -> Option<Notice> {
    // SAFETY: by the caller's promise.
    let (name, text) = unsafe { (text(message.name)?, text(message.msg)?) };
    Some(Notice { name: name.to_owned(), message: text.to_owned() })
}

/// Allocates a string for C, to be freed by [`freeNotifsMsgBuf`]. A zero byte inside ends it, as it would in C.
fn give(text: &str) -> *mut c_char {
    let bytes = text.split('\0').next().unwrap_or_default();
    CString::new(bytes).map_or(ptr::null_mut(), CString::into_raw)
}

/// Returns the messages received since the last call and writes their number to `size`; null if there are none.
///
/// # Safety
/// A live engine and a place for the count.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getNotifsFromEngine(engine: *mut c_void, size: *mut c_int) -> *mut NotifyMessage {
    if size.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: checked above.
    unsafe { size.write(0) };
    let mut first = ptr::null_mut();
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            let messages = engine.engine.take_notices();
            if messages.is_empty() {
                return Ok(0);
            }
            let given: Box<[NotifyMessage]> =
                messages.iter().map(|one| NotifyMessage { name: give(&one.name), msg: give(&one.message) }).collect();
            size.write(given.len() as c_int);
            first = Box::into_raw(given).cast();
            Ok(0)
        });
    }
    first
}

/// Frees the messages that [`getNotifsFromEngine`] returned; null is ignored.
///
/// # Safety
/// `msg` and `size` come from one call of [`getNotifsFromEngine`], and are freed once.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn freeNotifsMsgBuf(msg: *mut NotifyMessage, size: c_int) -> c_int {
    let Ok(count) = usize::try_from(size) else { return INVALID_ARGUMENT };
    if msg.is_null() {
        return 0;
    }
    guarded(INVALID_ARGUMENT, || {
        // SAFETY: a box of that length was given away, and each string in it.
        unsafe {
            let given = Box::from_raw(ptr::slice_from_raw_parts_mut(msg, count));
            for text in given.iter().flat_map(|one| [one.name, one.msg]).filter(|text| !text.is_null()) {
                drop(CString::from_raw(text));
            }
        }
        0
    })
}

/// Sends a message to the engine of an open segment.
///
/// # Safety
/// A live engine; the message's strings have a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn genNotifyInEngine(
    engine: *mut c_void,
    target_id: u64,
    notify_msg: NotifyMessage,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            let message = message(&notify_msg).ok_or(INVALID_ARGUMENT)?;
            let target = u32::try_from(target_id).map_err(|_| INVALID_ARGUMENT)?;
            engine.engine.notify(SegmentHandle::from_bits(target), &message).map_err(|error| error.code())?;
            Ok(0)
        })
    }
}
