//! Drivers of devices for tests, without a device: strict where a real driver is forgiving.
//!
//! The folders `cuda`, `hip` and `npu` make shared libraries of this crate, under the names by which programs load
//! CUDA's driver, HIP's runtime and AscendCL. A library has a state of its own in each process that loads it.
//!
//! * **Device memory** is an address range without access, so one byte that the CPU touches is a crash. Its bytes are
//!   in a memfd, which only the driver maps.
//! * **Copies** are done by a thread for each stream, after a random delay and at a modelled rate, so a missing wait
//!   shows as wrong bytes. For measurements, [`Control::model_engines`] makes them take the time of a copy engine and
//!   move nothing.
//! * **Addresses** are used again after a free, with another buffer id.
//! * **Other processes** map an allocation by its handle, but not the process that made the handle, and none twice; and
//!   a physical allocation of the virtual-memory interface by its descriptor. A mapping outlives the allocation.
//! * **Misuse** is counted or punished: a call without a current context is refused and counted, a copy from or to
//!   freed memory loses the device, a call in a forked child aborts.
//!
//! A test calls [`load_cuda`], [`load_hip`] or [`load_npu`] before the product first asks for the driver; another
//! process gets the directory of [`directory`] as its `LD_LIBRARY_PATH`. [`Control`] sets delays, injects errors and
//! reads counters.
//!
//! With `KVPLANE_GPU` in the environment (`cargo x test --gpu`), the same tests run over the drivers of the machine, as
//! far as they need no more of a driver: [`Control::skips`].

mod control;
mod engines;
mod exports;
mod hip;
mod loader;
mod machine;
mod memory;
mod npu;
mod state;
mod streams;
mod virtual_memory;

pub use control::{Control, Counters, HandleType, directory, is_missing, load_cuda, load_hip, load_npu};
pub use loader::FakeDriverError;
