//! Disks and NVMe controllers in sysfs, with their place in the PCI tree; drives attached over a network have none.

use super::files::{children, numbered_children, read_cpus, read_number, read_word};
use super::tree::DeviceTree;
use crate::model::{BlockDevice, HardwareQueue, NvmeController, PciPath};
use std::path::Path;

/// Unit of disk sizes in sysfs, whatever the disk's sector size.
const SECTOR_BYTES: u64 = 512;
/// Most hardware queues read of a disk.
const MAX_HARDWARE_QUEUES: usize = 1_024;

pub(super) fn block_devices(tree: DeviceTree<'_>) -> Vec<BlockDevice> {
    let class = tree.join("block");
    let mut devices = Vec::new();
    for name in children(&class) {
        let disk = class.join(&name);
        let sectors: Option<u64> = read_number(&disk.join("size"));
        // Unused loop devices and empty drives have no sectors; the paths of a multipath NVMe namespace are hidden
        // behind the namespace itself.
        let hidden = read_number::<u64>(&disk.join("hidden")) == Some(1);
        if !disk.is_dir() || hidden || sectors == Some(0) {
            continue;
        }
        let rotational: Option<u64> = read_number(&disk.join("queue/rotational"));
        let device = disk.join("device");
        let controllers = if name.starts_with("nvme") { controllers_of(&device) } else { Vec::new() };
        let (numa_node, pci) = place_of_disk(tree, &device);
        devices.push(BlockDevice {
            numa_node,
            pci,
            nvme: name.starts_with("nvme"),
            controllers,
            bytes: sectors.and_then(|sectors| sectors.checked_mul(SECTOR_BYTES)),
            block_bytes: read_number(&disk.join("queue/logical_block_size")).filter(|&bytes: &u32| bytes > 0),
            rotational: rotational.map(|flag| flag != 0),
            hardware_queues: read_hardware_queues(&disk.join("mq")),
            name,
        });
    }
    devices
}

/// Returns the place of a disk. The device behind a multipath NVMe namespace is a subsystem outside the bus tree; it
/// lists its controllers, and has a place if they all agree.
fn place_of_disk(tree: DeviceTree<'_>, device: &Path) -> (Option<u32>, Option<PciPath>) {
    let place = |device: &Path| (tree.numa_node_above(device), tree.pci_path(device));
    let (numa_node, pci) = place(device);
    if numa_node.is_some() || pci.is_some() {
        return (numa_node, pci);
    }
    let names = children(device).into_iter().filter(|name| is_controller(name));
    let places: Vec<_> = names.map(|name| place(&device.join(name))).collect();
    let Some((numa_node, pci)) = places.first().cloned() else { return (None, None) };
    let agreed_node = numa_node.filter(|_| places.iter().all(|(other, _)| *other == numa_node));
    let agreed_pci = pci.clone().filter(|_| places.iter().all(|(_, other)| *other == pci));
    (agreed_node, agreed_pci)
}

pub(super) fn nvme_controllers(tree: DeviceTree<'_>) -> Vec<NvmeController> {
    let class = tree.join("class/nvme");
    let names = children(&class).into_iter().filter(|name| is_controller(name));
    let controller = |name: String| {
        let directory = class.join(&name);
        NvmeController {
            numa_node: tree.numa_node_above(&directory),
            pci: tree.pci_path(&directory),
            transport: read_word(&directory.join("transport")),
            address: read_word(&directory.join("address")),
            model: read_word(&directory.join("model")),
            state: read_word(&directory.join("state")),
            queues: read_number(&directory.join("queue_count")),
            subsystem: read_word(&directory.join("subsysnqn")),
            name,
        }
    };
    names.map(controller).collect()
}

/// Returns true for a controller's name: `nvme0`, not `nvme0n1`.
fn is_controller(name: &str) -> bool {
    let number = name.strip_prefix("nvme").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns the controllers of a namespace: its device, or those that its subsystem lists.
fn controllers_of(device: &Path) -> Vec<String> {
    let own = std::fs::canonicalize(device).ok().and_then(|path| path.file_name()?.to_str().map(str::to_owned));
    match own.filter(|name| is_controller(name)) {
        Some(name) => vec![name],
        None => children(device).into_iter().filter(|name| is_controller(name)).collect(),
    }
}

fn read_hardware_queues(directory: &Path) -> Vec<HardwareQueue> {
    let numbers = numbered_children(directory, "").into_iter().take(MAX_HARDWARE_QUEUES);
    let queue = |index: u32| {
        let cpus = read_cpus(&directory.join(format!("{index}/cpu_list"))).unwrap_or_default();
        HardwareQueue { index, cpus }
    };
    numbers.map(queue).collect()
}
