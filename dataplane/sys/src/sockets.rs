//! Sockets: TCP streams with and without zero-copy sends, and Unix sockets that pass descriptors.

pub mod net;
pub mod stream;
pub mod unix;
pub mod zero_copy;
