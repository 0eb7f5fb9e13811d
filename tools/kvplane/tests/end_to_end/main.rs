//! End-to-end tests: real processes of the `kvplane` binary, killed and fed with invalid input, and the public crate
//! beside them.
//!
//! Each test has a directory, a cluster name and free loopback ports of its own, so all run side by side; children are
//! killed when their handles are dropped. The tests are one binary because linking takes most of the build time.

mod absences;
mod admin;
mod arguments;
mod certificates;
mod classes;
mod cluster;
mod commands;
mod conductor;
mod config_files;
mod counted;
mod data_tls;
mod deploy;
mod disks;

mod etcd;
mod fuse;
mod fuzz;
mod keeping;
mod keys;
mod kills;
#[path = "../../../../control/etcd/tests/launch/mod.rs"]
mod launch;
mod logs;
mod moves;
mod namespaces;
#[path = "../../../../dataplane/transfer/tests/suite/network/mod.rs"]
mod network;
mod p2p;
mod peers;
mod places;
mod put_sessions;
mod reference;
mod replays;
mod replicas;
mod reshard;
mod restarts;
mod rig;
mod silence;
mod ssd;
mod ssd_faults;
mod ssd_kills;
mod ssd_long;
mod ssd_slots;
mod strangers;
mod stripes;
mod support;
mod tenants;
mod tiers;
mod tools;
mod topology;
mod transfers;
#[path = "../../../../topology/tests/suite/saved/tree/mod.rs"]
mod tree;
mod waiting;
