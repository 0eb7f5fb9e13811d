//! Files and drives: opened for direct transfers, claimed by one process, and by passthrough.

pub mod claim;
pub mod file;
pub mod nvme;
pub mod private_files;
