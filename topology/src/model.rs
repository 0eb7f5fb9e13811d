//! The machine as a value: what the planner, the drawing and the drivers need to know about it, and no more.
//!
//! Absence is explicit: an `Option` that is `None` means that the kernel did not say. A device whose NUMA node is
//! unknown (the kernel prints `-1`, usual in virtual machines and on boxes with one node) is not on node 0.
//!
//! The value is plain data. It does not keep itself true: a CPU taken offline later still stands in it.

use crate::cpulist::CpuSet;
use std::collections::BTreeMap;

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
    /// Block devices that have a medium, by name.
    pub block_devices: Vec<BlockDevice>,
    /// CPUs on which this process may run. May name CPUs that are not online.
    pub allowed_cpus: CpuSet,
}

/// Memory, and usually CPUs, at one distance from each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// The kernel's number of the node.
    pub id: u32,
    /// Memory of the node, bytes.
    pub memory_bytes: Option<u64>,
    /// Distance to each node, in the order of [`Machine::numa_nodes`], 10 being local (ACPI SLIT units); empty
    /// where unknown.
    pub distances: Vec<u32>,
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

/// One network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Interface name, such as `eth0`.
    pub name: String,
    /// Node of the device behind it.
    pub numa_node: Option<u32>,
    /// Link speed, megabits per second.
    pub speed_mbps: Option<u64>,
    /// Switched on and not known to lack a carrier.
    pub up: bool,
    /// The loopback interface.
    pub loopback: bool,
    /// RDMA device on the same hardware function, such as `mlx5_0`.
    pub rdma_device: Option<String>,
}

/// One whole disk (not a partition).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// Device name below `/dev`.
    pub name: String,
    /// Node of the controller behind it; `None` also where its controllers sit on different nodes.
    pub numa_node: Option<u32>,
    /// An NVMe namespace.
    pub nvme: bool,
    /// Capacity, bytes.
    pub bytes: Option<u64>,
    /// Spinning medium.
    pub rotational: Option<bool>,
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
