//! The driver of a store, as a shard reaches it.

use core::fmt;

use crate::types::{OpId, Operation, Outcome, StoreError};

/// One shard's access to a store. No call blocks.
pub trait StorePort: Send {
    /// Begins an operation. Every operation ends, at the latest at the driver's deadline.
    fn start(&mut self, id: OpId, operation: Operation);
    /// Returns the result of an operation that has ended.
    fn poll(&mut self) -> Option<(OpId, Result<Outcome, StoreError>)>;
    /// Returns true if [`Self::poll`] has a result.
    fn is_ready(&self) -> bool;
}

/// Store that shards share.
pub trait Store: Send + Sync + fmt::Debug {
    /// Opens the access of one shard. `wake` is called from another thread whenever an operation has ended.
    fn open(&self, wake: Box<dyn Fn() + Send + Sync>) -> Box<dyn StorePort>;
    /// Returns the place of the store, for people: without credentials.
    fn place(&self) -> String;
}
