//! The machine as a value: what the planner, the drawing and the drivers need to know about it, and no more.
//!
//! Absence is explicit: an `Option` that is `None` means that the kernel did not say. A device whose NUMA node is
//! unknown (the kernel prints `-1`, usual in virtual machines and on boxes with one node) is not on node 0.
//!
//! The value is plain data. It does not keep itself true: a CPU taken offline later still stands in it.

mod device;
mod pci;

use crate::cpulist::CpuSet;
use std::collections::{BTreeMap, BTreeSet};

pub use device::{BlockDevice, Gpu, HardwareQueue, LinkLayer, Nic, NvmeController, PortState, RdmaDevice, RdmaPort};
pub use pci::{MAX_BRIDGES, NotPci, PciAddress, PciPath, PciRelation, PciRoot};

/// One machine, or the part of it that a process sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// NUMA nodes by ascending id; empty where the kernel has no NUMA support.
    pub numa_nodes: Vec<NumaNode>,
    /// Online logical CPUs by ascending id.
    pub cores: Vec<Core>,
    /// Caches, each once, by level, kind and first CPU.
    pub caches: Vec<Cache>,
    /// Network interfaces by name, virtual ones too.
    pub nics: Vec<Nic>,
    /// RDMA devices by name.
    pub rdma_devices: Vec<RdmaDevice>,
    /// Block devices that have a medium, by name.
    pub block_devices: Vec<BlockDevice>,
    /// NVMe controllers by name.
    pub nvme_controllers: Vec<NvmeController>,
    /// Accelerators by PCI address.
    pub gpus: Vec<Gpu>,
    /// CPUs on which this process may run. May name CPUs that are not online.
    pub allowed_cpus: CpuSet,
    /// Processor time that this process's control group may use, thousandths of a CPU; `None`: no limit is known.
    pub cpu_limit_millis: Option<u64>,
    /// What could not be found out and what follows, one sentence each.
    pub notes: Vec<String>,
}

/// What a node is made of.
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
    /// A word for people and programs.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Cpus => "cpus",
            Self::Cxl => "cxl",
            Self::MemoryOnly => "memory only",
        }
    }
}

/// How fast the nearest initiators reach a node's memory, as the firmware tells (HMAT). Bandwidth in mebibytes a
/// second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeAccess {
    /// Latency of a read, nanoseconds.
    pub read_latency_ns: Option<u32>,
    /// Latency of a write, nanoseconds.
    pub write_latency_ns: Option<u32>,
    /// Bandwidth of reads.
    pub read_mib_per_s: Option<u32>,
    /// Bandwidth of writes.
    pub write_mib_per_s: Option<u32>,
}

/// Memory, and usually CPUs, at one distance from each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNode {
    /// The kernel's number of the node.
    pub id: u32,
    /// What it is made of.
    pub kind: NodeKind,
    /// Memory of the node, bytes.
    pub memory_bytes: Option<u64>,
    /// Distance to each node, in the order of [`Machine::numa_nodes`], 10 being local (ACPI SLIT units); empty
    /// where unknown.
    pub distances: Vec<u32>,
    /// What the firmware tells about its speed; `None` where it tells nothing.
    pub access: Option<NodeAccess>,
}

/// One logical CPU: what a thread is pinned to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Core {
    /// The kernel's number of the logical CPU.
    pub id: usize,
    /// NUMA node it belongs to.
    pub numa_node: Option<u32>,
    /// Socket it sits in.
    pub package: Option<u32>,
    /// Number of its physical core, unique within the package only.
    pub core_id: Option<u32>,
    /// Logical CPUs of the same physical core, this one included.
    pub smt_siblings: CpuSet,
}

/// What a cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheKind {
    /// Data only.
    Data,
    /// Instructions only.
    Instruction,
    /// Both.
    Unified,
}

/// One cache and the CPUs behind it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cache {
    /// 1 is nearest to the core.
    pub level: u32,
    /// What it holds.
    pub kind: CacheKind,
    /// Logical CPUs that share it.
    pub shared_cpus: CpuSet,
    /// Capacity, bytes.
    pub size_bytes: Option<u64>,
}

/// Logical CPUs that share one physical core, as [`Machine::physical_cores`] groups them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhysicalCore {
    /// Its online logical CPUs; never empty.
    pub cpus: CpuSet,
    /// Node of its lowest logical CPU.
    pub numa_node: Option<u32>,
}

impl Machine {
    /// Groups the online logical CPUs by physical core, in the order of each group's lowest CPU.
    ///
    /// Two CPUs are in one group when either names the other as a sibling, directly or through others: if the
    /// kernel's lists disagree, no CPU is wrongly taken for independent.
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

    /// Node to count a device to: its own, or, on a machine with one node of CPUs, that one.
    #[must_use]
    pub fn effective_node(&self, numa_node: Option<u32>) -> Option<u32> {
        numa_node.or_else(|| {
            let nodes: BTreeSet<Option<u32>> = self.cores.iter().map(|core| core.numa_node).collect();
            if nodes.len() == 1 { nodes.first().copied().flatten() } else { None }
        })
    }

    /// Distance from node `from` to node `to` in ACPI SLIT units; `None` where the kernel does not say.
    #[must_use]
    pub fn distance(&self, from: u32, to: u32) -> Option<u32> {
        let column = self.numa_nodes.iter().position(|node| node.id == to)?;
        self.numa_nodes.iter().find(|node| node.id == from)?.distances.get(column).copied()
    }

    /// CPUs that are online and on which this process may run.
    #[must_use]
    pub fn usable_cpus(&self) -> CpuSet {
        let online = self.cores.iter().map(|core| core.id);
        online.filter(|cpu| self.allowed_cpus.contains(cpu)).collect()
    }
}

/// The representative of `index` in a union-find forest, with path halving.
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
