//! Peers, their paths, rails and lanes.

mod closing;
mod fences;
mod paths;
mod rdma;
mod schedule;
mod ways;
