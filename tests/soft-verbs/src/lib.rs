//! Software RDMA devices inside this process: the same C structs and functions as those of a NIC.
//!
//! `loopback` devices move real bytes between queue pairs of one process, in order, with the checks of a NIC: keys,
//! bounds, access rights, missing receives, dead peers. A request is executed when it is posted, or, if it has to wait
//! (for a receive, or because its device is paused), during a later post or poll. Completions become visible by polling
//! only. Ports can be set down and devices removed. There is no clock: timer-driven retries of a NIC happen here at
//! each poll.
//!
//! A `null` device completes everything at once and moves only messages: it measures the cost of our own code.
//!
//! For tests and benchmarks only: a single lock for a whole fabric, and no packets, paths or congestion. The shipped
//! binary does not contain them (`cargo x ci linkage`). They reach the code under test as its library does, by the C
//! structs and the function table of [`provider`](kvplane_sys::verbs::provider):
//!
//! ```
//! use kvplane_soft_verbs::{Loopback, SoftPort, null_verbs};
//!
//! let fabric = Loopback::new(&[SoftPort::default(); 2]);
//! let verbs = fabric.verbs();
//! assert_eq!((verbs.name(), verbs.devices()?.len()), ("loopback", 2));
//! fabric.set_port(1, false);
//! assert!(verbs.device("loop1")?.open()?.active_port().is_err());
//! assert_eq!(null_verbs().devices()?[0].name(), "null0");
//! # Ok::<(), kvplane_sys::verbs::VerbsError>(())
//! ```

mod buffers;
mod execute;
mod fabric;
mod null;
mod objects;
mod queues;
mod rim;
#[cfg(test)]
mod tests;
mod work;

pub use buffers::DmaBufRule;

use fabric::Fabric;
use kvplane_sys::verbs::provider::{Functions, ProvidedDevices, VerbsProvider};
use kvplane_sys::verbs::{Mtu, Verbs, VerbsError};
use std::fmt;
use std::sync::Arc;

/// Port of a software device; each device has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftPort {
    /// Reported bandwidth, as four lanes of an existing speed: rounded down to 10, 40, 56, 100, 200, 400 or 800 Gb/s.
    pub bits_per_second: u64,
    /// Reported MTU.
    pub mtu: Mtu,
}

impl Default for SoftPort {
    fn default() -> Self {
        Self { bits_per_second: 100_000_000_000, mtu: Mtu::Bytes4096 }
    }
}

/// Creates a source with one device, `null0`, on which every request succeeds at once and only messages move bytes: it
/// measures the cost of our own code.
#[must_use]
pub fn null_verbs() -> Verbs {
    Verbs::provided_by(Loopback { fabric: Fabric::new("null", &[SoftPort::default()], true) })
}

/// Software devices `loop0`, `loop1` and so on that reach each other, with control over their ports. Clones refer to
/// the same fabric. Any thread may use it.
#[derive(Clone)]
pub struct Loopback {
    fabric: Arc<Fabric>,
}

impl Loopback {
    /// Creates a fabric with one device for each port.
    #[must_use]
    pub fn new(ports: &[SoftPort]) -> Self {
        Self { fabric: Fabric::new("loop", ports, false) }
    }

    /// Creates a source of its devices.
    #[must_use]
    pub fn verbs(&self) -> Verbs {
        Verbs::provided_by(self.clone())
    }

    /// Sets a device's port up or down. When it goes down, the device's queue pairs fail and are flushed; requests of
    /// peers get no response. The device reports either change by an event.
    pub fn set_port(&self, device: usize, up: bool) {
        self.fabric.lock().set_port(device, up);
    }

    /// Pauses or resumes the requests of a device: makes sure that requests are in flight.
    pub fn pause(&self, device: usize, paused: bool) {
        self.fabric.lock().pause(device, paused);
    }

    /// Sets the rule by which a device registers dma-buf descriptors from now on.
    pub fn set_dma_bufs(&self, device: usize, rule: DmaBufRule) {
        self.fabric.lock().ports[device].buffers.dma_bufs = rule;
    }

    /// Loads or unloads what stands for the kernel's module for peer memory: without it, a device refuses addresses of
    /// device memory.
    pub fn set_peer_memory(&self, device: usize, is_loaded: bool) {
        self.fabric.lock().ports[device].buffers.peer_memory = is_loaded;
    }

    /// Removes a device as if it was pulled out of the machine: it fails, reports that by an event, and cannot be
    /// opened again.
    pub fn remove(&self, device: usize) {
        self.fabric.lock().remove(device);
    }

    /// Returns the number of memory regions registered on a device.
    #[must_use]
    pub fn registered(&self, device: usize) -> usize {
        self.fabric.lock().registered(device)
    }

    /// Returns the number of deregistrations under a posted request: a NIC would have failed or corrupted memory.
    /// Always zero, unless the code under test has a bug.
    #[must_use]
    pub fn violations(&self) -> u64 {
        self.fabric.lock().violations
    }
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loopback").field("devices", &self.fabric.devices().count()).finish()
    }
}

// SAFETY: the functions behave as those of libibverbs. Devices are not written after their creation, terminate their
// texts and have no path in sysfs; their fabric owns them, and each open context holds the fabric.
unsafe impl VerbsProvider for Loopback {
    fn name(&self) -> &'static str {
        if self.fabric.is_null() { "null" } else { "loopback" }
    }

    fn functions(&self) -> &'static Functions {
        &rim::FUNCTIONS
    }

    fn devices(&self) -> Result<ProvidedDevices, VerbsError> {
        let owner = Arc::clone(&self.fabric);
        Ok(ProvidedDevices { devices: self.fabric.devices().collect(), owner })
    }
}
