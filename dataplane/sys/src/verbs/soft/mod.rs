//! RDMA devices of software, inside this process: the same C structs and functions as a NIC's, without one.
//!
//! `loopback` devices move real bytes between queue pairs of one process, in order, with the checks a NIC makes: keys,
//! bounds, access, receives that are not there, peers that are gone. A request is carried out when it is posted, or, if
//! it must wait (for a receive, or because its device is paused), when somebody posts or polls. Completions become
//! visible by polling only. Ports can be pulled and devices removed. There is no clock: what a NIC repeats by timers is
//! repeated here with each poll.
//!
//! A `null` device completes everything at once and moves nothing but messages: it shows what our own code costs.
//!
//! It is a test device: one lock for all of a fabric, and no packets, paths or congestion.

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

/// A port of a software device: each has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftPort {
    /// What it claims as its speed, as four lanes of a speed there is: rounded down to 10, 40, 56, 100, 200, 400 or
    /// 800 Gb/s.
    pub bits_per_second: u64,
    /// What it claims as its packets.
    pub mtu: super::Mtu,
}

impl Default for SoftPort {
    fn default() -> Self {
        Self { bits_per_second: 100_000_000_000, mtu: super::Mtu::Bytes4096 }
    }
}

/// Software devices `loop0`, `loop1` and so on that reach each other, and the hands on their cables. Clones are the
/// same fabric. Any thread may use it.
#[derive(Clone)]
pub struct Loopback {
    fabric: Arc<Fabric>,
}

impl Loopback {
    /// A fabric with one device for each port.
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

    /// Pulls a device's cable, or puts it back. The queue pairs of a device without a cable fail and are flushed; peers
    /// that ask them for something get no answer. Both ways the device tells of it by an event.
    pub fn set_port(&self, device: usize, up: bool) {
        self.fabric.lock().set_port(device, up);
    }

    /// Lets a device's requests wait where they are, or go on: to have something under way for certain.
    pub fn pause(&self, device: usize, paused: bool) {
        self.fabric.lock().pause(device, paused);
    }

    /// Removes a device as if pulled out of the machine: it fails, tells so by an event, and cannot be opened again.
    pub fn remove(&self, device: usize) {
        self.fabric.lock().remove(device);
    }

    /// Memory registered on a device.
    #[must_use]
    pub fn registered(&self, device: usize) -> usize {
        self.fabric.lock().registered(device)
    }

    /// Times that memory was deregistered under a request that was posted and not over: a NIC would have failed or
    /// written somewhere. Always zero, unless this crate is wrong.
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
