//! Far pools of a node: configured on the command line, and divided among the shards.

use std::fmt;
use std::str::FromStr;

use kvplane_sys::FarPart;
use kvplane_topology::model::{NodeKind, NumaNode};
use kvplane_topology::{Machine, ShardPlan};
use kvplane_transfer::{ParseBytesError, parse_bytes};

use crate::node::{NodeConfig, NodeConfigError};

/// Least bytes of far memory for each shard.
const PART_LEAST_BYTES: u64 = 1 << 20;

/// Unit of the parts: whole pages, and whole blocks of an SSD.
const PART_UNIT_BYTES: u64 = 4096;

/// Far memory of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FarMemory {
    /// NUMA nodes without CPUs: those behind CXL if there are any, otherwise all of them. Each shard has its part on
    /// the one that is nearest to it.
    Cxl,
    /// A NUMA node, with or without CPUs.
    NumaNode(u32),
}

/// Part of the pool that is in far memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FarPool {
    /// Memory to use.
    pub memory: FarMemory,
    /// Bytes to allocate there, over all shards.
    pub bytes: u64,
}

/// Error of a text that names no far pool.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ParseFarPoolError {
    /// The last part is no size.
    Size(ParseBytesError),
    /// It is of neither form, or the size is 0.
    NoPool { text: String },
    /// It names a dax device, which is no NUMA node.
    Dax { text: String },
}

impl fmt::Display for ParseFarPoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(error) => error.fmt(f),
            Self::NoPool { text } => {
                write!(f, "{text:?} names no far memory: give cxl:SIZE or numa:NODE:SIZE, such as cxl:256G")
            }
            Self::Dax { text } => write!(
                f,
                "{text:?}: dax devices are not mapped directly; make a NUMA node of it (daxctl reconfigure-device \
                 --mode=system-ram --no-movable DEVICE), and give cxl:SIZE or numa:NODE:SIZE"
            ),
        }
    }
}

impl std::error::Error for ParseFarPoolError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Size(error) => Some(error),
            Self::NoPool { .. } | Self::Dax { .. } => None,
        }
    }
}

impl FromStr for FarPool {
    type Err = ParseFarPoolError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let no_pool = || ParseFarPoolError::NoPool { text: text.to_owned() };
        let (memory, size) = text.rsplit_once(':').ok_or_else(no_pool)?;
        let memory = match memory.split_once(':') {
            None if memory == "cxl" => FarMemory::Cxl,
            Some(("numa", node)) => FarMemory::NumaNode(node.parse().map_err(|_| no_pool())?),
            Some(("dax", _)) => return Err(ParseFarPoolError::Dax { text: text.to_owned() }),
            _ => return Err(no_pool()),
        };
        let bytes = parse_bytes(size).map_err(ParseFarPoolError::Size)?;
        if bytes == 0 {
            return Err(no_pool());
        }
        Ok(Self { memory, bytes })
    }
}

/// Far pool of one shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FarPoolPart {
    /// NUMA node of its memory.
    pub(crate) node: u32,
    pub(crate) bytes: u64,
}

impl FarPoolPart {
    /// Returns the part of a region that it is, behind this many bytes of near memory.
    pub(crate) const fn behind(self, near_bytes: u64) -> FarPart {
        FarPart { offset: near_bytes as usize, node: self.node }
    }
}

/// Returns the unit of the near part of each shard's pool: whole huge pages where far memory follows it.
pub(crate) const fn near_unit_bytes(config: &NodeConfig) -> u64 {
    if config.far_pool.is_some() { FarPart::UNIT_BYTES as u64 } else { PART_UNIT_BYTES }
}

/// Returns the far pool of each shard of this plan: equal parts.
pub(crate) fn of_shards(
    config: &NodeConfig,
    machine: &Machine,
    layout: &ShardPlan,
) -> Result<Vec<Option<FarPoolPart>>, NodeConfigError> {
    let shards = layout.shards.len();
    let Some(FarPool { memory, bytes }) = config.far_pool else { return Ok(vec![None; shards]) };
    if !config.device_pools.is_empty() {
        return Err(NodeConfigError::FarPoolBesideDevicePools);
    }
    if config.keep_memory.is_some() {
        return Err(NodeConfigError::FarPoolInKeptMemory);
    }
    let part_bytes = bytes / shards as u64 / PART_UNIT_BYTES * PART_UNIT_BYTES;
    if part_bytes < PART_LEAST_BYTES {
        return Err(NodeConfigError::FarPool { bytes, least_bytes: PART_LEAST_BYTES * shards as u64 });
    }
    let nodes = nodes_of(machine, memory)?;
    let mut taken = vec![0; nodes.len()];
    let mut parts = Vec::with_capacity(shards);
    for seat in &layout.shards {
        let distance = |node: &NumaNode| seat.numa_node.and_then(|near| machine.distance(near, node.id));
        // The nearest, and of several the one with the fewest shards.
        let nearest = (0..nodes.len()).min_by_key(|at| (distance(nodes[*at]).unwrap_or(u32::MAX), taken[*at]));
        let at = nearest.expect("there is a node");
        taken[at] += part_bytes;
        parts.push(Some(FarPoolPart { node: nodes[at].id, bytes: part_bytes }));
    }
    for (node, taken) in nodes.iter().zip(taken) {
        if let Some(memory_bytes) = node.memory_bytes.filter(|memory_bytes| taken > *memory_bytes) {
            return Err(NodeConfigError::FarPoolBeyondNode { node: node.id, bytes: taken, memory_bytes });
        }
    }
    Ok(parts)
}

/// Returns the NUMA nodes that the memory names; at least one.
fn nodes_of(machine: &Machine, memory: FarMemory) -> Result<Vec<&NumaNode>, NodeConfigError> {
    let all = &machine.numa_nodes;
    let found: Vec<&NumaNode> = match memory {
        FarMemory::NumaNode(number) => all.iter().filter(|node| node.id == number).collect(),
        FarMemory::Cxl => {
            let has_cxl = all.iter().any(|node| node.kind == NodeKind::Cxl);
            let is_far = |node: &&NumaNode| match node.kind {
                NodeKind::Cxl => true,
                NodeKind::MemoryOnly => !has_cxl,
                NodeKind::Cpus => false,
            };
            all.iter().filter(is_far).collect()
        }
    };
    if found.is_empty() {
        let known = all.iter().map(|node| node.id).collect();
        return Err(NodeConfigError::NoFarMemory { memory, known });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use kvplane_topology::CpuSet;
    use kvplane_topology::plan::ShardSeat;

    use super::*;

    fn pool(text: &str) -> FarPool {
        text.parse().expect("a far pool")
    }

    #[test]
    fn far_pools_are_a_memory_and_a_size() {
        assert_eq!(pool("cxl:256G"), FarPool { memory: FarMemory::Cxl, bytes: 256 << 30 });
        assert_eq!(pool("numa:12:4M"), FarPool { memory: FarMemory::NumaNode(12), bytes: 4 << 20 });
        for wrong in ["", "cxl", "cxl:", "cxl:0", "cxl:1x", "numa:1G", "numa:x:1G", "numa:-1:1G", "ssd:1G", "cxl:1:1G"]
        {
            assert!(wrong.parse::<FarPool>().is_err(), "{wrong}");
        }
        let dax = "dax:/dev/dax0.0:1G".parse::<FarPool>().expect_err("refused").to_string();
        assert!(dax.contains("daxctl reconfigure-device"), "{dax}");
    }

    /// Returns a machine of two nodes with CPUs and nodes of these kinds, each of 1 GiB and near one of the former.
    fn machine(far: &[(NodeKind, usize)]) -> Machine {
        let kinds = [NodeKind::Cpus, NodeKind::Cpus].into_iter().chain(far.iter().map(|(kind, _)| *kind));
        let near_of = |at: usize| if at < 2 { at } else { far[at - 2].1 };
        let nodes = kinds.enumerate().map(|(at, kind)| NumaNode {
            id: at as u32,
            kind,
            memory_bytes: Some(1 << 30),
            distances: (0..2 + far.len()).map(|to| if near_of(to) == near_of(at) { 14 } else { 24 }).collect(),
            access: None,
        });
        Machine { numa_nodes: nodes.collect(), ..Machine::default() }
    }

    fn layout(nodes: &[u32]) -> ShardPlan {
        let seat = |(shard, node): (usize, &u32)| ShardSeat {
            shard,
            core: None,
            numa_node: Some(*node),
            nics: Vec::new(),
            drives: Vec::new(),
            reason: String::new(),
        };
        let shards = nodes.iter().enumerate().map(seat).collect();
        ShardPlan { shards, housekeeping_cores: CpuSet::new(), notes: Vec::new() }
    }

    fn config(text: &str) -> NodeConfig {
        NodeConfig { far_pool: Some(pool(text)), ..NodeConfig::local("test", 1 << 30) }
    }

    #[test]
    fn each_shard_has_its_part_on_the_nearest_node_without_cpus() {
        let of = |config: &NodeConfig, machine: &Machine| {
            let parts = of_shards(config, machine, &layout(&[0, 1, 0])).expect("a layout").into_iter().flatten();
            parts.map(|part| (part.node, part.bytes >> 20)).collect::<Vec<_>>()
        };
        let two = machine(&[(NodeKind::Cxl, 0), (NodeKind::Cxl, 1)]);
        assert_eq!(of(&config("cxl:9M"), &two), [(2, 3), (3, 3), (2, 3)]);
        let both_near = machine(&[(NodeKind::Cxl, 0), (NodeKind::Cxl, 0)]);
        assert_eq!(of(&config("cxl:9M"), &both_near), [(2, 3), (3, 3), (2, 3)], "as near as each other: in turns");
        let mixed = machine(&[(NodeKind::MemoryOnly, 0), (NodeKind::Cxl, 1)]);
        assert_eq!(of(&config("cxl:9M"), &mixed), [(3, 3), (3, 3), (3, 3)], "memory of other kinds may be faster");
        let on_package = machine(&[(NodeKind::MemoryOnly, 0)]);
        assert_eq!(of(&config("cxl:9M"), &on_package), [(2, 3), (2, 3), (2, 3)]);
        assert_eq!(of(&config("numa:1:9M"), &on_package), [(1, 3), (1, 3), (1, 3)]);
        assert_eq!(of(&NodeConfig::local("test", 1 << 30), &two), []);
    }

    #[test]
    fn a_far_pool_that_cannot_be_is_refused() {
        let two = machine(&[(NodeKind::Cxl, 0)]);
        let refusal = |config: &NodeConfig, machine: &Machine| {
            of_shards(config, machine, &layout(&[0, 1])).expect_err("refused").to_string()
        };
        assert!(refusal(&config("cxl:9M"), &machine(&[])).contains("no NUMA node is without CPUs"));
        assert!(refusal(&config("numa:7:9M"), &two).contains("no NUMA node 7, only 0, 1, 2"));
        assert!(refusal(&config("cxl:2G"), &two).contains("node 2 has 1073741824 bytes"), "parts of both shards");
        assert!(refusal(&config("cxl:1M"), &two).contains("2097152 are needed"));
        let kept = NodeConfig { keep_memory: Some("/dev/shm/x".into()), ..config("cxl:9M") };
        assert!(refusal(&kept, &two).contains("exclude each other"));
        let device_pools = vec!["cuda:0=8G".parse().expect("a device pool")];
        assert!(refusal(&NodeConfig { device_pools, ..config("cxl:9M") }, &two).contains("exclude each other"));
    }
}
