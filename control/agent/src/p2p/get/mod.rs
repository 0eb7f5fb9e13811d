//! Fetches of objects into memory: a new replica is fetched, or one that is held in part is widened.

mod follow;
mod options;
mod reports;
mod run;
mod widen;
mod worker;

use std::sync::Arc;
use std::time::Instant;

use kvplane_cluster::p2p::{HALVES, ShardSet};
use kvplane_engine::Region;
use kvplane_transfer::TransferEngine;

use super::catalog::{Catalog, Object, is_forgotten};
use super::error::P2pError;
use super::replica::{Replica, Seat, hashes};
use super::replicas::Replicas;
use crate::error::Error;

pub use options::{GetOptions, Progress};

use run::Run;
use widen::Widening;

/// One call of [`P2pStore::get_replica`](super::P2pStore::get_replica).
pub(super) struct Get<'a> {
    catalog: &'a Catalog,
    engine: &'a TransferEngine,
    replicas: &'a Replicas,
    object: &'a Object,
    options: &'a GetOptions<'a>,
    until: Instant,
}

impl<'a> Get<'a> {
    /// Creates the get of an object, whose deadline counts from now.
    pub(super) fn new(
        catalog: &'a Catalog,
        engine: &'a TransferEngine,
        replicas: &'a Replicas,
        object: &'a Object,
        options: &'a GetOptions<'a>,
    ) -> Self {
        Self { catalog, engine, replicas, object, options, until: Instant::now() + options.limit() }
    }

    /// Fetches the object into memory, one region for each buffer; returns the number of bytes that were fetched.
    ///
    /// # Errors
    /// Errors of [`P2pStore::get_replica`](super::P2pStore::get_replica).
    pub(super) fn fetch(&self, regions: &[Arc<Region>]) -> Result<u64, Error> {
        check_fit(self.object, regions)?;
        if let Some(replica) = self.replicas.find(&self.object.name, self.object.version) {
            return self.widen(&replica, regions);
        }
        let replica = self.replicas.announce(prepare(self.object, regions, self.options)?)?;
        let _busy = replica.mark_busy();
        let result = self.take_seat(&replica).and_then(|()| self.run(&replica).finish());
        if result.is_err() {
            self.replicas.abandon(&replica)?;
        }
        result
    }

    /// Fetches the requested shards that a replica lacks. After a failure, the shards held before and the arrived ones
    /// stay held.
    fn widen(&self, replica: &Arc<Replica>, regions: &[Arc<Region>]) -> Result<u64, Error> {
        let widening = Widening::of(replica, self.object, regions, self.options)?;
        let _busy = widening.begin()?;
        let missing = widening.prepare(self.options)?;
        let wanted = widening.want(self.catalog, self.replicas.keeper(), &missing, self.until);
        let result = wanted.and_then(|()| self.run(replica).finish());
        if result.is_err() && self.replicas.keeper().hold_without_wants(replica).is_err() {
            // Peers would be kept busy for a replica that does not fetch: it is dropped instead.
            self.replicas.abandon(replica)?;
        }
        result
    }

    /// Registers the rank of a replica for the first time.
    fn take_seat(&self, replica: &Replica) -> Result<(), Error> {
        for half in (0..HALVES).filter(|_| replica.fetch.seat().is_some()) {
            let parent = match self.catalog.join_ranks(replica, half) {
                Err(error) if error.is_unanswered() || is_forgotten(&error) => None,
                result => result?,
            };
            replica.fetch.set_parent(half, parent);
        }
        Ok(())
    }

    fn run<'r>(&'r self, replica: &'r Arc<Replica>) -> Run<'r> {
        Run::new(self.catalog, self.replicas.keeper(), self.engine, replica, self.options, self.until)
    }
}

/// Checks that the memory matches the object's buffers in length, and is writable.
fn check_fit(object: &Object, regions: &[Arc<Region>]) -> Result<(), P2pError> {
    let layout = &object.spec.layout;
    let sizes: Vec<u64> = regions.iter().map(|region| region.bytes() as u64).collect();
    if sizes != layout.sizes() {
        let name = object.name.clone();
        let differs = sizes.iter().zip(layout.sizes()).position(|(ours, theirs)| ours != theirs);
        return Err(match differs {
            Some(buffer) => {
                P2pError::BufferBytes { name, buffer, bytes: layout.sizes()[buffer], given_bytes: sizes[buffer] }
            }
            None => P2pError::BufferCount { name, buffers: layout.sizes().len(), given: sizes.len() },
        });
    }
    if let Some(region) = regions.iter().find(|region| !region.writable()) {
        return Err(P2pError::ReadOnlyMemory { address: region.address() });
    }
    Ok(())
}

/// Prepares a replica; with `resume`, verifies which requested shards are present.
fn prepare(object: &Object, regions: &[Arc<Region>], options: &GetOptions<'_>) -> Result<Replica, Error> {
    let (layout, shards) = (&object.spec.layout, object.spec.layout.shards());
    let want = options.wanted(shards)?;
    let spec = &object.spec;
    let (mut have, mut missing) = (ShardSet::empty(shards), want.clone());
    if options.resume {
        let found = hashes(layout, regions);
        for shard in want.iter().filter(|&shard| found[shard as usize] == spec.hashes[shard as usize]) {
            have.insert(shard);
            missing.remove(shard);
        }
    }
    let seat = match &options.ranks {
        Some(_) if options.shards.is_some() => {
            return Err(P2pError::ShardsOfRank.into());
        }
        Some(ranks) => Some((ranks.follow(&missing, options.limit())?, Seat::new(ranks, &have)?)),
        None => None,
    };
    let mut replica = Replica::partial(&object.name, object.version, Arc::clone(spec), regions, have, missing);
    if let Some((follow, seat)) = seat {
        replica.follow_schedule(follow, seat);
    }
    Ok(replica)
}
