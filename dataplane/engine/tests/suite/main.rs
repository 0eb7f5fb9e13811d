//! Tests of shards and hosts from outside, in one binary: a module for each subject.

mod faults;
mod fences;
mod files;
mod gather;
mod mooncake;
mod mooncake_stock;
mod rdma;
mod roundtrip;
mod same_host;
mod support;
mod tickets;
