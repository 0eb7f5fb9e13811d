//! Files and drives: direct I/O, claimed files and devices, private files, and NVMe passthrough.

pub mod claim;
pub mod file;
pub mod nvme;
pub mod private_files;
