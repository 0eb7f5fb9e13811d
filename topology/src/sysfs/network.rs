//! Network interfaces in sysfs, with their NUMA node and PCI function.
//!
//! A class directory holds links into the device tree. The node is an attribute of a bus device that may be several
//! levels above the link's target (a virtio NIC's PCI function, a SATA disk's controller), so it is looked up from
//! there towards the root, within the tree's `devices` directory.

use super::files::{children, numbered_children, read_number, read_text};
use super::tree::DeviceTree;
use crate::model::Nic;
use std::path::Path;

/// Bits of an interface's flags, as in `ifconfig`.
const FLAG_UP: u64 = 0x1;
const FLAG_LOOPBACK: u64 = 0x8;

pub(super) fn nics(tree: DeviceTree<'_>) -> Vec<Nic> {
    let class = tree.join("class/net");
    let mut nics = Vec::new();
    for name in children(&class) {
        let interface = class.join(&name);
        // `bonding_masters`, for example, is a file among the interfaces.
        if !interface.is_dir() {
            continue;
        }
        let flags = read_flags(&interface);
        let state = read_text(&interface.join("operstate")).unwrap_or_default();
        // Drivers that do not track their carrier, such as loopback, report `unknown`.
        let carrier = matches!(state.trim(), "up" | "unknown");
        let device = interface.join("device");
        let queues = numbered_children(&interface.join("queues"), "rx-").len();
        nics.push(Nic {
            numa_node: tree.numa_node_above(&device),
            pci: tree.pci_path(&device),
            driver: tree.driver(&device),
            speed_mbps: read_number(&interface.join("speed")).filter(|&speed: &u64| speed > 0),
            mtu_bytes: read_number(&interface.join("mtu")).filter(|&mtu: &u32| mtu > 0),
            queues: (queues > 0).then_some(queues as u32),
            up: carrier && flags & FLAG_UP != 0,
            loopback: flags & FLAG_LOOPBACK != 0,
            rdma_device: children(&device.join("infiniband")).into_iter().next(),
            name,
        });
    }
    nics
}

/// Returns the interface's flags, printed as `0x1003`; 0 if they cannot be read.
fn read_flags(interface: &Path) -> u64 {
    let text = read_text(&interface.join("flags")).unwrap_or_default();
    let digits = text.trim().strip_prefix("0x").unwrap_or_default();
    u64::from_str_radix(digits, 16).unwrap_or(0)
}
