//! Tests of the shared tier: its format, and shards over a simulated store.

mod format;
mod turns;
mod world;
