//! Lines of a node's devices in the text drawing.

use super::{home, printable, size_text};
use crate::model::{BlockDevice, Gpu, LinkLayer, Machine, Nic, NvmeController, RdmaDevice, RdmaPort};
use crate::rails::{Location, RailMatrix, gigabits, natural_key};

/// Returns one line per device of `node`.
pub(super) fn lines(machine: &Machine, rails: &RailMatrix, node: Option<u32>) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let named = gpu_names(machine);
    let gpus = machine.gpus.iter().zip(named).filter(|(gpu, _)| home(machine, gpu.numa_node, true) == node);
    lines.extend(gpus.map(|(gpu, name)| gpu_line(gpu, name)));
    let mut rdma: Vec<&RdmaDevice> =
        machine.rdma_devices.iter().filter(|one| home(machine, one.numa_node, one.pci.is_some()) == node).collect();
    rdma.sort_by_cached_key(|device| natural_key(&device.name));
    lines.extend(rdma.into_iter().map(|device| rdma_line(device, rails)));
    let mut nics: Vec<&Nic> =
        machine.nics.iter().filter(|one| home(machine, one.numa_node, one.pci.is_some()) == node).collect();
    nics.sort_by_cached_key(|nic| natural_key(&nic.name));
    lines.extend(nics.into_iter().map(nic_line));
    let mut disks: Vec<&BlockDevice> =
        machine.block_devices.iter().filter(|one| home(machine, one.numa_node, one.pci.is_some()) == node).collect();
    disks.sort_by_cached_key(|disk| natural_key(&disk.name));
    lines.extend(disks.into_iter().map(|disk| disk_line(disk, &machine.nvme_controllers)));
    lines
}

/// Returns the location's name of each GPU; none for those that cannot be used.
pub(super) fn gpu_names(machine: &Machine) -> Vec<Option<String>> {
    let mut before: Vec<&'static str> = Vec::new();
    let name = |gpu: &Gpu| {
        gpu.usable().then(|| {
            let index = before.iter().filter(|prefix| **prefix == gpu.prefix()).count() as u32;
            before.push(gpu.prefix());
            Location::Gpu(gpu.prefix(), index).to_string()
        })
    };
    machine.gpus.iter().map(name).collect()
}

fn gpu_line(gpu: &Gpu, name: Option<String>) -> String {
    let driver = gpu.driver.as_deref().map_or(String::new(), |driver| format!(", {}", printable(driver)));
    let name = name.unwrap_or_else(|| "(not usable here)".to_owned());
    format!("gpu {name}: {} at {}{driver}", gpu.vendor(), gpu.pci.function)
}

fn rdma_line(device: &RdmaDevice, rails: &RailMatrix) -> String {
    let ports: Vec<String> = device.ports.iter().map(port_text).collect();
    let ports = if ports.is_empty() { "no port".to_owned() } else { ports.join("; ") };
    let place = device.pci.as_ref().map_or(String::new(), |pci| format!(", at {}", pci.function));
    let used = if rails.rail(&device.name).is_some() { "" } else { ", no rail" };
    format!("rdma {}: {ports}{place}{used}", printable(&device.name))
}

fn port_text(port: &RdmaPort) -> String {
    let speed = port.speed_mbps.map_or("speed unknown".to_owned(), gigabits);
    let mtu = port.active_mtu_bytes.map_or(String::new(), |mtu| format!(", MTU {mtu}"));
    let over = port.netdev.as_deref().map_or(String::new(), |netdev| format!(", over {}", printable(netdev)));
    let layer =
        if port.link_layer == LinkLayer::Unknown { String::new() } else { format!(" {}", port.link_layer.word()) };
    format!("port {} {}{layer}, {speed}{mtu}{over}", port.number, port.state.word())
}

fn nic_line(nic: &Nic) -> String {
    let speed = nic.speed_mbps.map_or("speed unknown".into(), gigabits);
    let state = if nic.up { "up" } else { "down" };
    let loopback = if nic.loopback { ", loopback" } else { "" };
    let rdma = nic.rdma_device.as_deref();
    let rdma = rdma.map_or(String::new(), |device| format!(", RDMA {}", printable(device)));
    format!("nic {}: {speed}, {state}{loopback}{rdma}", printable(&nic.name))
}

fn disk_line(disk: &BlockDevice, controllers: &[NvmeController]) -> String {
    let kind = match (disk.nvme, disk.rotational) {
        (true, _) => ", NVMe",
        (false, Some(true)) => ", rotational",
        (false, Some(false)) => ", solid state",
        (false, None) => "",
    };
    let attached = attached_by(disk, controllers).map_or(String::new(), |controller| {
        let transport = controller.transport.as_deref().unwrap_or_default();
        let address = controller.address.as_deref().unwrap_or("an unknown address");
        format!(" over {} from {}", printable(transport), printable(address))
    });
    format!("disk {}: {}{kind}{attached}", printable(&disk.name), size_text(disk.bytes))
}

/// Returns the controller over which a network drive is attached.
pub(super) fn attached_by<'a>(disk: &BlockDevice, controllers: &'a [NvmeController]) -> Option<&'a NvmeController> {
    let mut mine = controllers.iter().filter(|controller| disk.controllers.contains(&controller.name));
    mine.find(|controller| controller.over_fabrics())
}
