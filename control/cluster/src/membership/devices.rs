//! Devices of each node's incarnations. Records on a device count for a node's slots only if every incarnation of the
//! node since the device was last written had it: an incarnation without the device may have removed and replaced
//! objects that the device still has.
//!
//! An incarnation with devices reports them before it joins. While successive incarnations of a node report the same
//! devices, the epoch stays that was next when the first of them reported. A device remembers the last map that was
//! known to it: its records are void if that map is of an earlier epoch.

use std::collections::BTreeMap;

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};

use super::effects::Effects;
use crate::record::{Devices, Record, RecordKey};
use crate::rejection::Rejection;

/// Devices of nodes, as each node reported them last.
#[derive(Default)]
pub(crate) struct DeviceTable {
    by_node: BTreeMap<NodeId, Devices>,
}

impl DeviceTable {
    pub(crate) fn get(&self, node: NodeId) -> Option<&Devices> {
        self.by_node.get(&node)
    }

    /// Returns true if the last incarnation of a node has devices.
    pub(super) fn has(&self, node: NodeId) -> bool {
        self.by_node.contains_key(&node)
    }

    /// Returns the devices, by node.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Devices> {
        self.by_node.values()
    }

    /// Inserts devices from a stored record or from an offer.
    pub(crate) fn insert(&mut self, said: Devices) {
        self.by_node.insert(said.node, said);
    }

    /// Notes the devices of an incarnation that is about to join, while `newest` is the newest epoch. Returns the epoch
    /// since which every incarnation of the node had these devices.
    pub(super) fn attach(
        &mut self,
        node: NodeId,
        incarnation: Incarnation,
        devices: u128,
        newest: Epoch,
        limit: usize,
        effects: &mut Effects,
    ) -> Result<Epoch, Rejection> {
        let known = self.by_node.get(&node);
        if let Some(later) = known.filter(|known| known.incarnation > incarnation) {
            return Err(Rejection::StaleIncarnation { node, given: incarnation, known: later.incarnation });
        }
        if known.is_none() && self.by_node.len() >= limit {
            return Err(Rejection::TooManyMembers { limit });
        }
        let kept = known.filter(|known| known.devices == devices).map(|known| known.since);
        let since = kept.unwrap_or(Epoch(newest.0 + 1));
        let said = Devices { node, incarnation, devices, since };
        if known != Some(&said) {
            self.by_node.insert(node, said);
            effects.put(Record::Devices(said));
        }
        Ok(since)
    }

    /// Notes the start of an incarnation: it has no devices, unless it has reported some.
    pub(super) fn begin(&mut self, node: NodeId, incarnation: Incarnation, effects: &mut Effects) {
        if self.by_node.get(&node).is_some_and(|said| said.incarnation != incarnation) {
            self.forget(node, effects);
        }
    }

    /// Forgets a node's devices.
    pub(super) fn forget(&mut self, node: NodeId, effects: &mut Effects) {
        if self.by_node.remove(&node).is_some() {
            effects.remove(RecordKey::Devices(node));
        }
    }
}
