//! Meshes through their public interface: several in one process, and processes that are killed and stopped.

#[path = "../../../tls/tests/support/mod.rs"]
mod certificates;
mod frames;
mod many;
mod processes;
mod reconnect;
mod rig;
mod tls;
