//! Files and devices: who may use one, blocks of it past the page cache, and the NVMe drive behind it.

pub mod claim;
pub mod file;
pub mod nvme;
