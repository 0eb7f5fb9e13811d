//! Sockets: addresses and options, streams and their gathered calls, descriptors that travel, sends without a copy.

pub mod net;
pub mod stream;
pub mod unix;
pub mod zero_copy;
