//! The P2P store's catalog and swarms: what they promise, in property tests, and how fast and how fair they are, in a
//! simulation whose links are fluid.

mod catalog;
mod fluid;
mod ranks;
mod swarm;
