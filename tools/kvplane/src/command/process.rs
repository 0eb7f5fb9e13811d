//! Common parts of every process of kvplane: log, stop signals, metrics port, and child processes.

pub(crate) mod child;
pub(crate) mod log;
pub(crate) mod metrics;
pub(crate) mod stop;
