//! The wire: identities, digests, frames and their messages, the cluster map; and what both sides of it share.
//!
//! Pure: nothing here opens a socket or a file, reads a clock or draws its own randomness. The same code runs on a
//! shard, in a client and in the simulator.

#![forbid(unsafe_code)]

pub mod checksum;
pub mod config;
pub mod digest;
pub mod flags;
pub mod frame;
pub mod histogram;
pub mod ids;
pub mod limits;
pub mod map;
pub mod message;
pub mod rng;
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
