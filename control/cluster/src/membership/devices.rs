//! Which devices the incarnations of a node had. What a device holds of a node's slots counts only if no incarnation of
//! the node went without it since it was last written: such an incarnation may have removed and replaced what is on it.
//!
//! An incarnation that has devices says which, before it joins. As long as the incarnations of a node, one after the
//! other, say the same, the epoch stands that was next when the first of them said it. A device remembers the last map
//! that it knew: what it has is of no use if that is of an earlier epoch.

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

    /// True when the last incarnation of a node has devices.
    pub(super) fn has(&self, node: NodeId) -> bool {
        self.by_node.contains_key(&node)
    }

    /// By node.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Devices> {
        self.by_node.values()
    }

    /// Enters devices from a stored record or from an offer.
    pub(crate) fn insert(&mut self, said: Devices) {
        self.by_node.insert(said.node, said);
    }

    /// An incarnation that is about to join says which devices it has, while `newest` is the newest epoch: since which
    /// epoch no incarnation of the node had others.
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

    /// An incarnation of a node begins; without devices, unless it has said which.
    pub(super) fn begin(&mut self, node: NodeId, incarnation: Incarnation, effects: &mut Effects) {
        if self.by_node.get(&node).is_some_and(|said| said.incarnation != incarnation) {
            self.forget(node, effects);
        }
    }

    /// Nothing is known of a node's devices any more.
    pub(super) fn forget(&mut self, node: NodeId, effects: &mut Effects) {
        if self.by_node.remove(&node).is_some() {
            effects.remove(RecordKey::Devices(node));
        }
    }
}
