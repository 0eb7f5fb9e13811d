//! What changed in a slot while an owner of it was away.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, NodeId, ShardId};
use kvplane_proto::map::ShardKey;

/// Absences of one slot: of owners that were gone one after the other.
pub(in crate::service) const ABSENCES_MOST: usize = 8;

/// Since when all that others than this owner changed in a slot is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) struct Absence {
    pub(in crate::service) node: NodeId,
    pub(in crate::service) shard: ShardId,
    pub(in crate::service) since: Epoch,
}

impl Absence {
    /// Whether it is of this owner, in whatever incarnation.
    pub(in crate::service) fn is_of(&self, owner: ShardKey) -> bool {
        self.owner() == (owner.node, owner.shard)
    }

    /// The owner that is absent, in whatever incarnation.
    const fn owner(&self) -> (NodeId, ShardId) {
        (self.node, self.shard)
    }
}

/// What changed in one slot.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(in crate::service) struct Changes {
    pub(in crate::service) absences: Vec<Absence>,
    /// By a map of which epoch each was changed last. What an owner had by that map or a later one it has changed
    /// itself, or has compared already.
    pub(in crate::service) digests: BTreeMap<Digest, Epoch>,
}

impl Changes {
    /// Knows of another absence; of two of one owner, the longer counts.
    pub(in crate::service) fn add(&mut self, absence: Absence) {
        let same = |known: &Absence| known.owner() == absence.owner();
        if let Some(at) = self.absences.iter().position(same) {
            self.absences[at].since = self.absences[at].since.min(absence.since);
        } else if self.absences.len() < ABSENCES_MOST {
            self.absences.push(absence);
        }
    }

    /// An object was changed by a map of this epoch. Whether it is the first change of it.
    pub(in crate::service) fn change(&mut self, digest: Digest, epoch: Epoch) -> bool {
        let known = self.digests.insert(digest, epoch);
        if let Some(known) = known.filter(|known| *known > epoch) {
            self.digests.insert(digest, known);
        }
        known.is_none()
    }

    /// Digests that changed after an owner had the slot by a map of this epoch.
    pub(in crate::service) fn since(&self, had: Epoch) -> impl Iterator<Item = Digest> {
        self.digests.iter().filter(move |(_, epoch)| **epoch > had).map(|(digest, _)| *digest)
    }
}
