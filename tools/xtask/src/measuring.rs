//! Benchmarks: kvplane's own, and comparisons with other engines and stores.

pub mod bench;
pub mod figures;
pub mod lines;
pub mod peers;
