//! Use of each physical core, for all drawings.

use crate::cpulist::CpuSet;
use crate::model::Machine;
use crate::plan::ShardPlan;
use std::collections::BTreeMap;

/// Use of a core without shards; [`Use::Shard`] if it has a shard, or no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// A shard, or no use.
    Shard,
    /// Housekeeping: all other threads.
    Housekeeping,
    /// The process may not run on the core.
    Denied,
}

/// One physical core.
pub(super) struct Cell {
    pub(super) numa_node: Option<u32>,
    pub(super) cpus: CpuSet,
    /// CPUs that shards are pinned to.
    pub(super) pinned: CpuSet,
    /// Shards pinned to these CPUs.
    pub(super) shards: Vec<usize>,
    pub(super) usage: Use,
}

pub(super) fn cells(machine: &Machine, plan: &ShardPlan) -> Vec<Cell> {
    let usable = machine.usable_cpus();
    let shard_of_cpu: BTreeMap<usize, usize> =
        plan.shards.iter().filter_map(|seat| Some((seat.core?, seat.shard))).collect();
    let cell = |core: crate::model::PhysicalCore| {
        let pinned: CpuSet = core.cpus.iter().copied().filter(|cpu| shard_of_cpu.contains_key(cpu)).collect();
        let usage = if !core.cpus.is_disjoint(&plan.housekeeping_cores) {
            Use::Housekeeping
        } else if core.cpus.is_disjoint(&usable) {
            Use::Denied
        } else {
            Use::Shard
        };
        let shards = pinned.iter().filter_map(|cpu| shard_of_cpu.get(cpu).copied()).collect();
        Cell { numa_node: core.numa_node, cpus: core.cpus, pinned, shards, usage }
    };
    machine.physical_cores().into_iter().map(cell).collect()
}
