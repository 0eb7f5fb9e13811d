//! Batches of transfers of TENT's interface.

use std::ffi::{c_char, c_int, c_void};

use kvplane::{NoticeTargets, Opcode, Priority, SegmentHandle, SubmitOptions, TaskState, TaskStatus, TransferRequest};

use super::engine::{ENGINES, Engine};
use super::error::{TentError, print_once, with_engine};
use super::notifications::notice;
use super::segments::handle;
use super::types::{Request, Status};
use crate::links::write_loads;
use crate::rim::{array, guarded};
use crate::types::NicLoad;

/// Result of an allocation on an engine that does not exist.
const NO_ENGINE: u64 = u64::MAX;
/// Result of an allocation beyond a limit.
const NO_BATCH: u64 = 0;

/// Allocates a batch for up to `batch_size` transfers.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn tent_allocate_batch(engine: *mut c_void, batch_size: usize) -> u64 {
    guarded(NO_BATCH, || {
        let found = ENGINES.get(engine).map_err(TentError::from);
        let absent = if found.is_err() { NO_ENGINE } else { NO_BATCH };
        found.and_then(|engine| Ok(engine.batches.add(batch_size)?)).unwrap_or_else(|error| {
            print_once("tent_allocate_batch", &error);
            absent
        })
    })
}

/// Frees a batch, once its transfers have ended.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn tent_free_batch(engine: *mut c_void, batch_id: u64) -> c_int {
    with_engine("tent_free_batch", engine, |engine| Ok(engine.batches.release(batch_id)?))
}

/// Converts a request, and checks its transport.
fn request(engine: &Engine, entry: &Request) -> Result<TransferRequest, TentError> {
    let opcode = match entry.opcode {
        0 => Opcode::Read,
        1 => Opcode::Write,
        other => return Err(TentError::Number { what: "the opcode", number: other.into() }),
    };
    let target = handle(entry.target_id)?;
    if entry.transport_hint != 0 {
        let to_file = target != SegmentHandle::LOCAL && engine.engine.segment_info(target)?.file.is_some();
        engine.transports.check_hint(entry.transport_hint, to_file)?;
    }
    let (source, target_offset, length) = (entry.source as u64, entry.target_offset, entry.length);
    Ok(TransferRequest { opcode, source, target, target_offset, length })
}

/// Returns the class of the most urgent request: a submission has one.
fn priority(entries: &[Request]) -> Result<Option<Priority>, TentError> {
    let mut least = usize::MAX;
    for entry in entries {
        let class = usize::try_from(entry.priority).ok().filter(|class| *class < Priority::ALL.len());
        let number = entry.priority.into();
        least = least.min(class.ok_or(TentError::Number { what: "the priority", number })?);
    }
    Ok(Priority::ALL.get(least).copied())
}

/// Starts the transfers of an array.
///
/// # Safety
/// Null, or an array of `count` requests, whose memory stays until they have ended.
unsafe fn submit(
    engine: &Engine,
    batch_id: u64,
    entries: *mut Request,
    count: usize,
    options: SubmitOptions,
) -> Result<(), TentError> {
    if entries.is_null() {
        return Err(TentError::Null { what: "the array of requests" });
    }
    let batch = engine.batches.get(batch_id)?;
    // Before the array is read, which is not so long if the count is wrong.
    batch.check_capacity(count)?;
    // SAFETY: by the caller's promise.
    let entries = unsafe { array(entries, count) }.ok_or(TentError::Null { what: "the array of requests" })?;
    let options = SubmitOptions { priority: priority(entries)?, ..options };
    let requests: Result<Vec<_>, TentError> = entries.iter().map(|entry| request(engine, entry)).collect();
    Ok(batch.submit(&engine.engine, &requests?, &options)?)
}

/// Validates the requests of a batch as a whole and starts them.
///
/// # Safety
/// Null, or an array of `count` requests, whose memory stays until they have ended.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_submit(
    engine: *mut c_void,
    batch_id: u64,
    entries: *mut Request,
    count: usize,
) -> c_int {
    with_engine("tent_submit", engine, |engine| {
        // SAFETY: by the caller's promise.
        unsafe { submit(engine, batch_id, entries, count, SubmitOptions::default()) }
    })
}

/// Starts transfers like [`tent_submit`], and notifies the owners of their segments when all have completed.
///
/// # Safety
/// Conditions of [`tent_submit`]; strings with a final zero, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_submit_notif(
    engine: *mut c_void,
    batch_id: u64,
    entries: *mut Request,
    count: usize,
    name: *const c_char,
    message: *const c_char,
) -> c_int {
    with_engine("tent_submit_notif", engine, |engine| {
        // SAFETY: by the caller's promise.
        unsafe {
            let notice = Some(notice(name, message)?);
            let options = SubmitOptions { notice, notice_to: NoticeTargets::All, ..SubmitOptions::default() };
            submit(engine, batch_id, entries, count, options)
        }
    })
}

/// Returns a status as C code has it. A submitted transfer is pending: programs poll while it is.
const fn status_of(state: TaskState, transferred_bytes: u64) -> Status {
    let state = if state.is_final() { state } else { TaskState::Pending };
    Status { status: state as c_int, transferred_bytes }
}

const fn status_of_task(task: TaskStatus) -> Status {
    status_of(task.state, task.transferred_bytes)
}

/// Writes a status.
///
/// # Safety
/// Null, or a writable place.
unsafe fn write(out: *mut Status, status: impl FnOnce() -> Result<Status, TentError>) -> Result<(), TentError> {
    if out.is_null() {
        return Err(TentError::Null { what: "the place for the status" });
    }
    let status = status()?;
    // SAFETY: by the caller's promise.
    unsafe { out.write(status) };
    Ok(())
}

/// Writes the state of one task of a batch to `status`.
///
/// # Safety
/// A place for the status, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_task_status(
    engine: *mut c_void,
    batch_id: u64,
    task_id: usize,
    status: *mut Status,
) -> c_int {
    with_engine("tent_task_status", engine, |engine| {
        // SAFETY: by the caller's promise.
        unsafe { write(status, || Ok(status_of_task(engine.batches.get(batch_id)?.status(task_id)?))) }
    })
}

/// Writes the state of a batch to `status`.
///
/// # Safety
/// A place for the status, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_overall_status(engine: *mut c_void, batch_id: u64, status: *mut Status) -> c_int {
    with_engine("tent_overall_status", engine, |engine| {
        let overall = || {
            let (state, bytes) = engine.batches.get(batch_id)?.overall();
            Ok(status_of(state, bytes))
        };
        // SAFETY: by the caller's promise.
        unsafe { write(status, overall) }
    })
}

/// Writes the states of up to `count` tasks to `statuses`, and the number of all tasks to `count`.
///
/// # Safety
/// A count and as many places as it says, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_task_status_list(
    engine: *mut c_void,
    batch_id: u64,
    statuses: *mut Status,
    count: *mut usize,
) -> c_int {
    with_engine("tent_task_status_list", engine, |engine| {
        if statuses.is_null() || count.is_null() {
            return Err(TentError::Null { what: "the place for the statuses or their count" });
        }
        // SAFETY: by the caller's promise: the count is readable and says how many places are writable.
        unsafe {
            let (found, all) = engine.batches.get(batch_id)?.statuses(*count);
            for (place, status) in found.into_iter().enumerate() {
                statuses.add(place).write(status_of_task(status));
            }
            count.write(all);
        }
        Ok(())
    })
}

/// Cancels a task that is the only one of its submission in flight.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn tent_cancel_task(engine: *mut c_void, batch_id: u64, task_id: usize) -> c_int {
    with_engine("tent_cancel_task", engine, |engine| Ok(engine.batches.get(batch_id)?.cancel(task_id)?))
}

/// Writes the load of up to `count` rails to `stats`, and the number of all rails to `count`.
///
/// # Safety
/// A count and as many places as it says, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_get_nic_load_stats(
    engine: *mut c_void,
    stats: *mut NicLoad,
    count: *mut usize,
) -> c_int {
    with_engine("tent_get_nic_load_stats", engine, |engine| {
        if stats.is_null() || count.is_null() {
            return Err(TentError::Null { what: "the place for the loads or their count" });
        }
        // SAFETY: by the caller's promise.
        unsafe { write_loads(&engine.engine, stats, &mut *count) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(priority: c_int) -> Request {
        let source = std::ptr::null_mut();
        Request { opcode: 0, source, target_id: 0, target_offset: 0, length: 0, priority, transport_hint: 0 }
    }

    #[test]
    fn the_most_urgent_request_gives_the_class() {
        assert_eq!(priority(&[entry(2), entry(1), entry(2)]).expect("classes"), Some(Priority::Medium));
        assert_eq!(priority(&[entry(0)]).expect("a class"), Some(Priority::High));
        assert_eq!(priority(&[]).expect("none"), None);
        assert!(priority(&[entry(0), entry(3)]).is_err() && priority(&[entry(-1)]).is_err());
    }

    #[test]
    fn tasks_in_flight_are_pending() {
        assert_eq!(status_of(TaskState::Waiting, 0).status, TaskState::Pending as c_int);
        assert_eq!(status_of(TaskState::Timeout, 5).status, 5);
    }
}
