//! Reads a [`Machine`] from sysfs, below a root that can be any directory, so that tests bring their own.
//!
//! sysfs differs between kernels, drivers and containers, and files vanish while they are read. So a file that is
//! missing, unreadable or odd means "unknown", never an error; the only errors are a root that is not a sysfs
//! tree and a tree without CPUs, where every later answer would be nonsense.
//!
//! Reading is bounded: [`MAX_FILE_BYTES`] a file, [`MAX_ENTRIES`] a directory. Some files ask a driver (a NIC's
//! speed takes the kernel's network lock): read at start, not on a shard.

mod drives;
mod gpus;
mod memory;
mod network;
mod process;
mod rdma;

use crate::cpulist::{self, CpuSet, MAX_CPUS};
use crate::model::{Cache, CacheKind, Core, Machine, PciPath};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The most that is read of one file; sysfs attributes are at most a page, CPU lists a few pages.
pub const MAX_FILE_BYTES: u64 = 64 << 10;
/// The longest name or address that is kept.
const MAX_WORD_BYTES: usize = 512;
/// The most entries that are read of one directory.
pub const MAX_ENTRIES: usize = 16_384;
/// How far above a device its node is looked for; PCI trees are about this deep at most.
const MAX_ANCESTORS: usize = 32;
/// Caches a CPU has, at most; real ones have four.
const MAX_CACHES_PER_CPU: usize = 16;

/// Where to read the machine from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysfs {
    root: PathBuf,
    process: PathBuf,
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
    /// The machine that this process runs on: `/sys` and `/proc/self`.
    #[must_use]
    pub fn system() -> Self {
        Self::at("/sys", "/proc/self")
    }

    /// Another tree. `process` is a directory like `/proc/self`, for the CPUs allowed to the process (`status`) and the
    /// name of its control group (`cgroup`), whose limits are below the root in `fs/cgroup`.
    pub fn at(root: impl Into<PathBuf>, process: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), process: process.into() }
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
        let mut machine = Machine {
            numa_nodes,
            cores: online.iter().map(core).collect(),
            caches: read_caches(&cpu_directory, &online),
            nics: self.nics(),
            rdma_devices: Vec::new(),
            block_devices: self.block_devices(),
            nvme_controllers: self.nvme_controllers(),
            gpus: self.gpus(),
            allowed_cpus: self.allowed_cpus().unwrap_or(online),
            cpu_limit_millis: self.cpu_limit_millis(),
            notes: Vec::new(),
        };
        self.add_rdma_devices(&mut machine);
        machine.notes = crate::unknown::notes(&machine);
        Ok(machine)
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

    /// The node that the device or the nearest device above it names.
    fn numa_node_above(&self, device: &Path) -> Option<u32> {
        let (top, device) = self.in_device_tree(device)?;
        let within = device.ancestors().take(MAX_ANCESTORS).take_while(|at| at.starts_with(&top));
        within.into_iter().find_map(|at| read_number(&at.join("numa_node")))
    }

    /// The PCI function that the device is or hangs on.
    fn pci_path(&self, device: &Path) -> Option<PciPath> {
        let (top, device) = self.in_device_tree(device)?;
        let components = device.strip_prefix(&top).ok()?.components();
        PciPath::from_components(components.filter_map(|component| component.as_os_str().to_str()))
    }

    /// The driver of the nearest device, itself included, that has one on the PCI bus or below.
    fn driver(&self, device: &Path) -> Option<String> {
        let (top, device) = self.in_device_tree(device)?;
        let within = device.ancestors().take(MAX_ANCESTORS).take_while(|at| at.starts_with(&top));
        within.into_iter().find_map(|at| link_name(&at.join("driver")))
    }

    /// The tree of devices and a device in it, both without links.
    fn in_device_tree(&self, device: &Path) -> Option<(PathBuf, PathBuf)> {
        let top = fs::canonicalize(self.root.join("devices")).ok()?;
        let device = fs::canonicalize(device).ok()?;
        device.starts_with(&top).then_some((top, device))
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

/// A short text in a file of its own, without white space around it; `None` when there is none.
fn read_word(path: &Path) -> Option<String> {
    let text = read_text(path)?;
    let word = text.trim();
    (!word.is_empty() && word.len() <= MAX_WORD_BYTES).then(|| word.to_owned())
}

/// The last component of what a link points to.
fn link_name(link: &Path) -> Option<String> {
    fs::read_link(link).ok()?.file_name()?.to_str().map(str::to_owned)
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
