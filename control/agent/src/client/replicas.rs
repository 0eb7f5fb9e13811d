//! How many owners have an object: after a put, and later.

use std::net::SocketAddr;

use kvplane_client::Request;
use kvplane_proto::Status;
use kvplane_proto::map::OwnerTable;
use kvplane_proto::message::PutOptions;

use super::puts::put_request;
use super::questions::address_of;
use super::stripes::HEAD_BYTES;
use super::{Client, Put};
use crate::error::Error;

impl Client {
    /// Stores a copy of these bytes under a key with as many owners as `options` say, and waits until they have it, or
    /// turn out not to take it. How many there are: 0 where an object was there already.
    ///
    /// # Errors
    /// When the bytes cannot be stored, or are too long for one shard: the status says why.
    pub fn put_replicas(&mut self, key: &[u8], value: &[u8], options: &PutOptions) -> Result<(Put, u8), Error> {
        if value.is_empty() {
            return Err(Error::Status { what: "put of 0 bytes".to_owned(), status: Status::Empty, cause: None });
        }
        let bounce = self.bounce(value.len())?;
        bounce.region.copy_in(0, value);
        let slice = bounce.slice(0, value.len());
        let options = PutOptions { wait_replicas: options.replicas > 1, ..*options };
        super::puts::check_options(&options)?;
        self.puts.clear();
        let name = (&self.tenant[..], key);
        let request = put_request(&mut self.puts, name, self.keep_keys, slice.local, &options)?;
        let results = self.run_new_puts(&[request])?;
        let replicas = results[0].replicas;
        Ok((self.stored(results[0], slice)?, replicas))
    }

    /// The shards that have the objects under these keys, for each the first owner before the second; empty where there
    /// is no object. A byte of each object is read, which counts as an access and brings what only an SSD has into
    /// memory. The second is known where the cluster keeps two copies and [`super::ClientConfig::spread`] is on; of an
    /// object in stripes, what names the stripes decides.
    ///
    /// # Errors
    /// When a key is empty or too long, there is no map, or an owner cannot be asked.
    pub fn replicas(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<Vec<SocketAddr>>, Error> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let digests: Result<Vec<_>, Error> = keys.iter().map(|key| self.digest(key.as_ref())).collect();
        let digests = digests?;
        let bounce = self.bounce(digests.len() * HEAD_BYTES)?;
        let room = |at: usize, bytes| bounce.slice(at * HEAD_BYTES, bytes).local;
        let first = |(at, digest): (usize, &_)| Request::GetRange(*digest, 0, room(at, 1));
        let requests: Vec<Request> = digests.iter().enumerate().map(first).collect();
        let mut results = self.run(&requests)?;
        let striped: Vec<usize> = (0..results.len()).filter(|at| results[*at].status == Status::Striped).collect();
        let head = |at: &usize| Request::GetHead(digests[*at], room(*at, HEAD_BYTES));
        let heads: Vec<Request> = striped.iter().map(head).collect();
        let heads = if heads.is_empty() { Vec::new() } else { self.run(&heads)? };
        striped.into_iter().zip(heads).for_each(|(at, result)| results[at] = result);
        let map = self.link.map().ok_or_else(|| Error::Argument("the control plane gave no map".to_owned()))?;
        let table = OwnerTable::compute(&map);
        let places = results.into_iter().zip(&digests).map(|(result, digest)| {
            if !self.present(result, "question for the replicas")? {
                return Ok(Vec::new());
            }
            let owners = table.owners(digest.slot()).iter().take(usize::from(result.replicas));
            Ok(owners.filter_map(|owner| address_of(&map, *owner)).collect())
        });
        places.collect()
    }
}
