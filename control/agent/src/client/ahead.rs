//! Prefetch: objects are read from the SSDs of nodes into their memory before a get needs them.

use std::time::Duration;

use kvplane_client::{Request, TaskResult};
use kvplane_proto::Status;

use super::Client;
use crate::error::Error;

/// Tier that prefetched objects are brought to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PrefetchTo {
    /// Memory of the node that has the object on an SSD.
    Memory,
}

impl Client {
    /// Like [`Self::batch_exists`], and prefetches objects that are on an SSD only: nodes begin to read them into
    /// memory, within the part of their memory that is set aside for prefetching. Objects that no get has read within
    /// this client's deadline are evicted from memory again.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn batch_exists_ahead(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        let results = self.run_keys(keys, Request::Prefetch)?;
        results.into_iter().map(|result| self.present(result, "exists")).collect()
    }

    /// Prefetches objects into `tier`: nodes begin to read those that are on a slower tier. A get of an object whose
    /// prefetch is in flight joins it. Returns for each key whether the object exists; a prefetch itself is not
    /// guaranteed, because nodes limit the memory of prefetched objects. Objects that no get has read within the
    /// deadline are evicted from memory again. A node that does not answer within the deadline counts as one without
    /// the object.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn prefetch(
        &mut self,
        keys: &[impl AsRef<[u8]>],
        tier: PrefetchTo,
        deadline: Duration,
    ) -> Result<Vec<bool>, Error> {
        let PrefetchTo::Memory = tier;
        let own = core::mem::replace(&mut self.deadline, deadline);
        let results = self.run_keys(keys, Request::Prefetch);
        self.deadline = own;
        let there = |result: TaskResult| match result.status {
            Status::DeadlineExceeded => Ok(false),
            _ => self.present(result, "prefetch"),
        };
        results?.into_iter().map(there).collect()
    }
}
