//! Rail matrix: for each memory location, the RDMA ports to use for it, nearest first. Pure.
//!
//! A rail is an RDMA device with an active port. The rails of a location are grouped in tiers: an engine spreads over
//! the first tier, and uses the next one when a tier is busy or broken. The rails of a tier are equally near;
//! [`Tier::reason`] explains the tier in words, because an operator who sees an unexpected choice needs its inputs.
//!
//! Rails slower than half the fastest come behind all others, even if they are near: a transfer that is spread evenly
//! would wait for them.

mod given;
mod json;
mod notes;
mod tiers;

use crate::model::{LinkLayer, Machine, PciPath, PortState, RdmaDevice, RdmaPort};
use serde::Serialize;
use std::fmt;

pub(crate) use notes::gigabits;

pub use given::{GivenMatrix, GivenRow, MAX_MATRIX_BYTES, MatrixError};

/// Memory location.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Location {
    /// A NUMA node, by the kernel's number: `cpu:0`. Mooncake uses this name for any node.
    Cpu(u32),
    /// A NUMA node that is CXL memory, by the kernel's number: `cxl:2`.
    Cxl(u32),
    /// A GPU, by its vendor's prefix and its index among those in the order of PCI addresses: `cuda:0`.
    Gpu(&'static str, u32),
}

impl Location {
    /// Returns Mooncake's name of the location: it knows NUMA nodes as `cpu:N` only.
    #[must_use]
    pub fn mooncake_name(self) -> String {
        match self {
            Self::Cxl(node) => Self::Cpu(node).to_string(),
            other => other.to_string(),
        }
    }

    /// Returns true if `name` names this location. `cpu:N` names any kind of node, `gpu:N` a GPU of any vendor.
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

/// An RDMA device with an active port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rail {
    /// Device name.
    pub name: String,
    /// Number of the port: the fastest active one, the lowest of equals.
    pub port: u32,
    /// Interface that the port runs over.
    pub netdev: Option<String>,
    /// Rate of the port, in megabits per second.
    pub speed_mbps: Option<u64>,
    /// Largest payload of a packet, in bytes.
    pub active_mtu_bytes: Option<u32>,
    /// Node of the device.
    pub numa_node: Option<u32>,
    /// Place in the PCI tree.
    pub pci: Option<PciPath>,
}

/// An RDMA device that is not a rail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExcludedDevice {
    /// Device name.
    pub name: String,
    /// The reason, and a remedy.
    pub reason: String,
}

/// Proximity of a tier's rails, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// Below the same PCI switch.
    SameSwitch,
    /// Below the same root complex.
    SameRootComplex,
    /// On the same NUMA node.
    SameNode,
    /// The node of the memory or of the rail is unknown.
    NodeUnknown,
    /// On another NUMA node.
    OtherNode,
    /// By a given matrix.
    Given,
}

impl Nearness {
    /// Returns the proximity's name in drawings and JSON.
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Tier {
    pub nearness: Nearness,
    /// For [`Nearness::SameSwitch`] the bridges between, for nodes their NUMA distance; `None` if unknown.
    pub distance: Option<u32>,
    /// True if the rails are held back because they are slower than half the fastest one.
    pub slow: bool,
    /// Device names, the preferred one first.
    pub rails: Vec<String>,
    /// Reason for the rails' tier.
    pub reason: String,
}

/// Tiers of one location.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// Location of the memory.
    pub location: Location,
    /// Tiers, nearest first; none is empty, and each rail is in one of them.
    pub tiers: Vec<Tier>,
}

/// Rails of all locations of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RailMatrix {
    /// Usable rails by name, in natural order of numbers.
    pub rails: Vec<Rail>,
    /// RDMA devices that are not rails, by name.
    pub excluded: Vec<ExcludedDevice>,
    /// Locations: nodes by number, then GPUs.
    pub rows: Vec<Row>,
    /// Facts about the rails for operators, one sentence each.
    pub notes: Vec<String>,
}

/// Error of a location that the machine does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownLocation {
    /// The requested name, truncated to 64 characters.
    pub name: String,
    /// The machine's locations.
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
    /// Returns the tiers of the location of this name; see [`Location::is_named`].
    ///
    /// # Errors
    ///
    /// [`UnknownLocation`] lists the machine's locations.
    pub fn row(&self, location: &str) -> Result<&Row, UnknownLocation> {
        self.rows.iter().find(|row| row.location.is_named(location)).ok_or_else(|| UnknownLocation {
            name: location.chars().take(64).collect(),
            known: self.rows.iter().map(|row| row.location.to_string()).collect(),
        })
    }

    /// Returns the rail of this name.
    #[must_use]
    pub fn rail(&self, name: &str) -> Option<&Rail> {
        self.rails.iter().find(|rail| rail.name == name)
    }

    /// Returns the least speed of a rail that is not held back, in megabits per second; 0 if no speed is known.
    #[must_use]
    pub fn full_speed_from_mbps(&self) -> u64 {
        self.rails.iter().filter_map(|rail| rail.speed_mbps).max().unwrap_or(0).div_ceil(2)
    }

    /// Returns true if a rail is held back: slower than half the fastest.
    #[must_use]
    pub fn is_slow(&self, rail: &Rail) -> bool {
        rail.speed_mbps.is_some_and(|speed| speed < self.full_speed_from_mbps())
    }
}

/// Computes the matrix of `machine`.
#[must_use]
pub fn rail_matrix(machine: &Machine) -> RailMatrix {
    let mut matrix = RailMatrix::default();
    for device in &machine.rdma_devices {
        match usable_port(device) {
            Ok(port) => matrix.rails.push(rail(device, port)),
            Err(reason) => {
                matrix.excluded.push(ExcludedDevice { name: device.name.clone(), reason: reason.to_string() });
            }
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

/// Reason for which no port of a device can be used.
#[derive(Clone, Copy, Debug)]
enum PortError<'a> {
    /// The device has no port.
    None,
    /// None of its ports is active; the state of the first one tells what to check.
    Inactive { first: &'a RdmaPort, ports: &'a [RdmaPort] },
}

impl fmt::Display for PortError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Inactive { first, ports } = self else {
            return f.write_str("it has no port: check that its driver is loaded completely");
        };
        let state = |port: &RdmaPort| {
            let physical = port.physical_state.as_deref().map_or(String::new(), |state| format!(" ({state})"));
            format!("port {} is {}{physical}", port.number, port.state.word())
        };
        let states: Vec<String> = ports.iter().map(state).collect();
        let help = match (first.state, first.link_layer) {
            (PortState::Down, _) => "check the cable, the switch, and that its interface is up",
            (PortState::Initializing | PortState::Armed, LinkLayer::InfiniBand) => {
                "a subnet manager has to configure it"
            }
            (PortState::Initializing | PortState::Armed, _) => "its link is coming up",
            _ => "its state cannot be read",
        };
        write!(f, "no active port: {}; {help}", states.join(", "))
    }
}

/// Returns the port to use, or the reason for which there is none.
fn usable_port(device: &RdmaDevice) -> Result<&RdmaPort, PortError<'_>> {
    let active = device.ports.iter().filter(|port| port.state == PortState::Active);
    // `min_by_key` returns the first of equals, so the lowest number.
    if let Some(port) = active.min_by_key(|port| std::cmp::Reverse(port.speed_mbps)) {
        return Ok(port);
    }
    let first = device.ports.first().ok_or(PortError::None)?;
    Err(PortError::Inactive { first, ports: &device.ports })
}

/// Splits a name so that `mlx5_2` sorts before `mlx5_10`.
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
    // Names that differ only in leading zeros still need an order.
    key.push((name.to_owned(), 0));
    key
}
