//! The rail matrix: for each place that memory can be, the RDMA ports to use for it, nearest first. Pure.
//!
//! A rail is an RDMA device with an active port. The rails of a location stand in tiers: an engine spreads over the
//! first tier and turns to the next when a tier is busy or broken. A tier's rails are equally near; how near is said in
//! words ([`Tier::reason`]), because an operator who sees an odd choice wants to know what it was made from.
//!
//! Rails slower than half the fastest stand behind all others, even near ones: whoever spreads evenly would wait for
//! them.

mod given;
mod json;
mod notes;
mod tiers;

use crate::model::{LinkLayer, Machine, PciPath, PortState, RdmaDevice, RdmaPort};
use std::fmt;

pub(crate) use notes::gigabits;

pub use given::{GivenMatrix, GivenRow, MAX_MATRIX_BYTES, MatrixError};

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Location {
    /// A NUMA node, by the kernel's number: `cpu:0`. Mooncake calls any node that.
    Cpu(u32),
    /// A NUMA node that is CXL memory, by the kernel's number: `cxl:2`.
    Cxl(u32),
    /// A GPU, by the prefix of its vendor and its place among those in the order of PCI addresses: `cuda:0`.
    Gpu(&'static str, u32),
}

impl Location {
    /// The name that Mooncake uses: it knows NUMA nodes as `cpu:N` only.
    #[must_use]
    pub fn mooncake_name(self) -> String {
        match self {
            Self::Cxl(node) => Self::Cpu(node).to_string(),
            other => other.to_string(),
        }
    }

    /// Whether `name` means this location. `cpu:N` means any node, `gpu:N` a GPU of any vendor.
    #[must_use]
    pub fn is_named(self, name: &str) -> bool {
        let alias = match self {
            Self::Cpu(_) => return name == self.to_string(),
            Self::Cxl(node) => format!("cpu:{node}"),
            Self::Gpu(_, index) => format!("gpu:{index}"),
        };
        name == alias || name == self.to_string()
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(node) => write!(f, "cpu:{node}"),
            Self::Cxl(node) => write!(f, "cxl:{node}"),
            Self::Gpu(prefix, index) => write!(f, "{prefix}:{index}"),
        }
    }
}

/// An RDMA device whose port carries data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rail {
    /// Device name.
    pub name: String,
    /// The port: the fastest active one, the lowest of equals.
    pub port: u32,
    /// Interface that the port runs over.
    pub netdev: Option<String>,
    /// Rate of the port, megabits per second.
    pub speed_mbps: Option<u64>,
    /// Largest payload of a packet, bytes.
    pub active_mtu_bytes: Option<u32>,
    /// Node of the device.
    pub numa_node: Option<u32>,
    /// Where it hangs.
    pub pci: Option<PciPath>,
}

/// An RDMA device that is no rail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExcludedDevice {
    /// Device name.
    pub name: String,
    /// Why, and what would help.
    pub reason: String,
}

/// How near the rails of a tier are, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// Below the same PCI switch.
    SameSwitch,
    /// Below the same root complex.
    SameRootComplex,
    /// On the same NUMA node.
    SameNode,
    /// The node of one of both is unknown.
    NodeUnknown,
    /// On another NUMA node.
    OtherNode,
    /// As a matrix says that was given.
    Given,
}

impl Nearness {
    /// A few words for people and programs.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::SameSwitch => "same switch",
            Self::SameRootComplex => "same root complex",
            Self::SameNode => "same node",
            Self::NodeUnknown => "node unknown",
            Self::OtherNode => "other node",
            Self::Given => "given",
        }
    }
}

/// Rails that are equally near.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tier {
    /// How near.
    pub nearness: Nearness,
    /// For [`Nearness::SameSwitch`] the bridges between, for nodes their NUMA distance; `None` where unknown.
    pub distance: Option<u32>,
    /// Held back because they are slower than half the fastest rail.
    pub slow: bool,
    /// Device names, the one to begin with first.
    pub rails: Vec<String>,
    /// Why they stand here.
    pub reason: String,
}

/// The tiers of one location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Where the memory is.
    pub location: Location,
    /// Nearest first; none is empty, and each rail stands in one.
    pub tiers: Vec<Tier>,
}

/// All locations of a machine and the rails for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RailMatrix {
    /// Usable rails by name, numbers in names counted as numbers.
    pub rails: Vec<Rail>,
    /// RDMA devices that are not, by name.
    pub excluded: Vec<ExcludedDevice>,
    /// Locations: nodes by number, then GPUs.
    pub rows: Vec<Row>,
    /// What an operator should know, one sentence each.
    pub notes: Vec<String>,
}

/// A location that the machine does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownLocation {
    /// The name asked for, cut to 64 characters.
    pub name: String,
    /// Locations that there are.
    pub known: Vec<String>,
}

impl fmt::Display for UnknownLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = if self.known.is_empty() { "none".to_owned() } else { self.known.join(", ") };
        write!(f, "no memory location {:?} on this machine; there are: {known}", self.name)
    }
}

impl std::error::Error for UnknownLocation {}

impl RailMatrix {
    /// The tiers for memory at the location of this name; see [`Location::is_named`].
    ///
    /// # Errors
    ///
    /// [`UnknownLocation`] lists what there is.
    pub fn row(&self, location: &str) -> Result<&Row, UnknownLocation> {
        self.rows.iter().find(|row| row.location.is_named(location)).ok_or_else(|| UnknownLocation {
            name: location.chars().take(64).collect(),
            known: self.rows.iter().map(|row| row.location.to_string()).collect(),
        })
    }

    /// The rail of this name.
    #[must_use]
    pub fn rail(&self, name: &str) -> Option<&Rail> {
        self.rails.iter().find(|rail| rail.name == name)
    }

    /// The slowest that a rail may be without being held back, megabits per second; 0 where no speed is known.
    #[must_use]
    pub fn full_speed_from_mbps(&self) -> u64 {
        self.rails.iter().filter_map(|rail| rail.speed_mbps).max().unwrap_or(0).div_ceil(2)
    }

    /// Whether a rail is held back: slower than half the fastest.
    #[must_use]
    pub fn is_slow(&self, rail: &Rail) -> bool {
        rail.speed_mbps.is_some_and(|speed| speed < self.full_speed_from_mbps())
    }
}

/// Works out the matrix of `machine`.
#[must_use]
pub fn rail_matrix(machine: &Machine) -> RailMatrix {
    let mut matrix = RailMatrix::default();
    for device in &machine.rdma_devices {
        match usable_port(device) {
            Ok(port) => matrix.rails.push(rail(device, port)),
            Err(reason) => matrix.excluded.push(ExcludedDevice { name: device.name.clone(), reason }),
        }
    }
    matrix.rails.sort_by_cached_key(|rail| natural_key(&rail.name));
    matrix.excluded.sort_by_cached_key(|excluded| natural_key(&excluded.name));
    matrix.rows = tiers::rows(machine, &matrix);
    matrix.notes = notes::notes(machine, &matrix);
    matrix
}

fn rail(device: &RdmaDevice, port: &RdmaPort) -> Rail {
    Rail {
        name: device.name.clone(),
        port: port.number,
        netdev: port.netdev.clone(),
        speed_mbps: port.speed_mbps,
        active_mtu_bytes: port.active_mtu_bytes,
        numa_node: device.numa_node,
        pci: device.pci.clone(),
    }
}

/// The port to use, or why there is none.
fn usable_port(device: &RdmaDevice) -> Result<&RdmaPort, String> {
    let active = device.ports.iter().filter(|port| port.state == PortState::Active);
    // The first of equals wins `min_by_key`, so the lowest number.
    if let Some(port) = active.min_by_key(|port| std::cmp::Reverse(port.speed_mbps)) {
        return Ok(port);
    }
    let state = |port: &RdmaPort| {
        let physical = port.physical_state.as_deref().map_or(String::new(), |state| format!(" ({state})"));
        format!("port {} is {}{physical}", port.number, port.state.word())
    };
    let states: Vec<String> = device.ports.iter().map(state).collect();
    let Some(first) = device.ports.first() else {
        return Err("it shows no port: is its driver loaded completely?".to_owned());
    };
    let help = match (first.state, first.link_layer) {
        (PortState::Down, _) => "check the cable, the switch, and that its interface is up",
        (PortState::Initializing | PortState::Armed, LinkLayer::InfiniBand) => "a subnet manager has to configure it",
        (PortState::Initializing | PortState::Armed, _) => "its link is coming up",
        _ => "its state cannot be read",
    };
    Err(format!("no active port: {}; {help}", states.join(", ")))
}

/// Splits a name so that `mlx5_2` stands before `mlx5_10`.
pub(crate) fn natural_key(name: &str) -> Vec<(String, u128)> {
    let mut key: Vec<(String, u128)> = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let letters = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let digits = rest[letters..].find(|c: char| !c.is_ascii_digit()).map_or(rest.len(), |end| letters + end);
        let number = rest[letters..digits].parse().unwrap_or(u128::MAX);
        key.push((rest[..letters].to_owned(), number));
        rest = &rest[digits..];
    }
    // Names that differ in leading zeros only still need an order.
    key.push((name.to_owned(), 0));
    key
}
