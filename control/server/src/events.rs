//! Events for others over ZeroMQ, and those of engines.

pub(crate) mod msgpack;
pub(crate) mod publisher;
pub(crate) mod zmtp;
pub(crate) mod zmtp_client;
