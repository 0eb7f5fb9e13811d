//! Rules about documents: their statements about the tree are true.

pub mod adr;
pub mod code_map;
pub mod parity;
pub mod walks;
