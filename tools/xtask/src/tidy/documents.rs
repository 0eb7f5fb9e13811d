//! Rules about documents: what they say of the tree is so.

pub mod adr;
pub mod code_map;
pub mod links;
pub mod parity;
pub mod references;
pub mod walks;
