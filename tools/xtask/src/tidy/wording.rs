//! Rules about words: clean text, headers of files, names of types.

pub mod behaviours;
pub mod comments;
pub mod header;
pub mod names;
pub mod text;
