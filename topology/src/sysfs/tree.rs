//! The tree of devices: where a device that a class directory links to hangs, found upwards from it.

use super::files::{link_name, read_number};
use crate::model::PciPath;
use std::fs;
use std::path::{Path, PathBuf};

/// How far above a device its node is looked for; PCI trees are about this deep at most.
const MAX_ANCESTORS: usize = 32;

/// A sysfs tree, by its root.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceTree<'a> {
    root: &'a Path,
}

impl<'a> DeviceTree<'a> {
    pub(super) const fn new(root: &'a Path) -> Self {
        Self { root }
    }

    /// A directory of the tree.
    pub(super) fn join(&self, directory: &str) -> PathBuf {
        self.root.join(directory)
    }

    /// The node that the device or the nearest device above it names.
    pub(super) fn numa_node_above(&self, device: &Path) -> Option<u32> {
        let (top, device) = self.in_device_tree(device)?;
        let within = device.ancestors().take(MAX_ANCESTORS).take_while(|at| at.starts_with(&top));
        within.into_iter().find_map(|at| read_number(&at.join("numa_node")))
    }

    /// The PCI function that the device is or hangs on.
    pub(super) fn pci_path(&self, device: &Path) -> Option<PciPath> {
        let (top, device) = self.in_device_tree(device)?;
        let components = device.strip_prefix(&top).ok()?.components();
        PciPath::from_components(components.filter_map(|component| component.as_os_str().to_str()))
    }

    /// The driver of the nearest device, itself included, that has one on the PCI bus or below.
    pub(super) fn driver(&self, device: &Path) -> Option<String> {
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
