//! Replica counts: puts that wait for their replicas, and queries for the holders of objects.

use std::net::SocketAddr;
use std::time::Duration;

use kvplane_client::{Request, TaskResult};
use kvplane_proto::map::OwnerTable;
use kvplane_proto::message::{ObjectName, PutOptions};
use kvplane_proto::{Digest, Status};

use super::puts::put_request;
use super::questions::address_of;
use super::stripes::HEAD_BYTES;
use super::{Client, Put};
use crate::error::Error;

/// Longest wait for an owner whose replica owner answered in its place.
const OWNER_WAIT: Duration = Duration::from_secs(1);

impl Client {
    /// Stores a copy of these bytes under a key, replicated as `options` say, and waits until the replicas are written
    /// or turn out not to be. Returns the number of owners that have the object: 0 if an object existed already.
    ///
    /// # Errors
    /// When the bytes cannot be stored, or are too long for one shard: the status says why.
    pub fn put_replicas(&mut self, key: &[u8], value: &[u8], options: &PutOptions) -> Result<(Put, u8), Error> {
        if value.is_empty() {
            return Err(Error::Status { what: "put of 0 bytes".to_owned(), status: Status::Empty, cause: None });
        }
        let bounce = self.bounce(value.len())?;
        bounce.region().copy_in(0, value);
        let slice = bounce.slice(0, value.len());
        let options = PutOptions { wait_replicas: options.replicas > 1, ..*options };
        super::puts::check_options(&options)?;
        self.puts.clear();
        let name = ObjectName { tenant: &self.tenant, key };
        let request = put_request(&mut self.puts, &name, self.keep_keys, slice.local(), &options)?;
        let results = self.run_new_puts(&[request])?;
        let replicas = results[0].replicas;
        Ok((self.stored(results[0], slice)?, replicas))
    }

    /// Returns the shards that hold the objects under these keys, for each the owner before the replica owner; empty
    /// where there is no object. One byte of each object is read, which counts as an access and promotes objects that
    /// are on an SSD only. The replica owner is known where the cluster keeps two replicas and
    /// [`super::ClientConfig::spread`] is on; for a striped object, the stripe head decides. Where the owner is dead or
    /// does not answer and the replica owner answers in its place, the owner is left out unless it confirms within a
    /// second that it has the object.
    ///
    /// # Errors
    /// When a key is empty or too long, there is no map, or an owner does not answer.
    pub fn replicas(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<Vec<SocketAddr>>, Error> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let digests: Result<Vec<_>, Error> = keys.iter().map(|key| self.digest(key.as_ref())).collect();
        let digests = digests?;
        let bounce = self.bounce(digests.len() * HEAD_BYTES)?;
        let room = |at: usize, bytes| bounce.slice(at * HEAD_BYTES, bytes).local();
        let first = |(at, digest): (usize, &_)| Request::GetRange(*digest, 0, room(at, 1));
        let requests: Vec<Request> = digests.iter().enumerate().map(first).collect();
        let mut results = self.run(&requests)?;
        let striped: Vec<usize> = (0..results.len()).filter(|at| results[*at].status == Status::Striped).collect();
        let head = |at: &usize| Request::GetHead(digests[*at], room(*at, HEAD_BYTES));
        let heads: Vec<Request> = striped.iter().map(head).collect();
        let heads = if heads.is_empty() { Vec::new() } else { self.run(&heads)? };
        striped.into_iter().zip(heads).for_each(|(at, result)| results[at] = result);
        let owners = self.owners_of_hedged(&digests, &results)?;
        let map = self.link.map().ok_or_else(|| Error::Argument("there is no cluster map yet".to_owned()))?;
        let table = OwnerTable::compute(&map);
        let places = results.into_iter().zip(&digests).zip(owners).map(|((result, digest), has_owner)| {
            if !self.present(result, "query of the replicas")? {
                return Ok(Vec::new());
            }
            let known = match (result.from_replica, has_owner) {
                (false, _) => 0..usize::from(result.replicas),
                (true, false) => 1..2,
                (true, true) => 0..2,
            };
            let owners = table.owners(digest.slot());
            let owners = owners.get(known.start..known.end.min(owners.len())).unwrap_or_default();
            Ok(owners.iter().filter_map(|owner| address_of(&map, *owner)).collect())
        });
        places.collect()
    }

    /// Returns, for each object that its replica owner answered for, whether the owner has it too. A hedged get does
    /// not tell: the owner may only be slow.
    fn owners_of_hedged(&mut self, digests: &[Digest], results: &[TaskResult]) -> Result<Vec<bool>, Error> {
        let mut owners = vec![false; results.len()];
        let hedged: Vec<usize> = (0..results.len()).filter(|at| results[*at].from_replica).collect();
        if hedged.is_empty() {
            return Ok(owners);
        }
        let requests: Vec<Request> = hedged.iter().map(|at| Request::Exists(digests[*at])).collect();
        let soon = self.deadline.min(OWNER_WAIT);
        let whole = core::mem::replace(&mut self.deadline, soon);
        let answers = self.run(&requests);
        self.deadline = whole;
        for (at, answer) in hedged.into_iter().zip(answers?) {
            // `Striped` means that the stripe head exists.
            owners[at] = matches!(answer.status, Status::Ok | Status::Striped);
        }
        Ok(owners)
    }
}
