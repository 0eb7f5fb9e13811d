//! SSD tier of a shard: a log of checksummed records over the segments of one device, with its index, reclaim and
//! recovery.
//!
//! Pure and single-threaded: nothing here opens a device, reads a clock or touches memory by itself. The device is a
//! range of bytes; the tier hands out block operations, and the host reports their completions. Memory is named by
//! offsets and is accessed through [`Memory`]. The layout and the guarantees are documented in docs/tier.md.
//!
//! Modules that the host uses:
//! * [`tier`]: the shell: calls, completions and time go in, block operations and events come out.
//! * [`types`]: calls, events and reports, and the reasons of failures.
//! * [`config`]: sizes and limits; all memory follows from them.
//! * [`memory`] and [`ops`]: memory that the host provides, and block operations that it carries out.
//! * [`format`]: the on-disk format.
//! * [`scrub`]: the schedule of background checks.
//!
//! Internal components, each above those that it uses:
//! * `opening`, `recovery`, `reclaim`, `scrub`: identity of the device, its contents after a start, reclaim of
//!   segments, and detection of damage.
//! * `log`: appends, reads and removes records.
//! * `contents`: which records are live, and the segment of each.
//! * `device`: layout of the device, and the operations in flight.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss, clippy::cast_lossless)
)]

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
pub use tier::{Tier, TierStats, TierTenants};
pub use types::errors::{GetError, OpenError, PutError, Reason, RemoveError};
pub use types::{
    Ack, DamageCounters, Event, Get, Identity, Miss, OpenOptions, Output, Put, PutReceipt, RecordView, RecoveryReport,
    Removal, TenantLimit, TenantOf, TierUse, Token,
};
