//! What the rules look at: the files of the tree, what each Rust source holds, manifests, and the modules of crates.
//!
//! All of it is read once and lies in memory as plain data. Nothing here knows a rule.

pub mod cores;
pub mod crates;
pub mod manifest;
pub mod outline;
pub mod tree;
