//! Queries about objects (existence, length, owners) and removals.

mod exists;

use std::net::SocketAddr;

use kvplane_client::{Request, TaskResult};
use kvplane_proto::map::{ClusterMap, Owner, OwnerTable};
use kvplane_proto::{Digest, Status};
use kvplane_transfer::Metrics;

use super::Client;
use crate::error::Error;

impl Client {
    /// Returns the counters of this client; rails are listed without the names of their shards.
    pub fn metrics(&mut self) -> Metrics {
        let mut metrics = Metrics::default();
        let devices = self.initiator.device_names();
        metrics.add(0, self.initiator.books(), &devices, &|_| String::new());
        metrics
    }

    /// Returns true if there is an object under this key. Does not count as an access.
    ///
    /// # Errors
    /// When its owner does not answer.
    pub fn exists(&mut self, key: &[u8]) -> Result<bool, Error> {
        let result = self.run_keys(&[key], Request::Exists)?.pop();
        result.map_or(Ok(false), |result| self.present(result, "exists"))
    }

    pub(super) fn present(&self, result: TaskResult, what: &str) -> Result<bool, Error> {
        match result.status {
            Status::Ok => Ok(true),
            Status::NotFound => Ok(false),
            status => Err(self.problem(what.to_owned(), status)),
        }
    }

    /// Returns the length of the object under this key, or `None` if there is none. Does not count as an access.
    ///
    /// # Errors
    /// When its owner does not answer.
    pub fn size(&mut self, key: &[u8]) -> Result<Option<u64>, Error> {
        Ok(self.batch_size(&[key])?.pop().flatten())
    }

    /// Returns the lengths of the objects under these keys. Does not count as an access.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn batch_size(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<Option<u64>>, Error> {
        let results = self.run_keys(keys, Request::Size)?;
        results.into_iter().map(|result| Ok(self.present(result, "size")?.then_some(result.bytes))).collect()
    }

    /// Removes the object under this key. Returns true if there was one.
    ///
    /// # Errors
    /// When its owner does not answer.
    pub fn remove(&mut self, key: &[u8]) -> Result<bool, Error> {
        Ok(self.batch_remove(&[key])?.pop().unwrap_or(false))
    }

    /// Removes the objects under these keys. Returns for each whether there was one.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn batch_remove(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        let results = self.run_keys(keys, Request::Remove)?;
        results.into_iter().map(|result| self.present(result, "remove")).collect()
    }

    /// Returns the shards that own these keys by the map in use, whether or not there are objects; `None` where a key
    /// has no owner.
    ///
    /// # Errors
    /// When a key is empty or too long, or there is no map.
    pub fn owners(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<Option<SocketAddr>>, Error> {
        self.follow_map();
        let map = self.link.map().ok_or_else(|| Error::Argument("there is no cluster map yet".to_owned()))?;
        let table = OwnerTable::compute(&map);
        let address = |owner| address_of(&map, owner);
        keys.iter().map(|key| Ok(table.owner_of(self.digest(key.as_ref())?).and_then(address))).collect()
    }

    pub(super) fn run_keys(
        &mut self,
        keys: &[impl AsRef<[u8]>],
        request: impl Fn(Digest) -> Request,
    ) -> Result<Vec<TaskResult>, Error> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let requests: Result<Vec<Request>, Error> =
            keys.iter().map(|key| Ok(request(self.digest(key.as_ref())?))).collect();
        let requests = requests?;
        let mut results = self.run(&requests)?;
        self.resolve_striped(&requests, &mut results)?;
        Ok(results)
    }
}

/// Returns the TCP address of a shard of a map.
pub(super) fn address_of(map: &ClusterMap, owner: Owner) -> Option<SocketAddr> {
    let member = map.members.get(usize::from(owner.member))?;
    member.shards.get(usize::from(owner.shard.0)).map(|shard| shard.tcp)
}
