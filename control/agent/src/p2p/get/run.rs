//! Run of a get: threads carry out orders, and the caller's own thread reports the outcomes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use kvplane_cluster::p2p::HALVES;
use kvplane_transfer::TransferEngine;

use super::follow::follow;
use super::options::{GetOptions, Progress};
use super::reports::Reports;
use super::worker::work;
use crate::error::Error;
use crate::p2p::catalog::Catalog;
use crate::p2p::error::P2pError;
use crate::p2p::replica::Replica;
use crate::p2p::replicas::Keeper;
use crate::p2p::sources::Sources;

/// Number of fetch threads: the orders in flight that the control plane gives to a member, plus some that hang.
const WORKERS: usize = 20;

/// Fetch of the missing shards of one replica.
pub(super) struct Run<'a> {
    catalog: &'a Catalog,
    keeper: &'a Keeper,
    replica: &'a Arc<Replica>,
    sources: Sources<'a>,
    options: &'a GetOptions<'a>,
    until: Instant,
}

impl<'a> Run<'a> {
    /// Creates the fetch of an announced replica, with a deadline.
    pub(super) const fn new(
        catalog: &'a Catalog,
        keeper: &'a Keeper,
        engine: &'a TransferEngine,
        replica: &'a Arc<Replica>,
        options: &'a GetOptions<'a>,
        until: Instant,
    ) -> Self {
        Self { catalog, keeper, replica, sources: Sources::new(engine), options, until }
    }

    /// Fetches until all shards are present; returns the number of bytes that were fetched.
    ///
    /// # Errors
    /// When no peer holds a shard, the deadline has passed, or the process is interrupted.
    pub(super) fn finish(self) -> Result<u64, Error> {
        let replica = self.replica;
        let (have, missing) = replica.fetch.counts();
        // Counted here: several shards arrive concurrently, and each reports a count of its own.
        let arrived = AtomicU32::new(0);
        let each = |shard| {
            let Some(each) = self.options.each else { return };
            let arrived = arrived.fetch_add(1, Ordering::Relaxed) + 1;
            each(Progress { shard, have: have + arrived, missing: missing.saturating_sub(arrived) });
        };
        std::thread::scope(|scope| {
            let (sources, catalog) = (&self.sources, self.catalog);
            let workers = WORKERS.min(replica.spec.layout.shards() as usize);
            let mut started = 0;
            for _ in 0..workers {
                let builder = std::thread::Builder::new().name("kvp-p2p-fetch".to_owned());
                let body = || work(replica, sources, &each);
                started += usize::from(builder.spawn_scoped(scope, body).is_ok());
            }
            for half in (0..HALVES).filter(|_| replica.fetch.seat().is_some()) {
                let builder = std::thread::Builder::new().name("kvp-p2p-follow".to_owned());
                if builder.spawn_scoped(scope, move || follow(catalog, replica, sources, half)).is_err() {
                    started = 0;
                }
            }
            let result = if started == 0 && workers > 0 {
                Err(P2pError::NoThread.into())
            } else {
                let is_patient = self.options.deadline.is_some();
                Reports::new(self.catalog, self.keeper, replica, self.until, is_patient).report_all()
            };
            replica.fetch.stop();
            result
        })?;
        Ok(replica.fetch.fetched_bytes())
    }
}
