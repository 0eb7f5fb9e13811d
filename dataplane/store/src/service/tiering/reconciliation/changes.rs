//! Changes in a slot while an owner of it was absent.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, NodeId, ShardId};
use kvplane_proto::map::ShardKey;

/// Most absences of one slot: of owners that left one after the other.
pub(in crate::service) const ABSENCES_MOST: usize = 8;

/// Absence of an owner: all changes of a slot by other owners since this epoch are known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) struct Absence {
    pub(in crate::service) node: NodeId,
    pub(in crate::service) shard: ShardId,
    pub(in crate::service) since: Epoch,
}

impl Absence {
    /// Returns true if this owner, in any incarnation, is the absent one.
    pub(in crate::service) fn is_of(&self, owner: ShardKey) -> bool {
        self.owner() == (owner.node, owner.shard)
    }

    /// Returns the absent owner, independent of its incarnation.
    const fn owner(&self) -> (NodeId, ShardId) {
        (self.node, self.shard)
    }
}

/// Changes in one slot.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(in crate::service) struct Changes {
    pub(in crate::service) absences: Vec<Absence>,
    /// Epoch by which each object was changed last. An owner that had the slot by that map or a later one has made the
    /// change itself, or has reconciled it already.
    pub(in crate::service) digests: BTreeMap<Digest, Epoch>,
}

impl Changes {
    /// Adds an absence; of two of one owner, the longer counts.
    pub(in crate::service) fn add(&mut self, absence: Absence) {
        let same = |known: &Absence| known.owner() == absence.owner();
        if let Some(at) = self.absences.iter().position(same) {
            self.absences[at].since = self.absences[at].since.min(absence.since);
        } else if self.absences.len() < ABSENCES_MOST {
            self.absences.push(absence);
        }
    }

    /// Records a change of an object by a map of this epoch. Returns true if it is the object's first.
    pub(in crate::service) fn change(&mut self, digest: Digest, epoch: Epoch) -> bool {
        let known = self.digests.insert(digest, epoch);
        if let Some(known) = known.filter(|known| *known > epoch) {
            self.digests.insert(digest, known);
        }
        known.is_none()
    }

    /// Returns the digests that changed after an owner had the slot by a map of this epoch.
    pub(in crate::service) fn since(&self, had: Epoch) -> impl Iterator<Item = Digest> {
        self.digests.iter().filter(move |(_, epoch)| **epoch > had).map(|(digest, _)| *digest)
    }
}
