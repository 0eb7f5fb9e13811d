//! Memory of devices for Python: where it is, and the streams of its users.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvplane::device::{CopyQueue, Device, DeviceError, DeviceId, MemoryKind, StreamHandle, locate};
use kvplane::interrupt;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cpython::number_of;
use crate::outcome::{INTERNAL, INVALID, TIMEOUT, failed};

/// Interval at which an awaited stream is polled.
const LOOK: Duration = Duration::from_micros(20);
/// Longest wait for the work on a stream.
const LONGEST: Duration = Duration::from_secs(60);

/// Returns the location of memory of a device, `cuda:0`. Empty, with the reason as the last error, where the memory is
/// not a device's.
#[pyfunction]
pub(crate) fn location(
    py: Python<'_>,
    #[pyo3(from_py_with = number_of)] address: u64,
    #[pyo3(from_py_with = number_of)] bytes: u64,
) -> String {
    let found = py.detach(|| locate(address, bytes));
    let why = match found.map(|found| found.kind) {
        Ok(MemoryKind::Device(id) | MemoryKind::Managed(id)) => return id.to_string(),
        Ok(MemoryKind::Host) => DeviceError::HostMemory { address }.to_string(),
        Err(error) => error.to_string(),
    };
    failed(INVALID, why);
    String::new()
}

/// Returns the device of a location and a stream of its family.
///
/// # Errors
/// `ValueError` for a location that is not a device.
pub(crate) fn stream_at(location: &str, raw: u64) -> PyResult<(DeviceId, StreamHandle)> {
    let no_device = || PyValueError::new_err(format!("{location:?} is no location of a device"));
    let id = DeviceId::parse(location).ok_or_else(no_device)?;
    Ok((id, StreamHandle { family: id.family, raw }))
}

/// Queues by which the work on streams of callers is awaited: one for each device and concurrent wait.
#[derive(Default)]
pub(crate) struct StreamQueues {
    idle: Mutex<Vec<CopyQueue>>,
}

impl StreamQueues {
    /// Waits until the work that is on a stream now is done. Returns 0 or an error code.
    pub(crate) fn wait(&self, id: DeviceId, stream: StreamHandle) -> i64 {
        let mut queue = match self.take(id) {
            Ok(queue) => queue,
            Err(error) => return failed(INVALID, error.to_string()),
        };
        let code = wait_in(&mut queue, stream).unwrap_or_else(|error| failed(INVALID, error.to_string()));
        // After a timeout, its next wait is for the work of this one, too.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(queue);
        code
    }

    fn take(&self, id: DeviceId) -> Result<CopyQueue, DeviceError> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(position) = idle.iter().position(|queue| queue.device().id() == id) {
            return Ok(idle.swap_remove(position));
        }
        drop(idle);
        CopyQueue::new(&Device::open(id)?)
    }

    /// Drops the queues, and with them the contexts that they hold.
    pub(crate) fn clear(&self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

fn wait_in(queue: &mut CopyQueue, stream: StreamHandle) -> Result<i64, DeviceError> {
    queue.wait_for(stream)?;
    // A batch without copies is done when the stream's work is.
    let ticket = queue.copy(Vec::new())?;
    let until = Instant::now() + LONGEST;
    while queue.poll()? <= ticket {
        if Instant::now() > until {
            return Ok(failed(TIMEOUT, format!("the work on a stream took more than {} s", LONGEST.as_secs())));
        }
        if !interrupt::sleep(LOOK) {
            return Ok(failed(INTERNAL, "the call was interrupted"));
        }
    }
    Ok(0)
}
