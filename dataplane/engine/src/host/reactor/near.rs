//! How near a host's RDMA devices are to its memory: as the embedder knows the machine, looked up by names.

use std::collections::HashMap;

use kvplane_client::{Near, Nearness, Place};
use kvplane_sys::{Region, cpu};

/// Pages of a region whose node the kernel is asked.
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
