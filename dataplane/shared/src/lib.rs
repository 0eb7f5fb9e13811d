//! Shared tier of a shard: packs of objects in a store that many nodes see (a parallel file system, or an S3 bucket),
//! with the shard's index of them.
//!
//! Pure and single-threaded: nothing here opens a file, sends a request or reads a clock. [`SharedTier`] hands out
//! operations on named store objects, and its host reports their completions. docs/adr/0031-shared-tier.md explains the
//! design, docs/shared-tier-format.md has the bytes.
//!
//! * A shard appends objects and removals to *packs*, which it writes one after the other: its *log*. Nothing is
//!   changed in place, except for the manifest, which is replaced as a whole.
//! * A *checkpoint* has the index as of one pack. The *manifest* names the newest checkpoint, the slots for which it
//!   and the packs after it are complete, and the epoch of the map that the shard follows.
//! * A new owner of a slot rebuilds the slot's index from the manifest of the owner before it, in exactly that owner's
//!   incarnation, and only if the manifest was written under the layout in which that owner had the slot last.
//!   Otherwise what the store has of the slot is void. So a removal that was acknowledged is never undone, whichever
//!   nodes died, and whatever a fenced owner writes later.
//! * An object that the tier has, or may have, is removed or replaced only when the removal is in the log.
//!
//! Modules: [`types`] has what goes in and out, [`port`] the driver as the host sees it, [`config`] the limits,
//! [`format`] the bytes; [`owners`] the history of the slots' owners; `index`, `packer`, `log`, `sources`, `clock`
//! and `health` are the components of [`tier`].

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss, clippy::cast_lossless)
)]

mod cleanup;
mod clock;
pub mod config;
pub mod format;
mod health;
mod index;
mod log;
pub mod owners;
mod packer;
pub mod port;
mod sources;
pub mod tier;
pub mod types;

pub use config::{SharedConfig, UploadPolicy};
pub use owners::{OwnerHistory, Owners};
pub use tier::{SharedStats, SharedTier};
pub use types::{
    GetRange, HeldObject, ListedObject, MapChange, NewObject, OpId, Operation, Outcome, Refusal, SharedEvent,
    SharedView, SlotSource, SourceRule, StoreError, VoidReason,
};
