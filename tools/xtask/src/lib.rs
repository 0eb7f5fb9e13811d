//! The project's own commands, run as `cargo x`: prepare a machine, show the demo, run the tests and the checks.
//!
//! Uses the standard library alone, so that it builds in seconds on a machine that has nothing but cargo. Each command
//! is a module with a `run` that returns a [`process::Failure`] carrying the exit status; `main` only parses and
//! prints. Nothing here is used by the product.

#![forbid(unsafe_code)]

pub mod bench;
pub mod ci;
pub mod cli;
pub mod demo;
pub mod elf;
pub mod mutations;
pub mod peers;
pub mod process;
pub mod python;
pub mod rig;
pub mod seeds;
pub mod setup;
pub mod testing;
pub mod tidy;
pub mod workspace;
