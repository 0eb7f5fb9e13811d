//! NUMA nodes in sysfs: their memory, distances, firmware figures (HMAT), and the nodes that are CXL memory.
//!
//! A node without CPUs is CXL memory if a `dax` device of a CXL region names it as its target; without such a device it
//! can be memory on the package, of an accelerator, or persistent.

use super::files::{children, numbered_children, read_cpus, read_number, read_text};
use super::tree::DeviceTree;
use crate::model::{NodeAccess, NodeKind, NumaNode};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Reads the nodes, and the node of each CPU that a node claims.
pub(super) fn numa_nodes(tree: DeviceTree<'_>) -> (Vec<NumaNode>, BTreeMap<usize, u32>) {
    let directory = tree.join("devices/system/node");
    let ids = numbered_children(&directory, "node");
    let cxl = cxl_nodes(tree);
    let mut node_of_cpu = BTreeMap::new();
    let mut nodes = Vec::new();
    for &id in &ids {
        let node = directory.join(format!("node{id}"));
        let cpus = read_cpus(&node.join("cpulist"));
        // An unreadable list does not mean that there are no CPUs.
        let kind = match &cpus {
            Some(cpus) if cpus.is_empty() && cxl.contains(&id) => NodeKind::Cxl,
            Some(cpus) if cpus.is_empty() => NodeKind::MemoryOnly,
            _ => NodeKind::Cpus,
        };
        for cpu in cpus.unwrap_or_default() {
            node_of_cpu.entry(cpu).or_insert(id);
        }
        let distances = read_distances(&node.join("distance"));
        nodes.push(NumaNode {
            id,
            kind,
            memory_bytes: read_memory_bytes(&node.join("meminfo")),
            // A row of another length cannot be matched to nodes.
            distances: if distances.len() == ids.len() { distances } else { Vec::new() },
            access: read_access(&node.join("access0/initiators")),
        });
    }
    (nodes, node_of_cpu)
}

/// Returns the nodes that hold memory behind CXL.
fn cxl_nodes(tree: DeviceTree<'_>) -> BTreeSet<u32> {
    let directory = tree.join("bus/dax/devices");
    let of_device = |name: String| {
        let device = directory.join(name);
        let place = fs::canonicalize(&device).ok()?;
        let of_cxl = |part: &std::ffi::OsStr| {
            part.to_str().is_some_and(|part| part.starts_with("cxl") || part.starts_with("dax_region"))
        };
        let behind_cxl = place.components().any(|component| of_cxl(component.as_os_str()));
        behind_cxl.then(|| read_number(&device.join("target_node"))).flatten()
    };
    children(&directory).into_iter().filter_map(of_device).collect()
}

fn read_access(initiators: &Path) -> Option<NodeAccess> {
    let figure = |name: &str| read_number(&initiators.join(name)).filter(|&figure: &u32| figure > 0);
    let access = NodeAccess {
        read_latency_ns: figure("read_latency"),
        write_latency_ns: figure("write_latency"),
        read_mib_per_s: figure("read_bandwidth"),
        write_mib_per_s: figure("write_bandwidth"),
    };
    (access != NodeAccess::default()).then_some(access)
}

fn read_distances(path: &Path) -> Vec<u32> {
    let row = read_text(path).unwrap_or_default();
    row.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>().unwrap_or_default()
}

/// Parses a line such as `Node 0 MemTotal:  5204172 kB`.
fn read_memory_bytes(path: &Path) -> Option<u64> {
    let text = read_text(path)?;
    let total = text.lines().find_map(|line| line.split_once("MemTotal:"))?.1;
    let kibibytes: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1 << 10)
}
