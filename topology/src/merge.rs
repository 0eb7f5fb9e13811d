//! Merge of two descriptions of one machine: hwloc's for structure, sysfs's for values that change.
//!
//! If both contain a value, hwloc's counts for nodes, cores and places of devices, and a note reports a difference. If
//! one lacks a value, the other's is taken. Values that only sysfs has are kept.

use crate::model::{BlockDevice, Core, Gpu, Machine, NodeKind, NumaNode, PciPath};
use std::fmt::Debug;

/// Most differences that are named; further ones are counted.
const MAX_NAMED: usize = 8;

/// Merges the descriptions of one machine by hwloc and sysfs.
#[must_use]
pub fn merge(hwloc: Machine, sysfs: Machine) -> Machine {
    let mut differences = Differences::default();
    let mut machine = sysfs;
    merge_cores(&mut machine.cores, hwloc.cores, &mut differences);
    merge_nodes(&mut machine.numa_nodes, hwloc.numa_nodes, &mut differences);
    if !hwloc.caches.is_empty() {
        machine.caches = hwloc.caches;
    }
    for theirs in hwloc.nics {
        match machine.nics.iter_mut().find(|ours| ours.name == theirs.name) {
            Some(ours) => {
                let place = DeviceLocation { numa_node: theirs.numa_node, pci: theirs.pci };
                place.merge_into(&mut ours.numa_node, &mut ours.pci, &theirs.name, &mut differences);
                ours.rdma_device = ours.rdma_device.take().or(theirs.rdma_device);
            }
            None => machine.nics.push(theirs),
        }
    }
    for theirs in hwloc.rdma_devices {
        match machine.rdma_devices.iter_mut().find(|ours| ours.name == theirs.name) {
            Some(ours) => {
                let place = DeviceLocation { numa_node: theirs.numa_node, pci: theirs.pci };
                place.merge_into(&mut ours.numa_node, &mut ours.pci, &theirs.name, &mut differences);
                if ours.ports.is_empty() {
                    ours.ports = theirs.ports;
                }
            }
            None => machine.rdma_devices.push(theirs),
        }
    }
    merge_disks(&mut machine.block_devices, hwloc.block_devices, &mut differences);
    merge_gpus(&mut machine.gpus, hwloc.gpus, &mut differences);
    machine.nics.sort_by(|a, b| a.name.cmp(&b.name));
    machine.rdma_devices.sort_by(|a, b| a.name.cmp(&b.name));
    machine.block_devices.sort_by(|a, b| a.name.cmp(&b.name));
    machine.gpus.sort_by_key(|gpu| gpu.pci.function);
    machine.notes = crate::unknown::notes(&machine);
    machine.notes.extend(differences.sentences());
    machine
}

#[derive(Default)]
struct Differences {
    found: Vec<String>,
}

impl Differences {
    /// Takes hwloc's value if there is one; records a difference if both have one and they differ.
    fn take<T: PartialEq + Debug>(&mut self, what: &str, ours: &mut Option<T>, theirs: Option<T>) {
        let Some(theirs) = theirs else { return };
        if let Some(ours) = ours
            && *ours != theirs
        {
            self.found.push(format!("{what} is {theirs:?} by hwloc and {ours:?} by the kernel"));
        }
        *ours = Some(theirs);
    }

    fn sentences(self) -> Vec<String> {
        let more = self.found.len().saturating_sub(MAX_NAMED);
        let mut out: Vec<String> =
            self.found.into_iter().take(MAX_NAMED).map(|one| format!("The {one}; hwloc's is taken.")).collect();
        if more > 0 {
            out.push(format!("hwloc and the kernel differ in {more} more places."));
        }
        out
    }
}

/// Place of a device, by hwloc.
struct DeviceLocation {
    numa_node: Option<u32>,
    pci: Option<PciPath>,
}

impl DeviceLocation {
    /// Merges this place into the one that sysfs gives for the device of this name.
    fn merge_into(
        self,
        numa_node: &mut Option<u32>,
        pci: &mut Option<PciPath>,
        name: &str,
        differences: &mut Differences,
    ) {
        differences.take(&format!("node of {name}"), numa_node, self.numa_node);
        if let (Some(mine), Some(other)) = (&*pci, &self.pci)
            && mine.function == other.function
        {
            // hwloc may leave out bridges that it considers unimportant: the longer path holds more.
            if mine.bridges.len() < other.bridges.len() {
                *pci = self.pci;
            }
            return;
        }
        differences.take(&format!("PCI function of {name}"), pci, self.pci);
    }
}

fn merge_cores(ours: &mut [Core], theirs: Vec<Core>, differences: &mut Differences) {
    for core in theirs {
        let Some(mine) = ours.iter_mut().find(|mine| mine.id == core.id) else {
            // Offline by the kernel's state: hwloc's file may be older.
            continue;
        };
        differences.take(&format!("node of CPU {}", core.id), &mut mine.numa_node, core.numa_node);
        differences.take(&format!("package of CPU {}", core.id), &mut mine.package, core.package);
        mine.core_id = core.core_id.or(mine.core_id);
        mine.smt_siblings.extend(core.smt_siblings);
    }
}

fn merge_nodes(ours: &mut Vec<NumaNode>, theirs: Vec<NumaNode>, differences: &mut Differences) {
    let same_nodes = ours.iter().map(|node| node.id).eq(theirs.iter().map(|node| node.id));
    if ours.is_empty() {
        *ours = theirs;
        return;
    }
    for node in theirs {
        let Some(mine) = ours.iter_mut().find(|mine| mine.id == node.id) else { continue };
        if mine.kind == NodeKind::MemoryOnly {
            mine.kind = node.kind;
        }
        // The two count reserved pages differently: the kernel's figure is the usable memory.
        mine.memory_bytes = mine.memory_bytes.or(node.memory_bytes);
        mine.access = mine.access.or(node.access);
        if same_nodes && !node.distances.is_empty() {
            let mut distances = (!mine.distances.is_empty()).then(|| std::mem::take(&mut mine.distances));
            differences.take(&format!("row of distances of node {}", node.id), &mut distances, Some(node.distances));
            mine.distances = distances.unwrap_or_default();
        }
    }
}

fn merge_disks(ours: &mut Vec<BlockDevice>, theirs: Vec<BlockDevice>, differences: &mut Differences) {
    for disk in theirs {
        match ours.iter_mut().find(|mine| mine.name == disk.name) {
            Some(mine) => {
                let place = DeviceLocation { numa_node: disk.numa_node, pci: disk.pci };
                place.merge_into(&mut mine.numa_node, &mut mine.pci, &disk.name, differences);
                mine.bytes = mine.bytes.or(disk.bytes);
                mine.block_bytes = mine.block_bytes.or(disk.block_bytes);
            }
            // An unused loop device, or a drive that was removed: the kernel's state is newer.
            None if disk.bytes.is_none_or(|bytes| bytes == 0) => {}
            None => ours.push(disk),
        }
    }
}

fn merge_gpus(ours: &mut Vec<Gpu>, theirs: Vec<Gpu>, differences: &mut Differences) {
    for gpu in theirs {
        match ours.iter_mut().find(|mine| mine.pci.function == gpu.pci.function) {
            Some(mine) => {
                let name = format!("GPU {}", gpu.pci.function);
                differences.take(&format!("node of {name}"), &mut mine.numa_node, gpu.numa_node);
            }
            None => ours.push(gpu),
        }
    }
}
