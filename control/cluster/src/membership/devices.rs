//! Which devices the incarnations of a node had. What a device holds of a node's slots counts only if no incarnation of
//! the node went without it since it was last written: such an incarnation may have removed and replaced what is on it.
//!
//! An incarnation that has devices says which, before it joins. As long as the incarnations of a node, one after the
//! other, say the same, the epoch stands that was next when the first of them said it. A device remembers the last map
//! that it knew: what it has is of no use if that is of an earlier epoch.

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};

use crate::cluster::Cluster;
use crate::message::{Change, Reply};
use crate::record::{Record, RecordKey};
use crate::rejection::Rejection;

/// What the last incarnation of a node said of its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Devices {
    /// Which node.
    pub node: NodeId,
    /// Which incarnation.
    pub incarnation: Incarnation,
    /// A digest of the devices' identities.
    pub devices: u128,
    /// No incarnation of the node since this epoch had others.
    pub since: Epoch,
}

impl Cluster {
    pub(crate) fn attach(&mut self, node: NodeId, incarnation: Incarnation, devices: u128) -> Result<Reply, Rejection> {
        self.refuse_while_adopting(node)?;
        let known = self.devices.get(&node);
        if let Some(later) = known.filter(|known| known.incarnation > incarnation) {
            self.counters.stale += 1;
            return Err(Rejection::StaleIncarnation { node, given: incarnation, known: later.incarnation });
        }
        let limit = self.config.limits.members + self.config.limits.ended_incarnations;
        if known.is_none() && self.devices.len() >= limit {
            return Err(Rejection::TooManyMembers { limit });
        }
        let kept = known.filter(|known| known.devices == devices).map(|known| known.since);
        let since = kept.unwrap_or(Epoch(self.newest_epoch().0 + 1));
        let said = Devices { node, incarnation: incarnation, devices, since };
        if known != Some(&said) {
            self.devices.insert(node, said);
            self.changes.push(Change::Put(Record::Devices(said)));
        }
        Ok(Reply::DevicesKept { since })
    }

    /// The last incarnation of a node that is known of, as a member or by its devices; 0 where none is.
    #[must_use]
    pub fn last_incarnation(&self, node: NodeId) -> Incarnation {
        let joined = self.rows.get(&node).map(|row| row.member.incarnation);
        let attached = self.devices.get(&node).map(|said| said.incarnation);
        joined.max(attached).unwrap_or(Incarnation(0))
    }

    /// An incarnation of a node begins; without devices, unless it has said which.
    pub(crate) fn begin_with_devices(&mut self, node: NodeId, incarnation: Incarnation) {
        if self.devices.get(&node).is_some_and(|said| said.incarnation != incarnation) {
            self.forget_devices(node);
        }
    }

    /// Nothing is known of the node any more.
    pub(crate) fn forget_devices(&mut self, node: NodeId) {
        if self.devices.remove(&node).is_some() {
            self.changes.push(Change::Remove(RecordKey::Devices(node)));
        }
    }
}
