//! Devices as values: network interfaces, RDMA devices, disks, NVMe controllers, GPUs.
//!
//! A NUMA node of a device is `None` where the kernel prints -1 or says nothing. A PCI path is `None` for devices that
//! are no hardware of this machine: loopback, soft-RoCE, drives attached over a network.

use super::pci::PciPath;
use crate::cpulist::CpuSet;

/// One network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nic {
    /// Interface name, such as `eth0`.
    pub name: String,
    /// Node of the device behind it.
    pub numa_node: Option<u32>,
    /// PCI function behind it.
    pub pci: Option<PciPath>,
    /// Kernel driver of that function.
    pub driver: Option<String>,
    /// Link speed, megabits per second.
    pub speed_mbps: Option<u64>,
    /// Largest packet, bytes.
    pub mtu_bytes: Option<u32>,
    /// Receive queues.
    pub queues: Option<u32>,
    /// Switched on and not known to lack a carrier.
    pub up: bool,
    /// The loopback interface.
    pub loopback: bool,
    /// RDMA device on the same hardware function or over this interface, such as `mlx5_0`.
    pub rdma_device: Option<String>,
}

/// State of an RDMA port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PortState {
    /// The kernel did not say.
    #[default]
    Unknown,
    /// No link.
    Down,
    /// Linked, not configured by a subnet manager yet.
    Initializing,
    /// Configured, not carrying data yet.
    Armed,
    /// Carries data.
    Active,
}

impl PortState {
    /// By the number that verbs and sysfs give it.
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        match number {
            1 => Self::Down,
            2 => Self::Initializing,
            3 => Self::Armed,
            // 5 is "active, deferred": the link is gone for a moment, the port keeps its state.
            4 | 5 => Self::Active,
            _ => Self::Unknown,
        }
    }

    /// A word for people and programs.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Down => "down",
            Self::Initializing => "initializing",
            Self::Armed => "armed",
            Self::Active => "active",
        }
    }
}

/// What an RDMA port is wired to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkLayer {
    /// The kernel did not say.
    #[default]
    Unknown,
    /// RoCE or iWARP.
    Ethernet,
    /// InfiniBand.
    InfiniBand,
}

impl LinkLayer {
    /// A word for people and programs.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Ethernet => "ethernet",
            Self::InfiniBand => "infiniband",
        }
    }
}

/// One port of an RDMA device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaPort {
    /// Number, from 1.
    pub number: u32,
    /// Whether it carries data.
    pub state: PortState,
    /// Why it may not, in the kernel's word: `LinkUp`, `Polling`, `Disabled`.
    pub physical_state: Option<String>,
    /// What it is wired to.
    pub link_layer: LinkLayer,
    /// Signalling rate, megabits per second.
    pub speed_mbps: Option<u64>,
    /// Largest payload of a packet, bytes: what verbs call the active MTU. Worked out from the interface's, as the
    /// kernel does, because sysfs does not print it.
    pub active_mtu_bytes: Option<u32>,
    /// Interface over which it runs.
    pub netdev: Option<String>,
}

/// One RDMA device: what verbs open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaDevice {
    /// Device name, such as `mlx5_0`.
    pub name: String,
    /// Node of the function behind it.
    pub numa_node: Option<u32>,
    /// PCI function behind it; of its interface, for a device in software.
    pub pci: Option<PciPath>,
    /// Kernel driver of that function.
    pub driver: Option<String>,
    /// Ports by number.
    pub ports: Vec<RdmaPort>,
}

/// One hardware queue of a disk, and the CPUs that submit to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HardwareQueue {
    /// The kernel's number of the queue.
    pub index: u32,
    /// CPUs that it serves; empty for queues that are only polled.
    pub cpus: CpuSet,
}

/// One whole disk (not a partition).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockDevice {
    /// Device name below `/dev`.
    pub name: String,
    /// Node of the controller behind it; `None` also where its controllers sit on different nodes.
    pub numa_node: Option<u32>,
    /// PCI function behind it; `None` also where there are several.
    pub pci: Option<PciPath>,
    /// An NVMe namespace.
    pub nvme: bool,
    /// NVMe controllers that lead to it, by name.
    pub controllers: Vec<String>,
    /// Capacity, bytes.
    pub bytes: Option<u64>,
    /// Logical block, bytes.
    pub block_bytes: Option<u32>,
    /// Spinning medium.
    pub rotational: Option<bool>,
    /// Hardware queues by index; empty where unknown.
    pub hardware_queues: Vec<HardwareQueue>,
}

/// One NVMe controller: a drive's, or the end of an attached network drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmeController {
    /// Device name, such as `nvme0`.
    pub name: String,
    /// Node of the drive, or of nothing for a network drive.
    pub numa_node: Option<u32>,
    /// PCI function of the drive.
    pub pci: Option<PciPath>,
    /// How it is reached: `pcie`, `tcp`, `rdma`, `fc`, `loop`.
    pub transport: Option<String>,
    /// Where: a PCI address, or `traddr=10.0.0.1,trsvcid=4420`.
    pub address: Option<String>,
    /// Model name.
    pub model: Option<String>,
    /// `live`, `connecting`, `resetting`, ...
    pub state: Option<String>,
    /// Queues, the administrative one included.
    pub queues: Option<u32>,
    /// Qualified name of its subsystem.
    pub subsystem: Option<String>,
}

impl NvmeController {
    /// Whether it leads to a drive of another machine.
    #[must_use]
    pub fn over_fabrics(&self) -> bool {
        self.transport.as_deref().is_some_and(|transport| transport != "pcie" && transport != "apple-nvme")
    }
}

/// One accelerator with memory of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Where it hangs.
    pub pci: PciPath,
    /// PCI vendor number.
    pub vendor_id: u32,
    /// PCI device number.
    pub device_id: Option<u32>,
    /// Node it hangs on.
    pub numa_node: Option<u32>,
    /// Kernel driver; `vfio-pci` for one that is given to a virtual machine.
    pub driver: Option<String>,
}

/// Vendors of GPUs, as PCI numbers them.
const NVIDIA: u32 = 0x10de;
const AMD: u32 = 0x1002;
const INTEL: u32 = 0x8086;

impl Gpu {
    /// Whether a PCI function of this class (24 bits) and vendor is one. Boot screens of management controllers are
    /// VGA too, so plain VGA counts only from makers of accelerators that are sold as such.
    #[must_use]
    pub const fn is_one(class: u32, vendor_id: u32) -> bool {
        match class >> 8 {
            0x0302 | 0x1200 => true,
            0x0380 => matches!(vendor_id, NVIDIA | AMD | INTEL),
            0x0300 => matches!(vendor_id, NVIDIA | AMD),
            _ => false,
        }
    }

    /// The vendor's name.
    #[must_use]
    pub const fn vendor(&self) -> &'static str {
        match self.vendor_id {
            NVIDIA => "NVIDIA",
            AMD => "AMD",
            INTEL => "Intel",
            _ => "other vendor",
        }
    }

    /// How memory locations name it, before the colon: `cuda`, `hip` or `gpu`.
    #[must_use]
    pub const fn prefix(&self) -> &'static str {
        match self.vendor_id {
            NVIDIA => "cuda",
            AMD => "hip",
            _ => "gpu",
        }
    }

    /// Whether processes of this machine can use it.
    #[must_use]
    pub fn usable(&self) -> bool {
        self.driver.as_deref() != Some("vfio-pci")
    }
}
