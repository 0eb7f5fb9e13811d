//! Rules about documents: their statements about the tree are true.

pub mod adr;
pub mod code_map;
pub mod links;
pub mod messages;
pub mod parity;
pub mod references;
pub mod walks;
