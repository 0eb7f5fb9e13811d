//! Memory of processes: copies between processes, and the memory map of this one.

pub mod memory_map;
pub mod process_memory;
