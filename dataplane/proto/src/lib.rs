//! The protocol core: identities, digests, wire frames, the cluster map, and the state machines of batches, requests
//! and endpoints.
//!
//! Pure: nothing here opens a socket or a file, reads a clock or draws its own randomness. The same code runs on a
//! shard, in a client and in the simulator.

pub mod checksum;
pub mod client;
pub mod config;
pub mod digest;
pub mod flags;
pub mod frame;
pub mod ids;
pub mod limits;
pub mod map;
pub mod message;
pub mod rng;
pub mod sched;
pub mod states;
pub mod status;

pub use config::ConfigError;
pub use digest::Digest;
pub use flags::{FrameFlags, ItemFlags};
pub use ids::{
    BatchId, Epoch, Incarnation, NodeId, PinId, RequestId, ReservationId, SegmentId, ShardId, Slot, Version,
};
pub use limits::Limits;
pub use status::Status;
