//! Tests of `kvplane tebench`, and of Mooncake's tools by their names.

pub(crate) mod classes;
pub(crate) mod measurements;
pub(crate) mod tools;
