//! Staging: the bytes of device memory pass through pinned host memory, which the transports use like any other.
//!
//! A [`Stage`] belongs to one device and one thread. It has a region of pinned memory on the device's NUMA node, out of
//! which it gives [`Chunk`]s, and two queues of asynchronous copies, one for each direction, so that the copy of one
//! chunk runs under the transfer of another. Completions are polled; no call waits for the device.
//!
//! Requests of this process are staged by its [initiators](crate::initiator), those of peers by the service's side of
//! a host.

mod allocation_checks;
mod pace;
mod pages;
mod ranges;
mod stage;

pub(crate) use allocation_checks::AllocationChecks;
pub use ranges::MemoryRange;
pub(crate) use ranges::StagedMemory;
pub use stage::StagingCounters;
pub(crate) use stage::{CHUNK_BYTES, Chunk, STAGE_BYTES, Stage};

/// Alignment of the requests that share a chunk, in bytes: a line of the cache.
pub(crate) const ALIGN_BYTES: u64 = 64;
