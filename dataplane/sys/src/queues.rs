//! Rings between threads and between processes, and the doorbells that wake who waits for them.

pub mod doorbell;
pub mod shm_ring;
pub mod spsc;
