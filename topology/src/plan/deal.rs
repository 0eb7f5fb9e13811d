//! Assignment of NIC and drive queues to shards.
//!
//! Devices go to the shards of their node in round-robin order: with more devices than shards each device has one
//! shard, with more shards than devices each shard has one device. A device whose node has no shard goes to the nearest
//! node with shards; a device of an unknown node goes to all. A shard without a NIC takes one of the nearest node. Slow
//! NICs, and interfaces without RDMA on a machine with rails, are assigned so that none is lost, but do not count as a
//! shard's NIC.

use super::{QueueShare, ShardSeat};
use crate::model::{BlockDevice, Machine, Nic};
use crate::rails::{Rail, RailMatrix, natural_key};
use std::collections::{BTreeMap, BTreeSet};

/// A device with queues.
#[derive(Clone)]
struct Device {
    name: String,
    numa_node: Option<u32>,
    /// Number of its queues, if known.
    queues: Option<u32>,
}

/// List of a seat that a device is added to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Nic,
    Drive,
}

/// Fills the device lists of all seats, and completes their reasons.
pub(super) fn queues(machine: &Machine, rails: &RailMatrix, seats: &mut [ShardSeat]) {
    let (fast, slow) = (rails_where(machine, rails, false), rails_where(machine, rails, true));
    let plain = plain_nics(machine, rails);
    let mut dealer = Dealer { machine, seats, used: BTreeMap::new() };
    let share_of_each = if fast.is_empty() { &plain } else { &fast };
    dealer.deal(Kind::Nic, share_of_each, true);
    dealer.fill(share_of_each);
    dealer.deal(Kind::Drive, &drives(machine), true);
    dealer.nearest_first();
    dealer.deal(Kind::Nic, &slow, false);
    if !fast.is_empty() {
        dealer.deal(Kind::Nic, &plain, false);
    }
    for seat in seats {
        let reason = reason(seat);
        seat.reason.push_str(&reason);
    }
}

/// Returns the bandwidth of a node's rails in megabits per second, without slow ones; that of its interfaces if the
/// machine has no rails.
pub(super) fn bandwidth_of_node(machine: &Machine, rails: &RailMatrix, node: u32) -> u64 {
    let on_node = |numa_node| machine.effective_node(numa_node) == Some(node);
    if !rails.rails.is_empty() {
        let mine = rails.rails.iter().filter(|rail| on_node(rail.numa_node) && !rails.is_slow(rail));
        return mine.filter_map(|rail| rail.speed_mbps).sum();
    }
    let nics = plain_nics(machine, rails);
    let counts = |nic: &&Nic| nics.iter().any(|one| one.name == nic.name) && on_node(nic.numa_node);
    machine.nics.iter().filter(counts).filter_map(|nic| nic.speed_mbps).sum()
}

fn rails_where(machine: &Machine, rails: &RailMatrix, slow: bool) -> Vec<Device> {
    let wanted = rails.rails.iter().filter(|rail| rails.is_slow(rail) == slow);
    let device = |rail: &Rail| Device {
        name: rail.name.clone(),
        numa_node: machine.effective_node(rail.numa_node),
        queues: None,
    };
    wanted.map(device).collect()
}

/// Returns the hardware interfaces that are up and have no rail over them.
fn plain_nics(machine: &Machine, rails: &RailMatrix) -> Vec<Device> {
    let rail_over = |name: &String| rails.rails.iter().any(|rail| rail.netdev.as_ref() == Some(name));
    let has_rail = |nic: &Nic| {
        rail_over(&nic.name) || nic.rdma_device.as_deref().is_some_and(|device| rails.rail(device).is_some())
    };
    let usable = machine.nics.iter().filter(|nic| nic.up && !nic.loopback && nic.pci.is_some() && !has_rail(nic));
    let device = |nic: &Nic| Device {
        name: nic.name.clone(),
        numa_node: machine.effective_node(nic.numa_node),
        queues: nic.queues,
    };
    sorted(usable.map(device).collect())
}

/// Returns the NVMe namespaces, including attached ones.
fn drives(machine: &Machine) -> Vec<Device> {
    let device = |disk: &BlockDevice| Device {
        name: disk.name.clone(),
        numa_node: disk.numa_node.or_else(|| machine.effective_node(None).filter(|_| disk.pci.is_some())),
        queues: (!disk.hardware_queues.is_empty()).then_some(disk.hardware_queues.len() as u32),
    };
    sorted(machine.block_devices.iter().filter(|disk| disk.nvme).map(device).collect())
}

fn sorted(mut devices: Vec<Device>) -> Vec<Device> {
    devices.sort_by_cached_key(|device| natural_key(&device.name));
    devices
}

struct Dealer<'a> {
    machine: &'a Machine,
    seats: &'a mut [ShardSeat],
    /// Number of assigned shares, by device.
    used: BTreeMap<String, u32>,
}

impl Dealer<'_> {
    /// Assigns each device; with `everybody`, each shard of a device's node gets a share of some device.
    fn deal(&mut self, kind: Kind, devices: &[Device], everybody: bool) {
        let mut by_seats: BTreeMap<Vec<usize>, Vec<&Device>> = BTreeMap::new();
        for device in devices {
            by_seats.entry(self.seats_near(device.numa_node)).or_default().push(device);
        }
        for (seats, devices) in by_seats {
            let rounds = if everybody { seats.len().max(devices.len()) } else { devices.len() };
            for round in 0..rounds {
                self.give(kind, seats[round % seats.len()], devices[round % devices.len()]);
            }
        }
    }

    /// Sorts the devices of a seat's own node before others.
    fn nearest_first(&mut self) {
        for seat in self.seats.iter_mut() {
            seat.nics.sort_by_key(|share| !share.local);
            seat.drives.sort_by_key(|share| !share.local);
        }
    }

    /// Assigns a NIC of the nearest node with NICs to each seat without one.
    fn fill(&mut self, devices: &[Device]) {
        let mut turns: BTreeMap<Option<u32>, usize> = BTreeMap::new();
        for index in 0..self.seats.len() {
            if devices.is_empty() || !self.seats[index].nics.is_empty() {
                continue;
            }
            let here = self.seats[index].numa_node;
            let far = |device: &&Device| self.distance(here, device.numa_node);
            let Some(least) = devices.iter().map(|device| far(&device)).min() else { continue };
            let nearest: Vec<&Device> = devices.iter().filter(|device| far(device) == least).collect();
            let turn = turns.entry(here).or_default();
            let device = nearest[*turn % nearest.len()].clone();
            *turn += 1;
            self.give(Kind::Nic, index, &device);
        }
    }

    /// Returns the seats of a node, or of the nearest node with seats; all seats, for an unknown node or without pinned
    /// seats.
    fn seats_near(&self, node: Option<u32>) -> Vec<usize> {
        let all = || (0..self.seats.len()).collect();
        let Some(node) = node else { return all() };
        let nodes: BTreeSet<u32> = self.seats.iter().filter_map(|seat| seat.numa_node).collect();
        let Some(nearest) = nodes.into_iter().min_by_key(|&other| self.distance(Some(node), Some(other))) else {
            return all();
        };
        let of_node = self.seats.iter().enumerate().filter(|(_, seat)| seat.numa_node == Some(nearest));
        of_node.map(|(index, _)| index).collect()
    }

    /// Returns a sort key: the same node first, then known distances, then unknown ones.
    fn distance(&self, from: Option<u32>, to: Option<u32>) -> (bool, u32) {
        match (from, to) {
            (Some(from), Some(to)) if from == to => (false, 0),
            (Some(from), Some(to)) => {
                let distance = self.machine.distance(from, to);
                (distance.is_none(), distance.unwrap_or(u32::MAX).max(1))
            }
            _ => (true, u32::MAX),
        }
    }

    fn give(&mut self, kind: Kind, seat: usize, device: &Device) {
        let count = self.used.entry(device.name.clone()).or_default();
        let seat = &mut self.seats[seat];
        let mapped =
            seat.core.filter(|_| kind == Kind::Drive).and_then(|core| self.machine.drive_queue(&device.name, core));
        let share = QueueShare {
            device: device.name.clone(),
            queue: mapped.unwrap_or(*count % device.queues.unwrap_or(u32::MAX).max(1)),
            numa_node: device.numa_node,
            local: device.numa_node.is_some() && seat.numa_node == device.numa_node,
        };
        *count += 1;
        match kind {
            Kind::Nic => seat.nics.push(share),
            Kind::Drive => seat.drives.push(share),
        }
    }
}

impl Machine {
    /// Returns the hardware queue of a disk that serves a CPU.
    fn drive_queue(&self, disk: &str, cpu: usize) -> Option<u32> {
        let disk = self.block_devices.iter().find(|one| one.name == disk)?;
        disk.hardware_queues.iter().find(|queue| queue.cpus.contains(&cpu)).map(|queue| queue.index)
    }
}

fn reason(seat: &ShardSeat) -> String {
    let list = |shares: &[QueueShare]| {
        let one = |share: &QueueShare| {
            let far = match (share.numa_node, seat.numa_node) {
                (None, _) => " (node unknown)".to_owned(),
                (Some(there), Some(here)) if here != there => format!(" (on node {there})"),
                _ => String::new(),
            };
            format!("{} queue {}{far}", share.device, share.queue)
        };
        shares.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    let mut out = String::new();
    if !seat.nics.is_empty() {
        out.push_str(&format!(" NICs assigned to it: {}.", list(&seat.nics)));
    }
    if !seat.drives.is_empty() {
        out.push_str(&format!(" Drives assigned to it: {}.", list(&seat.drives)));
    }
    out
}
