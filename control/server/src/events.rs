//! ZeroMQ: publication of the store's events, and subscription to those of engines.

pub(crate) mod publisher;
pub(crate) mod zmtp;
pub(crate) mod zmtp_client;
