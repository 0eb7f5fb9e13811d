//! Transports: streams and small messages, their handshakes, and many peers.

pub(crate) mod data_tls;
pub(crate) mod handshakes;
mod initiator;
pub(crate) mod latency;
pub(crate) mod many_peers;
pub(crate) mod perftest;
pub(crate) mod same_host;
pub(crate) mod shm;
pub(crate) mod staging;
pub(crate) mod tcp;
