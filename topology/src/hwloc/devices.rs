//! Devices in hwloc's XML: bridges, PCI functions and the operating system's devices on them.
//!
//! A device is on the node of the nearest enclosing object that is not a device, if that object has CPUs of one node
//! only. The machine object determines no node: hwloc puts a device there when it does not know its place.

use super::{above, info, objects};
use crate::model::{BlockDevice, Gpu, Machine, Nic, PciAddress, PciPath, PciRoot, PortState, RdmaDevice, RdmaPort};
use roxmltree::Node;
use std::collections::BTreeSet;

/// Types of devices, as hwloc 2 numbers them.
const BLOCK: &str = "0";
const NETWORK: &str = "2";
const OPEN_FABRICS: &str = "3";
/// Most ports of an RDMA device.
const MAX_PORTS: u32 = 16;
/// Unit of hwloc's disk sizes.
const KIBIBYTE: u64 = 1_024;

pub(super) fn add(machine: &mut Machine, root: Node<'_, '_>) {
    for device in objects(root, "OSDev") {
        let Some(name) = device.attribute("name").map(str::to_owned) else { continue };
        let place = DeviceLocation::of(device, machine);
        match device.attribute("osdev_type") {
            Some(NETWORK) => machine.nics.push(Nic {
                name,
                numa_node: place.numa_node,
                pci: place.pci,
                up: true,
                rdma_device: beside(device, OPEN_FABRICS),
                ..Nic::default()
            }),
            Some(OPEN_FABRICS) => machine.rdma_devices.push(RdmaDevice {
                name,
                numa_node: place.numa_node,
                pci: place.pci,
                driver: None,
                ports: ports(device),
            }),
            // hwloc lists memory behind DAX as a block device.
            Some(BLOCK) if !name.starts_with("dax") && !name.starts_with("pmem") => {
                machine.block_devices.push(BlockDevice {
                    nvme: name.starts_with("nvme"),
                    name,
                    numa_node: place.numa_node,
                    pci: place.pci,
                    bytes: info(device, "Size").and_then(|size| size.parse::<u64>().ok()?.checked_mul(KIBIBYTE)),
                    block_bytes: info(device, "SectorSize").and_then(|size| size.parse().ok()),
                    ..BlockDevice::default()
                });
            }
            _ => {}
        }
    }
    machine.nics.sort_by(|a, b| a.name.cmp(&b.name));
    machine.rdma_devices.sort_by(|a, b| a.name.cmp(&b.name));
    machine.block_devices.sort_by(|a, b| a.name.cmp(&b.name));
    add_gpus(machine, root);
}

/// Place of a device in the machine.
struct DeviceLocation {
    numa_node: Option<u32>,
    pci: Option<PciPath>,
}

impl DeviceLocation {
    fn of(device: Node<'_, '_>, machine: &Machine) -> Self {
        Self { numa_node: numa_node(device, machine), pci: pci_path(device) }
    }
}

/// Returns the bridges around a device, outermost first, and the function that it is or belongs to.
fn pci_path(device: Node<'_, '_>) -> Option<PciPath> {
    let mut root: Option<PciRoot> = None;
    let mut bridges: Vec<PciAddress> = Vec::new();
    let mut function: Option<PciAddress> = None;
    for object in device.ancestors() {
        match object.attribute("type") {
            Some("PCIDev") if function.is_none() => function = object.attribute("pci_busid")?.parse().ok(),
            Some("Bridge") => match object.attribute("pci_busid") {
                Some(address) => bridges.push(address.parse().ok()?),
                None => root = host_bridge(object.attribute("bridge_pci")?),
            },
            _ => {}
        }
    }
    bridges.reverse();
    bridges.truncate(crate::model::MAX_BRIDGES);
    Some(PciPath { root: root?, bridges, function: function? })
}

/// Parses a host bridge: `0000:[80-8f]` opens at bus 80 of domain 0.
fn host_bridge(buses: &str) -> Option<PciRoot> {
    let (domain, range) = buses.split_once(":[")?;
    let (first, _) = range.split_once('-')?;
    format!("pci{domain}:{first}").parse().ok()
}

fn numa_node(device: Node<'_, '_>, machine: &Machine) -> Option<u32> {
    let is_device = |object: &Node<'_, '_>| matches!(object.attribute("type"), Some("OSDev" | "PCIDev" | "Bridge"));
    let around = device.ancestors().find(|object| object.tag_name().name() == "object" && !is_device(object))?;
    if around.attribute("type") == Some("Machine") {
        return None;
    }
    let cpus = super::cpus(around, "cpuset")?;
    let inside = machine.cores.iter().filter(|core| cpus.contains(&core.id));
    let nodes: BTreeSet<Option<u32>> = inside.map(|core| core.numa_node).collect();
    if nodes.len() == 1 { nodes.first().copied().flatten() } else { None }
}

/// Returns the only device of a type on the same function.
fn beside(device: Node<'_, '_>, kind: &str) -> Option<String> {
    let function = above(device, "PCIDev")?;
    let mut others = function.children().filter(|child| child.attribute("osdev_type") == Some(kind));
    let first = others.next()?;
    others.next().is_none().then(|| first.attribute("name").map(str::to_owned)).flatten()
}

fn ports(device: Node<'_, '_>) -> Vec<RdmaPort> {
    let port = |number: u32| {
        let state = info(device, &format!("Port{number}State"))?;
        let number_of_state = state.trim().parse().unwrap_or(0);
        let netdev = if number == 1 { beside(device, NETWORK) } else { None };
        Some(RdmaPort { number, state: PortState::from_number(number_of_state), netdev, ..RdmaPort::default() })
    };
    (1..=MAX_PORTS).map_while(port).collect()
}

fn add_gpus(machine: &mut Machine, root: Node<'_, '_>) {
    let mut gpus: Vec<Gpu> = objects(root, "PCIDev").filter_map(|object| gpu(object, machine)).collect();
    gpus.sort_by_key(|gpu| gpu.pci.function);
    machine.gpus = gpus;
}

/// Parses a GPU's class, vendor and device from a text like `0302 [10de:2330] [10de:16c1] a1`.
fn gpu(object: Node<'_, '_>, machine: &Machine) -> Option<Gpu> {
    let (class, rest) = object.attribute("pci_type")?.split_once(" [")?;
    let (vendor, rest) = rest.split_once(':')?;
    let (device, _) = rest.split_once(']')?;
    let hex = |digits: &str| u32::from_str_radix(digits, 16).ok();
    let (class, vendor_id) = (hex(class)?.checked_mul(256)?, hex(vendor)?);
    if !Gpu::is_one(class, vendor_id) {
        return None;
    }
    let DeviceLocation { numa_node, pci } = DeviceLocation::of(object, machine);
    Some(Gpu { pci: pci?, vendor_id, device_id: hex(device), numa_node, driver: None })
}
