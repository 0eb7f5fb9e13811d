//! Meshes through their public interface: several in one process, and processes that are killed and stopped.

mod frames;
mod many;
mod processes;
mod reconnect;
mod rig;
