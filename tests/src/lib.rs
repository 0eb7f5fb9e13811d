//! End-to-end and simulated tests of the whole system.
//!
//! [`world`] is a deterministic simulation: the pure code of clients, shards and control plane in one thread, over a
//! network, clocks and memory that a seed decides about, with checkers that know what every byte must be.

#![forbid(unsafe_code)]

pub mod world;
