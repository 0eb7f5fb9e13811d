//! The device half of the sysfs reader: network interfaces and disks, and which NUMA node they hang on.
//!
//! A class directory holds links into the device tree. The node is an attribute of a bus device that may stand
//! several levels above the link's target (a virtio NIC's PCI function, a SATA disk's controller), so it is looked for
//! upwards, within the tree's own `devices` directory.

use super::{Sysfs, children, read_number, read_text};
use crate::model::{BlockDevice, Nic};
use std::fs;
use std::path::Path;

/// How far above a device its node is looked for; PCI trees are about this deep at most.
const MAX_ANCESTORS: usize = 32;
/// sysfs counts disks in sectors of this size, whatever the disk's own.
const SECTOR_BYTES: u64 = 512;
/// Bits of an interface's flags, as `ifconfig` has them.
const FLAG_UP: u64 = 0x1;
const FLAG_LOOPBACK: u64 = 0x8;

impl Sysfs {
    pub(super) fn nics(&self) -> Vec<Nic> {
        let class = self.root.join("class/net");
        let mut nics = Vec::new();
        for name in children(&class) {
            let interface = class.join(&name);
            // `bonding_masters`, for one, is a file among the interfaces.
            if !interface.is_dir() {
                continue;
            }
            let flags = read_flags(&interface);
            let state = read_text(&interface.join("operstate")).unwrap_or_default();
            // Drivers that do not track their carrier, loopback among them, report `unknown`.
            let carrier = matches!(state.trim(), "up" | "unknown");
            let device = interface.join("device");
            nics.push(Nic {
                numa_node: self.numa_node_above(&device),
                speed_mbps: read_number(&interface.join("speed")).filter(|&speed: &u64| speed > 0),
                up: carrier && flags & FLAG_UP != 0,
                loopback: flags & FLAG_LOOPBACK != 0,
                rdma_device: children(&device.join("infiniband")).into_iter().next(),
                name,
            });
        }
        nics
    }

    pub(super) fn block_devices(&self) -> Vec<BlockDevice> {
        let class = self.root.join("block");
        let mut devices = Vec::new();
        for name in children(&class) {
            let disk = class.join(&name);
            let sectors: Option<u64> = read_number(&disk.join("size"));
            // Unused loop devices and empty drives have no sectors; the paths of a multipath NVMe namespace are
            // hidden behind the namespace itself.
            let hidden = read_number::<u64>(&disk.join("hidden")) == Some(1);
            if !disk.is_dir() || hidden || sectors == Some(0) {
                continue;
            }
            let rotational: Option<u64> = read_number(&disk.join("queue/rotational"));
            devices.push(BlockDevice {
                numa_node: self.disk_numa_node(&disk.join("device")),
                nvme: name.starts_with("nvme"),
                bytes: sectors.and_then(|sectors| sectors.checked_mul(SECTOR_BYTES)),
                rotational: rotational.map(|flag| flag != 0),
                name,
            });
        }
        devices
    }

    /// The device behind a multipath NVMe namespace is a subsystem outside the bus tree; it lists its controllers, and
    /// has a node when they all agree.
    fn disk_numa_node(&self, device: &Path) -> Option<u32> {
        self.numa_node_above(device).or_else(|| {
            let names = children(device);
            let controllers = names.iter().filter(|name| {
                let number = name.strip_prefix("nvme").unwrap_or_default();
                !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
            });
            let mut nodes = controllers.map(|name| self.numa_node_above(&device.join(name)));
            let first = nodes.next()??;
            nodes.all(|node| node == Some(first)).then_some(first)
        })
    }

    /// The node that the device or the nearest device above it names.
    fn numa_node_above(&self, device: &Path) -> Option<u32> {
        let top = fs::canonicalize(self.root.join("devices")).ok()?;
        let device = fs::canonicalize(device).ok()?;
        let within = device.ancestors().take(MAX_ANCESTORS).take_while(|at| at.starts_with(&top));
        within.into_iter().find_map(|at| read_number(&at.join("numa_node")))
    }
}

/// The interface's flags, printed as `0x1003`; 0 where they cannot be read.
fn read_flags(interface: &Path) -> u64 {
    let text = read_text(&interface.join("flags")).unwrap_or_default();
    let digits = text.trim().strip_prefix("0x").unwrap_or_default();
    u64::from_str_radix(digits, 16).unwrap_or(0)
}
