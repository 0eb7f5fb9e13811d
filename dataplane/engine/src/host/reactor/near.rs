//! Distances of a host's RDMA devices from its memory, as the embedder configures them, looked up by names.

use std::collections::HashMap;

use kvplane_client::{Near, Nearness, Place};
use kvplane_sys::device::DeviceInfo;
use kvplane_sys::{Region, cpu};

/// Pages of a region whose NUMA node is queried.
const PAGES_ASKED: usize = 8;

/// Place where memory may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceName {
    /// Name of the place, such as `cpu:0`.
    pub name: String,
    /// NUMA node, if the place is one.
    pub node: Option<u32>,
    /// PCI address in lower case, if the place is a device's memory: `0000:1a:00.0`.
    pub pci: Option<String>,
}

/// Distances of devices from memory.
#[derive(Clone, Debug, Default)]
pub struct NearDevices {
    /// Places, in the order of their numbers.
    pub places: Vec<PlaceName>,
    /// Distance of each device from each of the places, by device name.
    pub devices: HashMap<String, Vec<Nearness>>,
    /// Explanations of the distances, for people.
    pub why: HashMap<String, Vec<String>>,
}

impl NearDevices {
    /// Returns the place of this name; `cpu:N` is any place that is node N.
    #[must_use]
    pub fn place(&self, name: &str) -> Place {
        let node = name.strip_prefix("cpu:").and_then(|node| node.parse::<u32>().ok());
        let is = |place: &PlaceName| place.name == name || (node.is_some() && place.node == node);
        self.places.iter().position(is).map_or(Place::UNKNOWN, Place::at)
    }

    /// Returns the place of a device's memory: by its PCI address, as drivers number only the devices that are visible
    /// to the process, in an order of their own; by its name if the address is unknown.
    #[must_use]
    pub fn place_of_device(&self, info: &DeviceInfo) -> Place {
        let is = |place: &PlaceName| place.pci.as_deref() == Some(&info.pci_address);
        let found = self.places.iter().position(is);
        found.map_or_else(|| self.place(&info.id.to_string()), Place::at)
    }

    /// Returns the place of a NUMA node.
    #[must_use]
    pub fn place_of_node(&self, node: u32) -> Place {
        self.places.iter().position(|place| place.node == Some(node)).map_or(Place::UNKNOWN, Place::at)
    }

    /// Returns the table of the distances of these devices, in this order.
    #[must_use]
    pub fn table<'a>(&self, names: impl Iterator<Item = &'a str>) -> Near {
        let unknown = || vec![Nearness::default(); self.places.len()];
        Near::new(names.map(|name| self.devices.get(name).cloned().unwrap_or_else(unknown)).collect())
    }
}

/// Returns the NUMA node of a region, if all its resident pages are on one.
#[must_use]
pub fn node_of_region(region: &Region) -> Option<u32> {
    let step = (region.bytes() / PAGES_ASKED).max(1);
    let mut nodes = (0..region.bytes()).step_by(step).filter_map(|at| cpu::node_of(region.address() + at as u64));
    let first = nodes.next()?;
    nodes.all(|node| node == first).then_some(first)
}

#[cfg(test)]
mod tests {
    use kvplane_sys::device::{DeviceId, Family};

    use super::*;

    #[test]
    fn places_are_found_by_name_and_by_node() {
        let place = |name: &str, node| PlaceName { name: name.to_owned(), node, pci: None };
        let places = vec![place("cpu:0", Some(0)), place("cxl:2", Some(2)), place("cuda:0", None)];
        let row = vec![Nearness { tier: 1, same_node: Some(false) }; 3];
        let near = NearDevices { places, devices: [("mlx5_0".to_owned(), row)].into(), ..Default::default() };
        let found = ["cpu:0", "cpu:2", "cxl:2", "cuda:0", "cpu:1", "*"].map(|name| near.place(name));
        assert_eq!(found, [1, 2, 2, 3, 0, 0].map(Place));
        assert_eq!((near.place_of_node(2), near.place_of_node(7)), (Place(2), Place::UNKNOWN));
        let table = near.table(["other", "mlx5_0"].into_iter());
        assert_eq!((table.of(0, Place(1)).same_node, table.of(1, Place(3)).tier), (None, 1));
    }

    #[test]
    fn a_device_is_found_by_its_address_whatever_its_number() {
        let place = |name: &str, pci: &str| PlaceName { name: name.to_owned(), node: None, pci: Some(pci.to_owned()) };
        let places = vec![place("cuda:0", "0000:1a:00.0"), place("cuda:1", "0000:3b:00.0")];
        let near = NearDevices { places, ..NearDevices::default() };
        // The only visible one of the two is the second.
        let mut info = DeviceInfo {
            id: DeviceId { family: Family::Cuda, ordinal: 0 },
            name: String::new(),
            pci_address: "0000:3b:00.0".to_owned(),
            copy_engines: 1,
            dma_buf: true,
            host_node: None,
            needs_flush: false,
            hides_writes: false,
        };
        assert_eq!(near.place_of_device(&info), Place(2));
        info.pci_address = String::new();
        assert_eq!(near.place_of_device(&info), Place(1), "its driver gives no address");
    }
}
