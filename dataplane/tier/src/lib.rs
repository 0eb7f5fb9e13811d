//! The SSD tier of a shard: a log of checked records over the segments of one device, its index, reclaim and recovery.
//!
//! Pure and single-threaded: nothing here opens a device, reads a clock or touches memory by itself. The device is a
//! range of bytes; the tier asks for block operations and is told how they ended. Memory is named by offsets and is
//! reached through [`Memory`]. The layout and the promises stand in docs/tier.md.
//!
//! * [`format`]: what stands on the device.
//! * [`config`]: sizes and limits; all memory follows from them.
//! * [`memory`] and [`ops`]: what the host provides and carries out.
//! * [`types`] and [`errors`]: what goes in and comes out.
//! * [`policy`]: what reclaim keeps.
//! * [`scrub`]: when records are checked.
//! * [`tier`]: the state machine.

#![forbid(unsafe_code)]

pub mod config;
pub mod errors;
pub mod format;
mod index;
pub mod memory;
pub mod ops;
pub mod policy;
pub mod scrub;
mod segments;
mod slots;
pub mod tier;
pub mod types;

pub use config::{OBJECT_BYTES, TierConfig};
pub use errors::{GetError, OpenError, PutError, Reason, RemoveError};
pub use format::{Doubt, Ownership, SlotSet};
pub use index::{BYTES_PER_OBJECT, MAX_HITS};
pub use memory::{Memory, Space, Span};
pub use ops::{Action, BlockOp, Fault, OpId, Pieces, Priority};
pub use scrub::{ScrubPass, ScrubReport, ScrubState};
pub use tier::{ENDS_BYTES, Harm, Tier, TierStats};
pub use types::{
    Ack, Event, Get, Identity, Miss, OpenOptions, Output, Put, PutReceipt, RecordView, RecoveryReport, Removal, Token,
};
