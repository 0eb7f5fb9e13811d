//! Batches of the C interface: capacity for a number of transfers, submitted in one or several calls.

mod pool;

use std::ffi::{c_int, c_void};

use kvplane::{Opcode, SegmentHandle, SubmitOptions, TransferRequest};

use crate::engine::Engine;
use crate::notifications::message;
use crate::rim::{INVALID_ARGUMENT, array, with_engine};
use crate::types::{NotifyMessage, TransferRequest as Entry, TransferStatus};

pub(crate) use pool::{BatchError, Batches};

/// Result of `allocateBatchID` on failure.
const INVALID_BATCH: u64 = u64::MAX;

/// Positive error codes, as batch functions return them.
mod code {
    use std::ffi::c_int;

    pub(super) const INVALID_ARGUMENT: c_int = 1;
    pub(super) const TOO_MANY_REQUESTS: c_int = 2;
    pub(super) const BATCH_BUSY: c_int = 4;
}

impl BatchError {
    /// Returns the code of the batch functions of `transfer_engine_c.h`.
    fn code(&self) -> c_int {
        match self {
            Self::Unknown { .. } | Self::Leaving | Self::NoTask { .. } | Self::Shared { .. } => code::INVALID_ARGUMENT,
            Self::Full { .. } | Self::Capacity { .. } => code::TOO_MANY_REQUESTS,
            Self::Busy => code::BATCH_BUSY,
            Self::Engine(error) => -error.code(),
        }
    }
}

fn submit(engine: &Engine, batch: u64, entries: &[Entry], options: &SubmitOptions) -> Result<c_int, c_int> {
    let requests: Result<Vec<TransferRequest>, c_int> = entries.iter().map(request).collect();
    let room = engine.batches.get(batch).map_err(|error| error.code())?;
    room.submit(&engine.engine, &requests?, options).map_err(|error| error.code())?;
    Ok(0)
}

fn request(entry: &Entry) -> Result<TransferRequest, c_int> {
    let opcode = match entry.opcode {
        0 => Opcode::Read,
        1 => Opcode::Write,
        _ => return Err(code::INVALID_ARGUMENT),
    };
    let target = u32::try_from(entry.target_id).map_err(|_| code::INVALID_ARGUMENT)?;
    Ok(TransferRequest {
        opcode,
        source: entry.source as u64,
        target: SegmentHandle::from_bits(target),
        target_offset: entry.target_offset,
        length: entry.length,
    })
}

/// Allocates a batch for up to `batch_size` transfers, or returns `INVALID_BATCH`.
///
/// # Safety
/// A live engine, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn allocateBatchID(engine: *mut c_void, batch_size: usize) -> u64 {
    let mut id = INVALID_BATCH;
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            if batch_size > 0 {
                id = engine.batches.add(batch_size).unwrap_or(INVALID_BATCH);
            }
            Ok(0)
        });
    }
    id
}

/// Validates the requests of a batch as a whole and starts them.
///
/// # Safety
/// A live engine and an array of `count` requests, whose memory stays until they have ended.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn submitTransfer(
    engine: *mut c_void,
    batch_id: u64,
    entries: *mut Entry,
    count: usize,
) -> c_int {
    // SAFETY: by the caller's promise.
    let result = unsafe {
        with_engine(engine, |engine| {
            let entries = array(entries, count).ok_or(code::INVALID_ARGUMENT)?;
            submit(engine, batch_id, entries, &SubmitOptions::default())
        })
    };
    positive(result)
}

/// Starts transfers like [`submitTransfer`], and notifies the first request's target when all have completed.
///
/// # Safety
/// Conditions of [`submitTransfer`]; the message's strings have a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn submitTransferWithNotify(
    engine: *mut c_void,
    batch_id: u64,
    entries: *mut Entry,
    count: usize,
    notify_msg: NotifyMessage,
) -> c_int {
    // SAFETY: by the caller's promise.
    let result = unsafe {
        with_engine(engine, |engine| {
            let entries = array(entries, count).ok_or(code::INVALID_ARGUMENT)?;
            let notify = message(&notify_msg).ok_or(code::INVALID_ARGUMENT)?;
            let options = SubmitOptions { notice: Some(notify), ..SubmitOptions::default() };
            submit(engine, batch_id, entries, &options)
        })
    };
    positive(result)
}

/// Writes the state of one task of a batch to `status`.
///
/// # Safety
/// A live engine and a place for the answer.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getTransferStatus(
    engine: *mut c_void,
    batch_id: u64,
    task_id: usize,
    status: *mut TransferStatus,
) -> c_int {
    if status.is_null() {
        return code::INVALID_ARGUMENT;
    }
    // SAFETY: by the caller's promise.
    let result = unsafe {
        with_engine(engine, |engine| {
            let found = engine.batches.get(batch_id).and_then(|room| room.status(task_id));
            let found = found.map_err(|error| error.code())?;
            status.write(TransferStatus { status: found.state as c_int, transferred_bytes: found.transferred_bytes });
            Ok(0)
        })
    };
    positive(result)
}

/// Frees a batch, unless one of its transfers is in flight.
///
/// # Safety
/// A live engine.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn freeBatchID(engine: *mut c_void, batch_id: u64) -> c_int {
    let free = |engine: &Engine| engine.batches.remove(batch_id).map(|()| 0).map_err(|error| error.code());
    // SAFETY: by the caller's promise.
    positive(unsafe { with_engine(engine, free) })
}

/// Returns a code as the functions of batches do: without its sign.
const fn positive(code: c_int) -> c_int {
    if code == INVALID_ARGUMENT { code::INVALID_ARGUMENT } else { code.abs() }
}
