//! Tests of the SSD tier, over files, injected faults and real block devices.

pub(crate) mod disks;
pub(crate) mod faults;
pub(crate) mod fuse;
pub(crate) mod kills;
pub(crate) mod long;
pub(crate) mod objects;
pub(crate) mod slots;
pub(crate) mod tiers;
