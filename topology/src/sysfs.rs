//! Reads a [`Machine`] from sysfs, below a root that can be any directory, so that tests bring their own.
//!
//! sysfs differs between kernels, drivers and containers, and files vanish while they are read. So a file that is
//! missing, unreadable or odd means "unknown", never an error; the only errors are a root that is not a sysfs
//! tree and a tree without CPUs, where every later answer would be nonsense.
//!
//! Reading is bounded: [`MAX_FILE_BYTES`] a file, [`MAX_ENTRIES`] a directory. Some files ask a driver (a NIC's
//! speed takes the kernel's network lock): read at start, not on a shard.

mod devices;

use crate::cpulist::{self, CpuSet, MAX_CPUS};
use crate::model::{Cache, CacheKind, Core, Machine, NumaNode};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The most that is read of one file; sysfs attributes are at most a page, CPU lists a few pages.
pub const MAX_FILE_BYTES: u64 = 64 << 10;
/// The most entries that are read of one directory.
pub const MAX_ENTRIES: usize = 16_384;
/// Caches a CPU has, at most; real ones have four.
const MAX_CACHES_PER_CPU: usize = 16;

/// Where to read the machine from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysfs {
    root: PathBuf,
    process_status: PathBuf,
}

/// Why there is no machine to describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SysfsError {
    /// The root has no `devices/system/cpu` directory.
    NotSysfs {
        /// The root.
        root: PathBuf,
    },
    /// The tree names no CPU.
    NoCpus {
        /// The root.
        root: PathBuf,
    },
}

impl fmt::Display for SysfsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSysfs { root } => write!(
                f,
                "{} is not a sysfs tree: it has no devices/system/cpu directory; is sysfs mounted there?",
                root.display()
            ),
            Self::NoCpus { root } => write!(
                f,
                "{0}/devices/system/cpu names no CPU, neither in its file \"online\" nor as cpuN directories",
                root.display()
            ),
        }
    }
}

impl std::error::Error for SysfsError {}

impl Sysfs {
    /// The machine that this process runs on: `/sys` and `/proc/self/status`.
    #[must_use]
    pub fn system() -> Self {
        Self::at("/sys", "/proc/self/status")
    }

    /// Another tree. `process_status` is a file in the format of `/proc/self/status`, for its `Cpus_allowed_list`.
    pub fn at(root: impl Into<PathBuf>, process_status: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), process_status: process_status.into() }
    }

    /// Reads everything once. Blocks on file system calls.
    ///
    /// # Errors
    ///
    /// Only [`SysfsError`]; what cannot be read in a sysfs tree stays unknown. Where the allowed CPUs cannot be
    /// read, all online ones count as allowed: pinning to one that is not fails loudly at that point.
    pub fn read(&self) -> Result<Machine, SysfsError> {
        let cpu_directory = self.root.join("devices/system/cpu");
        if !cpu_directory.is_dir() {
            return Err(SysfsError::NotSysfs { root: self.root.clone() });
        }
        let online = self.online_cpus(&cpu_directory);
        if online.is_empty() {
            return Err(SysfsError::NoCpus { root: self.root.clone() });
        }
        let (numa_nodes, node_of_cpu) = self.numa_nodes();
        let core = |&id: &usize| read_core(&cpu_directory, id, node_of_cpu.get(&id).copied());
        Ok(Machine {
            numa_nodes,
            cores: online.iter().map(core).collect(),
            caches: read_caches(&cpu_directory, &online),
            nics: self.nics(),
            block_devices: self.block_devices(),
            allowed_cpus: self.allowed_cpus().unwrap_or(online),
        })
    }

    /// CPUs that this process may run on; `None` where the status file does not say.
    fn allowed_cpus(&self) -> Option<CpuSet> {
        let status = read_text(&self.process_status)?;
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        cpulist::parse(list).ok().filter(|cpus| !cpus.is_empty())
    }

    fn online_cpus(&self, cpu_directory: &Path) -> CpuSet {
        match read_cpus(&cpu_directory.join("online")) {
            Some(cpus) if !cpus.is_empty() => cpus,
            _ => numbered_children(cpu_directory, "cpu")
                .into_iter()
                .map(|number| number as usize)
                .filter(|&cpu| cpu < MAX_CPUS)
                .collect(),
        }
    }

    /// The nodes, and the node of each CPU that one claims.
    fn numa_nodes(&self) -> (Vec<NumaNode>, BTreeMap<usize, u32>) {
        let directory = self.root.join("devices/system/node");
        let ids = numbered_children(&directory, "node");
        let mut node_of_cpu = BTreeMap::new();
        let mut nodes = Vec::new();
        for &id in &ids {
            let node = directory.join(format!("node{id}"));
            for cpu in read_cpus(&node.join("cpulist")).unwrap_or_default() {
                node_of_cpu.entry(cpu).or_insert(id);
            }
            let distances = read_distances(&node.join("distance"));
            nodes.push(NumaNode {
                id,
                memory_bytes: read_memory_bytes(&node.join("meminfo")),
                // A row of another length cannot be matched to nodes.
                distances: if distances.len() == ids.len() { distances } else { Vec::new() },
            });
        }
        (nodes, node_of_cpu)
    }
}

fn read_core(cpu_directory: &Path, id: usize, numa_node: Option<u32>) -> Core {
    let topology = cpu_directory.join(format!("cpu{id}/topology"));
    // The first name is the newer one; both mean the hardware threads of one core.
    let mut smt_siblings = read_cpus(&topology.join("core_cpus_list"))
        .or_else(|| read_cpus(&topology.join("thread_siblings_list")))
        .unwrap_or_default();
    smt_siblings.insert(id);
    Core {
        id,
        numa_node,
        package: read_number(&topology.join("physical_package_id")),
        core_id: read_number(&topology.join("core_id")),
        smt_siblings,
    }
}

/// Each CPU lists the caches above it; one that several list is kept once.
fn read_caches(cpu_directory: &Path, online: &CpuSet) -> Vec<Cache> {
    let mut caches = BTreeSet::new();
    for cpu in online {
        let directory = cpu_directory.join(format!("cpu{cpu}/cache"));
        let indices = numbered_children(&directory, "index");
        caches.extend(indices.into_iter().take(MAX_CACHES_PER_CPU).filter_map(|index| {
            let cache = directory.join(format!("index{index}"));
            let kind = match read_text(&cache.join("type"))?.trim() {
                "Data" => CacheKind::Data,
                "Instruction" => CacheKind::Instruction,
                "Unified" => CacheKind::Unified,
                _ => return None,
            };
            Some(Cache {
                level: read_number(&cache.join("level"))?,
                kind,
                shared_cpus: read_cpus(&cache.join("shared_cpu_list"))?,
                size_bytes: parse_size(read_text(&cache.join("size"))?.trim()),
            })
        }));
    }
    caches.into_iter().collect()
}

/// `48K` as bytes; the kernel prints caches in kibibytes.
fn parse_size(text: &str) -> Option<u64> {
    let kibibytes: u64 = text.strip_suffix('K')?.parse().ok()?;
    kibibytes.checked_mul(1 << 10).filter(|&bytes| bytes > 0)
}

fn read_distances(path: &Path) -> Vec<u32> {
    let row = read_text(path).unwrap_or_default();
    row.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>().unwrap_or_default()
}

/// From a line such as `Node 0 MemTotal:  5204172 kB`.
fn read_memory_bytes(path: &Path) -> Option<u64> {
    let text = read_text(path)?;
    let total = text.lines().find_map(|line| line.split_once("MemTotal:"))?.1;
    let kibibytes: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1 << 10)
}

/// The start of a file, as text; `None` when it cannot be read or is not text.
fn read_text(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(MAX_FILE_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

/// A number in a file of its own; `None` also for the kernel's `-1`, which means unknown wherever it is read here.
fn read_number<T: TryFrom<i64>>(path: &Path) -> Option<T> {
    T::try_from(read_text(path)?.trim().parse::<i64>().ok()?).ok()
}

fn read_cpus(path: &Path) -> Option<CpuSet> {
    cpulist::parse(&read_text(path)?).ok()
}

/// Names in a directory, sorted; empty when it cannot be read. Names that are not UTF-8 are left out.
fn children(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let names = entries.take(MAX_ENTRIES).filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names
}

/// The numbers N of the entries `<prefix>N`, ascending.
fn numbered_children(directory: &Path, prefix: &str) -> Vec<u32> {
    let names = children(directory);
    let number = |name: &String| name.strip_prefix(prefix)?.parse().ok();
    let mut numbers: Vec<u32> = names.iter().filter_map(number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}
