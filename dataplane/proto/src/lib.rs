//! The protocol core: identities, digests, wire frames, the cluster map, and the state machines of batches, requests and
//! endpoints.
//!
//! Pure: nothing here opens a socket or a file, reads a clock or draws its own randomness. The same code runs on a shard,
//! in a client and in the simulator.

pub mod digest;
pub mod ids;
pub mod map;
pub mod rng;
