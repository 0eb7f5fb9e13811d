//! Detached replicas: replicas of objects that memory has evicted and the SSD has.
//!
//! The replicas stay at the replica owners, so that the record on the SSD is not the only copy. When the object is read
//! into memory again, they are its replicas again; when it is gone, or has another version, they are removed like those
//! of any object that is gone ([`super::ObjectTable::take_orphans`]).

use std::collections::BTreeMap;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::map::ReplicaSet;

use crate::entry::Copies;

/// Replicas of one object.
#[derive(Clone, Copy, Debug)]
pub(super) struct DetachedCopies {
    pub(super) version: Version,
    pub(super) copies: Copies,
}

/// Detached replicas by object. There are never more than the SSD has records; about 50 bytes each.
#[derive(Debug, Default)]
pub struct DetachedReplicas {
    /// True where there is an SSD.
    are_kept: bool,
    copies: BTreeMap<Digest, DetachedCopies>,
    /// Objects of which it is not known yet whether the SSD has them.
    unconfirmed: Vec<Digest>,
    /// Objects that memory has evicted and that were to have more replicas, since the last look.
    lacking: Vec<(Digest, Copies)>,
}

impl DetachedReplicas {
    /// Keeps the replicas of evicted objects from now on: the shard has an SSD.
    pub(crate) const fn keep(&mut self) {
        self.are_kept = true;
    }

    /// Returns the number of objects.
    #[must_use]
    pub fn len(&self) -> usize {
        self.copies.len()
    }

    /// Returns true if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.copies.is_empty()
    }

    /// Returns the replicas of an object that memory does not have.
    #[must_use]
    pub fn copies(&self, digest: Digest) -> Option<Copies> {
        Some(self.copies.get(&digest)?.copies)
    }

    /// Takes the objects of which it is not known yet whether the SSD has this version.
    pub(crate) fn take_unconfirmed(&mut self) -> Vec<(Digest, Version)> {
        let digests = core::mem::take(&mut self.unconfirmed);
        digests.into_iter().filter_map(|digest| Some((digest, self.copies.get(&digest)?.version))).collect()
    }

    /// Takes the objects that memory has evicted since the last call and that were to have more replicas.
    pub(crate) fn take_lacking(&mut self) -> Vec<(Digest, Copies)> {
        core::mem::take(&mut self.lacking)
    }

    /// Notes that memory evicts an object that is to have more replicas than it has.
    pub(super) fn note_lacking(&mut self, digest: Digest, copies: Copies) {
        if self.are_kept {
            self.lacking.push((digest, copies));
        }
    }

    /// Makes it unknown of all objects whether the SSD has them.
    pub(crate) fn doubt_all(&mut self) {
        self.unconfirmed = self.copies.keys().copied().collect();
    }

    /// Applies a change of replica owners: `change` returns which of those of an object may have a replica by the new
    /// map. Objects without any are forgotten.
    pub(crate) fn reassign(&mut self, mut change: impl FnMut(Digest, ReplicaSet) -> ReplicaSet) {
        self.copies.retain(|digest, object| {
            object.copies.at = change(*digest, object.copies.at);
            !object.copies.at.is_empty()
        });
    }

    /// Adds the replicas of an object that memory evicts. False if they are not kept.
    pub(super) fn add(&mut self, digest: Digest, copies: DetachedCopies) -> bool {
        if self.are_kept {
            self.copies.insert(digest, copies);
            self.unconfirmed.push(digest);
        }
        self.are_kept
    }

    /// Removes the replicas of an object.
    pub(super) fn take(&mut self, digest: Digest) -> Option<DetachedCopies> {
        self.copies.remove(&digest)
    }

    /// Removes the replicas of all objects.
    pub(super) fn take_all(&mut self) -> BTreeMap<Digest, DetachedCopies> {
        self.unconfirmed.clear();
        core::mem::take(&mut self.copies)
    }
}
