//! Model of a machine: the values that the planner, the drawing and the drivers need, and no more.
//!
//! Absence is explicit: an `Option` that is `None` means that the kernel did not report the value. A device whose NUMA
//! node is unknown (the kernel prints `-1`, usual in virtual machines and on hosts with one node) is not on node 0.
//!
//! The value is plain data and does not follow changes: a CPU taken offline later stays in it.

mod device;
mod pci;

use crate::cpulist::CpuSet;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

pub use device::{BlockDevice, Gpu, HardwareQueue, LinkLayer, Nic, NvmeController, PortState, RdmaDevice, RdmaPort};
pub use pci::{MAX_BRIDGES, NotPci, PciAddress, PciPath, PciRelation, PciRoot};

/// A machine, or the part of it that a process sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// NUMA nodes by ascending id; empty if the kernel has no NUMA support.
    pub numa_nodes: Vec<NumaNode>,
    /// Online logical CPUs by ascending id.
    pub cores: Vec<Core>,
    /// Distinct caches, by level, kind and first CPU.
    pub caches: Vec<Cache>,
    /// Network interfaces by name, including virtual ones.
    pub nics: Vec<Nic>,
    /// RDMA devices by name.
    pub rdma_devices: Vec<RdmaDevice>,
    /// Block devices with a medium, by name.
    pub block_devices: Vec<BlockDevice>,
    /// NVMe controllers by name.
    pub nvme_controllers: Vec<NvmeController>,
    /// Accelerators by PCI address.
    pub gpus: Vec<Gpu>,
    /// CPUs on which this process may run. May name CPUs that are not online.
    pub allowed_cpus: CpuSet,
    /// CPU time that this process's control group may use, in thousandths of a CPU; `None` if no limit is known.
    pub cpu_limit_millis: Option<u64>,
    /// Unknown values and their consequences, one sentence each.
    pub notes: Vec<String>,
}

/// Kind of a NUMA node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeKind {
    /// Memory with CPUs.
    #[default]
    Cpus,
    /// Memory without CPUs behind CXL.
    Cxl,
    /// Other memory without CPUs: on the package, persistent, or of an accelerator.
    MemoryOnly,
}

impl NodeKind {
    /// Returns the kind's name in drawings and JSON.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Cpus => "cpus",
            Self::Cxl => "cxl",
            Self::MemoryOnly => "memory only",
        }
    }
}

/// Latency and bandwidth between a node's memory and the nearest initiators, as the firmware reports them (HMAT).
/// Bandwidth in mebibytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NodeAccess {
    /// Latency of a read, in nanoseconds.
    pub read_latency_ns: Option<u32>,
    /// Latency of a write, in nanoseconds.
    pub write_latency_ns: Option<u32>,
    /// Bandwidth of reads.
    pub read_mib_per_s: Option<u32>,
    /// Bandwidth of writes.
    pub write_mib_per_s: Option<u32>,
}

/// Memory, and usually CPUs, at one distance from each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct NumaNode {
    /// The kernel's number of the node.
    pub id: u32,
    pub kind: NodeKind,
    /// Memory of the node, in bytes.
    pub memory_bytes: Option<u64>,
    /// Distance to each node, in the order of [`Machine::numa_nodes`], 10 being local (ACPI SLIT units); empty if
    /// unknown.
    pub distances: Vec<u32>,
    /// Speed of the node's memory by the firmware; `None` if the firmware reports none.
    pub access: Option<NodeAccess>,
}

/// One logical CPU: the unit that a thread is pinned to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Core {
    /// The kernel's number of the logical CPU.
    pub id: usize,
    /// NUMA node of the CPU.
    pub numa_node: Option<u32>,
    /// Socket of the CPU.
    pub package: Option<u32>,
    /// Number of its physical core, unique within the package only.
    pub core_id: Option<u32>,
    /// Logical CPUs of the same physical core, this one included.
    pub smt_siblings: CpuSet,
}

/// Contents of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheKind {
    /// Data only.
    Data,
    /// Instructions only.
    Instruction,
    /// Data and instructions.
    Unified,
}

impl CacheKind {
    /// Returns the kind's name in JSON.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Instruction => "instruction",
            Self::Unified => "unified",
        }
    }
}

/// One cache and the CPUs behind it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Cache {
    /// Level; 1 is nearest to the core.
    pub level: u32,
    /// Contents of the cache.
    pub kind: CacheKind,
    /// Logical CPUs that share it.
    pub shared_cpus: CpuSet,
    /// Capacity, in bytes.
    pub size_bytes: Option<u64>,
}

/// Logical CPUs that share one physical core, as grouped by [`Machine::physical_cores`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhysicalCore {
    /// Online logical CPUs of the core; never empty.
    pub cpus: CpuSet,
    /// Node of its lowest logical CPU.
    pub numa_node: Option<u32>,
}

impl Machine {
    /// Groups the online logical CPUs by physical core, in the order of each group's lowest CPU.
    ///
    /// Two CPUs are in one group if either names the other as a sibling, directly or through others: if the kernel's
    /// lists disagree, no CPU is wrongly considered independent.
    #[must_use]
    pub fn physical_cores(&self) -> Vec<PhysicalCore> {
        let position: BTreeMap<usize, usize> =
            self.cores.iter().enumerate().map(|(index, core)| (core.id, index)).collect();
        let mut parent: Vec<usize> = (0..self.cores.len()).collect();
        for (index, core) in self.cores.iter().enumerate() {
            for other in core.smt_siblings.iter().filter_map(|cpu| position.get(cpu)) {
                let (a, b) = (root(&mut parent, index), root(&mut parent, *other));
                parent[a.max(b)] = a.min(b);
            }
        }
        let mut groups: BTreeMap<usize, CpuSet> = BTreeMap::new();
        for (index, core) in self.cores.iter().enumerate() {
            groups.entry(root(&mut parent, index)).or_default().insert(core.id);
        }
        let mut cores: Vec<PhysicalCore> = groups
            .into_values()
            .map(|cpus| {
                let lowest = cpus.first().and_then(|cpu| position.get(cpu));
                let numa_node = lowest.and_then(|&index| self.cores[index].numa_node);
                PhysicalCore { cpus, numa_node }
            })
            .collect();
        cores.sort_by_key(|core| core.cpus.first().copied());
        cores
    }

    /// Returns the node that a device counts for: its own, or, on a machine with one node of CPUs, that one.
    #[must_use]
    pub fn effective_node(&self, numa_node: Option<u32>) -> Option<u32> {
        numa_node.or_else(|| {
            let nodes: BTreeSet<Option<u32>> = self.cores.iter().map(|core| core.numa_node).collect();
            if nodes.len() == 1 { nodes.first().copied().flatten() } else { None }
        })
    }

    /// Returns the distance from node `from` to node `to` in ACPI SLIT units; `None` if unknown.
    #[must_use]
    pub fn distance(&self, from: u32, to: u32) -> Option<u32> {
        let column = self.numa_nodes.iter().position(|node| node.id == to)?;
        self.numa_nodes.iter().find(|node| node.id == from)?.distances.get(column).copied()
    }

    /// Returns the CPUs that are online and on which this process may run.
    #[must_use]
    pub fn usable_cpus(&self) -> CpuSet {
        let online = self.cores.iter().map(|core| core.id);
        online.filter(|cpu| self.allowed_cpus.contains(cpu)).collect()
    }
}

/// Returns the representative of `index` in a union-find forest, with path halving.
fn root(parent: &mut [usize], mut index: usize) -> usize {
    while parent[index] != index {
        parent[index] = parent[parent[index]];
        index = parent[index];
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    fn core(id: usize, siblings: &[usize]) -> Core {
        let smt_siblings = siblings.iter().copied().collect();
        Core { id, numa_node: Some(id as u32), package: None, core_id: None, smt_siblings }
    }

    #[test]
    fn siblings_that_only_one_side_names_share_a_core() {
        let cores = vec![core(0, &[0]), core(1, &[]), core(2, &[0, 99]), core(3, &[2, 3])];
        let machine = Machine { cores, ..Machine::default() };
        let groups: Vec<Vec<usize>> =
            machine.physical_cores().iter().map(|c| c.cpus.iter().copied().collect()).collect();
        assert_eq!(groups, [vec![0, 2, 3], vec![1]]);
        assert_eq!(machine.physical_cores()[1].numa_node, Some(1));
    }

    #[test]
    fn a_usable_cpu_is_online_and_allowed() {
        let allowed_cpus = CpuSet::from([1, 7]);
        let cores = vec![core(0, &[0]), core(1, &[1])];
        let machine = Machine { cores, allowed_cpus, ..Machine::default() };
        assert_eq!(machine.usable_cpus(), CpuSet::from([1]));
    }
}
