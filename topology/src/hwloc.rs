//! Reader of a [`Machine`] from hwloc's XML, as `lstopo --of xml` and the library's export write it (format 2).
//!
//! hwloc knows structure: nodes, cores, caches, the PCI tree, and the place of each device in it. It does not know
//! values that change: speeds, MTUs, drivers, the CPUs that this process may use. Those stay unknown, and
//! [`merge`](crate::merge::merge) takes them from sysfs. An interface whose state the file does not contain counts as
//! up.
//!
//! Reading is bounded: [`MAX_XML_BYTES`], and CPU numbers below [`MAX_CPUS`]. Missing or malformed attributes leave a
//! value unknown.

mod devices;
mod memory;
mod set;

use crate::cpulist::{CpuSet, MAX_CPUS};
use crate::model::{Cache, CacheKind, Core, Machine};
use roxmltree::{Document, Node, ParsingOptions};
use std::collections::BTreeSet;
use std::fmt;

/// Most bytes of a file; a machine of a thousand CPUs has about 2 MB.
pub const MAX_XML_BYTES: usize = 32 << 20;
/// Most elements and texts of a file.
const MAX_XML_NODES: u32 = 2_000_000;

/// Error of reading a machine from XML.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum HwlocError {
    /// More than [`MAX_XML_BYTES`].
    TooLarge { bytes: usize },
    /// Not XML.
    NotXml {
        /// The error and its position.
        message: String,
    },
    /// XML, but not of hwloc, or of a format other than 2.
    NotHwloc {
        /// Description of the file's root element.
        found: String,
    },
    /// The file names no CPU.
    NoCpus,
}

impl fmt::Display for HwlocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { bytes } => {
                write!(f, "the hwloc file has {bytes} bytes, and at most {MAX_XML_BYTES} are read")
            }
            Self::NotXml { message } => write!(f, "the hwloc file is not XML: {message}"),
            Self::NotHwloc { found } => {
                write!(f, "not hwloc's XML of format 2 but {found}; write it with hwloc 2: lstopo --of xml file.xml")
            }
            Self::NoCpus => write!(f, "the hwloc file names no CPU"),
        }
    }
}

impl std::error::Error for HwlocError {}

/// Reads a machine from hwloc's XML.
///
/// # Errors
///
/// [`HwlocError`] if the text is not hwloc's XML of format 2, or names no CPU.
pub fn parse(xml: &str) -> Result<Machine, HwlocError> {
    if xml.len() > MAX_XML_BYTES {
        return Err(HwlocError::TooLarge { bytes: xml.len() });
    }
    let options = ParsingOptions { allow_dtd: true, nodes_limit: MAX_XML_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(xml, options)
        .map_err(|error| HwlocError::NotXml { message: error.to_string() })?;
    let root = document.root_element();
    let version = root.attribute("version").unwrap_or("none");
    if root.tag_name().name() != "topology" || !version.starts_with("2.") {
        let name: String = root.tag_name().name().chars().take(64).collect();
        let version: String = version.chars().take(16).collect();
        return Err(HwlocError::NotHwloc { found: format!("an element {name:?} of version {version:?}") });
    }
    let memory = memory::read(root);
    let mut machine = Machine {
        cores: cores(root, &memory),
        caches: caches(root),
        allowed_cpus: allowed_cpus(root),
        numa_nodes: memory.nodes,
        ..Machine::default()
    };
    if machine.cores.is_empty() {
        return Err(HwlocError::NoCpus);
    }
    if machine.allowed_cpus.is_empty() {
        machine.allowed_cpus = machine.cores.iter().map(|core| core.id).collect();
    }
    devices::add(&mut machine, root);
    machine.notes = crate::unknown::notes(&machine);
    Ok(machine)
}

/// Iterates over all objects of a type below `root`, in the order of the file.
fn objects<'a>(root: Node<'a, 'a>, kind: &'static str) -> impl Iterator<Item = Node<'a, 'a>> {
    root.descendants().filter(move |node| is_object(*node, kind))
}

fn is_object(node: Node<'_, '_>, kind: &str) -> bool {
    node.tag_name().name() == "object" && node.attribute("type") == Some(kind)
}

/// Returns the nearest object of a type that contains this one.
fn above<'a>(node: Node<'a, 'a>, kind: &str) -> Option<Node<'a, 'a>> {
    node.ancestors().skip(1).find(|one| is_object(*one, kind))
}

fn number<T: TryFrom<u64>>(node: Node<'_, '_>, name: &str) -> Option<T> {
    T::try_from(node.attribute(name)?.trim().parse::<u64>().ok()?).ok()
}

/// Returns the value of an `<info>` of an object.
fn info<'a>(node: Node<'a, 'a>, name: &str) -> Option<&'a str> {
    let infos = node.children().filter(|child| child.tag_name().name() == "info");
    infos.filter(|info| info.attribute("name") == Some(name)).find_map(|info| info.attribute("value"))
}

fn cpus(node: Node<'_, '_>, name: &str) -> Option<CpuSet> {
    set::parse(node.attribute(name)?, MAX_CPUS)
}

fn cores(root: Node<'_, '_>, memory: &memory::Memory) -> Vec<Core> {
    let core = |pu: Node<'_, '_>| {
        let id: usize = number(pu, "os_index").filter(|&id| id < MAX_CPUS)?;
        let physical = above(pu, "Core");
        let mut smt_siblings = physical.and_then(|core| cpus(core, "cpuset")).unwrap_or_default();
        smt_siblings.insert(id);
        Some(Core {
            id,
            numa_node: memory.node_of_cpu.get(&id).copied(),
            package: above(pu, "Package").and_then(|package| number(package, "os_index")),
            core_id: physical.and_then(|core| number(core, "os_index")),
            smt_siblings,
        })
    };
    let mut cores: Vec<Core> = objects(root, "PU").filter_map(core).collect();
    cores.sort_by_key(|core| core.id);
    cores.dedup_by_key(|core| core.id);
    cores
}

fn caches(root: Node<'_, '_>) -> Vec<Cache> {
    let all = root.descendants().filter(|node| node.tag_name().name() == "object");
    let cache = |node: Node<'_, '_>| {
        if !node.attribute("type")?.ends_with("Cache") {
            return None;
        }
        let kind = match node.attribute("cache_type")? {
            "0" => CacheKind::Unified,
            "1" => CacheKind::Data,
            "2" => CacheKind::Instruction,
            _ => return None,
        };
        Some(Cache {
            level: number(node, "depth")?,
            kind,
            shared_cpus: cpus(node, "cpuset")?,
            size_bytes: number(node, "cache_size").filter(|&bytes: &u64| bytes > 0),
        })
    };
    all.filter_map(cache).collect::<BTreeSet<_>>().into_iter().collect()
}

fn allowed_cpus(root: Node<'_, '_>) -> CpuSet {
    objects(root, "Machine").find_map(|machine| cpus(machine, "allowed_cpuset")).unwrap_or_default()
}
