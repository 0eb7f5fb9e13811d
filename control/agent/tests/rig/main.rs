//! Transfer engine on hardware that most machines lack: NVMe drives, NVMe over fabrics, NUMA nodes, CXL memory, NICs
//! with cables that can be unplugged, RDMA devices.
//!
//! `cargo x test --rig` runs these in virtual machines. They write to drives, so they run nowhere else: the variables
//! of the rig (docs/rig.md) describe the hardware, and without them each test reports what it needs.

mod bed;
mod drives;
mod memory;
mod near;
mod netdevs;
mod packets;
mod rdma;
mod sysfs;
