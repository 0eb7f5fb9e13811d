//! Tests of the shared tier: its format, and shards over a simulated store.

mod format;
mod troubles;
mod turns;
mod world;
