//! Rings between threads and between processes, and doorbells that wake their sleeping consumers.

pub mod doorbell;
mod event;
#[cfg(all(test, loom))]
mod models;
pub mod shm_ring;
pub mod spsc;
mod sync;
