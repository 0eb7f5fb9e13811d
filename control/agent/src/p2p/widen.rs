//! Fetches of further shards of an object that is held in part: the existing replica is extended, and serves its shards
//! meanwhile.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kvplane_cluster::p2p::ShardSet;
use kvplane_engine::Region;
use kvplane_rpc::p2p::{ReleaseObject, WantShards};
use kvplane_sys::interrupt;

use super::get::{GetOptions, wanted};
use super::replica::{self, Replica};
use super::{Flag, Object, StoreState, is_away, is_forgotten};
use crate::error::Error;

/// Backoff after the control plane did not answer.
const AWAY: Duration = Duration::from_millis(200);

impl StoreState {
    /// Returns the replica that a get extends, if the object is held here already.
    pub(super) fn held(
        &self,
        object: &Object,
        regions: &[Arc<Region>],
        options: &GetOptions<'_>,
    ) -> Result<Option<Arc<Replica>>, Error> {
        let found = self.replicas().get(&(object.name.clone(), object.version)).map(Arc::clone);
        let Some(replica) = found else { return Ok(None) };
        let place = |region: &Arc<Region>| (region.address(), region.bytes());
        let why = if replica.origin {
            "and was registered: all of it is here"
        } else if !replica.regions.iter().map(place).eq(regions.iter().map(place)) {
            "in other memory: fetch the rest into the same memory, or delete that replica first"
        } else if replica.digest != object.spec.digest() {
            "and is another object: look it up again"
        } else if options.ranks.is_some() {
            "and ranks fetch all of an object: pass no rank, or delete that replica first"
        } else {
            return Ok(Some(replica));
        };
        Err(Error::Argument(format!(
            "version {} of object {:?} is held here already, {why}",
            object.version, object.name
        )))
    }

    /// Fetches the requested shards that a replica lacks; returns the number of bytes that were fetched. After a
    /// failure, the shards held before and the arrived ones stay held.
    pub(super) fn widen(&self, replica: &Arc<Replica>, options: &GetOptions<'_>, until: Instant) -> Result<u64, Error> {
        let busy = |what| Error::Argument(format!("object {:?} is being {what}: wait for that to end", replica.name));
        let _fetched = Flag::take(&replica.fetched).ok_or_else(|| busy("fetched"))?;
        if replica.leaving.load(Ordering::Acquire) {
            return Err(busy("given up"));
        }
        let missing = prepare(replica, options)?;
        let result = self.want(replica, &missing, until).and_then(|()| self.fetch_all(replica, options, until));
        if result.is_err() {
            self.narrow(replica)?;
        }
        result
    }

    /// Requests the missing shards from the control plane.
    fn want(&self, replica: &Arc<Replica>, missing: &ShardSet, until: Instant) -> Result<(), Error> {
        while !missing.is_empty() {
            let (client, member) = (self.client, replica.member());
            let call = WantShards { client, member, want: missing.intervals(), failed: Vec::new() };
            let result = match self.link.call(call) {
                Ok(_) => return Ok(()),
                // A new announcement includes the missing shards, unless another thread announced before: then the
                // request is repeated.
                Err(error) if is_forgotten(&error) => self.keeper.hold_again(self, replica, member),
                Err(error) => Err(error),
            };
            match result {
                Err(error) if !is_away(&error) && !is_forgotten(&error) => return Err(error),
                Err(error) if Instant::now() >= until => return Err(error),
                _ if !interrupt::sleep(AWAY) => return Err(Error::interrupted()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Withdraws the request for missing shards. The catalog has no call for that: the replica is announced again, and
    /// the former member released. Peers that fetch from the former member get an order for another one, which may be
    /// the same memory.
    fn narrow(&self, replica: &Arc<Replica>) -> Result<(), Error> {
        let turn = replica.again.lock().unwrap_or_else(PoisonError::into_inner);
        let member = replica.member();
        {
            let mut fetch = replica.fetch();
            fetch.want = ShardSet::empty(replica.spec.layout.shards());
            fetch.orders.clear();
        }
        if self.keeper.hold(self, replica).is_ok() {
            // If this is lost, the member is removed when a peer fails to fetch from it.
            let _ = self.link.call(ReleaseObject { client: self.client, member, wait: false });
            return Ok(());
        }
        // Peers would be kept busy for a replica that does not fetch: it is dropped instead.
        drop(turn);
        self.replicas().remove(&(replica.name.clone(), replica.version));
        self.retire(replica, Duration::ZERO)
    }
}

/// Prepares a replica for another fetch; returns the shards that it lacks.
fn prepare(replica: &Replica, options: &GetOptions<'_>) -> Result<ShardSet, Error> {
    let layout = &replica.spec.layout;
    let mut missing = wanted(layout.shards(), options)?;
    let found = if options.resume { replica::hashes(layout, &replica.regions) } else { Vec::new() };
    let mut fetch = replica.fetch();
    fetch.have.iter().for_each(|shard| {
        missing.remove(shard);
    });
    let is_right = |&shard: &u32| found.get(shard as usize) == Some(&replica.spec.hashes[shard as usize]);
    let right: Vec<u32> = missing.iter().filter(is_right).collect();
    for &shard in &right {
        missing.remove(shard);
        fetch.have.insert(shard);
    }
    fetch.want = missing.clone();
    fetch.got = right;
    fetch.orders.clear();
    fetch.failed.clear();
    (fetch.fetched_bytes, fetch.trouble, fetch.stop) = (0, None, false);
    Ok(missing)
}
