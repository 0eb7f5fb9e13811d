//! Integration tests of shards and hosts, in one binary: a module for each subject.

mod faults;
mod fences;
mod files;
mod gather;
mod mooncake;
mod mooncake_stock;
#[path = "../../../transport/tests/suite/mooncake/raw.rs"]
#[allow(dead_code, reason = "shared with the tests of the driver, which use all of it")]
mod raw;
mod rdma;
mod roundtrip;
mod same_host;
mod support;
mod tickets;
