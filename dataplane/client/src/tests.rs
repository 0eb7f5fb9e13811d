//! Tests of the client: a scripted peer drives it, without sockets, memory or clocks.

mod answers;
mod batches;
mod books;
mod machines;
mod network;
mod random;
pub(crate) mod rig;
mod router;
