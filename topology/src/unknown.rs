//! Notes on unknown values of a machine's description, with their consequences.
//!
//! Devices with the same unknown value share a sentence, so that a large machine does not fill a screen.

use crate::model::{Machine, PortState};

/// Most names in one sentence; further ones are counted.
const NAMES: usize = 4;

/// Returns one sentence for each kind of unknown value.
pub(crate) fn notes(machine: &Machine) -> Vec<String> {
    let mut notes = Vec::new();
    if machine.numa_nodes.is_empty() {
        notes.push("No NUMA node is known: all memory counts as equally near.".to_owned());
    }
    if machine.numa_nodes.len() > 1 {
        let nodes = machine.numa_nodes.iter().filter(|node| node.distances.is_empty());
        let nodes = nodes.map(|node| format!("node {}", node.id));
        push(&mut notes, nodes, "distances", "other nodes count as equally far");
        several_nodes(machine, &mut notes);
    }
    let silent = machine.numa_nodes.iter().filter(|node| node.memory_bytes.is_none());
    push(&mut notes, silent.map(|node| format!("node {}", node.id)), "memory size", "the kernel does not report it");
    let ports = || machine.rdma_devices.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    let silent = ports().filter(|(_, port)| port.state == PortState::Unknown);
    let silent = silent.map(|(device, port)| format!("{} port {}", device.name, port.number));
    push(&mut notes, silent, "port state", "not used as rails");
    let active = || ports().filter(|(_, port)| port.state == PortState::Active);
    let name = |(device, port): (&crate::model::RdmaDevice, &crate::model::RdmaPort)| {
        format!("{} port {}", device.name, port.number)
    };
    let silent = active().filter(|(_, port)| port.speed_mbps.is_none()).map(name);
    push(&mut notes, silent, "port speed", "measured once in use");
    let silent = active().filter(|(_, port)| port.active_mtu_bytes.is_none()).map(name);
    push(&mut notes, silent, "active MTU", "known once the device is opened");
    notes
}

/// Adds the unknown values that matter only if there are several nodes.
fn several_nodes(machine: &Machine, notes: &mut Vec<String>) {
    let cpus = machine.cores.iter().filter(|core| core.numa_node.is_none());
    push(notes, cpus.map(|core| format!("CPU {}", core.id)), "NUMA node", "used last");
    let mut devices: Vec<String> = Vec::new();
    let hardware = machine.nics.iter().filter(|nic| nic.pci.is_some() && nic.numa_node.is_none());
    devices.extend(hardware.map(|nic| nic.name.clone()));
    let rdma = machine.rdma_devices.iter().filter(|device| device.numa_node.is_none());
    devices.extend(rdma.map(|device| device.name.clone()));
    let drives = machine.block_devices.iter().filter(|disk| disk.pci.is_some() && disk.numa_node.is_none());
    devices.extend(drives.map(|disk| disk.name.clone()));
    let gpus = machine.gpus.iter().filter(|gpu| gpu.numa_node.is_none());
    devices.extend(gpus.map(|gpu| format!("GPU {}", gpu.pci.function)));
    push(notes, devices.into_iter(), "NUMA node", "counted as neither near nor far");
}

fn push(notes: &mut Vec<String>, names: impl Iterator<Item = String>, what: &str, consequence: &str) {
    let names: Vec<String> = names.collect();
    if !names.is_empty() {
        notes.push(format!("Unknown: {what} of {}; {consequence}.", list(&names)));
    }
}

/// Lists the first names, with the count of further ones.
pub(crate) fn list<T: AsRef<str>>(names: &[T]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMES).map(AsRef::as_ref).collect();
    let more = names.len().saturating_sub(NAMES);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", shown.join(", "))
}
