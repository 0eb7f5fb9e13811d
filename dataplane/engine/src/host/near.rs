//! How near a host's RDMA devices are to its memory: told by whoever knows the machine, looked up by names.

use std::collections::HashMap;
use std::sync::Arc;

use kvplane_client::{Near, Nearness, NodeCounts, Place};
use kvplane_sys::{Region, cpu};

use super::Host;

/// Pages of a region that are asked for their node.
const PAGES_ASKED: usize = 8;

/// A place where memory may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceName {
    /// Its name, such as `cpu:0`.
    pub name: String,
    /// The NUMA node, where it is one.
    pub node: Option<u32>,
}

/// How near devices are to memory.
#[derive(Clone, Debug, Default)]
pub struct NearDevices {
    /// The places, in the order of their numbers.
    pub places: Vec<PlaceName>,
    /// For each device by its name, how near it is to each of them.
    pub devices: HashMap<String, Vec<Nearness>>,
    /// The same in words, for people.
    pub why: HashMap<String, Vec<String>>,
}

impl NearDevices {
    /// The place of this name; `cpu:N` is any place that is node N.
    #[must_use]
    pub fn place(&self, name: &str) -> Place {
        let node = name.strip_prefix("cpu:").and_then(|node| node.parse::<u32>().ok());
        let is = |place: &PlaceName| place.name == name || (node.is_some() && place.node == node);
        self.places.iter().position(is).map_or(Place::UNKNOWN, Place::at)
    }

    /// The place of a node.
    #[must_use]
    pub fn place_of_node(&self, node: u32) -> Place {
        self.places.iter().position(|place| place.node == Some(node)).map_or(Place::UNKNOWN, Place::at)
    }

    /// As a table of these devices, in this order.
    #[must_use]
    pub fn table<'a>(&self, names: impl Iterator<Item = &'a str>) -> Near {
        let unknown = || vec![Nearness::default(); self.places.len()];
        Near::new(names.map(|name| self.devices.get(name).cloned().unwrap_or_else(unknown)).collect())
    }
}

/// The NUMA node of a region, if its pages are on one as far as they are in memory.
#[must_use]
pub fn node_of_region(region: &Region) -> Option<u32> {
    let step = (region.bytes() / PAGES_ASKED).max(1);
    let mut nodes = (0..region.bytes()).step_by(step).filter_map(|at| cpu::node_of(region.address() + at as u64));
    let first = nodes.next()?;
    nodes.all(|node| node == first).then_some(first)
}

/// An RDMA device of a host, and payloads that it moved for peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceSnapshot {
    /// Its name.
    pub name: String,
    /// Bits per second; 0 when it is down or its speed is not known.
    pub bits_per_second: u64,
    /// Payloads between the pool and peers, by whether pool and device are on one NUMA node.
    pub served: NodeCounts,
}

impl Host {
    /// Where a region is, by its name if somebody gave one, else by the kernel's word.
    pub(super) fn place_of(&self, region: &Arc<Region>, location: Option<&str>) -> Place {
        let near = &self.rdma_work.near;
        match location.filter(|location| *location != "*") {
            _ if near.places.is_empty() => Place::UNKNOWN,
            Some(location) => near.place(location),
            None => node_of_region(region).map_or(Place::UNKNOWN, |node| near.place_of_node(node)),
        }
    }

    /// RDMA devices that are open, with what they did for peers.
    #[must_use]
    pub fn rdma_snapshot(&self) -> Vec<DeviceSnapshot> {
        let served = &self.rdma_work.served;
        let device = |(number, (name, bits_per_second, _)): (usize, (&str, u64, Option<String>))| DeviceSnapshot {
            name: name.to_owned(),
            bits_per_second,
            served: served.get(number).copied().unwrap_or_default(),
        };
        self.rdma_work.driver.devices().enumerate().map(device).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_found_by_name_and_by_node() {
        let place = |name: &str, node| PlaceName { name: name.to_owned(), node };
        let places = vec![place("cpu:0", Some(0)), place("cxl:2", Some(2)), place("cuda:0", None)];
        let row = vec![Nearness { tier: 1, same_node: Some(false) }; 3];
        let near = NearDevices { places, devices: [("mlx5_0".to_owned(), row)].into(), ..Default::default() };
        let found = ["cpu:0", "cpu:2", "cxl:2", "cuda:0", "cpu:1", "*"].map(|name| near.place(name));
        assert_eq!(found, [1, 2, 2, 3, 0, 0].map(Place));
        assert_eq!((near.place_of_node(2), near.place_of_node(7)), (Place(2), Place::UNKNOWN));
        let table = near.table(["other", "mlx5_0"].into_iter());
        assert_eq!((table.of(0, Place(1)).same_node, table.of(1, Place(3)).tier), (None, 1));
    }
}
