//! Shard plan: the logical CPU and the devices' queues of each shard. Pure: a function of a machine and a request.
//!
//! A shard polls. Pinned, it may take a whole physical core for itself, so:
//!
//! * no two shards share a physical core: two pollers on SMT siblings halve each other;
//! * one physical core always stays free for everything else: the control plane, clients, interrupts;
//! * shards alternate over NUMA nodes, so that each node's memory and devices have a shard near them, beginning with
//!   the node with the highest NIC bandwidth;
//! * only CPUs that this process is allowed to use are assigned, and no more pollers than the control group's CPU limit
//!   feeds: a group over its limit is throttled, pollers included.
//!
//! If these cannot all hold for the requested number of shards, *no* shard is pinned: the scheduler then shares the
//! CPUs, and the shards must park as soon as they are idle ([`ShardPlan::must_park_at_once`]). Pinning some of them
//! would only push the others onto the cores of the pinned ones.
//!
//! Queues of NICs and drives are then assigned to the shards of their node. Every device is served by some shard, and
//! every shard has a NIC if the machine has one.

mod deal;

use crate::cpulist::{self, CpuSet};
use crate::model::{Machine, PhysicalCore};
use crate::rails::{RailMatrix, rail_matrix};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

/// Most shards of a plan. Each is a thread, a listening port and a pool; no machine gains from more.
pub const MAX_SHARDS: usize = 1_024;

/// Request for a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanRequest {
    /// Number of shards; none for as many as can be pinned, and at least 1. 0 counts as 1, and more than [`MAX_SHARDS`]
    /// as that many, with a note.
    pub shards: Option<usize>,
    /// CPUs that the calling thread may run on by the scheduler; narrows the machine's allowed CPUs. `None` for the
    /// machine's alone.
    pub affinity: Option<CpuSet>,
}

impl PlanRequest {
    /// Creates a request for this many shards, on any CPU that the machine allows.
    #[must_use]
    pub fn shards(shards: usize) -> Self {
        Self { shards: Some(shards), affinity: None }
    }
}

/// A device queue assigned to a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QueueShare {
    /// Device name: an RDMA device, an interface without one, or a drive.
    pub device: String,
    /// Number of the queue. For a drive with a known map of queues, the kernel's number of the one that serves the
    /// shard's CPU; otherwise a count from 0 over the shards that share the device.
    pub queue: u32,
    /// Node of the device.
    pub numa_node: Option<u32>,
    /// True if device and shard are on one node.
    pub local: bool,
}

/// Placement of one shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ShardSeat {
    /// Index of the shard, in `0..shards`.
    pub shard: usize,
    /// Logical CPU to pin its thread to; `None` leaves the thread to the scheduler.
    pub core: Option<usize>,
    /// Node to allocate its memory from; `None` if unknown, or if the shard is not pinned.
    pub numa_node: Option<u32>,
    /// NIC queues that it polls, the preferred one first.
    pub nics: Vec<QueueShare>,
    /// Queues of NVMe drives that it submits to.
    pub drives: Vec<QueueShare>,
    /// Reason for this placement.
    pub reason: String,
}

/// Placement of all shards of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPlan {
    /// Placements in shard order; between 1 and [`MAX_SHARDS`].
    pub shards: Vec<ShardSeat>,
    /// Logical CPUs for all other threads: the usable ones whose physical core has no pinned shard. If the only
    /// physical core has several hardware threads, those that the shard does not have.
    pub housekeeping_cores: CpuSet,
    /// Facts about the plan for operators, one sentence each.
    pub notes: Vec<String>,
}

impl ShardPlan {
    /// Returns true if idle shards must park at once instead of polling for a while first: they share their cores with
    /// other threads.
    #[must_use]
    pub fn must_park_at_once(&self) -> bool {
        self.shards.iter().any(|seat| seat.core.is_none())
    }
}

/// Plans the shards of a process on `machine`.
#[must_use]
pub fn plan(machine: &Machine, request: &PlanRequest) -> ShardPlan {
    let mut usable_cpus = machine.usable_cpus();
    if let Some(affinity) = &request.affinity {
        usable_cpus.retain(|cpu| affinity.contains(cpu));
    }
    let cores = usable_physical_cores(machine, &usable_cpus);
    let mut notes = Vec::new();
    if usable_cpus.len() < machine.cores.len() {
        let (usable, online) = (usable_cpus.len(), machine.cores.len());
        let list = cpulist::format(&usable_cpus);
        notes.push(format!("This process may use {usable} of {online} CPUs: {list}."));
    }
    let rails = rail_matrix(machine);
    let mut seats = pinnable_seats(machine, &rails, &cores);
    let limited = keep_to_limit(machine, &usable_cpus, &mut seats, &mut notes);
    let shards = shard_count(request.shards, seats.len(), &mut notes);
    let mut plan = if shards > seats.len() {
        notes.push(crowded_note(shards, seats.len(), cores.len(), limited));
        let reason = "Not pinned: the scheduler places it.".to_owned();
        let shards = (0..shards).map(|shard| new_seat(shard, None, reason.clone())).collect();
        ShardPlan { shards, housekeeping_cores: usable_cpus, notes }
    } else {
        pinned(machine, &seats[..shards], cores.len(), usable_cpus, notes)
    };
    deal::queues(machine, &rails, &mut plan.shards);
    plan
}

fn new_seat(shard: usize, seat: Option<&Seat>, reason: String) -> ShardSeat {
    ShardSeat {
        shard,
        core: seat.map(|seat| seat.cpu),
        numa_node: seat.and_then(|seat| seat.numa_node),
        nics: Vec::new(),
        drives: Vec::new(),
        reason,
    }
}

fn pinned(machine: &Machine, seats: &[Seat], cores: usize, usable_cpus: CpuSet, mut notes: Vec<String>) -> ShardPlan {
    if cores == 1 {
        notes.push("The only usable physical core is divided between a shard and all other threads.".into());
    }
    let mut housekeeping_cores = usable_cpus;
    for seat in seats {
        housekeeping_cores.retain(|cpu| !seat.occupied_cpus.contains(cpu));
    }
    let several_nodes = machine.numa_nodes.len() > 1;
    let seat = |(shard, seat): (usize, &Seat)| {
        let node = match seat.numa_node {
            Some(node) if several_nodes => format!(" of node {node}, as shards alternate over nodes"),
            None if several_nodes => " of an unknown node".to_owned(),
            _ => String::new(),
        };
        let idle: CpuSet = seat.occupied_cpus.iter().copied().filter(|&cpu| cpu != seat.cpu).collect();
        let idle = match idle.is_empty() {
            true => String::new(),
            false => format!("; its sibling {} is left idle", cpulist::format(&idle)),
        };
        new_seat(shard, Some(seat), format!("CPU {}: the next free physical core{node}{idle}.", seat.cpu))
    };
    ShardPlan { shards: seats.iter().enumerate().map(seat).collect(), housekeeping_cores, notes }
}

/// Removes the seats that the CPU limit does not feed; returns whether it did.
fn keep_to_limit(machine: &Machine, usable_cpus: &CpuSet, seats: &mut Vec<Seat>, notes: &mut Vec<String>) -> bool {
    let Some(limit) = machine.cpu_limit_millis.filter(|&limit| limit < usable_cpus.len() as u64 * 1_000) else {
        return false;
    };
    // One CPU's time is kept for everything else.
    let pollers = usize::try_from(limit / 1_000).unwrap_or(usize::MAX).saturating_sub(1);
    if pollers >= seats.len() {
        return false;
    }
    seats.truncate(pollers);
    let (whole, hundredths) = (limit / 1_000, limit % 1_000 / 10);
    notes.push(format!(
        "The control group allows {whole}.{hundredths:02} CPUs of time: {pollers} may poll, one is kept for the rest."
    ));
    true
}

/// A physical core that a shard can be pinned to.
struct Seat {
    cpu: usize,
    numa_node: Option<u32>,
    /// CPUs to keep free of other threads while a shard is pinned here.
    occupied_cpus: CpuSet,
}

/// Returns the physical cores with at least one usable CPU, reduced to usable CPUs.
fn usable_physical_cores(machine: &Machine, usable_cpus: &CpuSet) -> Vec<PhysicalCore> {
    let mut cores = machine.physical_cores();
    for core in &mut cores {
        core.cpus.retain(|cpu| usable_cpus.contains(cpu));
    }
    cores.retain(|core| !core.cpus.is_empty());
    cores
}

/// Returns all seats, best first: a plan of n shards takes the first n.
fn pinnable_seats(machine: &Machine, rails: &RailMatrix, cores: &[PhysicalCore]) -> Vec<Seat> {
    if let [only] = cores {
        return seat_beside_housekeeping(only).into_iter().collect();
    }
    let mut free_of_node: BTreeMap<u32, VecDeque<&PhysicalCore>> = BTreeMap::new();
    for core in cores {
        // Cores of an unknown node form a group of their own, the last.
        free_of_node.entry(core.numa_node.unwrap_or(u32::MAX)).or_default().push_back(core);
    }
    // Housekeeping takes a core from the node with most cores, so that no node loses its only shard; on an even machine
    // that is the core of CPU 0, where interrupts go by default.
    let most = free_of_node.values().map(VecDeque::len).max().unwrap_or(0);
    if let Some(free) = free_of_node.values_mut().find(|free| free.len() == most) {
        free.pop_front();
    }
    let mut free: Vec<(u32, VecDeque<&PhysicalCore>)> = free_of_node.into_iter().collect();
    free.sort_by_key(|(node, _)| Reverse(deal::bandwidth_of_node(machine, rails, *node)));
    let mut seats = Vec::new();
    while free.iter().any(|(_, free)| !free.is_empty()) {
        let round = free.iter_mut().filter_map(|(_, free)| free.pop_front());
        seats.extend(round.filter_map(|core| {
            let cpu = *core.cpus.first()?;
            Some(Seat { cpu, numa_node: core.numa_node, occupied_cpus: core.cpus.clone() })
        }));
    }
    seats
}

/// On a single physical core with several hardware threads (usually a small virtual machine), the last thread is for a
/// shard and the others are for the rest: better than a shard that the scheduler migrates between CPUs.
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

fn crowded_note(shards: usize, pinnable: usize, cores: usize, limited: bool) -> String {
    let why = match (pinnable, cores) {
        (0, 1..) if limited => "The limit of processor time leaves none to poll with".into(),
        _ if limited => format!("{shards} shards were requested, more than may poll"),
        (_, 0) => "No usable CPU is known".into(),
        (0, _) => "The only usable CPU is needed for everything else too".into(),
        (_, 1) => format!("{shards} shards were requested on one usable physical core"),
        _ => format!(
            "{shards} shards were requested, but only {pinnable} can have a core of their own (of {cores} usable, \
             with one kept for everything else)"
        ),
    };
    format!("{why}: shards are not pinned, and park as soon as they are idle.")
}
