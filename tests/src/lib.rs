//! End-to-end and simulated tests of the whole system.
//!
//! [`world`] is a deterministic simulation: the pure code of clients, shards and control plane in one thread, over a
//! network, clocks and memory that follow from a seed, with checkers that know the expected value of every byte.

#![forbid(unsafe_code)]

pub mod world;
