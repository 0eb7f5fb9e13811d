//! What the machine is and who sits where: NUMA nodes, cores, caches, NICs, block devices; shard plan.
//!
//! Three steps, each usable alone. [`sysfs`] reads the kernel's description into a [`model::Machine`], a plain
//! value; [`synthetic`] makes such a value from a line of text. [`plan`] decides from it, without looking at
//! anything else, which logical CPU each shard gets. [`draw`] shows both, to people and to programs.
//!
//! What the kernel does not say stays `None`: nothing here guesses a node, a speed or a sibling.
//!
//! This crate pins no thread, binds no memory and opens no device; it depends on no other crate.

pub mod cpulist;
pub mod draw;
mod json;
pub mod model;
pub mod plan;
pub mod synthetic;
pub mod sysfs;

pub use cpulist::CpuSet;
pub use model::Machine;
pub use plan::{ShardPlan, plan};
pub use sysfs::Sysfs;
