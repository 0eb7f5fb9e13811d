//! The transfer engine on hardware that most machines do not have: NVMe drives, NVMe over fabrics, NUMA nodes, CXL
//! memory, NICs with cables that can be
//! pulled, RDMA devices.
//!
//! `cargo x test --rig` runs these in virtual machines. They write to drives, so they run nowhere else: what is there
//! they learn from the variables of the rig (docs/rig.md), and without them each says what it would have needed.

mod bed;
mod drives;
mod memory;
mod near;
mod netdevs;
mod packets;
mod rdma;
mod sysfs;
