//! The library half of the `kvplane` binary: what a workload is, what a cache should have made of it, and how a run is
//! measured and shown.
//!
//! Nothing in these modules opens a connection: the commands in the binary drive the store and the transfer engine
//! and hand their measurements here. That keeps the judges (patterns, cache models, statistics) independent of what
//! they judge; [`sim`] alone runs the store itself, and is judged by them.

#![forbid(unsafe_code)]

pub mod histogram;
pub mod html;
pub mod model;
pub mod pattern;
pub mod report;
pub mod sim;
pub mod tebench;
pub mod trace;
