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
use super::error::P2pError;

pub use options::{ReadBytes, ReadOptions};
pub(super) use reader::RangeReads;

/// Checks that copies lie within an object's buffer, and within memory of so many bytes.
///
/// # Errors
/// When one does not.
pub(super) fn check_copies(object: &Object, buffer: usize, copies: &[Copy], memory_bytes: u64) -> Result<(), P2pError> {
    let buffer_bytes = object.layout.sizes().get(buffer).copied().unwrap_or(0);
    let within = |first: u64, bytes: u64, end: u64| first.checked_add(bytes).is_some_and(|last| last <= end);
    if let Some(copy) = copies.iter().find(|copy| !within(copy.source_offset, copy.bytes, buffer_bytes)) {
        let (name, offset, bytes) = (object.name.clone(), copy.source_offset, copy.bytes);
        return Err(P2pError::BufferRange { name, buffer, buffer_bytes, offset, bytes });
    }
    if let Some(copy) = copies.iter().find(|copy| !within(copy.target_offset, copy.bytes, memory_bytes)) {
        return Err(P2pError::MemoryRange { memory_bytes, offset: copy.target_offset, bytes: copy.bytes });
    }
    Ok(())
}
