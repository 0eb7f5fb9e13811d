//! The host's side of a client: its settings and the time, and what the host is to do and when.

use crate::outbox::Outbox;
use crate::timers::Timers;
use crate::types::Config;

/// What a client has of its host, and has for it.
pub(crate) struct HostSide {
    pub(crate) config: Config,
    /// The latest time that an input brought.
    pub(crate) now_ns: u64,
    pub(crate) timers: Timers,
    pub(crate) outbox: Outbox,
}

impl HostSide {
    pub(crate) fn new(config: Config) -> Self {
        Self { config, now_ns: 0, timers: Timers::default(), outbox: Outbox::default() }
    }
}
