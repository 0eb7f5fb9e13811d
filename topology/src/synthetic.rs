//! Machines described by a line of text, `numa:2 core:4 pu:2`, for planning hardware that is not available and for
//! tests.
//!
//! The notation is a subset of the one of hwloc's tools. Logical CPUs are numbered as Linux does on most x86 servers:
//! the first hardware thread of every core, node by node, then the second threads. So the siblings of CPU 0 have
//! distant numbers, and code that considers CPUs with adjacent numbers independent fails early.
//!
//! No caches or devices: a plan needs none.

use crate::cpulist::{CpuSet, MAX_CPUS};
use crate::model::{Core, Machine, NumaNode};
use std::fmt;

/// Memory of each synthetic node, in bytes.
const NODE_MEMORY_BYTES: u64 = 64 << 30;
/// Usual firmware distances of the local node and of another socket.
const LOCAL_DISTANCE: u32 = 10;
const REMOTE_DISTANCE: u32 = 21;

/// Error of parsing a description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SyntheticError {
    /// A word is not `numa:N`, `core:N` or `pu:N` with N of at least 1.
    Malformed {
        /// The word, cut to 32 characters.
        word: String,
    },
    /// A level appears twice, or below a level that it contains.
    OutOfOrder {
        /// The level.
        level: &'static str,
    },
    /// The levels multiply to more CPUs than [`MAX_CPUS`].
    TooManyCpus,
    /// The text names no level.
    Empty,
}

impl fmt::Display for SyntheticError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed { word } => {
                write!(f, "{word:?} is not numa:N, core:N or pu:N with N of at least 1")
            }
            Self::OutOfOrder { level } => {
                write!(f, "{level} appears twice or out of order; the order is numa, core, pu")
            }
            Self::TooManyCpus => write!(f, "more than {MAX_CPUS} CPUs; lower numa, core or pu"),
            Self::Empty => write!(f, "no levels; write for example \"numa:2 core:4 pu:2\""),
        }
    }
}

impl std::error::Error for SyntheticError {}

/// Creates a machine of `numa` nodes, each with `core` physical cores, each with `pu` hardware threads; a level left
/// out counts 1. All CPUs are allowed.
///
/// # Errors
///
/// [`SyntheticError`] names the word or the level that is wrong.
pub fn parse(text: &str) -> Result<Machine, SyntheticError> {
    const LEVELS: [&str; 3] = ["numa", "core", "pu"];
    let mut counts = [1_usize; LEVELS.len()];
    let mut next_level = 0;
    for word in text.split_whitespace() {
        let malformed = || SyntheticError::Malformed { word: word.chars().take(32).collect() };
        let (name, count) = word.split_once(':').ok_or_else(malformed)?;
        let level = LEVELS.iter().position(|level| *level == name).ok_or_else(malformed)?;
        if level < next_level {
            return Err(SyntheticError::OutOfOrder { level: LEVELS[level] });
        }
        next_level = level + 1;
        counts[level] = count.parse().ok().filter(|&count| count > 0).ok_or_else(malformed)?;
    }
    if next_level == 0 {
        return Err(SyntheticError::Empty);
    }
    let [nodes, cores, threads] = counts;
    let cpus = nodes.checked_mul(cores).and_then(|cores| cores.checked_mul(threads));
    if cpus.is_none_or(|cpus| cpus > MAX_CPUS) {
        return Err(SyntheticError::TooManyCpus);
    }
    Ok(build(nodes, cores, threads))
}

/// Counts are at least 1 and multiply to at most [`MAX_CPUS`], so they fit any integer used here.
fn build(nodes: usize, cores_per_node: usize, threads_per_core: usize) -> Machine {
    let physical_cores = nodes * cores_per_node;
    let core = |id: usize| {
        let physical = id % physical_cores;
        let node = (physical / cores_per_node) as u32;
        Core {
            id,
            numa_node: Some(node),
            package: Some(node),
            core_id: Some((physical % cores_per_node) as u32),
            smt_siblings: (0..threads_per_core).map(|t| t * physical_cores + physical).collect(),
        }
    };
    let distance = |a, b| {
        if a == b { LOCAL_DISTANCE } else { REMOTE_DISTANCE }
    };
    let node = |id: usize| NumaNode {
        id: id as u32,
        memory_bytes: Some(NODE_MEMORY_BYTES),
        distances: (0..nodes).map(|other| distance(id, other)).collect(),
        ..NumaNode::default()
    };
    let cpus = physical_cores * threads_per_core;
    Machine {
        numa_nodes: (0..nodes).map(node).collect(),
        cores: (0..cpus).map(core).collect(),
        allowed_cpus: (0..cpus).collect::<CpuSet>(),
        ..Machine::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_second_threads_after_all_first_ones() {
        let machine = parse("numa:2 core:2 pu:2").unwrap();
        assert_eq!(machine.cores.len(), 8);
        assert_eq!(machine.cores[1].smt_siblings, CpuSet::from([1, 5]));
        assert_eq!(machine.cores[5].smt_siblings, CpuSet::from([1, 5]));
        let nodes: Vec<_> = machine.cores.iter().map(|core| core.numa_node.unwrap()).collect();
        assert_eq!(nodes, [0, 0, 1, 1, 0, 0, 1, 1]);
        assert_eq!(machine.numa_nodes[1].distances, [21, 10]);
        assert_eq!(machine.physical_cores().len(), 4);
    }

    #[test]
    fn levels_left_out_count_one() {
        let machine = parse("core:3").unwrap();
        assert_eq!((machine.numa_nodes.len(), machine.cores.len()), (1, 3));
    }

    #[test]
    fn errors_name_the_malformed_word() {
        let malformed = |word: &str| Err(SyntheticError::Malformed { word: word.into() });
        assert_eq!(parse("  "), Err(SyntheticError::Empty));
        assert_eq!(parse("numa"), malformed("numa"));
        assert_eq!(parse("core:0"), malformed("core:0"));
        assert_eq!(parse("core:-1"), malformed("core:-1"));
        assert_eq!(parse("gpu:1"), malformed("gpu:1"));
        assert_eq!(parse("pu:2 core:2"), Err(SyntheticError::OutOfOrder { level: "core" }));
        assert_eq!(parse("pu:2 pu:2"), Err(SyntheticError::OutOfOrder { level: "pu" }));
        assert_eq!(parse("numa:128 core:65"), Err(SyntheticError::TooManyCpus));
        assert_eq!(parse("numa:9999999999 core:9999999999"), Err(SyntheticError::TooManyCpus));
    }
}
