//! Segments: registered memory that peers read and write by offset.
//!
//! A region that is being unregistered accepts no new requests, and its memory is returned only when the requests in
//! flight have ended: until then bytes of a peer may still be received into it.
//!
//! [`Segments`] knows nothing of objects, connections or time. It carries out the requests for segments (`requests.rs`)
//! and counts the users of each segment; [`Reads`] has the replies that are being sent.

mod gathered;
mod reads;
mod requests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use kvplane_proto::ids::SegmentId;
use kvplane_proto::message::{RegionDescriptor, SegmentDescriptor};
use kvplane_proto::{Limits, Status};
use reads::Reads;

use super::shard::sessions::PendingPayload;
use super::shard::timing::Outputs;
use super::types::{Memory, MemoryExtent, Output, PeerKey, RegisterError, SegmentInfo};

struct Entry {
    info: SegmentInfo,
    generation: u32,
    users: u32,
    leaving: bool,
}

/// Registered memory of a process, and the requests that use it. Single-threaded; part of a [`super::Service`].
pub struct Segments {
    /// Name under which peers open the segments.
    name: String,
    entries: Vec<Option<Entry>>,
    /// Indexes by address: registered ranges do not overlap, so that only the last one that starts at or before an
    /// address can contain it.
    by_address: BTreeMap<u64, u32>,
    generation: u32,
    /// Replies that are being sent from segments.
    reads: Reads,
    /// Bytes that peers have read, and written.
    read_bytes: u64,
    write_bytes: u64,
}

impl Segments {
    /// Creates an empty table. Generations count from `incarnation`, which differs between the incarnations of a
    /// process, so that an id of a former one names nothing.
    pub(super) const fn new(name: String, incarnation: u32) -> Self {
        Self {
            name,
            entries: Vec::new(),
            by_address: BTreeMap::new(),
            generation: incarnation,
            reads: Reads::new(),
            read_bytes: 0,
            write_bytes: 0,
        }
    }

    fn live(&self) -> impl Iterator<Item = (usize, &Entry)> {
        self.entries.iter().enumerate().filter_map(|(index, entry)| Some((index, entry.as_ref()?)))
    }

    /// Returns the memory registered under this id, unless it is being unregistered.
    #[must_use]
    pub fn info(&self, segment: SegmentId) -> Option<SegmentInfo> {
        self.find(segment).filter(|entry| !entry.leaving).map(|entry| entry.info)
    }

    /// Returns true if peers may use this segment.
    #[must_use]
    pub fn is_accessible(&self, segment: SegmentId) -> bool {
        self.info(segment).is_some_and(|info| info.remote_accessible)
    }

    /// Returns the description that peers get when they open this process's segments.
    #[must_use]
    pub fn descriptor(&self) -> SegmentDescriptor {
        let regions = self
            .live()
            .filter(|(_, entry)| !entry.leaving && entry.info.remote_accessible)
            .map(|(index, entry)| RegionDescriptor {
                segment: SegmentId { index: index as u32, generation: entry.generation },
                address: entry.info.address,
                bytes: entry.info.bytes,
                shareable: entry.info.shareable,
                writable: entry.info.writable,
            })
            .collect();
        SegmentDescriptor { name: self.name.clone(), regions }
    }

    /// Returns the bytes that peers have read, and those that they have written.
    pub(super) const fn bytes(&self) -> (u64, u64) {
        (self.read_bytes, self.write_bytes)
    }

    /// Registers memory, which peers may use from now on.
    ///
    /// # Errors
    /// If it is empty, overlaps registered memory, or exceeds the limit of regions.
    pub fn register(&mut self, info: SegmentInfo) -> Result<SegmentId, RegisterError> {
        if info.bytes == 0 {
            return Err(RegisterError::Empty);
        }
        let overlaps = |(_, other): &(usize, &Entry)| {
            other.info.address <= last_address(&info) && info.address <= last_address(&other.info)
        };
        if let Some((_, other)) = self.live().find(overlaps) {
            return Err(RegisterError::Overlap { address: other.info.address, bytes: other.info.bytes });
        }
        let index = match self.entries.iter().position(Option::is_none) {
            Some(index) => index,
            None if self.entries.len() < Limits::REGIONS_PER_SEGMENT => {
                self.entries.push(None);
                self.entries.len() - 1
            }
            None => return Err(RegisterError::TooMany { limit: Limits::REGIONS_PER_SEGMENT }),
        };
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        self.by_address.insert(info.address, index as u32);
        self.entries[index] = Some(Entry { info, generation, users: 0, leaving: false });
        Ok(SegmentId { index: index as u32, generation })
    }

    fn find(&self, id: SegmentId) -> Option<&Entry> {
        let entry = self.entries.get(id.index as usize)?.as_ref()?;
        (entry.generation == id.generation).then_some(entry)
    }

    fn get(&mut self, id: SegmentId) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(id.index as usize)?.as_mut()?;
        (entry.generation == id.generation).then_some(entry)
    }

    fn forget(&mut self, index: u32) {
        if let Some(entry) = self.entries[index as usize].take() {
            self.by_address.remove(&entry.info.address);
        }
    }

    /// Unregisters memory: peers cannot use it from now on. [`Output::Unregistered`] reports when no I/O uses it any
    /// more: at once for a stale id.
    pub(super) fn unregister(&mut self, segment: SegmentId, outputs: &mut Outputs) {
        match self.get(segment) {
            Some(entry) if entry.users > 0 => return entry.leaving = true,
            Some(_) => self.forget(segment.index),
            None => {}
        }
        outputs.push_back(Output::Unregistered { segment });
    }

    /// Returns the peers that are being sent bytes of this segment.
    pub(super) fn readers(&self, segment: SegmentId) -> impl Iterator<Item = PeerKey> {
        self.reads.readers(segment)
    }

    /// Checks a range that a peer of a foreign protocol named by address, and holds it until
    /// [`super::Service::release_by_address`]: unregistering waits for that as for any other use.
    ///
    /// The range must lie within one registered region. One that spans two adjacent regions is refused: each region is
    /// registered, unregistered and protected by itself, and the foreign engine checks against one at a time too.
    ///
    /// # Errors
    /// `OutOfRange` for a range that is empty, not registered or about to be unregistered; `Unauthorized` for one that
    /// peers may not use, or may only read.
    pub fn acquire_by_address(
        &mut self,
        address: u64,
        bytes: u64,
        write: bool,
    ) -> Result<(SegmentId, MemoryExtent), Status> {
        let (_, &index) = self.by_address.range(..=address).next_back().ok_or(Status::OutOfRange)?;
        let entry = self.entries[index as usize].as_mut().expect("an address of a registered range");
        // Not below 0: the range starts at or before the address. No sum of two numbers from outside, which could
        // overflow.
        let offset = address - entry.info.address;
        let inside = offset < entry.info.bytes && (1..=entry.info.bytes - offset).contains(&bytes);
        if !inside || entry.leaving {
            return Err(Status::OutOfRange);
        }
        if !entry.info.remote_accessible || (write && !entry.info.writable) {
            return Err(Status::Unauthorized);
        }
        entry.users += 1;
        let id = SegmentId { index, generation: entry.generation };
        let moved = if write { &mut self.write_bytes } else { &mut self.read_bytes };
        *moved += bytes;
        Ok((id, MemoryExtent { memory: Memory::Segment(id), offset, bytes }))
    }

    /// Checks a range and counts a user of it.
    fn acquire(&mut self, id: SegmentId, offset: u64, bytes: u64, write: bool) -> Result<MemoryExtent, Status> {
        let segment_bytes = self.usable_bytes(id, write)?;
        match offset.checked_add(bytes) {
            // Longer than the payload of a frame may be.
            Some(end) if end <= segment_bytes && bytes > Limits::PAYLOAD_BYTES => Err(Status::BadRequest),
            Some(end) if end <= segment_bytes && bytes > 0 => {
                self.count_users(&[id]);
                Ok(MemoryExtent { memory: Memory::Segment(id), offset, bytes })
            }
            _ => Err(Status::OutOfRange),
        }
    }

    /// Returns the length of a segment, if peers may use it in this way.
    fn usable_bytes(&self, id: SegmentId, write: bool) -> Result<u64, Status> {
        let entry = self.find(id).filter(|entry| !entry.leaving).ok_or(Status::Stale)?;
        if !entry.info.remote_accessible || write && !entry.info.writable {
            return Err(Status::Unauthorized);
        }
        Ok(entry.info.bytes)
    }

    /// Counts one more user of each of these segments, which were just looked up.
    fn count_users(&mut self, segments: &[SegmentId]) {
        for &id in segments {
            self.get(id).expect("a segment that was just looked up").users += 1;
        }
    }

    /// Ends a read whose reply was sent, or never will be.
    pub(super) fn finish_read(&mut self, segment: SegmentId, read: u32, outputs: &mut Outputs) {
        self.reads.finish(segment, read);
        self.release(segment, outputs);
    }

    /// Ends a gathered read whose reply was sent, or never will be.
    pub(super) fn finish_read_many(&mut self, read: u32, outputs: &mut Outputs) {
        let segments = self.reads.finish_gathered(read);
        self.release_many(segments, outputs);
    }

    /// Ends one use of each of these segments by a frame.
    fn release_many(&mut self, segments: Vec<SegmentId>, outputs: &mut Outputs) {
        for &segment in &segments {
            self.release(segment, outputs);
        }
        self.reads.recycle(segments);
    }

    /// Ends one use of a segment.
    pub(super) fn release(&mut self, id: SegmentId, outputs: &mut Outputs) {
        let entry = self.get(id).expect("a segment in use stays registered");
        entry.users -= 1;
        if entry.users == 0 && entry.leaving {
            self.forget(id.index);
            outputs.push_back(Output::Unregistered { segment: id });
        }
    }

    /// Ends the write of a payload that was received, or never will be: it uses no segments any more. Does nothing for
    /// other payloads.
    pub(super) fn end_write(&mut self, pending: PendingPayload, outputs: &mut Outputs) {
        match pending {
            PendingPayload::Write { segment, .. } => self.release(segment, outputs),
            PendingPayload::WriteMany { segments, .. } => self.release_many(segments, outputs),
            PendingPayload::Refused { .. } | PendingPayload::Put { .. } | PendingPayload::Fill { .. } => {}
        }
    }
}

/// Returns the last address of a non-empty range, capped at the end of the address space.
const fn last_address(info: &SegmentInfo) -> u64 {
    info.address.saturating_add(info.bytes - 1)
}

#[cfg(test)]
impl Segments {
    /// Returns the number of users of all segments.
    pub(super) fn users(&self) -> u32 {
        let users = self.live().map(|(_, entry)| entry.users).sum();
        assert!(users > 0 || self.reads.gathered() == 0);
        users
    }
}
