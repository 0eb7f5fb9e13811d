//! Segments: registered memory that peers read and write by offset.
//!
//! A region that is being unregistered takes no new requests, and its memory is given back only when those under way
//! have ended: until then a peer's bytes may still be on their way into it.

use std::collections::VecDeque;

use kvplane_proto::frame::{FLAG_CHECKSUM, Header};
use kvplane_proto::ids::SegmentId;
use kvplane_proto::message::{Kind, Operation, ReadItem, RegionDescriptor, SegmentDescriptor, WriteItem};
use kvplane_proto::{Limits, Status};

use super::Service;
use super::session::Pending;
use super::types::{CloseReason, Hold, Memory, Output, PayloadTo, PeerKey, Place, RegisterError, SegmentInfo};

struct Entry {
    info: SegmentInfo,
    generation: u32,
    users: u32,
    leaving: bool,
}

pub(super) struct SegmentTable {
    entries: Vec<Option<Entry>>,
    generation: u32,
    /// Answers that are leaving from a segment: to whom, from which.
    reads: Vec<Option<(PeerKey, SegmentId)>>,
    free_reads: Vec<u32>,
}

impl SegmentTable {
    /// Generations go on from `life`, which differs between the lives of a process: an id that was told in a former one
    /// names nothing.
    pub(super) const fn new(life: u32) -> Self {
        Self { entries: Vec::new(), generation: life, reads: Vec::new(), free_reads: Vec::new() }
    }

    fn live(&self) -> impl Iterator<Item = (usize, &Entry)> {
        self.entries.iter().enumerate().filter_map(|(index, entry)| Some((index, entry.as_ref()?)))
    }

    fn register(&mut self, info: SegmentInfo) -> Result<SegmentId, RegisterError> {
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

    /// Checks a range and counts a user of it.
    fn acquire(&mut self, id: SegmentId, offset: u64, bytes: u64, write: bool) -> Result<Place, Status> {
        let entry = self.get(id).filter(|entry| !entry.leaving).ok_or(Status::Stale)?;
        if write && !entry.info.writable {
            return Err(Status::Unauthorized);
        }
        match offset.checked_add(bytes) {
            // What is longer than a frame's payload may be cannot be answered.
            Some(end) if end <= entry.info.bytes && bytes > Limits::PAYLOAD_BYTES => Err(Status::BadRequest),
            Some(end) if end <= entry.info.bytes && bytes > 0 => {
                entry.users += 1;
                Ok(Place { memory: Memory::Segment(id), offset, bytes })
            }
            _ => Err(Status::OutOfRange),
        }
    }

    /// Remembers for whom a range was acquired.
    fn start_read(&mut self, peer: PeerKey, segment: SegmentId) -> Hold {
        let read = self.free_reads.pop().unwrap_or_else(|| {
            self.reads.push(None);
            self.reads.len() as u32 - 1
        });
        self.reads[read as usize] = Some((peer, segment));
        Hold::Segment { segment, read }
    }

    pub(super) fn finish_read(&mut self, segment: SegmentId, read: u32, outputs: &mut VecDeque<Output>) {
        let reader = self.reads.get_mut(read as usize).and_then(|entry| entry.take_if(|(_, from)| *from == segment));
        assert!(reader.is_some(), "an answer's segment was let go twice");
        self.free_reads.push(read);
        self.release(segment, outputs);
    }

    pub(super) fn release(&mut self, id: SegmentId, outputs: &mut VecDeque<Output>) {
        let entry = self.get(id).expect("a segment in use stays registered");
        entry.users -= 1;
        if entry.users == 0 && entry.leaving {
            self.entries[id.index as usize] = None;
            outputs.push_back(Output::Unregistered { segment: id });
        }
    }
}

/// The last address of a range that is not empty; what is past the end of the address space does not count.
const fn last_address(info: &SegmentInfo) -> u64 {
    info.address.saturating_add(info.bytes - 1)
}

#[cfg(test)]
impl SegmentTable {
    /// Users of all segments.
    pub(super) fn users(&self) -> u32 {
        assert_eq!(self.reads.len() - self.free_reads.len(), self.reads.iter().flatten().count());
        self.live().map(|(_, entry)| entry.users).sum()
    }
}

impl Service {
    /// Lets peers use this memory.
    ///
    /// # Errors
    /// When it is empty, overlaps registered memory, or is one too many.
    pub fn register(&mut self, info: SegmentInfo) -> Result<SegmentId, RegisterError> {
        self.segments.register(info)
    }

    /// Whether peers may use this segment.
    #[must_use]
    pub fn has_segment(&self, segment: SegmentId) -> bool {
        self.segments.find(segment).is_some_and(|entry| !entry.leaving)
    }

    /// Takes memory from peers; [`Output::Unregistered`] says when nothing uses it any more. A stale id is answered at
    /// once.
    pub fn unregister(&mut self, segment: SegmentId) {
        match self.segments.get(segment) {
            Some(entry) if entry.users > 0 => entry.leaving = true,
            Some(_) => {
                self.segments.entries[segment.index as usize] = None;
                self.outputs.push_back(Output::Unregistered { segment });
            }
            None => self.outputs.push_back(Output::Unregistered { segment }),
        }
    }

    /// Closes the connections that still write or read a segment whose unregistering takes too long.
    pub fn evict_users(&mut self, segment: SegmentId) {
        let writers = self.sessions.iter().enumerate().filter_map(|(index, session)| {
            let session = session.as_ref()?;
            matches!(session.pending, Some(Pending::Write { segment: used, .. }) if used == segment)
                .then_some(PeerKey { index: index as u32, generation: session.generation })
        });
        let reads = self.segments.reads.iter().flatten();
        let readers = reads.filter(|(_, used)| *used == segment).map(|&(peer, _)| peer);
        let users: Vec<PeerKey> = writers.chain(readers).collect();
        for peer in users {
            self.close(peer, CloseReason::SegmentGone);
        }
    }

    /// What peers see when they open this process's segment.
    #[must_use]
    pub fn segment_descriptor(&self) -> SegmentDescriptor {
        let regions = self
            .segments
            .live()
            .filter(|(_, entry)| !entry.leaving)
            .map(|(index, entry)| RegionDescriptor {
                segment: SegmentId { index: index as u32, generation: entry.generation },
                address: entry.info.address,
                bytes: entry.info.bytes,
                shareable: entry.info.shareable,
            })
            .collect();
        SegmentDescriptor { name: self.identity.segment_name.clone(), regions }
    }

    pub(super) fn open_segment(
        &mut self,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        // An empty name means whatever this process serves: peer-to-peer use without a catalog.
        if !body.is_empty() && body != self.identity.segment_name.as_bytes() {
            self.answer(peer, Operation::OpenSegment, header, Status::NotFound);
            return Ok(PayloadTo::Discard);
        }
        let start = self.bytes.len();
        let descriptor = self.segment_descriptor().encode();
        self.bytes.extend_from_slice(&descriptor);
        self.answer_items(peer, Operation::OpenSegment, header, start, 1);
        Ok(PayloadTo::Discard)
    }

    pub(super) fn read(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let checksum = (header.flags & FLAG_CHECKSUM != 0).then_some(0);
        for item in Self::items::<ReadItem>(header, body)? {
            match self.segments.acquire(item.segment, item.offset, item.bytes, false) {
                Ok(place) => {
                    self.counters.read_bytes += place.bytes;
                    let header = Header::reply(Kind::Reply(Operation::Read), item.request, Status::Ok)
                        .with_payload(place.bytes, checksum);
                    let payload = Some((place, self.segments.start_read(peer, item.segment)));
                    self.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload });
                }
                Err(status) => self.answer_id(peer, Operation::Read, item.request, status, 0),
            }
        }
        Ok(PayloadTo::Discard)
    }

    pub(super) fn write(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let mut items = Self::items::<WriteItem>(header, body)?;
        let (Some(item), None) = (items.next(), items.next()) else {
            return Err(CloseReason::Malformed("a write of not one range"));
        };
        let request = header.request;
        let acquired = self.segments.acquire(item.segment, item.offset, header.payload_bytes, true);
        let session = self.session(peer).expect("a session that was just looked up");
        match acquired {
            Ok(place) => {
                session.pending = Some(Pending::Write { request, segment: item.segment, expected: header.checksum() });
                self.counters.write_bytes += place.bytes;
                Ok(PayloadTo::Place(place))
            }
            Err(status) => {
                session.pending = Some(Pending::Refused { request, operation: Operation::Write, status });
                Ok(PayloadTo::Discard)
            }
        }
    }
}
