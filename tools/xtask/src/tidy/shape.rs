//! Rules about the shape of the code: sizes of types, files and folders, and dependencies between modules.

pub mod circles;
pub mod errors;
pub mod folders;
pub mod length;
pub mod parameters;
pub mod types;
