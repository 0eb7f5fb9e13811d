//! Puts that tell how many owners have the object.

use kvplane_proto::Status;
use kvplane_proto::message::PutOptions;

use super::puts::put_request;
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
        let results = self.run_puts(&[request])?;
        let replicas = results[0].replicas;
        Ok((self.stored(results[0], slice)?, replicas))
    }
}
