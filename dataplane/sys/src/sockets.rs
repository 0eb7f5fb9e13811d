//! Sockets: TCP streams with and without a copy, and sockets of this host that carry descriptors.

pub mod net;
pub mod stream;
pub mod unix;
pub mod zero_copy;
