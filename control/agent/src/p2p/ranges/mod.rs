//! Range reads of an object, from peers that hold all of the buffer, without becoming a member that holds it.
//!
//! Readers are not registered: a peer that leaves cuts them off. Therefore the read verifies afterwards that all peers
//! used are still members. Those that are have held the same memory all the time; bytes from others are read again.
//! Then shards that were read completely are compared with their hashes ([`checks`]): a peer that served wrong bytes is
//! not used any more, and everything is read again.

mod batches;
mod checks;
mod options;
mod reader;

use kvplane_cluster::reshard::Copy;

use super::catalog::Object;
use crate::error::Error;

pub use options::{ReadBytes, ReadOptions};
pub(super) use reader::RangeReads;

/// Checks that copies lie within an object's buffer, and within memory of so many bytes.
///
/// # Errors
/// When one does not.
pub(super) fn check_copies(object: &Object, buffer: usize, copies: &[Copy], memory: u64) -> Result<(), Error> {
    let size = object.layout.sizes().get(buffer).copied().unwrap_or(0);
    let within = |first: u64, bytes: u64, end: u64| first.checked_add(bytes).is_some_and(|last| last <= end);
    if let Some(copy) = copies.iter().find(|copy| !within(copy.source_offset, copy.bytes, size)) {
        let what = format!("{} bytes from {} on", copy.bytes, copy.source_offset);
        return Err(Error::Argument(format!("buffer {buffer} of {:?} has {size} bytes, not {what}", object.name)));
    }
    if let Some(copy) = copies.iter().find(|copy| !within(copy.target_offset, copy.bytes, memory)) {
        let what = format!("{} bytes from {} on", copy.bytes, copy.target_offset);
        return Err(Error::Argument(format!("the memory has {memory} bytes, not {what}")));
    }
    Ok(())
}
