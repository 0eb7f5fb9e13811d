//! Objects that outlive their process: collected at its end, and taken back by the next one.

use core::fmt;
use std::sync::Arc;

use kvplane_proto::digest::Digest;

use super::Store;
use super::space::KeptSpace;
use super::unchecked::{KeptCounters, PoolSums};
use crate::entry::Replica;
use crate::eviction::EvictionPolicy;
use crate::image::ImageContents;

/// Greatest version from which a process counts: the others are enough for it.
const VERSIONS_MOST: u64 = u64::MAX / 2;

/// Reason why the objects of a former process are not taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TakeBackError {
    /// There are objects already.
    NotEmpty,
    /// Versions are not below those that this process assigns.
    Versions,
    /// Places of objects contradict each other, or the pool.
    Places,
}

impl fmt::Display for TakeBackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotEmpty => "there are other objects already",
            Self::Versions => "its versions are not below those of this process",
            Self::Places => "places of its objects contradict each other, or the pool",
        })
    }
}

impl core::error::Error for TakeBackError {}

/// Returns the counters of a store's objects of a former process.
#[must_use]
pub const fn former_objects<P>(store: &Store<P>) -> KeptCounters {
    store.unchecked.counters
}

/// Objects of a store that outlive its process, with an eviction policy of type `P`.
pub struct KeptObjects<'a, P> {
    store: &'a mut Store<P>,
}

impl<'a, P> From<&'a mut Store<P>> for KeptObjects<'a, P> {
    fn from(store: &'a mut Store<P>) -> Self {
        Self { store }
    }
}

impl<P: EvictionPolicy> KeptObjects<'_, P> {
    /// Returns the objects and replicas that `is_kept` keeps, those first that are to be evicted first. What is in a
    /// device pool is not kept. The length of a tail is that of its room, and its checksum 0: the caller, who knows
    /// tails, sets both.
    ///
    /// `lends`: other processes may still access what is pinned or reserved, through mappings of the pool.
    #[must_use]
    pub fn collect(&mut self, is_kept: impl Fn(Digest, Replica) -> bool, lends: bool) -> ImageContents {
        let next_version = self.store.next_version();
        let contents = KeptSpace { space: &mut self.store.space }.collect(is_kept, lends);
        ImageContents { next_version, ..contents }
    }

    /// Counts versions from where the former process ended, if that is above those of this process, and possible.
    pub fn continue_versions(&mut self, contents: &ImageContents) {
        if contents.next_version.0 <= VERSIONS_MOST {
            self.store.next_version = self.store.next_version.max(contents.next_version.0);
        }
    }

    /// Takes the objects of a former process back: they are visible, no replica owner has a replica of them as far as
    /// is recorded ([`super::ObjectTable::note_copy`]), and each is compared with its checksum by `sums` before its
    /// bytes are lent the first time. Extents that are withheld, or lent, are not reused by this process.
    ///
    /// # Errors
    /// See [`TakeBackError`]; then nothing changes.
    pub fn take_back(&mut self, contents: &ImageContents, sums: &Arc<dyn PoolSums>) -> Result<(), TakeBackError> {
        let Store { space, unchecked, reservations, next_version, .. } = &mut *self.store;
        let is_empty = space.pool().free_granules() == space.pool().granules() && reservations.len() == 0;
        if !is_empty {
            return Err(TakeBackError::NotEmpty);
        }
        if contents.objects.iter().any(|object| object.version.0 >= *next_version) {
            return Err(TakeBackError::Versions);
        }
        let taken = KeptSpace { space: &mut *space }.take_back(contents).ok_or(TakeBackError::Places)?;
        unchecked.withheld += taken.withheld;
        for id in taken.lent {
            unchecked.lent += 1;
            space.pin(id);
        }
        unchecked.sums = Some(Arc::clone(sums));
        unchecked.counters.objects += taken.objects;
        unchecked.counters.bytes += taken.bytes;
        Ok(())
    }
}
