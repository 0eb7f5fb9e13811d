//! RDMA devices and their ports in sysfs.
//!
//! A software device (soft-RoCE) has no link to hardware; the interface that its port runs over has, unless that is
//! virtual too. sysfs does not print a port's active MTU: for RoCE the kernel derives it from the interface's, and so
//! does this reader.

use super::files::{children, numbered_children, read_number, read_text, read_word};
use super::tree::DeviceTree;
use crate::model::{LinkLayer, Machine, Nic, PortState, RdmaDevice, RdmaPort};
use std::path::Path;

/// Most ports of a device, and most entries of a port's address table.
const MAX_PORTS: usize = 16;
const MAX_GIDS: u32 = 256;
/// Most bytes of RoCE's headers in an Ethernet packet: route 40, UDP 8, base transport 12, extensions 4 and 28,
/// checksum 4.
const ROCE_HEADER_BYTES: u32 = 96;
/// Bytes of the header of IP over InfiniBand.
const IPOIB_HEADER_BYTES: u32 = 4;

/// Adds the devices to a machine whose interfaces are known, and records in each interface the device that runs over
/// it.
pub(super) fn add_devices(tree: DeviceTree<'_>, machine: &mut Machine) {
    let class = tree.join("class/infiniband");
    for name in children(&class) {
        let directory = class.join(&name);
        if !directory.is_dir() {
            continue;
        }
        let mut device = rdma_device(tree, name, &directory, &machine.nics);
        let over = |nic: &&mut Nic| device.ports.iter().any(|port| port.netdev.as_ref() == Some(&nic.name));
        for nic in machine.nics.iter_mut().filter(over) {
            nic.rdma_device.get_or_insert_with(|| device.name.clone());
        }
        let behind = device.ports.iter().find_map(|port| {
            let netdev = port.netdev.as_ref()?;
            machine.nics.iter().find(|nic| nic.name == *netdev)
        });
        if let (None, Some(nic)) = (&device.pci, behind) {
            device.pci.clone_from(&nic.pci);
            device.numa_node = device.numa_node.or(nic.numa_node);
        }
        machine.rdma_devices.push(device);
    }
}

fn rdma_device(tree: DeviceTree<'_>, name: String, directory: &Path, nics: &[Nic]) -> RdmaDevice {
    let hardware = directory.join("device");
    let numbers = numbered_children(&directory.join("ports"), "");
    let port = |number| read_port(directory, &hardware, number, nics);
    RdmaDevice {
        numa_node: tree.numa_node_above(&hardware),
        pci: tree.pci_path(&hardware),
        driver: tree.driver(&hardware),
        ports: numbers.into_iter().take(MAX_PORTS).map(port).collect(),
        name,
    }
}

fn read_port(directory: &Path, hardware: &Path, number: u32, nics: &[Nic]) -> RdmaPort {
    let port = directory.join(format!("ports/{number}"));
    let state = read_text(&port.join("state")).unwrap_or_default();
    let link_layer = match read_word(&port.join("link_layer")).as_deref() {
        Some("Ethernet") => LinkLayer::Ethernet,
        Some("InfiniBand") => LinkLayer::InfiniBand,
        _ => LinkLayer::Unknown,
    };
    let netdev = netdev_of_port(directory, hardware, number);
    let mtu = nics.iter().find(|nic| Some(&nic.name) == netdev.as_ref()).and_then(|nic| nic.mtu_bytes);
    RdmaPort {
        number,
        state: PortState::from_number(leading_number(&state).unwrap_or(0) as u32),
        physical_state: read_word(&port.join("phys_state"))
            .map(|text| text.split_once(':').map_or(text.as_str(), |(_, word)| word.trim()).to_owned()),
        link_layer,
        speed_mbps: read_text(&port.join("rate")).and_then(|rate| read_rate(&rate)),
        active_mtu_bytes: mtu.and_then(|mtu| active_mtu(link_layer, mtu)),
        netdev,
    }
}

/// Returns the interface of a port: by its address table, by the interfaces of the same function, or by the device's
/// parent.
fn netdev_of_port(directory: &Path, hardware: &Path, number: u32) -> Option<String> {
    let table = directory.join(format!("ports/{number}/gid_attrs/ndevs"));
    // Entries without an address cannot be read.
    let entries = numbered_children(&table, "").into_iter().filter(|&entry| entry < MAX_GIDS);
    let by_table = entries.into_iter().find_map(|entry| read_word(&table.join(entry.to_string())));
    by_table
        .or_else(|| {
            let port_of = |name: &String| {
                let interface = hardware.join("net").join(name);
                read_number::<u32>(&interface.join("dev_port")).unwrap_or(0) + 1 == number
            };
            children(&hardware.join("net")).into_iter().find(port_of)
        })
        .or_else(|| read_word(&directory.join("parent")))
}

/// Parses a rate, `400 Gb/sec (4X NDR)` or `2.5 Gb/sec (1X SDR)`, as megabits per second.
fn read_rate(text: &str) -> Option<u64> {
    let (number, rest) = text.trim().split_once(' ')?;
    let unit: u64 = if rest.starts_with("Gb/sec") { 1_000 } else { return None };
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let tenths: u64 = tenths.get(..1)?.parse().ok()?;
    let whole: u64 = whole.parse().ok()?;
    whole.checked_mul(unit)?.checked_add(tenths * unit / 10).filter(|&rate| rate > 0)
}

fn leading_number(text: &str) -> Option<u64> {
    text.split(':').next()?.trim().parse().ok()
}

/// Returns the largest MTU of verbs that fits the interface's.
fn active_mtu(link_layer: LinkLayer, interface_mtu: u32) -> Option<u32> {
    let room = match link_layer {
        LinkLayer::Ethernet => interface_mtu.checked_sub(ROCE_HEADER_BYTES)?,
        // In connected mode an interface's packets are larger than the link's, and do not determine its MTU.
        LinkLayer::InfiniBand if interface_mtu <= 4_092 => interface_mtu + IPOIB_HEADER_BYTES,
        _ => return None,
    };
    [4_096, 2_048, 1_024, 512, 256].into_iter().find(|&mtu| mtu <= room)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_the_kernel_prints_them() {
        assert_eq!(read_rate("400 Gb/sec (4X NDR)\n"), Some(400_000));
        assert_eq!(read_rate("2.5 Gb/sec (1X SDR)\n"), Some(2_500));
        for odd in ["", "400", "0 Gb/sec", "x Gb/sec", "1. Gb/sec", "99999999999999999999 Gb/sec", "4 Tb/sec"] {
            assert_eq!(read_rate(odd), None, "{odd}");
        }
    }

    #[test]
    fn an_active_mtu_leaves_room_for_headers() {
        let roce = |mtu| active_mtu(LinkLayer::Ethernet, mtu);
        assert_eq!(
            (roce(9_000), roce(4_192), roce(4_191), roce(1_500)),
            (Some(4_096), Some(4_096), Some(2_048), Some(1_024))
        );
        assert_eq!((roce(60), roce(351)), (None, None));
        let infiniband = |mtu| active_mtu(LinkLayer::InfiniBand, mtu);
        assert_eq!((infiniband(4_092), infiniband(2_044), infiniband(65_520)), (Some(4_096), Some(2_048), None));
        assert_eq!(active_mtu(LinkLayer::Unknown, 9_000), None);
    }
}
