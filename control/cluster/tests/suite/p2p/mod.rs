//! Catalog and swarms of the P2P store: their guarantees, in property tests, and their speed and fairness, in a fluid
//! simulation.

mod catalog;
mod fluid;
mod ranks;
mod swarm;
