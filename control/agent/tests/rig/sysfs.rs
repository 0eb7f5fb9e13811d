//! Drives and nodes as the kernel reports them, and the affinity of this process's threads.

use std::fs;
use std::path::{Path, PathBuf};

/// Namespace of an NVMe controller.
#[derive(Clone, Debug)]
pub(crate) struct Drive {
    /// Block device.
    pub(crate) path: PathBuf,
    /// Directory of the controller.
    pub(crate) controller: PathBuf,
    /// Transport: `pcie`, `tcp`, `rdma`, `loop`.
    pub(crate) transport: String,
    /// Number of the virtual drive: its own, or that of the drive that a target exports.
    pub(crate) number: String,
}

impl Drive {
    pub(crate) fn name(&self) -> String {
        format!("file://{}", self.path.display())
    }

    pub(crate) fn is_local(&self) -> bool {
        self.transport == "pcie"
    }

    pub(crate) fn says(&self, attribute: &str) -> String {
        read(&self.controller.join(attribute))
    }
}

/// Returns all drives, local ones first.
pub(crate) fn drives() -> Vec<Drive> {
    let mut found = Vec::new();
    for controller in children(Path::new("/sys/class/nvme"), "nvme") {
        let transport = read(&controller.join("transport"));
        let (serial, subsystem) = (read(&controller.join("serial")), read(&controller.join("subsysnqn")));
        let number = match subsystem.split_once("rig:d") {
            Some((_, number)) => number.to_owned(),
            None => serial.trim_start_matches("rig").to_owned(),
        };
        for namespace in children(&controller, "nvme") {
            let path = Path::new("/dev").join(namespace.file_name().unwrap());
            found.push(Drive {
                path,
                controller: controller.clone(),
                transport: transport.clone(),
                number: number.clone(),
            });
        }
    }
    found.sort_by_key(|drive| (!drive.is_local(), drive.path.clone()));
    found
}

/// Returns the cores of a node; none for a node of memory only.
pub(crate) fn cores_of(node: u32) -> Vec<usize> {
    let list = read(Path::new(&format!("/sys/devices/system/node/node{node}/cpulist")));
    let number = |text: &str| text.parse::<usize>().unwrap();
    list.split(',')
        .filter(|part| !part.is_empty())
        .flat_map(|part| match part.split_once('-') {
            Some((first, last)) => number(first)..=number(last),
            None => number(part)..=number(part),
        })
        .collect()
}

/// Returns the cores that the threads of this process may run on, each in the kernel's format.
pub(crate) fn cores_of_threads() -> Vec<String> {
    let threads = fs::read_dir("/proc/self/task").unwrap().flatten();
    let texts = threads.filter_map(|thread| fs::read_to_string(thread.path().join("status")).ok());
    texts
        .filter_map(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            line.map(|list| list.trim().to_owned())
        })
        .collect()
}

pub(crate) fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).trim().to_owned()
}

fn children(directory: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let named = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix));
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(named).collect();
    paths.sort();
    paths
}
