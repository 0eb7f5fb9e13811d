//! External tests of machine descriptions, in one binary: a module for each subject.

mod plan;
mod saved;
mod sysfs;
