//! Transfer engine through its public API: engines of one process transfer over both transports, from many threads.

mod completion;
mod counted;
mod device_memory;
mod device_peers;
mod files;
mod memory;
mod names;
mod namespaces;
mod near;
mod network;
mod processes;
mod rig;
mod stock_rdma;
mod stopped;
mod threads;
mod trouble;
