//! Batches of the C interface: capacity for a number of transfers, submitted in one or several calls.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError, RwLock, TryLockError};

use kvplane::{Batch, Opcode, SegmentHandle, SubmitOptions, TaskState, TransferRequest};

use crate::engine::Engine;
use crate::notifications::message;
use crate::rim::{INVALID_ARGUMENT, array, with_engine};
use crate::types::{NotifyMessage, TransferRequest as Entry, TransferStatus};

/// Result of `allocateBatchID` on failure.
const INVALID_BATCH: u64 = u64::MAX;
/// Maximum number of allocated batches.
const BATCHES: usize = 1 << 20;
/// Maximum number of transfers of one batch.
const BATCH_ROOM: usize = 1 << 20;

/// Positive error codes, as batch functions return them.
mod code {
    use std::ffi::c_int;

    pub(super) const INVALID_ARGUMENT: c_int = 1;
    pub(super) const TOO_MANY_REQUESTS: c_int = 2;
    pub(super) const BATCH_BUSY: c_int = 4;
}

/// Batch of the C interface: the submitted batches, each with the number of its first task.
struct Room {
    room: usize,
    /// Held while transfers are added, which may block on peers.
    filling: Mutex<()>,
    /// Locked to read, and to add a submitted batch; never during a wait, except for the completion of a batch whose
    /// tasks have all ended.
    parts: RwLock<Vec<(usize, Batch)>>,
}

/// Batches of an engine by id.
#[derive(Default)]
pub(crate) struct Batches {
    entries: RwLock<(u64, HashMap<u64, Arc<Room>>)>,
}

impl Batches {
    fn add(&self, room: usize) -> u64 {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if room == 0 || room > BATCH_ROOM || entries.1.len() >= BATCHES {
            return INVALID_BATCH;
        }
        entries.0 += 1;
        let id = entries.0;
        entries.1.insert(id, Arc::new(Room { room, filling: Mutex::default(), parts: RwLock::default() }));
        id
    }

    fn get(&self, id: u64) -> Result<Arc<Room>, c_int> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.1.get(&id).cloned().ok_or(code::INVALID_ARGUMENT)
    }

    fn remove(&self, id: u64) -> Result<c_int, c_int> {
        let entry = self.get(id)?;
        if matches!(entry.filling.try_lock(), Err(TryLockError::WouldBlock)) {
            return Err(code::BATCH_BUSY);
        }
        {
            let parts = entry.parts.read().unwrap_or_else(PoisonError::into_inner);
            for (_, batch) in parts.iter() {
                if !all_ended(batch) {
                    return Err(code::BATCH_BUSY);
                }
                // All its tasks have ended: the thread that drives the batch is about to complete it.
                batch.wait();
            }
        }
        self.entries.write().unwrap_or_else(PoisonError::into_inner).1.remove(&id);
        Ok(0)
    }

    /// Removes all batches; those in flight are cancelled and waited for.
    pub(crate) fn clear(&self) {
        let entries = core::mem::take(&mut self.entries.write().unwrap_or_else(PoisonError::into_inner).1);
        drop(entries);
    }
}

impl Room {
    fn submit(&self, engine: &Engine, entries: &[Entry], options: &SubmitOptions) -> Result<c_int, c_int> {
        let requests: Result<Vec<TransferRequest>, c_int> = entries.iter().map(request).collect();
        let requests = requests?;
        // Status queries of earlier transfers do not wait for the peer of this one.
        let _one = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        let used = {
            let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
            parts.last().map_or(0, |(first, batch)| first + batch.tasks())
        };
        if requests.len() > self.room - used {
            return Err(code::TOO_MANY_REQUESTS);
        }
        if requests.is_empty() {
            return Ok(0);
        }
        let batch = engine.engine.submit(&requests, options).map_err(|error| -error.code())?;
        self.parts.write().unwrap_or_else(PoisonError::into_inner).push((used, batch));
        Ok(0)
    }

    fn status(&self, task: usize) -> Result<TransferStatus, c_int> {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        let part = parts.partition_point(|(first, _)| *first <= task).checked_sub(1).ok_or(code::INVALID_ARGUMENT)?;
        let (first, batch) = &parts[part];
        let mut status = batch.task_status(task - first);
        if !status.state.is_final() {
            batch.poll();
            status = batch.task_status(task - first);
        }
        if status.state == TaskState::Invalid {
            return Err(code::INVALID_ARGUMENT);
        }
        Ok(TransferStatus { status: status.state as c_int, transferred_bytes: status.transferred_bytes })
    }
}

/// Returns true if every task has ended, by the same view as [`Room::status`]: the count of the whole batch may lag
/// behind the last task, and a caller that saw all tasks end may free the batch.
fn all_ended(batch: &Batch) -> bool {
    let status = batch.poll();
    status.ended == status.tasks || (0..status.tasks).all(|task| batch.task_status(task).state.is_final())
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
            id = engine.batches.add(batch_size);
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
            engine.batches.get(batch_id)?.submit(engine, entries, &SubmitOptions::default())
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
            engine.batches.get(batch_id)?.submit(engine, entries, &options)
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
            let found = engine.batches.get(batch_id)?.status(task_id)?;
            status.write(found);
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
    // SAFETY: by the caller's promise.
    positive(unsafe { with_engine(engine, |engine| engine.batches.remove(batch_id)) })
}

/// Returns a code as the functions of batches do: without its sign.
const fn positive(code: c_int) -> c_int {
    if code == INVALID_ARGUMENT { code::INVALID_ARGUMENT } else { code.abs() }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::net::TcpListener;
    use std::sync::atomic::AtomicBool;

    use kvplane::{Region, RegionOptions, RegisterOptions, TransferEngine, TransferEngineConfig};

    use super::*;

    fn engine() -> (Engine, Arc<Region>) {
        let config = TransferEngineConfig { shared_memory: false, ..TransferEngineConfig::default() };
        let engine = TransferEngine::start(config).expect("an engine on loopback");
        let memory = Region::allocate(&RegionOptions::new("batches", 8192)).expect("memory");
        engine.register(Arc::clone(&memory), &RegisterOptions::default()).expect("free memory");
        (Engine { engine, batches: Batches::default(), files: AtomicBool::new(false) }, memory)
    }

    #[test]
    fn an_unresponsive_peer_delays_no_status() {
        let (ours, memory) = engine();
        let (theirs, _) = engine();
        let peer = ours.engine.open_segment(theirs.engine.name()).expect("it lives");
        let address = theirs.engine.directory().address();
        drop(theirs);
        let silent = TcpListener::bind(address).expect("its port");
        let (source, number) = (memory.address(), i32::try_from(peer.to_bits()).expect("small"));
        let entry = move |target_id, target_offset| Entry {
            opcode: 1,
            source: source as *mut c_void,
            target_id,
            target_offset,
            length: 8,
        };
        let room = ours.batches.get(ours.batches.add(10)).expect("a batch");
        assert_eq!(room.submit(&ours, &[entry(0, source + 4096)], &SubmitOptions::default()), Ok(0));
        std::thread::scope(|scope| {
            let (room, ours) = (&room, &ours);
            // The peer never described an address like this, so its description is requested again.
            let slow = scope.spawn(move || room.submit(ours, &[entry(number, 1)], &SubmitOptions::default()));
            let (mut call, _) = silent.accept().expect("it is asked");
            assert_eq!(room.status(0).expect("a task").status, TaskState::Completed as c_int);
            call.set_nonblocking(true).expect("a socket");
            let end = loop {
                match call.read(&mut [0; 4096]) {
                    Ok(1..) => {}
                    other => break other.map_err(|error| error.kind()),
                }
            };
            assert_eq!(end, Err(ErrorKind::WouldBlock), "the status waited until the peer was given up");
            drop((call, silent));
            assert!(slow.join().expect("no panic").is_err());
        });
    }
}
