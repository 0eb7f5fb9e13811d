//! Part of the key `kvplane`: the RDMA devices of an engine, and which of them to prefer for which of its buffers.

use serde::{Deserialize, Serialize};

use super::error::invalid;
use super::{DescriptorError, MAX_NAME_BYTES};

/// Most devices that an engine lists.
const MAX_RAILS: usize = 64;
/// Most places that an engine lists.
const MAX_PLACES: usize = 254;

/// RDMA devices of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NativeRails {
    /// Devices, in the order of their numbers.
    pub devices: Vec<NativeDevice>,
    /// Places where its buffers may be.
    pub places: Vec<NativePlace>,
    /// For each buffer, in the order of `buffers`, the number of its place from 1 on, or 0 if unknown; or an empty
    /// list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buffers: Vec<u8>,
}

/// RDMA device of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NativeDevice {
    /// Name of the device on its host.
    pub name: String,
}

/// Place where an engine's buffers may be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NativePlace {
    /// Name of the place, such as `cpu:0`.
    pub name: String,
    /// Tier of each device: 0 for those to be used first.
    pub tiers: Vec<u8>,
    /// For each device, true if it is on the same NUMA node; `null` if unknown.
    pub same_node: Vec<Option<bool>>,
}

impl NativeRails {
    pub(super) fn check(&self, buffers: usize) -> Result<(), DescriptorError> {
        let (devices, places) = (self.devices.len(), self.places.len());
        let bad = |key: &str, reason: String| Err(invalid(format!("kvplane.rails.{key}"), reason));
        if devices > MAX_RAILS {
            return bad("devices", format!("has {devices} entries, more than {MAX_RAILS}"));
        }
        if places > MAX_PLACES {
            return bad("places", format!("has {places} entries, more than {MAX_PLACES}"));
        }
        let names = self.devices.iter().map(|device| &device.name).chain(self.places.iter().map(|place| &place.name));
        if let Some(name) = names.into_iter().find(|name| name.is_empty() || name.len() > MAX_NAME_BYTES) {
            return bad("name", format!("has {} bytes, not 1 to {MAX_NAME_BYTES}", name.len()));
        }
        for place in &self.places {
            let (tiers, same) = (place.tiers.len(), place.same_node.len());
            if tiers != devices || same != devices {
                return bad("places", format!("has {tiers} tiers and {same} nodes for {devices} devices"));
            }
        }
        if !self.buffers.is_empty() && self.buffers.len() != buffers {
            return bad("buffers", format!("has {} entries for {buffers} buffers", self.buffers.len()));
        }
        match self.buffers.iter().find(|place| usize::from(**place) > places) {
            Some(place) => bad("buffers", format!("names place {place} of {places}")),
            None => Ok(()),
        }
    }
}
