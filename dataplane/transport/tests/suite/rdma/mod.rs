//! The RDMA driver between two ends in one process: on software devices everywhere, and on this machine's own if it has
//! two.

mod bed;
mod copies;
mod failures;
mod foreign;
mod frames;
mod idle;
mod payloads;
mod sleep;
