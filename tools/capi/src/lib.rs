//! The C interface: `libtransfer_engine.so`, with the names and conventions of Mooncake's `transfer_engine_c.h`.
//!
//! `include/transfer_engine_c.h` is the contract. Each exported function checks its arguments, calls the public crate
//! and turns the outcome into a number; a panic of ours becomes an error and never unwinds into C.
//!
//! Invariants: a pointer that came from `createTransferEngine` is good until `destroyTransferEngine`, which is the
//! caller's promise; ids of batches and segments are looked up, so a stale one is an error.

mod batches;
mod engine;
mod links;
mod memory;
mod notifications;
mod rim;
mod segments;
mod shutdown;
mod types;
