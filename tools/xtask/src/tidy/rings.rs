//! Rules about which ring of the house a crate belongs to: what it may depend on, and what it may do.

pub mod dependencies;
pub mod purity;
pub mod unsafe_code;
