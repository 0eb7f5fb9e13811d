//! Rules about the shape of the code: how much one type, one file, one folder holds, and which modules know which.

pub mod circles;
pub mod folders;
pub mod length;
pub mod parameters;
pub mod types;
