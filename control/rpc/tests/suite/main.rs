//! Tests of the control protocol from outside, in one binary: a module for each subject.

mod certificates;
mod endpoints;
mod identities;
mod support;
mod wire;
