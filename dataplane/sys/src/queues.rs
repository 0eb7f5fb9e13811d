//! Rings between threads and between processes, and doorbells that wake their sleeping consumers.

pub mod doorbell;
pub mod shm_ring;
pub mod spsc;
