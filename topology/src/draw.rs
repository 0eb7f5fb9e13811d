//! Drawings of a machine, its shard plan and its rail matrix: [`text`] and [`svg`] for operators, [`json`] for
//! programs, and [`why`] for the reasons of all choices. [`escape`] makes any text fit into SVG and HTML.
//!
//! The text has one cell per physical core, grouped by NUMA node, so that a large server fits a screen. The JSON has
//! every field of all three values under its name; unknown is `null`.
//!
//! Names come from the kernel and can hold nearly any byte: control characters are escaped, so that no device name
//! controls the terminal.

use crate::cpulist;
use crate::model::{CacheKind, Machine, NodeKind};
use crate::plan::ShardPlan;
use crate::rails::RailMatrix;
use cells::{Cell, Use};
use std::collections::{BTreeMap, BTreeSet};

mod cells;
mod devices;
mod fields;
mod markup;
mod matrix;
mod svg;

pub use fields::json;
pub use markup::escape;
pub use matrix::why;
pub use svg::svg;

/// Maximum width of rows of cells, in characters.
const ROW_CHARACTERS: usize = 100;

/// Draws the machine, the placement of shards and the rail matrix as text, in lines that end with a line feed.
#[must_use]
pub fn text(machine: &Machine, plan: &ShardPlan, rails: &RailMatrix) -> String {
    let mut out = summary(machine, plan, machine.physical_cores().len());
    let cells = cell_texts(machine, plan);
    let width = cells.iter().map(|(_, cell)| cell.chars().count()).max().unwrap_or(0);
    for node in nodes(machine) {
        out.push_str(&node_heading(machine, node));
        let of_node = cells.iter().filter(|(cell_node, _)| *cell_node == node);
        push_rows(&mut out, of_node.map(|(_, cell)| cell.as_str()), width);
        for line in devices::lines(machine, rails, node) {
            out.push_str(&format!("  {line}\n"));
        }
    }
    out.push_str("[CPUs of one physical core]  *CPU of shard sN  hk: housekeeping  --: not allowed\n");
    out.push_str(&matrix::table(rails));
    for note in plan.notes.iter().chain(&rails.notes).chain(&machine.notes) {
        out.push_str(&format!("note: {}\n", printable(note)));
    }
    out
}

/// Returns all nodes with CPUs, memory or devices; `None`, the unknown one, last.
fn nodes(machine: &Machine) -> Vec<Option<u32>> {
    let known = machine.numa_nodes.iter().map(|node| Some(node.id));
    let cores = machine.cores.iter().map(|core| core.numa_node);
    let home = |numa_node, hardware| home(machine, numa_node, hardware);
    let nics = machine.nics.iter().map(|nic| home(nic.numa_node, nic.pci.is_some()));
    let rdma = machine.rdma_devices.iter().map(|device| home(device.numa_node, device.pci.is_some()));
    let disks = machine.block_devices.iter().map(|disk| home(disk.numa_node, disk.pci.is_some()));
    let gpus = machine.gpus.iter().map(|gpu| home(gpu.numa_node, true));
    let all = known.chain(cores).chain(nics).chain(rdma).chain(disks).chain(gpus);
    let mut nodes: BTreeSet<Option<u32>> = all.collect();
    let unknown = nodes.take(&None);
    nodes.into_iter().chain(unknown).collect()
}

/// Returns the node to draw a device on: hardware of a machine with one node is on that one.
fn home(machine: &Machine, numa_node: Option<u32>, hardware: bool) -> Option<u32> {
    if hardware { machine.effective_node(numa_node) } else { numa_node }
}

fn summary(machine: &Machine, plan: &ShardPlan, physical_cores: usize) -> String {
    let pinning = if plan.must_park_at_once() { "not pinned" } else { "pinned" };
    let mut out = format!(
        "{}, {}, {} ({} usable)\n{}, {pinning}; housekeeping on {}\n",
        count(machine.numa_nodes.len(), "NUMA node"),
        count(physical_cores, "physical core"),
        count(machine.cores.len(), "CPU"),
        machine.usable_cpus().len(),
        count(plan.shards.len(), "shard"),
        if plan.housekeeping_cores.is_empty() {
            "no known CPU".to_string()
        } else {
            let s = if plan.housekeeping_cores.len() == 1 { "" } else { "s" };
            format!("CPU{s} {}", cpulist::format(&plan.housekeeping_cores))
        },
    );
    let mut alike: BTreeMap<(u32, CacheKind, Option<u64>), usize> = BTreeMap::new();
    for cache in &machine.caches {
        *alike.entry((cache.level, cache.kind, cache.size_bytes)).or_default() += 1;
    }
    let caches: Vec<String> = alike
        .into_iter()
        .map(|((level, kind, size), number)| {
            let kind = match kind {
                CacheKind::Data => "d",
                CacheKind::Instruction => "i",
                CacheKind::Unified => "",
            };
            format!("{number} x L{level}{kind} {}", size_text(size))
        })
        .collect();
    if !caches.is_empty() {
        out.push_str(&format!("caches: {}\n", caches.join(", ")));
    }
    out
}

fn node_heading(machine: &Machine, id: Option<u32>) -> String {
    let Some(id) = id else {
        return "node unknown\n".into();
    };
    let Some(node) = machine.numa_nodes.iter().find(|node| node.id == id) else {
        return format!("node {id}\n");
    };
    let distances: Vec<String> = node.distances.iter().map(u32::to_string).collect();
    let distances = match distances.len() {
        0 | 1 => String::new(),
        _ => format!(", distances {}", distances.join(" ")),
    };
    let kind = match node.kind {
        NodeKind::Cpus => "",
        NodeKind::Cxl => " of CXL, no CPUs",
        NodeKind::MemoryOnly => ", no CPUs",
    };
    let access = node.access.and_then(|access| Some((access.read_latency_ns?, access.read_mib_per_s?)));
    let access = access.map_or(String::new(), |(ns, mib)| format!(", read {ns} ns {} GiB/s", mib >> 10));
    format!("node {id}: memory {}{kind}{distances}{access}\n", size_text(node.memory_bytes))
}

/// Returns one cell per physical core, with its node.
fn cell_texts(machine: &Machine, plan: &ShardPlan) -> Vec<(Option<u32>, String)> {
    let text = |cell: Cell| {
        let marked = |cpu: &usize| {
            let mark = if cell.pinned.contains(cpu) { "*" } else { "" };
            format!("{mark}{cpu}")
        };
        let cpus: Vec<String> = cell.cpus.iter().map(marked).collect();
        let mut uses: Vec<String> = cell.shards.iter().map(|shard| format!("s{shard}")).collect();
        match cell.usage {
            Use::Housekeeping => uses.push("hk".into()),
            Use::Denied => uses.push("--".into()),
            Use::Shard => {}
        }
        (cell.numa_node, format!("[{} {}]", cpus.join(","), uses.join(",")))
    };
    cells::cells(machine, plan).into_iter().map(text).collect()
}

fn push_rows<'a>(out: &mut String, cells: impl Iterator<Item = &'a str>, width: usize) {
    let per_row = ((ROW_CHARACTERS - 1) / (width + 1)).max(1);
    let cells: Vec<&str> = cells.collect();
    for row in cells.chunks(per_row) {
        let row: String = row.iter().map(|cell| format!(" {cell:width$}")).collect();
        out.push_str(&format!(" {}\n", row.trim_end()));
    }
}

fn printable(name: &str) -> String {
    let mut out = String::new();
    for character in name.chars() {
        if character.is_control() {
            out.extend(character.escape_default());
        } else {
            out.push(character);
        }
    }
    out
}

fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Formats bytes in the largest binary unit that leaves at least 1 before the point.
fn size_text(bytes: Option<u64>) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let Some(bytes) = bytes else {
        return "size unknown".into();
    };
    for (unit, shift) in UNITS {
        let whole = bytes >> shift;
        if whole > 0 {
            let tenths = (bytes >> (shift - 10) & 1_023) * 10 / 1_024;
            let point = if tenths == 0 { String::new() } else { format!(".{tenths}") };
            return format!("{whole}{point} {unit}");
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests;
