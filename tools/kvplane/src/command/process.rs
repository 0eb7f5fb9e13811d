//! What every process of ours has: a log, signals that stop it, and a port for its metrics.

pub(crate) mod log;
pub(crate) mod metrics;
pub(crate) mod stop;
