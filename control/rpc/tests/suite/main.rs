//! External tests of the control protocol, in one binary: a module for each subject.

mod certificates;
mod endpoints;
mod identities;
mod support;
mod wire;
