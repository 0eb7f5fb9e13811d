//! Commands of the project, run as `cargo x`: machine setup, demo, tests and checks.
//!
//! The crate is built first on a machine that has nothing but cargo, so it depends on little: parsers of Rust, of TOML
//! and of ELF files, for the checks. Each command is a module with a `run` that returns a [`process::Failure`] with the
//! exit status; `main` only parses and prints. The product uses nothing of this crate.

#![forbid(unsafe_code)]

pub mod ci;
pub mod cli;
pub mod demo;
pub mod linkage;
pub mod measuring;
pub mod nightly;
pub mod process;
pub mod python;
pub mod rig;
pub mod setup;
pub mod testing;
pub mod tidy;
pub mod workspace;
