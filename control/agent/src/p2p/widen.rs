//! Fetching more shards of an object of which some are held here already: that replica goes on, and serves meanwhile
//! what it has.

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

/// How long the control plane is left alone after it could not be asked.
const AWAY: Duration = Duration::from_millis(200);

impl StoreState {
    /// The replica that a get goes on with, where it is one of an object that is held here.
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
            "in other memory: fetch the rest into the same, or delete that replica before"
        } else if replica.digest != object.spec.digest() {
            "and is another object: find it again"
        } else if options.ranks.is_some() {
            "and ranks fetch all of an object: name no rank, or delete that replica before"
        } else {
            return Ok(Some(replica));
        };
        Err(Error::Argument(format!(
            "version {} of object {:?} is held here already, {why}",
            object.version, object.name
        )))
    }

    /// Fetches what a replica lacks of what is wanted; the bytes that were fetched are the answer. When it fails, what
    /// was held and what has arrived stays held.
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

    /// Says what is wanted besides.
    fn want(&self, replica: &Arc<Replica>, missing: &ShardSet, until: Instant) -> Result<(), Error> {
        while !missing.is_empty() {
            let (client, member) = (self.client, replica.member());
            let call = WantShards { client, member, want: missing.intervals(), failed: Vec::new() };
            let result = match self.link.call(call) {
                Ok(_) => return Ok(()),
                // What is wanted is announced with it; or was not, by who did so before: it is said again.
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

    /// Wants nothing more. The catalog has no word for that: it is announced anew, and then the former member goes. Who
    /// fetches from that one is told another source, which may be the same memory.
    fn narrow(&self, replica: &Arc<Replica>) -> Result<(), Error> {
        let turn = replica.again.lock().unwrap_or_else(PoisonError::into_inner);
        let member = replica.member();
        {
            let mut fetch = replica.fetch();
            fetch.want = ShardSet::empty(replica.spec.layout.shards());
            fetch.orders.clear();
        }
        if self.keeper.hold(self, replica).is_ok() {
            // Where it does not hear of that, it is told that nobody lives there when somebody asks.
            let _ = self.link.call(ReleaseObject { client: self.client, member, wait: false });
            return Ok(());
        }
        // Sources would be kept busy for who does not fetch: better it is not held any more.
        drop(turn);
        self.replicas().remove(&(replica.name.clone(), replica.version));
        self.retire(replica, Duration::ZERO)
    }
}

/// Makes a replica one that is fetched again: what it lacks.
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
