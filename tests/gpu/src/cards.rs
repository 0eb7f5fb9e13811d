//! Devices that a driver answers for.

use std::fmt;

use kvplane::device::{DeviceId, DeviceInfo, Family, open_families};
use kvplane_fake_devices::{Control, FakeDriverError};

/// Devices, and the reason for each family that has none.
pub(crate) struct Cards {
    pub(crate) found: Vec<DeviceInfo>,
    missing: Vec<String>,
}

/// Loads the driver of a family.
///
/// # Errors
/// When it is missing, or does not answer.
pub(crate) fn load(family: Family) -> Result<Control, FakeDriverError> {
    match family {
        Family::Cuda => kvplane_fake_cuda::load_cuda(),
        Family::Hip => kvplane_fake_hip::load_hip(),
        Family::Npu => kvplane_fake_npu::load_npu(),
    }
}

/// Returns the name of a device for tables.
pub(crate) fn title(info: &DeviceInfo, control: Control) -> String {
    let DeviceInfo { id, name, pci_address, copy_engines, .. } = info;
    let driver = if control.is_the_machines() { "" } else { ", over the driver for tests: no figure says anything" };
    format!("{name} ({id}, PCI {pci_address}, {copy_engines} copy engines{driver})")
}

/// Asks the drivers.
pub(crate) fn find() -> Cards {
    let mut cards = Cards { found: Vec::new(), missing: Vec::new() };
    let loaded = Family::ALL.map(|family| load(family).err());
    for ((family, devices), error) in open_families().into_iter().zip(loaded) {
        match (devices, error) {
            (_, Some(error)) => cards.missing.push(format!("{}: {error}", family.prefix())),
            (Err(error), None) => cards.missing.push(format!("{}: {error}", family.prefix())),
            (Ok(devices), None) if devices.is_empty() => {
                cards.missing.push(format!("{}: the driver has no device", family.prefix()));
            }
            (Ok(devices), None) => cards.found.extend(devices),
        }
    }
    cards
}

impl Cards {
    /// Returns the next device of a card's family; itself if it is the only one.
    pub(crate) fn after(&self, id: DeviceId) -> DeviceId {
        let same: Vec<DeviceId> = self.found.iter().map(|info| info.id).filter(|one| one.family == id.family).collect();
        let at = same.iter().position(|one| *one == id).unwrap_or(0);
        same.get((at + 1) % same.len().max(1)).copied().unwrap_or(id)
    }
}

impl fmt::Display for Cards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for info in &self.found {
            writeln!(f, "card: {}: {}", info.id, info.name)?;
        }
        self.missing.iter().try_for_each(|reason| writeln!(f, "skipped: {reason}"))
    }
}
