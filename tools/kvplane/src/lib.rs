//! Library of the `kvplane` binary: workloads, cache models that predict their hits, and the measurement and
//! presentation of runs.
//!
//! No module opens a connection: the commands in the binary drive the store and the transfer engine and pass their
//! measurements to these modules. That keeps the judges (patterns, cache models, statistics) independent of the code
//! that they judge; [`sim`] alone runs the store itself, and is judged by them.

#![forbid(unsafe_code)]

pub mod html;
pub mod latencies;
pub mod model;
pub mod pattern;
pub mod report;
pub mod sim;
pub mod tebench;
pub mod trace;
