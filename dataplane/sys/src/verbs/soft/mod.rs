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
//! For tests and benchmarks only, behind the feature `soft-verbs`: a single lock for a whole fabric, and no packets,
//! paths or congestion. It is a part of this crate because it fills the private C structs, and because no other crate
//! of the dataplane may use `unsafe`.

mod execute;
mod fabric;
mod null;
mod objects;
mod queues;
mod rim;
mod work;

pub(crate) use rim::FUNCTIONS;

use super::ffi::*;
use fabric::Fabric;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Port of a software device; each device has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftPort {
    /// Reported bandwidth, as four lanes of an existing speed: rounded down to 10, 40, 56, 100, 200, 400 or 800 Gb/s.
    pub bits_per_second: u64,
    /// Reported MTU.
    pub mtu: super::Mtu,
}

impl Default for SoftPort {
    fn default() -> Self {
        Self { bits_per_second: 100_000_000_000, mtu: super::Mtu::Bytes4096 }
    }
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

    pub(crate) fn null() -> Self {
        Self { fabric: Fabric::new("null", &[SoftPort::default()], true) }
    }

    pub(crate) fn is_null(&self) -> bool {
        self.fabric.is_null()
    }

    pub(crate) fn raw_devices(&self) -> impl Iterator<Item = NonNull<ibv_device>> {
        self.fabric.raw_devices()
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
    /// Always zero, unless this crate has a bug.
    #[must_use]
    pub fn violations(&self) -> u64 {
        self.fabric.lock().violations
    }
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loopback").field("devices", &self.raw_devices().count()).finish()
    }
}
