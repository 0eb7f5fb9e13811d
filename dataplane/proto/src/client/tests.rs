//! Tests of the asking side.
