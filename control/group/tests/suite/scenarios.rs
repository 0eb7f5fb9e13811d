//! Exact expectations of single calls.
