//! State that a client shares with its host: settings and time from the host, outputs and timers for it.

use crate::outbox::Outbox;
use crate::timers::Timers;
use crate::types::Config;

/// Settings and time from the host, outputs and timers for it.
pub(crate) struct HostSide {
    pub(crate) config: Config,
    /// Latest time that an input carried.
    pub(crate) now_ns: u64,
    pub(crate) timers: Timers,
    pub(crate) outbox: Outbox,
}

impl HostSide {
    pub(crate) fn new(config: Config) -> Self {
        Self { config, now_ns: 0, timers: Timers::default(), outbox: Outbox::default() }
    }
}
