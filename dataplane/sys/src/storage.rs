//! Files and drives: direct I/O, claimed files and devices, files in memory, private files, and NVMe passthrough.

pub mod claim;
pub mod file;
pub mod memory_file;
pub mod nvme;
pub mod private_files;
