//! Counters of each local RDMA device over a whole run, and the NUMA locality of memory and devices.

use kvplane::{NodeCounts, RailSnapshot};
use serde::{Serialize, Serializer};

/// Counters of one device, warm-ups included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Name of the device.
    pub name: String,
    /// Completed slices.
    pub operations: u64,
    /// Bytes of the completed slices.
    pub bytes: u64,
    /// Slices by NUMA locality of the local memory and this device.
    pub own: NodeCounts,
    /// Slices by NUMA locality of the peer's memory and its device, as far as the peer reports it.
    pub peer: NodeCounts,
}

impl Device {
    /// Adds the counts of a rail to those of its device in `all`.
    pub fn add(rail: &RailSnapshot, all: &mut Vec<Self>) {
        let Some(name) = &rail.device else { return };
        let position = all.iter().position(|device| device.name == *name).unwrap_or_else(|| {
            all.push(Self { name: name.clone(), ..Self::default() });
            all.len() - 1
        });
        let device = &mut all[position];
        device.operations += rail.operations;
        device.bytes += rail.bytes;
        device.own.add(&rail.own_node);
        device.peer.add(&rail.peer_node);
    }

    /// Formats the line for operators and scripts.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { name, operations, bytes, own, peer } = self;
        format!(
            "  [device] name={name} operations={operations} bytes={bytes} own_same={} own_other={} own_unknown={} \
             peer_same={} peer_other={} peer_unknown={}",
            own.same, own.other, own.unknown, peer.same, peer.other, peer.unknown
        )
    }
}

#[derive(Serialize)]
struct Nodes {
    same: u64,
    other: u64,
    unknown: u64,
}

impl From<NodeCounts> for Nodes {
    fn from(counts: NodeCounts) -> Self {
        let NodeCounts { same, other, unknown } = counts;
        Self { same, other, unknown }
    }
}

impl Serialize for Device {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Row<'a> {
            name: &'a str,
            operations: u64,
            bytes: u64,
            own_node: Nodes,
            peer_node: Nodes,
        }
        let Self { ref name, operations, bytes, own, peer } = *self;
        Row { name, operations, bytes, own_node: own.into(), peer_node: peer.into() }.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_a_line_and_a_record() {
        let own = NodeCounts { same: 4, other: 1, unknown: 0 };
        let peer = NodeCounts { unknown: 5, ..NodeCounts::default() };
        let device = Device { name: "mlx5_0".to_owned(), operations: 5, bytes: 90, own, peer };
        let line = "  [device] name=mlx5_0 operations=5 bytes=90 own_same=4 own_other=1 own_unknown=0 peer_same=0 \
                    peer_other=0 peer_unknown=5";
        assert_eq!(device.line(), line);
        let json = serde_json::to_value(&device).unwrap();
        assert_eq!((&json["own_node"]["same"], &json["peer_node"]["unknown"]), (&4.into(), &5.into()));
    }
}
