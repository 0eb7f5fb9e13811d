//! Wire protocol between clients and shards: ids, digests, frames, messages and the cluster map, and code that both
//! sides share.
//!
//! Pure (sans-IO): the crate opens no socket or file, reads no clock and draws no randomness by itself. The same code
//! runs in a shard, in a client and in the simulator.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss, clippy::cast_lossless)
)]

pub mod checksum;
pub mod config;
pub mod digest;
pub mod events;
pub mod flags;
pub mod frame;
pub mod histogram;
pub mod ids;
pub mod limits;
pub mod map;
pub mod message;
pub mod narrowing;
pub mod rng;
pub mod states;
pub mod status;
pub mod tenants;

pub use config::ConfigError;
pub use digest::Digest;
pub use flags::{FrameFlags, ItemFlags};
pub use ids::{
    BatchId, Epoch, Incarnation, NodeId, PinId, RequestId, ReservationId, SegmentId, ShardId, Slot, Version,
};
pub use limits::Limits;
pub use status::Status;
