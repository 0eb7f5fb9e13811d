//! Device tree of sysfs: the place of a device, found from a class directory's link by walking towards the root.

use super::files::{link_name, read_number};
use crate::model::PciPath;
use std::fs;
use std::path::{Path, PathBuf};

/// Most levels searched above a device for its node; PCI trees are about this deep at most.
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

    /// Returns the path of a directory of the tree.
    pub(super) fn join(&self, directory: &str) -> PathBuf {
        self.root.join(directory)
    }

    /// Returns the node that the device, or the nearest device above it, names.
    pub(super) fn numa_node_above(&self, device: &Path) -> Option<u32> {
        let (top, device) = self.in_device_tree(device)?;
        let within = device.ancestors().take(MAX_ANCESTORS).take_while(|at| at.starts_with(&top));
        within.into_iter().find_map(|at| read_number(&at.join("numa_node")))
    }

    /// Returns the PCI path of the function that the device is or belongs to.
    pub(super) fn pci_path(&self, device: &Path) -> Option<PciPath> {
        let (top, device) = self.in_device_tree(device)?;
        let components = device.strip_prefix(&top).ok()?.components();
        PciPath::from_components(components.filter_map(|component| component.as_os_str().to_str()))
    }

    /// Returns the driver of the device, or of the nearest device above it with a driver on the PCI bus or below.
    pub(super) fn driver(&self, device: &Path) -> Option<String> {
        let (top, device) = self.in_device_tree(device)?;
        let within = device.ancestors().take(MAX_ANCESTORS).take_while(|at| at.starts_with(&top));
        within.into_iter().find_map(|at| link_name(&at.join("driver")))
    }

    /// Returns the root of the device tree and the path of a device in it, both without links.
    fn in_device_tree(&self, device: &Path) -> Option<(PathBuf, PathBuf)> {
        let top = fs::canonicalize(self.root.join("devices")).ok()?;
        let device = fs::canonicalize(device).ok()?;
        device.starts_with(&top).then_some((top, device))
    }
}
