//! Notifications of TENT's interface: named messages between engines.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use kvplane::Notice;

use super::arrays::GivenArrays;
use super::error::{TentError, print_once, with_engine};
use super::segments::handle;
use super::types::{MESSAGE_BYTES, NAME_BYTES, NotifiInfo, NotifiRecord, put_text};
use crate::rim::{guarded, text_within};

/// Records that C code has.
static RECORDS: GivenArrays<NotifiRecord> = GivenArrays::new();

/// Converts a notification from C. What a receiver's record would cut is refused.
///
/// # Safety
/// Strings with a final zero, or null.
pub(super) unsafe fn notice(name: *const c_char, message: *const c_char) -> Result<Notice, TentError> {
    let text = |text: *const c_char, what, most| {
        // SAFETY: by the caller's promise.
        let found = if text.is_null() { Err(TentError::Null { what }) } else { Ok(unsafe { text_within(text, most) }) };
        found?.map(str::to_owned).ok_or(TentError::Text { what, most })
    };
    Ok(Notice {
        name: text(name, "the notification's name", NAME_BYTES - 1)?,
        message: text(message, "the notification's text", MESSAGE_BYTES - 1)?,
    })
}

/// Sends a notification to the engine of an open segment.
///
/// # Safety
/// Strings with a final zero, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_send_notifs(
    engine: *mut c_void,
    segment: u64,
    name: *const c_char,
    message: *const c_char,
) -> c_int {
    with_engine("tent_send_notifs", engine, |engine| {
        // SAFETY: by the caller's promise.
        let notice = unsafe { notice(name, message) }?;
        Ok(engine.engine.notify(handle(segment)?, &notice)?)
    })
}

/// Writes the notifications received since the last call, whose records are freed by [`tent_free_notifs`].
///
/// # Safety
/// A place for them, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_recv_notifs(engine: *mut c_void, info: *mut NotifiInfo) -> c_int {
    with_engine("tent_recv_notifs", engine, |engine| {
        if info.is_null() {
            return Err(TentError::Null { what: "the place for the notifications" });
        }
        let records: Vec<NotifiRecord> = engine.engine.take_notices().iter().map(record).collect();
        let num_records = records.len() as c_int;
        // SAFETY: by the caller's promise.
        unsafe { info.write(NotifiInfo { num_records, records: RECORDS.give(records) }) };
        Ok(())
    })
}

/// Converts a notice; one that another interface sent may be too long for a record.
fn record(notice: &Notice) -> NotifiRecord {
    let mut record = NotifiRecord { handle: 0, name: [0; NAME_BYTES], msg: [0; MESSAGE_BYTES] };
    let whole = [put_text(&mut record.name, &notice.name), put_text(&mut record.msg, &notice.message)];
    if whole.contains(&false) {
        print_once("tent_recv_notifs", &"a notification was longer than its record, and was cut");
    }
    record
}

/// Frees the records of notifications; null is ignored, and so are records that were freed.
///
/// # Safety
/// Notifications that [`tent_recv_notifs`] wrote, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_free_notifs(info: *mut NotifiInfo) {
    guarded((), || {
        // SAFETY: by the caller's promise.
        if let Some(info) = unsafe { info.as_mut() } {
            RECORDS.take_back(info.records);
            (info.num_records, info.records) = (0, ptr::null_mut());
        }
    });
}
