//! Hardware topology of a machine, and placement on it: NUMA nodes, cores, NICs, drives, GPUs; shard plan, rail matrix.
//!
//! Steps, each usable alone. [`sysfs`] reads the kernel's description into a [`model::Machine`], a plain value;
//! [`hwloc`] reads the same from hwloc's XML, and [`merge`](merge::merge) makes one of both; [`synthetic`] makes such a
//! value from a line of text. [`plan`] decides from the value alone which logical CPU and which queues each shard gets,
//! and [`rail_matrix`] which NICs serve which memory. [`draw`] shows all of it, to operators and to programs.
//!
//! A value that the sources do not contain stays `None`: this crate does not guess a node, a speed or a sibling. Notes
//! name the unknown values.
//!
//! This crate pins no thread, binds no memory and opens no device; it depends on no other crate of the workspace.

#![forbid(unsafe_code)]

pub mod cpulist;
pub mod draw;
pub mod hwloc;
mod json;
pub mod merge;
pub mod model;
pub mod plan;
pub mod rails;
pub mod synthetic;
pub mod sysfs;
mod unknown;

pub use cpulist::CpuSet;
pub use model::Machine;
pub use plan::{PlanRequest, ShardPlan, plan};
pub use rails::{RailMatrix, rail_matrix};
pub use sysfs::Sysfs;
