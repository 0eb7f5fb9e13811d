//! Devices as values: network interfaces, RDMA devices, disks, NVMe controllers, GPUs.
//!
//! A device's NUMA node is `None` if the kernel prints -1 or nothing. A PCI path is `None` for devices that are not
//! hardware of this machine: loopback, soft-RoCE, drives attached over a network.

use super::pci::PciPath;
use crate::cpulist::CpuSet;
use serde::Serialize;

/// One network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// Interface name, such as `eth0`.
    pub name: String,
    /// NUMA node of the device behind it.
    pub numa_node: Option<u32>,
    /// PCI function behind it.
    pub pci: Option<PciPath>,
    /// Kernel driver of that function.
    pub driver: Option<String>,
    /// Link speed, in megabits per second.
    pub speed_mbps: Option<u64>,
    /// Largest packet, in bytes.
    pub mtu_bytes: Option<u32>,
    /// Receive queues.
    pub queues: Option<u32>,
    /// True if the interface is enabled and not known to lack a carrier.
    pub up: bool,
    /// True for the loopback interface.
    pub loopback: bool,
    /// RDMA device on the same hardware function or over this interface, such as `mlx5_0`.
    pub rdma_device: Option<String>,
}

/// State of an RDMA port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PortState {
    /// The kernel reports no state.
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
    /// Returns the state for its number in verbs and sysfs.
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        match number {
            1 => Self::Down,
            2 => Self::Initializing,
            3 => Self::Armed,
            // 5 is "active, deferred": the link is lost for a moment, and the port keeps its state.
            4 | 5 => Self::Active,
            _ => Self::Unknown,
        }
    }

    /// Returns the state's name in drawings and JSON.
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

/// Link layer of an RDMA port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkLayer {
    /// The kernel reports no link layer.
    #[default]
    Unknown,
    /// RoCE or iWARP.
    Ethernet,
    /// InfiniBand.
    InfiniBand,
}

impl LinkLayer {
    /// Returns the link layer's name in drawings and JSON.
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
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RdmaPort {
    /// Number, from 1.
    pub number: u32,
    /// State of the port.
    pub state: PortState,
    /// Physical state in the kernel's words, which explains a port that is not active: `LinkUp`, `Polling`, `Disabled`.
    pub physical_state: Option<String>,
    pub link_layer: LinkLayer,
    /// Signalling rate, in megabits per second.
    pub speed_mbps: Option<u64>,
    /// Largest payload of a packet, in bytes: the active MTU of verbs. Derived from the interface's MTU, as the kernel
    /// does, because sysfs does not print it.
    pub active_mtu_bytes: Option<u32>,
    /// Interface that the port runs over.
    pub netdev: Option<String>,
}

/// One RDMA device, as verbs open it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RdmaDevice {
    /// Device name, such as `mlx5_0`.
    pub name: String,
    /// Node of the function behind it.
    pub numa_node: Option<u32>,
    /// PCI function behind it; that of its interface, for a software device.
    pub pci: Option<PciPath>,
    /// Kernel driver of that function.
    pub driver: Option<String>,
    /// Ports by number.
    pub ports: Vec<RdmaPort>,
}

/// One hardware queue of a disk, with the CPUs that submit to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HardwareQueue {
    /// The kernel's number of the queue.
    pub index: u32,
    /// CPUs that the queue serves; empty for queues that are only polled.
    pub cpus: CpuSet,
}

/// One whole disk (not a partition).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockDevice {
    /// Device name below `/dev`.
    pub name: String,
    /// NUMA node of the controller behind it; `None` also if its controllers are on different nodes.
    pub numa_node: Option<u32>,
    /// PCI function behind it; `None` also if there are several.
    pub pci: Option<PciPath>,
    /// True for an NVMe namespace.
    pub nvme: bool,
    /// Names of the NVMe controllers that lead to it.
    pub controllers: Vec<String>,
    /// Capacity, in bytes.
    pub bytes: Option<u64>,
    /// Size of a logical block, in bytes.
    pub block_bytes: Option<u32>,
    /// True for a spinning medium.
    pub rotational: Option<bool>,
    /// Hardware queues by index; empty if unknown.
    pub hardware_queues: Vec<HardwareQueue>,
}

/// One NVMe controller: of a local drive, or of an attached network drive.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NvmeController {
    /// Device name, such as `nvme0`.
    pub name: String,
    /// NUMA node of the drive; `None` for a network drive.
    pub numa_node: Option<u32>,
    /// PCI function of the drive.
    pub pci: Option<PciPath>,
    /// Transport: `pcie`, `tcp`, `rdma`, `fc`, `loop`.
    pub transport: Option<String>,
    /// Address: of PCI, or like `traddr=10.0.0.1,trsvcid=4420`.
    pub address: Option<String>,
    pub model: Option<String>,
    /// State: `live`, `connecting`, `resetting`, ...
    pub state: Option<String>,
    /// Number of queues, the admin queue included.
    pub queues: Option<u32>,
    /// Qualified name (NQN) of its subsystem.
    pub subsystem: Option<String>,
}

impl NvmeController {
    /// Returns true if the controller leads to a drive of another host.
    #[must_use]
    pub fn over_fabrics(&self) -> bool {
        self.transport.as_deref().is_some_and(|transport| transport != "pcie" && transport != "apple-nvme")
    }
}

/// One accelerator with its own memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Place in the PCI tree.
    pub pci: PciPath,
    /// PCI vendor number.
    pub vendor_id: u32,
    /// PCI device number.
    pub device_id: Option<u32>,
    /// NUMA node of the device.
    pub numa_node: Option<u32>,
    /// Kernel driver; `vfio-pci` for a GPU that is assigned to a virtual machine.
    pub driver: Option<String>,
}

/// PCI vendor numbers of GPUs.
const NVIDIA: u32 = 0x10de;
const AMD: u32 = 0x1002;
const INTEL: u32 = 0x8086;
const HUAWEI: u32 = 0x19e5;

impl Gpu {
    /// Returns true if a PCI function of this class (24 bits) and vendor is a GPU. Management controllers have VGA
    /// functions too, so plain VGA counts only for vendors of accelerators.
    #[must_use]
    pub const fn is_one(class: u32, vendor_id: u32) -> bool {
        match class >> 8 {
            0x0302 | 0x1200 => true,
            0x0380 => matches!(vendor_id, NVIDIA | AMD | INTEL),
            0x0300 => matches!(vendor_id, NVIDIA | AMD),
            _ => false,
        }
    }

    /// Returns the vendor's name.
    #[must_use]
    pub const fn vendor(&self) -> &'static str {
        match self.vendor_id {
            NVIDIA => "NVIDIA",
            AMD => "AMD",
            INTEL => "Intel",
            HUAWEI => "Huawei",
            _ => "other vendor",
        }
    }

    /// Returns the prefix of its memory location: `cuda`, `hip`, `npu` or `gpu`.
    #[must_use]
    pub const fn prefix(&self) -> &'static str {
        match self.vendor_id {
            NVIDIA => "cuda",
            AMD => "hip",
            HUAWEI => "npu",
            _ => "gpu",
        }
    }

    /// Returns true if processes of this machine can use it.
    #[must_use]
    pub fn usable(&self) -> bool {
        self.driver.as_deref() != Some("vfio-pci")
    }
}
