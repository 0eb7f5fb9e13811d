//! What is measured: our benchmarks, and other engines and stores beside ours.

pub mod bench;
pub mod figures;
pub mod peers;
