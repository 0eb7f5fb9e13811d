//! Tests of objects and of their distribution, by commands and the public crate.

mod far_memory;
mod keeping;
mod keys;
mod p2p;
mod places;
mod put_sessions;
mod replays;
mod reshard;
mod stripes;
