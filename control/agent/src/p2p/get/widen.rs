//! Widening: another fetch of an object that is held in part. The existing replica gets further shards, and meanwhile
//! serves those that it has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_cluster::p2p::ShardSet;
use kvplane_engine::Region;
use kvplane_sys::interrupt;

use super::options::GetOptions;
use crate::error::Error;
use crate::p2p::catalog::{Catalog, Object, is_forgotten};
use crate::p2p::error::{P2pError, WideningError};
use crate::p2p::replica::{Busy, Replica, hashes};
use crate::p2p::replicas::Keeper;

/// Backoff after the control plane did not answer.
const AWAY: Duration = Duration::from_millis(200);

/// Replica that another get may widen.
pub(super) struct Widening<'a> {
    replica: &'a Arc<Replica>,
}

impl<'a> Widening<'a> {
    /// Checks that a get of this object into this memory may widen the replica.
    ///
    /// # Errors
    /// When the replica is complete, in other memory or of another object, or the get is that of a rank.
    pub(super) fn of(
        replica: &'a Arc<Replica>,
        object: &Object,
        regions: &[Arc<Region>],
        options: &GetOptions<'_>,
    ) -> Result<Self, P2pError> {
        let place = |region: &Arc<Region>| (region.address(), region.bytes());
        let why = if replica.origin {
            WideningError::Registered
        } else if !replica.regions.iter().map(place).eq(regions.iter().map(place)) {
            WideningError::OtherMemory
        } else if replica.digest != object.spec.digest() {
            WideningError::OtherObject
        } else if options.ranks.is_some() {
            WideningError::Rank
        } else {
            return Ok(Self { replica });
        };
        Err(P2pError::NotWidened { name: object.name.clone(), version: object.version, why })
    }

    /// Begins the fetch, which ends when the mark is dropped.
    ///
    /// # Errors
    /// When another call fetches or retires the replica.
    pub(super) fn begin(&self) -> Result<Busy<'a>, P2pError> {
        let name = || self.replica.name.clone();
        let mark = self.replica.try_busy().ok_or_else(|| P2pError::BeingFetched { name: name() })?;
        if self.replica.is_leaving() {
            return Err(P2pError::BeingGivenUp { name: name() });
        }
        Ok(mark)
    }

    /// Returns the requested shards that the replica lacks, and wants them.
    ///
    /// # Errors
    /// When the object has no such shards.
    pub(super) fn prepare(&self, options: &GetOptions<'_>) -> Result<ShardSet, Error> {
        let layout = &self.replica.spec.layout;
        let wanted = options.wanted(layout.shards())?;
        let found = if options.resume { hashes(layout, &self.replica.regions) } else { Vec::new() };
        Ok(self.replica.fetch.restart(wanted, &found))
    }

    /// Requests the missing shards from the control plane.
    ///
    /// # Errors
    /// When the control plane refuses, or does not answer by the deadline; also an interruption of the process.
    pub(super) fn want(
        &self,
        catalog: &Catalog,
        keeper: &Keeper,
        missing: &ShardSet,
        until: Instant,
    ) -> Result<(), Error> {
        while !missing.is_empty() {
            let member = self.replica.member();
            let result = match catalog.want(member, missing.intervals(), Vec::new()) {
                Ok(()) => return Ok(()),
                // A new announcement includes the missing shards, unless another thread announced before: then the
                // request is repeated.
                Err(error) if is_forgotten(&error) => keeper.hold_again(self.replica, member),
                Err(error) => Err(error),
            };
            match result {
                Err(error) if !error.is_unanswered() && !is_forgotten(&error) => return Err(error),
                Err(error) if Instant::now() >= until => return Err(error),
                _ if !interrupt::sleep(AWAY) => return Err(Error::interrupted()),
                _ => {}
            }
        }
        Ok(())
    }
}
