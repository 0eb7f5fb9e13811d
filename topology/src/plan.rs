//! Which logical CPU each shard gets. Pure: a machine and a wish in, a plan out.
//!
//! A shard polls. Pinned, it may take a whole physical core for itself, so:
//!
//! * no two shards share a physical core: two pollers on SMT siblings halve each other;
//! * one physical core always stays free for everything else: the control plane, clients, interrupts;
//! * shards alternate over NUMA nodes, so that each node's memory and devices have a shard near them;
//! * only CPUs that this process is allowed to use are given out.
//!
//! When these cannot all hold for the number of shards asked for, *no* shard is pinned: the scheduler then shares what
//! there is, and the shards must park as soon as they have nothing to do ([`ShardPlan::must_park_at_once`]).
//! Pinning some would only push the others onto the cores of the pinned ones.
//!
//! The plan does not yet look at where NICs and disks sit, nor at a cgroup's CPU time quota.

use crate::cpulist::{self, CpuSet};
use crate::model::{Machine, PhysicalCore};
use std::collections::{BTreeMap, VecDeque};

/// The most shards that a plan has. Each is a thread, a listening port and a pool; no machine gains from more.
pub const MAX_SHARDS: usize = 1_024;

/// Where one shard sits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardSeat {
    /// The shard's index, `0..shards`.
    pub shard: usize,
    /// Logical CPU to pin its thread to; `None`: leave the thread to the scheduler.
    pub core: Option<usize>,
    /// Node to take its memory from; `None`: unknown, or the shard is not pinned.
    pub numa_node: Option<u32>,
}

/// Where all shards of a process sit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPlan {
    /// One seat a shard, in shard order; between 1 and [`MAX_SHARDS`].
    pub shards: Vec<ShardSeat>,
    /// Logical CPUs for every other thread: the usable ones whose physical core has no pinned shard. Where the only
    /// physical core has several hardware threads, those that the shard does not have.
    pub housekeeping_cores: CpuSet,
    /// What an operator should know about the plan, one sentence each.
    pub notes: Vec<String>,
}

impl ShardPlan {
    /// Whether shards must park as soon as they are idle instead of polling for a while first: they share their
    /// cores with other threads.
    #[must_use]
    pub fn must_park_at_once(&self) -> bool {
        self.shards.iter().any(|seat| seat.core.is_none())
    }
}

/// Plans `requested_shards` shards on `machine`; without a wish, as many as can be pinned, and at least 1.
///
/// A wish of 0 counts as 1, and one above [`MAX_SHARDS`] as that; a note says so.
#[must_use]
pub fn plan(machine: &Machine, requested_shards: Option<usize>) -> ShardPlan {
    let usable_cpus = machine.usable_cpus();
    let cores = usable_physical_cores(machine, &usable_cpus);
    let mut notes = Vec::new();
    if usable_cpus.len() < machine.cores.len() {
        let (usable, online) = (usable_cpus.len(), machine.cores.len());
        let list = cpulist::format(&usable_cpus);
        notes.push(format!("This process may use {usable} of {online} CPUs: {list}."));
    }
    let seats = pinnable_seats(&cores);
    let shards = shard_count(requested_shards, seats.len(), &mut notes);
    if shards > seats.len() {
        notes.push(crowded_note(shards, seats.len(), cores.len()));
        let unpinned = |shard| ShardSeat { shard, core: None, numa_node: None };
        let shards = (0..shards).map(unpinned).collect();
        return ShardPlan { shards, housekeeping_cores: usable_cpus, notes };
    }

    if cores.len() == 1 {
        notes.push("The only usable physical core is divided between a shard and the rest.".into());
    }
    let seats = &seats[..shards];
    let seat = |(shard, seat): (usize, &Seat)| ShardSeat { shard, core: Some(seat.cpu), numa_node: seat.numa_node };
    let mut housekeeping_cores = usable_cpus;
    for seat in seats {
        housekeeping_cores.retain(|cpu| !seat.occupied_cpus.contains(cpu));
    }
    ShardPlan { shards: seats.iter().enumerate().map(seat).collect(), housekeeping_cores, notes }
}

/// A place that one shard can be pinned to.
struct Seat {
    cpu: usize,
    numa_node: Option<u32>,
    /// CPUs that nothing else should run on while a shard sits here.
    occupied_cpus: CpuSet,
}

/// Physical cores with at least one usable CPU, reduced to those.
fn usable_physical_cores(machine: &Machine, usable_cpus: &CpuSet) -> Vec<PhysicalCore> {
    let mut cores = machine.physical_cores();
    for core in &mut cores {
        core.cpus.retain(|cpu| usable_cpus.contains(cpu));
    }
    cores.retain(|core| !core.cpus.is_empty());
    cores
}

/// All seats, best first: a plan of n shards takes the first n.
fn pinnable_seats(cores: &[PhysicalCore]) -> Vec<Seat> {
    if let [only] = cores {
        return seat_beside_housekeeping(only).into_iter().collect();
    }
    let mut free_of_node: BTreeMap<u32, VecDeque<&PhysicalCore>> = BTreeMap::new();
    for core in cores {
        // Cores of an unknown node form a node of their own, the last.
        free_of_node.entry(core.numa_node.unwrap_or(u32::MAX)).or_default().push_back(core);
    }
    // Housekeeping takes from the node that has most, so that no node loses its only shard; on an even machine that
    // is the core of CPU 0, where interrupts go unless told otherwise.
    let most = free_of_node.values().map(VecDeque::len).max().unwrap_or(0);
    if let Some(free) = free_of_node.values_mut().find(|free| free.len() == most) {
        free.pop_front();
    }
    let mut seats = Vec::new();
    while free_of_node.values().any(|free| !free.is_empty()) {
        let round = free_of_node.values_mut().filter_map(VecDeque::pop_front);
        seats.extend(round.filter_map(|core| {
            let cpu = *core.cpus.first()?;
            Some(Seat { cpu, numa_node: core.numa_node, occupied_cpus: core.cpus.clone() })
        }));
    }
    seats
}

/// On a single physical core with several hardware threads (a small virtual machine, usually) the last thread is
/// for a shard and the others for the rest: better than a shard that the scheduler moves about.
fn seat_beside_housekeeping(only: &PhysicalCore) -> Option<Seat> {
    let cpu = *only.cpus.last().filter(|_| only.cpus.len() > 1)?;
    Some(Seat { cpu, numa_node: only.numa_node, occupied_cpus: CpuSet::from([cpu]) })
}

fn shard_count(requested: Option<usize>, pinnable: usize, notes: &mut Vec<String>) -> usize {
    let wanted = requested.unwrap_or(pinnable.max(1));
    let shards = wanted.clamp(1, MAX_SHARDS);
    if shards != wanted {
        notes.push(format!("{wanted} shards are out of range; the plan has {shards}."));
    }
    shards
}

fn crowded_note(shards: usize, pinnable: usize, cores: usize) -> String {
    let why = match (pinnable, cores) {
        (_, 0) => "No usable CPU is known".into(),
        (0, _) => "The only usable CPU is needed for everything else too".into(),
        (_, 1) => format!("{shards} shards were asked for on one usable physical core"),
        _ => format!(
            "{shards} shards were asked for, but only {pinnable} can have a core of their own (of {cores} usable, \
             with one kept for everything else)"
        ),
    };
    format!("{why}: shards are not pinned, and park as soon as they are idle.")
}
