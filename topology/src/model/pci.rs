//! Place of a PCI function: its address, and the bridges between it and the processor.
//!
//! Two functions that share a bridge below the root complex reach each other without the processor; two below one root
//! complex cross only its fabric; all others cross the processor's interconnect, whose distance the NUMA node describes
//! better.

use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// Most bridges kept above a function; real trees have fewer than ten.
pub const MAX_BRIDGES: usize = 32;

/// The address of a PCI function, `0000:1b:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct PciAddress {
    /// PCI segment; above 16 bits behind some storage controllers.
    pub domain: u32,
    pub bus: u8,
    pub device: u8,
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// Error of parsing a PCI address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotPci;

impl FromStr for PciAddress {
    type Err = NotPci;

    fn from_str(text: &str) -> Result<Self, NotPci> {
        let (domain, rest) = text.split_once(':').ok_or(NotPci)?;
        let (bus, rest) = rest.split_once(':').ok_or(NotPci)?;
        let (device, function) = rest.split_once('.').ok_or(NotPci)?;
        let narrow = |digits, width, limit| hex(digits, width).filter(|&value| value <= limit).ok_or(NotPci);
        Ok(Self {
            domain: hex(domain, 8).ok_or(NotPci)?,
            bus: narrow(bus, 2, 0xff)? as u8,
            device: narrow(device, 2, 0x1f)? as u8,
            function: narrow(function, 1, 7)? as u8,
        })
    }
}

/// A root complex as the kernel names it: `pci0000:80`, its domain and first bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciRoot {
    /// PCI segment.
    pub domain: u32,
    /// First bus.
    pub bus: u8,
}

impl fmt::Display for PciRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pci{:04x}:{:02x}", self.domain, self.bus)
    }
}

impl FromStr for PciRoot {
    type Err = NotPci;

    fn from_str(text: &str) -> Result<Self, NotPci> {
        let (domain, bus) = text.strip_prefix("pci").and_then(|rest| rest.split_once(':')).ok_or(NotPci)?;
        Ok(Self { domain: hex(domain, 8).ok_or(NotPci)?, bus: hex(bus, 2).ok_or(NotPci)? as u8 })
    }
}

/// Parses 1 to `width` hexadecimal digits and nothing else.
fn hex(digits: &str, width: usize) -> Option<u32> {
    let plain = (1..=width).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    plain.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
}

/// Path from the processor to a function.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct PciPath {
    /// Root complex.
    pub root: PciRoot,
    /// Bridges on the path, the root port first; at most [`MAX_BRIDGES`].
    pub bridges: Vec<PciAddress>,
    /// The function itself.
    pub function: PciAddress,
}

/// Proximity of two PCI functions, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PciRelation {
    /// Below one switch, or on one card.
    SameSwitch {
        /// Bridges between them, counted from the lowest common one: 0 for functions of one card.
        bridges_between: usize,
    },
    /// Below one root complex, by different root ports.
    SameRootComplex,
    /// Below different root complexes.
    Apart,
}

impl PciPath {
    /// Returns the proximity of `other`.
    #[must_use]
    pub fn relation(&self, other: &Self) -> PciRelation {
        if self.root != other.root {
            return PciRelation::Apart;
        }
        let pairs = self.bridges.iter().zip(&other.bridges);
        let common = pairs.take_while(|(a, b)| a == b).count();
        let one_card = (self.function.domain, self.function.bus, self.function.device)
            == (other.function.domain, other.function.bus, other.function.device);
        if common == 0 && !one_card {
            return PciRelation::SameRootComplex;
        }
        PciRelation::SameSwitch { bridges_between: self.bridges.len() + other.bridges.len() - 2 * common }
    }

    /// Parses the components of a device's path below `devices`, such as
    /// `pci0000:80/0000:80:01.0/0000:81:00.0/net/eth0`; none if the device is on no PCI function.
    ///
    /// A controller that opens a separate domain (`pci10000:e0` below a function) counts as a bridge.
    #[must_use]
    pub fn from_components<'a>(components: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let mut root: Option<PciRoot> = None;
        let mut functions: Vec<PciAddress> = Vec::new();
        for component in components {
            if root.is_none() {
                root = component.parse().ok();
            } else if let Ok(address) = component.parse()
                && functions.len() < MAX_BRIDGES
            {
                functions.push(address);
            }
        }
        let function = functions.pop()?;
        Some(Self { root: root?, bridges: functions, function })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn path(text: &str) -> PciPath {
        PciPath::from_components(text.split('/')).unwrap()
    }

    #[test]
    fn a_path_is_read_from_the_device_tree() {
        let one = path("platform/pci0000:80/0000:80:01.0/0000:81:00.0/nvme/nvme0");
        assert_eq!((one.root.to_string(), one.function.to_string()), ("pci0000:80".into(), "0000:81:00.0".into()));
        assert_eq!(one.bridges.len(), 1);
        let behind = path("pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0");
        assert_eq!((behind.bridges.len(), behind.function.domain), (2, 0x10000));
        assert_eq!(PciPath::from_components("virtual/net/lo".split('/')), None);
        assert_eq!(PciPath::from_components(["pci0000:00"]), None);
    }

    #[test]
    fn relations_go_from_one_card_to_apart() {
        let switch = "pci0000:17/0000:17:01.0/0000:18:00.0";
        let gpu = path(&format!("{switch}/0000:19:00.0/0000:1a:00.0"));
        let nic = path(&format!("{switch}/0000:19:01.0/0000:1b:00.0"));
        let port = path(&format!("{switch}/0000:19:01.0/0000:1b:00.1"));
        let beside = path("pci0000:17/0000:17:03.0/0000:20:00.0");
        let far = path("pci0000:97/0000:97:01.0/0000:98:00.0");
        assert_eq!(gpu.relation(&nic), PciRelation::SameSwitch { bridges_between: 2 });
        assert_eq!(nic.relation(&port), PciRelation::SameSwitch { bridges_between: 0 });
        assert_eq!(gpu.relation(&beside), PciRelation::SameRootComplex);
        assert_eq!(gpu.relation(&far), PciRelation::Apart);
        let (on_root, next) = (path("pci0000:00/0000:00:02.0"), path("pci0000:00/0000:00:03.0"));
        assert_eq!(on_root.relation(&next), PciRelation::SameRootComplex);
    }

    proptest! {
        #[test]
        fn addresses_survive_the_round_trip(
            domain in 0_u32..0x20000,
            bus: u8,
            device in 0_u8..32,
            function in 0_u8..8,
        ) {
            let address = PciAddress { domain, bus, device, function };
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn any_text_is_answered(text in "[0-9a-fp:.ci+-]{0,20}") {
            let _ = text.parse::<PciAddress>();
            let _ = text.parse::<PciRoot>();
        }
    }
}
