//! Rules about the rings of crates: their dependencies and their allowed operations.

pub mod dependencies;
pub mod purity;
pub mod unsafe_code;
