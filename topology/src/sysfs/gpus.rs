//! GPUs in sysfs: PCI functions of the classes of accelerators.

use super::files::{children, link_name, read_word};
use super::tree::DeviceTree;
use crate::model::Gpu;
use std::path::Path;

pub(super) fn gpus(tree: DeviceTree<'_>) -> Vec<Gpu> {
    let bus = tree.join("bus/pci/devices");
    let gpu = |name: String| {
        let device = bus.join(&name);
        let class = read_hex(&device.join("class"))?;
        let vendor_id = read_hex(&device.join("vendor"))?;
        if !Gpu::is_one(class, vendor_id) {
            return None;
        }
        Some(Gpu {
            pci: tree.pci_path(&device)?,
            vendor_id,
            device_id: read_hex(&device.join("device")),
            numa_node: tree.numa_node_above(&device),
            driver: link_name(&device.join("driver")),
        })
    };
    let mut gpus: Vec<Gpu> = children(&bus).into_iter().filter_map(gpu).collect();
    gpus.sort_by_key(|gpu| gpu.pci.function);
    gpus
}

/// Parses a number like `0x10de`.
fn read_hex(path: &Path) -> Option<u32> {
    u32::from_str_radix(read_word(path)?.strip_prefix("0x")?, 16).ok()
}
