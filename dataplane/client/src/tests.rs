//! Tests of the asking side: a scripted peer drives it, without sockets, memory or clocks.

mod answers;
mod asks;
mod books;
mod bulk;
mod closing;
mod drafts;
mod failures;
mod fences;
mod gather;
mod hedges;
mod intake;
mod machines;
mod maps;
mod paths;
mod random;
mod rdma;
pub(crate) mod rig;
mod schedule;
mod spread;
mod validation;
mod ways;
