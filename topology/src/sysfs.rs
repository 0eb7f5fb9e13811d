//! Reader of a [`Machine`] from sysfs, below a root that can be any directory, so that tests can provide one.
//!
//! sysfs differs between kernels, drivers and containers, and files vanish while they are read. So a missing,
//! unreadable or malformed file means "unknown", never an error; the only errors are a root that is not a sysfs tree
//! and a tree without CPUs, for which every later answer would be meaningless.
//!
//! Reading is bounded: [`MAX_FILE_BYTES`] per file, [`MAX_ENTRIES`] per directory. Some files call into a driver (a
//! NIC's speed takes the kernel's network lock): read at start, not on a shard.

mod cpus;
mod drives;
mod files;
mod gpus;
mod memory;
mod network;
mod process;
mod rdma;
mod tree;

pub use files::{MAX_ENTRIES, MAX_FILE_BYTES};

use crate::model::Machine;
use std::fmt;
use std::path::PathBuf;
use tree::DeviceTree;

/// Sources of the machine's description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysfs {
    root: PathBuf,
    process: PathBuf,
}

/// Error of reading a machine from sysfs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum SysfsError {
    /// The root has no `devices/system/cpu` directory.
    NotSysfs { root: PathBuf },
    /// The tree names no CPU.
    NoCpus { root: PathBuf },
}

impl fmt::Display for SysfsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSysfs { root } => write!(
                f,
                "{} is not a sysfs tree: it has no devices/system/cpu directory; check that sysfs is mounted there",
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
    /// Returns the sources for this host and process: `/sys` and `/proc/self`.
    #[must_use]
    pub fn system() -> Self {
        Self::at("/sys", "/proc/self")
    }

    /// Returns the sources below other directories. `process` is a directory like `/proc/self`, for the CPUs allowed to
    /// the process (`status`) and the name of its control group (`cgroup`), whose limits are below the root in
    /// `fs/cgroup`.
    pub fn at(root: impl Into<PathBuf>, process: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), process: process.into() }
    }

    /// Reads the machine. Blocks on file system calls.
    ///
    /// # Errors
    ///
    /// [`SysfsError`]; unreadable values of a sysfs tree stay unknown. If the allowed CPUs cannot be read, all online
    /// ones count as allowed: pinning to a CPU that is not fails with an error.
    pub fn read(&self) -> Result<Machine, SysfsError> {
        let cpu_directory = self.root.join("devices/system/cpu");
        if !cpu_directory.is_dir() {
            return Err(SysfsError::NotSysfs { root: self.root.clone() });
        }
        let online = cpus::online_cpus(&cpu_directory);
        if online.is_empty() {
            return Err(SysfsError::NoCpus { root: self.root.clone() });
        }
        let tree = DeviceTree::new(&self.root);
        let (numa_nodes, node_of_cpu) = memory::numa_nodes(tree);
        let core = |&id: &usize| cpus::read_core(&cpu_directory, id, node_of_cpu.get(&id).copied());
        let mut machine = Machine {
            numa_nodes,
            cores: online.iter().map(core).collect(),
            caches: cpus::read_caches(&cpu_directory, &online),
            nics: network::nics(tree),
            rdma_devices: Vec::new(),
            block_devices: drives::block_devices(tree),
            nvme_controllers: drives::nvme_controllers(tree),
            gpus: gpus::gpus(tree),
            allowed_cpus: process::allowed_cpus(&self.process).unwrap_or(online),
            cpu_limit_millis: process::cpu_limit_millis(tree, &self.process),
            notes: Vec::new(),
        };
        rdma::add_devices(tree, &mut machine);
        machine.notes = crate::unknown::notes(&machine);
        Ok(machine)
    }
}
