//! Operating system interface of the dataplane: memory regions, readiness, sockets, io_uring, rings between threads and
//! processes, doorbells, verbs, NVMe, clocks and cores. The only crate of the dataplane that may use `unsafe`.
//!
//! Invariant: whatever a caller does through the safe functions here, and whatever a peer process writes into shared
//! memory, no memory is accessed except the memory provided for the operation. The functions that adopt memory of their
//! caller, such as [`Region::adopt`], are `unsafe` and document the contract; so does the interface for other
//! implementations of verbs, which only tests turn on. Linux on x86-64 and aarch64 only.
//!
//! The crate makes no decisions: no policy, no protocol, no retries.

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("kvplane-sys needs Linux on x86-64 or aarch64");

pub mod advice;
mod copy;
pub mod cpu;
pub mod device;
pub mod errno;
pub mod hwloc;
pub mod interrupt;
mod library;
pub mod lost_pages;
pub mod poller;
mod process;
mod queues;
pub mod random;
pub mod region;
pub mod ring;
mod sockets;
mod storage;
pub mod verbs;

pub use process::{memory_map, process_memory};
pub use queues::{doorbell, shm_ring, spsc};
pub use sockets::{net, stream, unix, zero_copy};
pub use storage::{claim, file, memory_file, nvme, private_files};

pub use claim::ClaimedFile;
pub use copy::STREAMING_BYTES;
pub use doorbell::{Doorbell, SharedDoorbell};
pub use file::{BLOCK_BYTES, BufferedReason, DirectFile, FileOptions};
pub use library::LibraryError;
pub use memory_file::{MemoryDirectory, MemoryFile, MemoryFileError};
pub use nvme::{NamespaceError, NvmeNamespace};
pub use poller::{Interest, Poller, Readiness};
pub use process_memory::{CrossError, CrossProcessRange};
pub use region::{FarPart, HugePages, IoBuf, PageKind, Region, RegionError, RegionOptions, host_available_bytes};
pub use ring::{CommandRing, Completion, RegisteredFile, Ring, RingFull};
pub use shm_ring::{CorruptRing, Full, ShmConsumer, ShmProducer};
pub use spsc::{Consumer, Producer};
pub use stream::{Gather, MAX_PIECES, Scatter};
