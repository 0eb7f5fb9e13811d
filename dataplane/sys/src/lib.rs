//! What the dataplane asks of the machine: memory regions, readiness, socket calls, io_uring rings, rings between
//! threads and processes, doorbells, descriptors, clocks and cores. The only crate of the dataplane that may say
//! `unsafe`.
//!
//! Invariant: whatever a caller does through the safe functions here, and whatever a peer process writes into shared
//! memory, no memory is touched that was not given for it. The one `unsafe fn`, [`Region::adopt`], says what
//! its caller promises. Linux on x86-64 only.
//!
//! It decides nothing: no policy, no protocol, no retries.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("kvplane-sys needs Linux on x86-64");

pub mod advice;
pub mod claim;
mod copy;
pub mod cpu;
pub mod doorbell;
pub mod errno;
pub mod file;
pub mod hwloc;
pub mod interrupt;
mod library;
pub mod lost_pages;
pub mod net;
pub mod nvme;
pub mod poller;
pub mod private_files;
pub mod process_memory;
pub mod random;
pub mod region;
pub mod ring;
pub mod shm_ring;
pub mod spsc;
pub mod stream;
pub mod unix;
pub mod verbs;
pub mod zero_copy;

pub use claim::ClaimedFile;
pub use copy::STREAMING_BYTES;
pub use doorbell::{Doorbell, SharedDoorbell};
pub use file::{BLOCK_BYTES, DirectFile, FileOptions};
pub use library::LibraryError;
pub use nvme::NvmeNamespace;
pub use poller::{Interest, Poller, Readiness};
pub use process_memory::{CrossError, CrossProcessRange};
pub use region::{HugePages, IoBuf, PageKind, Region, RegionError, RegionOptions};
pub use ring::{CommandRing, Completion, RegisteredFile, Ring, RingFull};
pub use shm_ring::{CorruptRing, Full, ShmConsumer, ShmProducer};
pub use spsc::{Consumer, Producer};
pub use stream::{Gather, MAX_PIECES, Scatter};
