//! Notes on the rails for operators: devices that are left out, and differences between rails.

use super::RailMatrix;
use crate::model::{Machine, NodeKind};
use crate::unknown::list;
use std::collections::BTreeMap;

/// Returns the notes, one sentence each.
pub(super) fn notes(machine: &Machine, matrix: &RailMatrix) -> Vec<String> {
    let mut notes = Vec::new();
    if matrix.rails.is_empty() {
        notes.push(match matrix.excluded.len() {
            0 => "This machine has no RDMA device: bytes go over TCP and shared memory.".to_owned(),
            _ => "No RDMA device has an active port: bytes go over TCP and shared memory.".to_owned(),
        });
    }
    notes.extend(matrix.excluded.iter().map(|one| format!("{} is left out: {}.", one.name, one.reason)));
    let mut speeds: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
    let mut mtus: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for rail in &matrix.rails {
        if let Some(speed) = rail.speed_mbps {
            speeds.entry(speed).or_default().push(&rail.name);
        }
        if let Some(mtu) = rail.active_mtu_bytes {
            mtus.entry(mtu).or_default().push(&rail.name);
        }
    }
    if speeds.len() > 1 {
        let by_speed: Vec<String> =
            speeds.iter().rev().map(|(speed, names)| format!("{} at {}", list(names), gigabits(*speed))).collect();
        notes.push(format!("Rails differ in speed ({}): shares follow the speed.", by_speed.join("; ")));
    }
    if mtus.len() > 1 {
        let by_mtu: Vec<String> = mtus.iter().rev().map(|(mtu, names)| format!("{mtu} for {}", list(names))).collect();
        notes.push(format!(
            "Rails differ in active MTU ({}): a connection takes the smaller of its ends; raise the interfaces' MTU.",
            by_mtu.join("; ")
        ));
    }
    for gpu in machine.gpus.iter().filter(|gpu| !gpu.usable()) {
        notes.push(format!(
            "GPU {} is given to a virtual machine (vfio-pci): it is not a memory location here.",
            gpu.pci.function
        ));
    }
    for node in machine.numa_nodes.iter().filter(|node| node.kind == NodeKind::MemoryOnly) {
        notes.push(format!(
            "Node {} has memory but no CPUs, and is not known as CXL: it is named cpu:{}.",
            node.id, node.id
        ));
    }
    notes
}

/// Formats a speed: `400000` as `400 Gb/s`.
pub(crate) fn gigabits(mbps: u64) -> String {
    match (mbps / 1_000, mbps % 1_000 / 100) {
        (0, _) => format!("{mbps} Mb/s"),
        (whole, 0) => format!("{whole} Gb/s"),
        (whole, tenths) => format!("{whole}.{tenths} Gb/s"),
    }
}
