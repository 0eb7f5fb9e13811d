//! Asking ahead: what will be wanted next is brought from the SSDs of nodes to their memory.

use std::time::Duration;

use kvplane_client::{Request, TaskResult};
use kvplane_proto::Status;

use super::Client;
use crate::error::Error;

/// Where objects are to be at hand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PrefetchTo {
    /// In the memory of the node that has them on an SSD.
    Memory,
}

impl Client {
    /// As [`Self::batch_exists`], and what is on SSDs only is wanted in memory next: nodes begin to read it, within the
    /// part of their memory that is set aside for that. What is not asked for within this client's deadline leaves
    /// memory again.
    ///
    /// # Errors
    /// When an owner cannot be asked.
    pub fn batch_exists_ahead(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        let results = self.run_keys(keys, Request::Prefetch)?;
        results.into_iter().map(|result| self.present(result, "exists")).collect()
    }

    /// Asks nodes to have these objects at hand in `tier`, where they are slower to reach: who asks for an object
    /// while it is on its way joins that. Says for each whether it is there at all; that it will be at hand is not
    /// promised, as nodes limit the memory that such objects take. What nobody asks for within the deadline goes back.
    /// A node that does not answer within the deadline counts as one without the object.
    ///
    /// # Errors
    /// When an owner cannot be asked.
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
