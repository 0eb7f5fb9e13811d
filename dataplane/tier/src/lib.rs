//! The SSD tier of a shard: a log of checked records over the segments of one device, its index, reclaim and recovery.
//!
//! Pure and single-threaded: nothing here opens a device, reads a clock or touches memory by itself. The device is a
//! range of bytes; the tier hands out block operations and hears how they ended. Memory is named by offsets and is
//! reached through [`Memory`]. The layout and the promises stand in docs/tier.md.
//!
//! What the host sees:
//! * [`tier`]: the shell: calls, completions and time go in, block operations and events come out.
//! * [`types`]: what goes in and comes out, and why something fails.
//! * [`config`]: sizes and limits; all memory follows from them.
//! * [`memory`] and [`ops`]: what the host provides and carries out.
//! * [`format`]: what stands on the device.
//! * [`scrub`]: when records are checked.
//!
//! The components, each above those that it uses:
//! * `opening`, `recovery`, `reclaim`, `scrub`: whose device it is, what it has, which segment gives way, and what is
//!   damaged.
//! * `log`: records are appended, read and removed.
//! * `contents`: which records count, and which segment each is in.
//! * `device`: where things lie, and the operations in flight.

#![forbid(unsafe_code)]

pub mod config;
mod contents;
mod device;
pub mod format;
mod log;
pub mod memory;
mod opening;
pub mod ops;
mod reclaim;
mod recovery;
pub mod scrub;
mod slots;
pub mod tier;
pub mod types;

pub use config::{OBJECT_BYTES, TierConfig};
pub use contents::{BYTES_PER_OBJECT, MAX_HITS};
pub use format::{Doubt, Ownership, SlotSet};
pub use memory::{Memory, Space, Span};
pub use opening::ENDS_BYTES;
pub use ops::{Action, BlockOp, Fault, OpId, Pieces, Priority};
pub use scrub::{ScrubPass, ScrubReport, ScrubState};
pub use tier::{Tier, TierStats};
pub use types::errors::{GetError, OpenError, PutError, Reason, RemoveError};
pub use types::{
    Ack, Event, Get, Harm, Identity, Miss, OpenOptions, Output, Put, PutReceipt, RecordView, RecoveryReport, Removal,
    Token,
};
