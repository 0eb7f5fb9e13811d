//! Tests of the control plane's core through its public interface, in one binary: a module for each subject.

mod absences;
mod adoption;
mod p2p;
mod properties;
mod records;
mod reshard;
mod scenarios;
mod settle;
mod silence;
mod support;
mod tasks;
mod whole_shards;
