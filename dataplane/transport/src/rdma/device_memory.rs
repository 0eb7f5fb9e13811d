//! Device memory of an RDMA driver: its registrations with the driver's devices, for our own copies and for peers.

use core::fmt;
use std::sync::Arc;

use kvplane_sys::device::{DeviceId, DeviceMemory};

use super::nic::{DeviceRegions, ExportedMemory};
use super::{Rdma, RegistrationPath};

/// Registration of device memory with an RDMA device, or the reason why there is none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceRegistration {
    /// Name of the RDMA device.
    pub nic: String,
    /// Device whose memory it is.
    pub device: DeviceId,
    /// First address of the memory.
    pub address: u64,
    /// Length of the memory, in bytes.
    pub bytes: u64,
    /// True for a segment, which peers access; false for memory of our own requests.
    pub is_segment: bool,
    /// Way in which the RDMA device accesses the memory.
    pub path: RegistrationPath,
}

impl fmt::Display for DeviceRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { nic, device, address, bytes, path, .. } = self;
        write!(f, "{bytes} bytes of {device} at {address:#x} over {nic}: {path}")
    }
}

/// Registers device memory with all devices of a driver, for copies from and to it. Returns true if all of them accept
/// it; false also if there is none.
pub fn register(driver: &mut Rdma, memory: &Arc<DeviceMemory>) -> bool {
    if driver.links.nics.is_empty() {
        return false;
    }
    // One descriptor for all devices, closed behind the last one.
    let exported = ExportedMemory::new(memory);
    let nics = driver.links.nics.iter_mut();
    let each = nics.map(|nic| nic.memory.ensure_device(&exported, &mut nic.piece_sizes));
    each.fold(true, |all, accepted| all & accepted)
}

/// Deregisters device memory that no copy uses any more.
pub fn forget(driver: &mut Rdma, memory: &Arc<DeviceMemory>) {
    driver.links.nics.iter_mut().for_each(|nic| nic.memory.forget_device(memory));
}

/// Returns the registrations of device memory with each device of a driver, and those that were refused.
#[must_use]
pub fn registrations(driver: &Rdma) -> Vec<DeviceRegistration> {
    let record = |index: usize, memory: &DeviceMemory, regions: &DeviceRegions, is_segment| DeviceRegistration {
        nic: driver.links.nics[index].context.name().to_owned(),
        device: memory.device().id(),
        address: memory.address(),
        bytes: memory.bytes(),
        is_segment,
        path: regions.path().clone(),
    };
    let nics = driver.links.nics.iter().enumerate();
    let own = nics.flat_map(|(index, nic)| nic.memory.devices().map(move |(memory, all)| (index, memory, all)));
    let own = own.map(|(index, memory, regions)| record(index, memory, regions, false));
    let segments = driver.segments.devices().map(|(index, memory, regions)| record(index, memory, regions, true));
    own.chain(segments).collect()
}
