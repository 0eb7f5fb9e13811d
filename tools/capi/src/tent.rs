//! TENT's C interface to the transfer engine: `include/tent/transfer_engine.h` is the contract.
//!
//! Engines are numbers in a table, so that a destroyed one is an error. A call that fails returns -1 and prints its
//! reason on standard error, once for each reason.

mod arrays;
mod engine;
mod error;
mod memory;
mod notifications;
mod segments;
mod settings;
mod transfers;
mod transports;
mod types;
