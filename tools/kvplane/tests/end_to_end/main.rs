//! End-to-end tests: real processes of the `kvplane` binary, killed and fed with invalid input, and the public crate
//! beside them.
//!
//! Each test has a directory, a cluster name and free loopback ports of its own, so all run side by side; children are
//! killed when their handles are dropped. The tests are one binary because linking takes most of the build time.

#[path = "../../../capi/tests/compiled/mod.rs"]
mod compiled;
mod emulation;
mod failover;
mod groups;
#[path = "../../../../control/etcd/tests/launch/mod.rs"]
mod launch;
#[path = "../../../../tests/tests/groups/fake.rs"]
mod members;
mod namespaces;
#[path = "../../../../dataplane/transfer/tests/suite/network/mod.rs"]
mod network;
mod objects;
mod operation;
mod rig;
mod security;
mod shared;
mod ssd;
mod support;
mod transfers;
#[path = "../../../../topology/tests/suite/saved/tree/mod.rs"]
mod tree;
