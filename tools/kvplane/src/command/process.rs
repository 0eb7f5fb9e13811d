//! Common parts of every process of kvplane: log, stop signals, and metrics port.

pub(crate) mod log;
pub(crate) mod metrics;
pub(crate) mod stop;
