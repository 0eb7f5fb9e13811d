//! Tests of descriptions of machines from outside, in one binary: a module for each subject.

mod plan;
mod saved;
mod sysfs;
