//! The transfer engine as its callers see it: engines of one process ask each other over both ways, from many threads.

mod completion;
mod counted;
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
