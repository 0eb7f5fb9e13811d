//! Drivers of devices for tests, without a device: strict where a real driver is forgiving.
//!
//! The folders `cuda` and `hip` make two shared libraries of this crate, under the names by which programs load CUDA's
//! driver and HIP's runtime. A library has a state of its own in each process that loads it.
//!
//! * **Device memory** is an address range without access, so one byte that the CPU touches is a crash. Its bytes are
//!   in a memfd, which only the driver maps.
//! * **Copies** are done by a thread for each stream, after a random delay and at a modelled rate, so a missing wait
//!   shows as wrong bytes.
//! * **Addresses** are used again after a free, with another buffer id.
//! * **Misuse** is counted or punished: a call without a current context is refused and counted, a copy from or to
//!   freed memory loses the device, a call in a forked child aborts.
//!
//! A test calls [`load_cuda`] or [`load_hip`] before the product first asks for the driver; another process gets the
//! directory of [`directory`] as its `LD_LIBRARY_PATH`. [`Control`] sets delays, injects errors and reads counters.

mod control;
mod exports;
mod hip;
mod memory;
mod state;
mod streams;

pub use control::{Control, Counters, FakeDriverError, directory, load_cuda, load_hip};
