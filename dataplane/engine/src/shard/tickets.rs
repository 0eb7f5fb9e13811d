//! What a shard needs to tell its peers from strangers, and to be told from one.

use std::sync::Arc;

use kvplane_ticket::{Credential, TicketKey};

use super::{Command, ShardError, ShardHandle};

impl ShardHandle {
    /// Gives the shard the keys that the control plane has, when its ticket time is so many seconds. Until the
    /// first, a shard that wants tickets lets nobody in.
    ///
    /// # Errors
    /// When its mailbox is full.
    pub fn learn_keys(&self, keys: Vec<TicketKey>, seconds: u64) -> Result<(), ShardError> {
        self.send(Command::Ask(Box::new(move |host| {
            let now_ns = host.now_ns();
            if let Some(service) = host.service() {
                service.control().learn_keys(keys, seconds, now_ns);
            }
        })))
    }

    /// Gives the shard a ticket of its own, for the shards that it fetches from.
    ///
    /// # Errors
    /// When its mailbox is full.
    pub fn set_credential(&self, credential: Arc<Credential>) -> Result<(), ShardError> {
        self.send(Command::Ask(Box::new(move |host| {
            let now_ns = host.now_ns();
            if let Some(client) = host.client() {
                client.set_credential(credential, now_ns);
            }
        })))
    }
}
