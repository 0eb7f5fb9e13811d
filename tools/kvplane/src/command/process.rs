//! Common parts of every process of kvplane: log, stop signals, metrics port, child processes, and the service manager.

pub(crate) mod child;
pub(crate) mod durations;
pub(crate) mod log;
pub(crate) mod metrics;
pub(crate) mod service_manager;
pub(crate) mod stop;
pub(crate) mod upgrades;
