//! Lookup of peers by name: their descriptors, and calls to their handshake daemons.

use std::time::Duration;

use kvplane_mooncake::{Caller, Descriptor, Notice, RdmaHandshake};

use super::direct;
use super::registry::Registry;
use crate::error::{ArgumentError, Error};

/// Lookup of peers: in the metadata store, or peer to peer, where a name is the address of the peer's daemon.
pub(crate) struct Lookup {
    caller: Caller,
    registry: Option<Registry>,
    /// True if only peers that prove a ticket are opened.
    is_guarded: bool,
}

impl Lookup {
    pub(crate) const fn new(caller: Caller, registry: Option<Registry>, is_guarded: bool) -> Self {
        Self { caller, registry, is_guarded }
    }

    /// Returns the descriptor of a peer's segment, within `limit` or the environment's timeout, whichever is shorter.
    ///
    /// # Errors
    /// When there is no such segment, or its descriptor is unavailable.
    pub(crate) fn find(&self, name: &str, limit: Duration) -> Result<Descriptor, Error> {
        if direct::is_direct(name) {
            return direct::descriptor_of(name);
        }
        if self.is_guarded {
            return Err(ArgumentError::NeedsHandshake { name: name.to_owned(), scheme: direct::SCHEME }.into());
        }
        let Some(registry) = &self.registry else { return self.ask(name, limit) };
        let text = registry.descriptor_of(name, limit)?;
        Ok(Descriptor::decode(text.as_bytes(), self.caller.max_message_bytes)?)
    }

    /// Requests the descriptor of the engine whose daemon is at this address, within `limit` or the environment's
    /// timeout, whichever is shorter.
    ///
    /// # Errors
    /// When no engine answers there.
    pub(crate) fn ask(&self, daemon: &str, limit: Duration) -> Result<Descriptor, Error> {
        let caller = Caller { timeout: self.caller.timeout.min(limit), ..self.caller };
        Ok(caller.descriptor(daemon, "{}")?)
    }

    /// Returns the address of a peer's daemon. Without a store, that is its name.
    fn daemon_of(&self, name: &str) -> Result<String, Error> {
        self.registry.as_ref().map_or_else(|| Ok(name.to_owned()), |registry| registry.daemon_of(name))
    }

    /// Checks that a peer's daemon answers.
    ///
    /// # Errors
    /// When it does not.
    pub(crate) fn probe(&self, name: &str) -> Result<(), Error> {
        Ok(self.caller.probe(&self.daemon_of(name)?)?)
    }

    /// Delivers a notice to a peer.
    ///
    /// # Errors
    /// When it was not accepted.
    pub(crate) fn notify(&self, name: &str, notice: &Notice) -> Result<(), Error> {
        Ok(self.caller.notify(&self.daemon_of(name)?, notice)?)
    }

    /// Requests an RDMA connection from a peer.
    ///
    /// # Errors
    /// When it does not answer, or refuses.
    pub(crate) fn connect(&self, name: &str, request: &RdmaHandshake) -> Result<RdmaHandshake, Error> {
        Ok(self.caller.connect(&self.daemon_of(name)?, request)?)
    }
}
