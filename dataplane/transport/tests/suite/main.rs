//! Tests of the drivers from outside, in one binary: a module for each subject.

mod fault;
mod mooncake;
mod rdma;
mod tcp;
