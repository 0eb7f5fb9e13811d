//! C interface: `libtransfer_engine.so`, with the names and conventions of Mooncake's `transfer_engine_c.h`.
//!
//! `include/transfer_engine_c.h` is the contract, `include/tent/transfer_engine.h` that of TENT's interface to the same
//! engine, `include/store_c.h` that of the store, `include/p2p_store_c.h` that of the P2P store, and
//! `include/mooncake_pg.h` that of process groups. Each exported function checks its arguments, calls the public crate
//! and converts the outcome into a number; a panic becomes an error and never unwinds into C.
//!
//! Invariants: a pointer from `createTransferEngine`, `mooncake_store_create` or `p2pStoreCreate` is valid until it is
//! destroyed, as the caller guarantees; ids of batches and segments, and handles of process groups and of TENT's
//! engines, are looked up, so a stale one is an error.

mod batches;
mod engine;
mod groups;
mod handles;
mod links;
mod memory;
mod notifications;
mod p2p;
mod rim;
mod segments;
mod shutdown;
mod stores;
mod tent;
mod types;
