//! Process groups of the C interface: `include/mooncake_pg.h` is the contract.
//!
//! Handles are numbers in tables, so that a stale or foreign one is an error, and a call keeps what it uses alive. Only
//! the Cpu half works on memory; the calls for the memory of devices are refused.

mod collectives;
mod completion;
mod context;
mod coordinator;
mod device_calls;
mod elements;
mod layout;
mod membership;
mod mirror;
mod outcome;
