//! Registered buffers of this process, found by address.
//!
//! A batch counts as a user of each buffer that it touches, from before its start until nothing accesses the memory any
//! more; unregistering waits for the users to leave.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvplane_engine::{FIRST_BUFFER, Region};
use kvplane_proto::SegmentId;
use kvplane_sys::device::{Backing, DeviceId};

use crate::error::{ArgumentError, Error, LimitError};

/// Maximum number of registered buffers of one engine, accessible to peers or not.
const BUFFERS: usize = 65_536;

/// Registered buffer.
pub(crate) struct Buffer {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) backing: Backing,
    /// Location, as given by its owner or reported by the kernel.
    pub(crate) location: String,
    /// Index of the buffer in every initiator.
    pub(crate) index: u32,
    /// Segment id for peers, if they may access it.
    pub(crate) segment: Option<SegmentId>,
    /// Number of batches that use it.
    users: AtomicUsize,
}

impl Buffer {
    /// Returns the region of memory of the host that can be shared with other processes.
    pub(crate) fn shareable(&self) -> Option<&Arc<Region>> {
        self.backing.region().filter(|region| region.fd().is_some())
    }

    /// Returns true if the memory can be accessed, as far as that is known at once: freed memory of the host would kill
    /// the process. That of a device is checked when it is copied.
    pub(crate) fn is_mapped(&self, offset: u64, bytes: u64) -> bool {
        self.backing.region().is_none_or(|region| region.is_mapped(offset as usize, bytes as usize))
    }

    pub(crate) fn enter(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn leave(&self) {
        // Release: the user's accesses happen before anything that follows the unregistration.
        self.users.fetch_sub(1, Ordering::Release);
    }

    pub(crate) fn is_used(&self) -> bool {
        self.users.load(Ordering::Acquire) > 0
    }
}

/// Buffers by address, and the free indices.
#[derive(Default)]
pub(crate) struct Map {
    by_address: BTreeMap<u64, Arc<Buffer>>,
    /// Buffers that are being unregistered: new users do not find them, and their memory is still in use.
    leaving: BTreeMap<u64, Arc<Buffer>>,
    /// Number of indices allocated so far; `free` holds those that were returned.
    named: u32,
    free: Vec<u32>,
}

impl Map {
    /// Returns the buffer that contains a range, and the offset of the range in it.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Option<(&Arc<Buffer>, u64)> {
        let (_, buffer) = self.by_address.range(..=address).next_back()?;
        let offset = address - buffer.address;
        let end = offset.checked_add(bytes)?;
        (end <= buffer.bytes).then_some((buffer, offset))
    }

    /// Allocates an index for a range, which must not overlap others.
    ///
    /// # Errors
    /// When the range is empty or overlaps a buffer, or the limit of buffers is reached.
    pub(crate) fn reserve(&mut self, address: u64, bytes: u64) -> Result<u32, Error> {
        if bytes == 0 {
            return Err(ArgumentError::EmptyMemory { address }.into());
        }
        let last = address.checked_add(bytes - 1).ok_or(ArgumentError::MemoryTooLong { address, bytes })?;
        for (buffers, leaving) in [(&self.by_address, false), (&self.leaving, true)] {
            if let Some((_, other)) = buffers.range(..=last).next_back()
                && other.address + (other.bytes - 1) >= address
            {
                return Err(Error::AddressOverlapped {
                    address,
                    bytes,
                    other_address: other.address,
                    other_bytes: other.bytes,
                    leaving,
                });
            }
        }
        if self.by_address.len() + self.leaving.len() >= BUFFERS {
            return Err(LimitError::Buffers { limit: BUFFERS }.into());
        }
        Ok(self.free.pop().unwrap_or_else(|| {
            self.named += 1;
            FIRST_BUFFER + self.named - 1
        }))
    }

    /// Begins to unregister the buffer at this address: new users do not find it. Its memory and index stay taken until
    /// [`Self::left`]. Returns the buffer, also if it is leaving already.
    pub(crate) fn leave(&mut self, address: u64) -> Option<Arc<Buffer>> {
        if let Some(buffer) = self.by_address.remove(&address) {
            self.leaving.insert(address, buffer);
        }
        self.leaving.get(&address).cloned()
    }

    /// Ends the unregistration of a buffer without users. Of several waiting callers, the first gets true.
    pub(crate) fn left(&mut self, buffer: &Arc<Buffer>) -> bool {
        if !self.leaving.get(&buffer.address).is_some_and(|other| Arc::ptr_eq(other, buffer)) {
            return false;
        }
        self.leaving.remove(&buffer.address);
        true
    }

    /// Frees an index that is not in use any more.
    pub(crate) fn give_back(&mut self, index: u32) {
        self.free.push(index);
    }

    pub(crate) fn insert(&mut self, backing: Backing, location: String, index: u32, segment: Option<SegmentId>) {
        let (address, bytes) = (backing.address(), backing.bytes());
        let buffer = Buffer { address, bytes, backing, location, index, segment, users: AtomicUsize::new(0) };
        self.by_address.insert(address, Arc::new(buffer));
    }

    /// Returns true if a buffer begins at this address, even one that is leaving.
    pub(crate) fn contains(&self, address: u64) -> bool {
        self.by_address.contains_key(&address) || self.leaving.contains_key(&address)
    }

    /// Returns true if a buffer is on this device, even one that is leaving.
    pub(crate) fn uses(&self, device: DeviceId) -> bool {
        let is_there =
            |buffer: &Arc<Buffer>| buffer.backing.device().is_some_and(|memory| memory.device().id() == device);
        self.by_address.values().chain(self.leaving.values()).any(is_there)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Buffer>> {
        self.by_address.values()
    }
}
