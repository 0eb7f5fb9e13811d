//! GIDs: the addresses of ports, and their ranking.
//!
//! A RoCE port has several for each address of its network interface, in both versions of the protocol. Version 2 runs
//! over UDP and is routable; its IPv4-mapped addresses work in most networks. Link-local addresses reach only neighbors
//! and rank last.

use crate::verbs::ffi::ibv_gid_entry;
use std::fmt;
use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;

/// Limit of GID table entries read from sysfs.
const SYSFS_PLACES: u32 = 1024;

/// Address of a port: 128 bits, an IPv6 address or an IPv4-mapped one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Returns the GID as an IPv6 address.
    #[must_use]
    pub fn address(self) -> Ipv6Addr {
        Ipv6Addr::from(self.0)
    }

    fn is_link_local(self) -> bool {
        match self.address().to_ipv4_mapped() {
            Some(v4) => v4.is_link_local(),
            None => self.address().is_unicast_link_local(),
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.address(), f)
    }
}

/// Protocol of a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE version 1: an Ethernet protocol of its own, not routed.
    RoceV1,
    /// RoCE version 2: over UDP.
    RoceV2,
}

/// Entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Index in the table, for queue pairs.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// Protocol of the address.
    pub kind: GidKind,
    /// Index of the network interface behind it; 0 if there is none.
    pub interface: u32,
}

impl GidEntry {
    pub(crate) fn from_raw(raw: &ibv_gid_entry) -> Option<Self> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&raw.gid[0].to_ne_bytes());
        bytes[8..].copy_from_slice(&raw.gid[1].to_ne_bytes());
        let kind = match raw.gid_type {
            0 => GidKind::InfiniBand,
            1 => GidKind::RoceV1,
            2 => GidKind::RoceV2,
            _ => return None,
        };
        Some(Self { index: raw.gid_index, gid: Gid(bytes), kind, interface: raw.ndev_ifindex })
    }

    /// Returns the rank of the entry: smaller is better. `None` if it is not usable.
    #[must_use]
    pub fn rank(&self) -> Option<u8> {
        let address = self.gid.address();
        // The lower half of an InfiniBand GID is the port's; an all-zero RoCE GID is a free entry.
        if address.is_unspecified() {
            return None;
        }
        let v4 = address.to_ipv4_mapped().is_some();
        Some(match (self.kind, self.gid.is_link_local()) {
            (GidKind::InfiniBand, _) => 0,
            (GidKind::RoceV2, false) if v4 => 1,
            (GidKind::RoceV2, false) => 2,
            (GidKind::RoceV1, false) => 3,
            (GidKind::RoceV2, true) => 4,
            (GidKind::RoceV1, true) => 5,
        })
    }
}

/// Sorts usable entries by rank, then by index, and removes the others.
pub(crate) fn rank_entries(entries: &mut Vec<GidEntry>) {
    entries.retain(|entry| entry.rank().is_some());
    entries.sort_by_key(|entry| (entry.rank(), entry.index));
}

/// Reads the table from sysfs, under the device's directory. Missing entries are skipped.
pub(crate) fn from_sysfs(device: &Path, port: u8) -> Vec<GidEntry> {
    let port = device.join("ports").join(port.to_string());
    let read = |path: &str, index: u32| fs::read_to_string(port.join(path).join(index.to_string())).ok();
    let entry = |index| {
        let gid: Ipv6Addr = read("gids", index)?.trim().parse().ok()?;
        // A free entry has no type: reading it is an error.
        let kind = match read("gid_attrs/types", index)?.trim() {
            "RoCE v2" => GidKind::RoceV2,
            // The kernel's name for both; the link layer distinguishes them.
            "IB/RoCE v1" if is_ethernet(&port) => GidKind::RoceV1,
            _ => GidKind::InfiniBand,
        };
        let interface = read("gid_attrs/ndevs", index)
            .and_then(|name| fs::read_to_string(format!("/sys/class/net/{}/ifindex", name.trim())).ok())
            .and_then(|number| number.trim().parse().ok())
            .unwrap_or(0);
        Some(GidEntry { index, gid: Gid(gid.octets()), kind, interface })
    };
    (0..SYSFS_PLACES).take_while(|index| port.join("gids").join(index.to_string()).exists()).filter_map(entry).collect()
}

fn is_ethernet(port: &Path) -> bool {
    fs::read_to_string(port.join("link_layer")).is_ok_and(|layer| layer.trim() == "Ethernet")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32, address: &str, kind: GidKind) -> GidEntry {
        GidEntry { index, gid: Gid(address.parse::<Ipv6Addr>().expect("address").octets()), kind, interface: 0 }
    }

    #[test]
    fn the_best_address_comes_first() {
        let mut entries = vec![
            entry(0, "fe80::1", GidKind::RoceV1),
            entry(1, "fe80::1", GidKind::RoceV2),
            entry(2, "::ffff:10.0.0.1", GidKind::RoceV1),
            entry(3, "::ffff:10.0.0.1", GidKind::RoceV2),
            entry(4, "2001:db8::1", GidKind::RoceV1),
            entry(5, "2001:db8::1", GidKind::RoceV2),
            entry(6, "::", GidKind::RoceV2),
            entry(7, "::ffff:169.254.3.4", GidKind::RoceV2),
            entry(8, "::ffff:10.0.0.2", GidKind::RoceV2),
        ];
        rank_entries(&mut entries);
        let order: Vec<u32> = entries.iter().map(|entry| entry.index).collect();
        assert_eq!(order, [3, 8, 5, 2, 4, 1, 7, 0]);
        let mut entries = vec![entry(0, "fe80::2:c903:f:1", GidKind::InfiniBand)];
        rank_entries(&mut entries);
        assert_eq!(entries.len(), 1, "the one address of InfiniBand is link-local by its looks");
    }

    #[test]
    fn a_table_from_sysfs() {
        let root = std::env::temp_dir().join(format!("kvplane-gids-{}", std::process::id()));
        let port = root.join("ports/1");
        for directory in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
            fs::create_dir_all(port.join(directory)).expect("directory");
        }
        let write = |path: &str, text: &str| fs::write(port.join(path), text).expect("written");
        write("link_layer", "Ethernet\n");
        write("gids/0", "fe80:0000:0000:0000:5054:00ff:fe12:3456\n");
        write("gid_attrs/types/0", "IB/RoCE v1\n");
        write("gids/1", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n");
        write("gid_attrs/types/1", "RoCE v2\n");
        write("gid_attrs/ndevs/1", "lo\n");
        write("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        let entries = from_sysfs(&root, 1);
        assert_eq!(entries.len(), 2, "a place without a type is free: {entries:?}");
        assert_eq!((entries[0].kind, entries[1].kind), (GidKind::RoceV1, GidKind::RoceV2));
        assert_eq!(entries[1].gid.to_string(), "::ffff:10.77.0.1");
        assert!(from_sysfs(&root, 2).is_empty() && from_sysfs(Path::new("/nowhere"), 1).is_empty());
        fs::remove_dir_all(root).expect("removed");
    }
}
