//! Input of the rules: files of the tree, outlines of Rust sources, manifests, and modules of crates.
//!
//! All of it is read once and kept in memory as plain data. These modules know no rule.

pub mod cores;
pub mod crates;
pub mod manifest;
pub mod outline;
pub mod tree;
