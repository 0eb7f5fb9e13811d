//! Tests of the answering side.
