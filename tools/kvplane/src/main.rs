//! The `kvplane` binary.
fn main() {}
