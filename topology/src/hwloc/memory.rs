//! NUMA nodes in hwloc's XML, their distances, and the firmware's figures.
//!
//! hwloc attaches a node without CPUs to the part of the machine that it is near to, and gives it that part's CPUs. So
//! a CPU belongs to the node with the fewest CPUs around it; of equals, to one that is not marked as added memory.

use super::{cpus, info, number, objects};
use crate::cpulist::CpuSet;
use crate::model::{NodeAccess, NodeKind, NumaNode};
use roxmltree::Node;
use std::collections::{BTreeMap, BTreeSet};

/// NUMA nodes, and the node of each CPU.
pub(super) struct Memory {
    pub(super) nodes: Vec<NumaNode>,
    pub(super) node_of_cpu: BTreeMap<usize, u32>,
}

/// Most nodes of a distance matrix.
const MAX_MATRIX_NODES: usize = 1_024;

struct MemoryNode {
    node: NumaNode,
    cpus: CpuSet,
    added: bool,
}

pub(super) fn read(root: Node<'_, '_>) -> Memory {
    let mut found: Vec<MemoryNode> = objects(root, "NUMANode").filter_map(read_node).collect();
    found.sort_by_key(|one| one.node.id);
    found.dedup_by_key(|one| one.node.id);
    let all: BTreeSet<usize> = found.iter().flat_map(|one| one.cpus.iter().copied()).collect();
    let mut node_of_cpu = BTreeMap::new();
    for cpu in all {
        let around = found.iter().filter(|one| one.cpus.contains(&cpu));
        if let Some(one) = around.min_by_key(|one| (one.added, one.cpus.len(), one.node.id)) {
            node_of_cpu.insert(cpu, one.node.id);
        }
    }
    let with_cpus: BTreeSet<u32> = node_of_cpu.values().copied().collect();
    for one in &mut found {
        one.node.kind = match (with_cpus.contains(&one.node.id), one.node.kind) {
            (true, _) => NodeKind::Cpus,
            (false, NodeKind::Cxl) => NodeKind::Cxl,
            (false, _) => NodeKind::MemoryOnly,
        };
    }
    let mut nodes: Vec<NumaNode> = found.into_iter().map(|one| one.node).collect();
    add_distances(root, &mut nodes);
    add_access(root, &mut nodes);
    Memory { nodes, node_of_cpu }
}

fn read_node(object: Node<'_, '_>) -> Option<MemoryNode> {
    let dax = info(object, "DAXType").is_some() || info(object, "DAXDevice").is_some();
    // For a DAX device of CXL memory, the parent is a path through the CXL bus.
    let behind_cxl = info(object, "DAXParent")
        .is_some_and(|parent| parent.split('/').any(|part| part.starts_with("cxl") || part.starts_with("dax_region")));
    let marked = object.attribute("subtype").is_some_and(|subtype| subtype.starts_with("CXL"));
    Some(MemoryNode {
        node: NumaNode {
            id: number(object, "os_index")?,
            kind: if behind_cxl || marked { NodeKind::Cxl } else { NodeKind::MemoryOnly },
            memory_bytes: number(object, "local_memory").filter(|&bytes: &u64| bytes > 0),
            ..NumaNode::default()
        },
        cpus: cpus(object, "cpuset").unwrap_or_default(),
        added: dax || object.attribute("subtype").is_some_and(|subtype| subtype != "DRAM"),
    })
}

/// Returns the numbers in the texts of an element's children of this name.
fn numbers(element: Node<'_, '_>, name: &str) -> Vec<u64> {
    let lists = element.children().filter(|child| child.tag_name().name() == name);
    let texts = lists.filter_map(|list| list.text());
    texts.flat_map(str::split_whitespace).filter_map(|word| word.parse().ok()).collect()
}

fn add_distances(root: Node<'_, '_>, nodes: &mut [NumaNode]) {
    /// Bit in the kind of a matrix whose values are latencies.
    const LATENCY: u64 = 1 << 2;
    let matrix = root.children().find(|child| {
        child.tag_name().name() == "distances2"
            && child.attribute("type") == Some("NUMANode")
            && child.attribute("indexing") == Some("os")
            && number::<u64>(*child, "kind").is_some_and(|kind| kind & LATENCY != 0)
    });
    let Some(matrix) = matrix else {
        // hwloc writes no matrix for a single node; the kernel's row for it is always this.
        if let [only] = nodes {
            only.distances = vec![10];
        }
        return;
    };
    let (indexes, values) = (numbers(matrix, "indexes"), numbers(matrix, "u64values"));
    let count = indexes.len();
    if count != nodes.len() || count > MAX_MATRIX_NODES || values.len() != count * count {
        return;
    }
    let place = |id: u32| indexes.iter().position(|&index| index == u64::from(id));
    let Some(order) = nodes.iter().map(|node| place(node.id)).collect::<Option<Vec<usize>>>() else { return };
    for (node, &row) in nodes.iter_mut().zip(&order) {
        let of_row = order.iter().map(|&column| u32::try_from(values[row * count + column]).ok());
        node.distances = of_row.collect::<Option<_>>().unwrap_or_default();
    }
}

/// Adds the figures of the nearest initiators: the fastest of each node.
fn add_access(root: Node<'_, '_>, nodes: &mut [NumaNode]) {
    for attribute in root.children().filter(|child| child.tag_name().name() == "memattr") {
        let name = attribute.attribute("name").unwrap_or_default();
        let values = attribute.children().filter(|child| child.tag_name().name() == "memattr_value");
        for value in values {
            let target = number::<u64>(value, "target_obj_gp_index");
            let object = target
                .and_then(|index| objects(root, "NUMANode").find(|node| number(*node, "gp_index") == Some(index)));
            let id: Option<u32> = object.and_then(|object| number(object, "os_index"));
            let figure = number::<u32>(value, "value").filter(|&figure| figure > 0);
            let (Some(id), Some(figure)) = (id, figure) else { continue };
            if let Some(node) = nodes.iter_mut().find(|node| node.id == id) {
                note_figure(&mut node.access, name, figure);
            }
        }
    }
}

fn note_figure(access: &mut Option<NodeAccess>, name: &str, figure: u32) {
    let mut noted = access.unwrap_or_default();
    let least = |slot: &mut Option<u32>| *slot = Some(slot.map_or(figure, |known| known.min(figure)));
    let most = |slot: &mut Option<u32>| *slot = Some(slot.map_or(figure, |known| known.max(figure)));
    match name {
        "ReadLatency" => least(&mut noted.read_latency_ns),
        "WriteLatency" => least(&mut noted.write_latency_ns),
        "Latency" => {
            least(&mut noted.read_latency_ns);
            least(&mut noted.write_latency_ns);
        }
        "ReadBandwidth" => most(&mut noted.read_mib_per_s),
        "WriteBandwidth" => most(&mut noted.write_mib_per_s),
        "Bandwidth" => {
            most(&mut noted.read_mib_per_s);
            most(&mut noted.write_mib_per_s);
        }
        _ => return,
    }
    *access = Some(noted);
}
