//! What the machine is and who sits where: NUMA nodes, cores, NICs, drives, GPUs; shard plan, rail matrix.
//!
//! Steps, each usable alone. [`sysfs`] reads the kernel's description into a [`model::Machine`], a plain value;
//! [`hwloc`] reads the same from hwloc's XML, and [`merge`](merge::merge) makes one of both; [`synthetic`] makes such a
//! value from a line of text. [`plan`] decides from it, without looking at anything else, which logical CPU and which
//! queues each shard gets, and [`rail_matrix`] which NICs serve which memory. [`draw`] shows all of it, to people and
//! to programs.
//!
//! What the sources do not say stays `None`: nothing here guesses a node, a speed or a sibling. What is unknown is said
//! in notes.
//!
//! This crate pins no thread, binds no memory and opens no device; it depends on no other crate of ours.

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
