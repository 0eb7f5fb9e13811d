//! Segments: registered memory that peers read and write by offset.
//!
//! A region that is being unregistered takes no new requests, and its memory is given back only when those under way
//! have ended: until then a peer's bytes may still be on their way into it.

use std::collections::BTreeMap;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::SegmentId;
use kvplane_proto::message::{Kind, Operation, ReadItem, RegionDescriptor, SegmentDescriptor, WriteItem};
use kvplane_proto::{FrameFlags, Limits, Status};

use super::Service;
use super::ranges::ManyReads;
use super::session::Pending;
use super::timing::Outputs;
use super::types::{CloseReason, Hold, Memory, Output, PayloadTo, PeerKey, Place, Places, RegisterError, SegmentInfo};

struct Entry {
    info: SegmentInfo,
    generation: u32,
    users: u32,
    leaving: bool,
}

pub(super) struct SegmentTable {
    entries: Vec<Option<Entry>>,
    /// Positions by address: registered ranges do not overlap, so the last that starts at or before an address is the
    /// only one that may hold it.
    by_address: BTreeMap<u64, u32>,
    generation: u32,
    /// Answers that are leaving from a segment: to whom, from which.
    reads: Vec<Option<(PeerKey, SegmentId)>>,
    free_reads: Vec<u32>,
    pub(super) many: ManyReads,
}

impl SegmentTable {
    /// Generations go on from `life`, which differs between the lives of a process: an id that was told in a former one
    /// names nothing.
    pub(super) const fn new(life: u32) -> Self {
        Self {
            entries: Vec::new(),
            by_address: BTreeMap::new(),
            generation: life,
            reads: Vec::new(),
            free_reads: Vec::new(),
            many: ManyReads::new(),
        }
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

    /// Checks a range of addresses and counts a user of it.
    fn acquire_by_address(&mut self, address: u64, bytes: u64, write: bool) -> Result<(SegmentId, Place), Status> {
        let (_, &index) = self.by_address.range(..=address).next_back().ok_or(Status::OutOfRange)?;
        let entry = self.entries[index as usize].as_mut().expect("an address of a registered range");
        // Not below 0: the range starts at or before the address. No sum of two numbers that came from outside.
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
        Ok((id, Place { memory: Memory::Segment(id), offset, bytes }))
    }

    /// Checks a range and counts a user of it.
    fn acquire(&mut self, id: SegmentId, offset: u64, bytes: u64, write: bool) -> Result<Place, Status> {
        let segment_bytes = self.usable_bytes(id, write)?;
        match offset.checked_add(bytes) {
            // What is longer than a frame's payload may be cannot be answered.
            Some(end) if end <= segment_bytes && bytes > Limits::PAYLOAD_BYTES => Err(Status::BadRequest),
            Some(end) if end <= segment_bytes && bytes > 0 => {
                self.count_users(&[id]);
                Ok(Place { memory: Memory::Segment(id), offset, bytes })
            }
            _ => Err(Status::OutOfRange),
        }
    }

    /// The length of a segment that peers may use in this way.
    pub(super) fn usable_bytes(&self, id: SegmentId, write: bool) -> Result<u64, Status> {
        let entry = self.find(id).filter(|entry| !entry.leaving).ok_or(Status::Stale)?;
        if !entry.info.remote_accessible || write && !entry.info.writable {
            return Err(Status::Unauthorized);
        }
        Ok(entry.info.bytes)
    }

    /// Counts one user more for each of these segments, which were just looked up.
    pub(super) fn count_users(&mut self, segments: &[SegmentId]) {
        for &id in segments {
            self.get(id).expect("a segment that was just looked up").users += 1;
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

    pub(super) fn finish_read(&mut self, segment: SegmentId, read: u32, outputs: &mut Outputs) {
        let reader = self.reads.get_mut(read as usize).and_then(|entry| entry.take_if(|(_, from)| *from == segment));
        assert!(reader.is_some(), "an answer's segment was let go twice");
        self.free_reads.push(read);
        self.release(segment, outputs);
    }

    pub(super) fn release(&mut self, id: SegmentId, outputs: &mut Outputs) {
        let entry = self.get(id).expect("a segment in use stays registered");
        entry.users -= 1;
        if entry.users == 0 && entry.leaving {
            self.forget(id.index);
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
        let users = self.live().map(|(_, entry)| entry.users).sum();
        assert!(users > 0 || self.many.under_way() == 0);
        users
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

    /// What was registered under this id, unless it is being unregistered.
    #[must_use]
    pub fn segment_info(&self, segment: SegmentId) -> Option<SegmentInfo> {
        self.segments.find(segment).filter(|entry| !entry.leaving).map(|entry| entry.info)
    }

    /// Whether peers may use this segment.
    #[must_use]
    pub fn has_segment(&self, segment: SegmentId) -> bool {
        self.segment_info(segment).is_some_and(|info| info.remote_accessible)
    }

    /// Checks a range that a peer of a foreign protocol named by address, and holds it until
    /// [`Self::release_by_address`]: unregistering waits for that as for any other use.
    ///
    /// The range must lie within one registered region. One that spans two adjacent regions is refused: each is
    /// registered, unregistered and protected by itself, and the foreign engine checks against one at a time too.
    ///
    /// # Errors
    /// `OutOfRange` for a range that is empty, not registered or about to be unregistered; `Unauthorized` for one that
    /// peers may not use, or may only read.
    pub fn acquire_by_address(&mut self, address: u64, bytes: u64, write: bool) -> Result<(SegmentId, Place), Status> {
        let acquired = self.segments.acquire_by_address(address, bytes, write)?;
        let counter = if write { &mut self.counters.write_bytes } else { &mut self.counters.read_bytes };
        *counter += bytes;
        Ok(acquired)
    }

    /// Ends a use that [`Self::acquire_by_address`] began. All I/O on the range has ended.
    ///
    /// # Panics
    /// When the segment is not in use.
    pub fn release_by_address(&mut self, segment: SegmentId) {
        self.segments.release(segment, &mut self.answers.outputs);
    }

    /// Takes memory from peers; [`Output::Unregistered`] says when nothing uses it any more. A stale id is answered at
    /// once.
    pub fn unregister(&mut self, segment: SegmentId) {
        match self.segments.get(segment) {
            Some(entry) if entry.users > 0 => entry.leaving = true,
            Some(_) => {
                self.segments.forget(segment.index);
                self.answers.outputs.push_back(Output::Unregistered { segment });
            }
            None => self.answers.outputs.push_back(Output::Unregistered { segment }),
        }
    }

    /// Closes the connections that still write or read a segment whose unregistering takes too long.
    pub fn evict_users(&mut self, segment: SegmentId) {
        let writers = self.sessions.select(|session| match &session.pending {
            Some(Pending::Write { segment: used, .. }) => *used == segment,
            Some(Pending::WriteMany { segments, .. }) => segments.contains(&segment),
            _ => false,
        });
        let reads = self.segments.reads.iter().flatten();
        let readers = reads.filter(|(_, used)| *used == segment).map(|&(peer, _)| peer);
        let users: Vec<PeerKey> =
            writers.into_iter().chain(readers).chain(self.segments.many.readers(segment)).collect();
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
            .filter(|(_, entry)| !entry.leaving && entry.info.remote_accessible)
            .map(|(index, entry)| RegionDescriptor {
                segment: SegmentId { index: index as u32, generation: entry.generation },
                address: entry.info.address,
                bytes: entry.info.bytes,
                shareable: entry.info.shareable,
                writable: entry.info.writable,
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
        let descriptor = self.segment_descriptor().encode();
        self.answers.items(peer, Operation::OpenSegment, header.request, 1, |body| body.extend_from_slice(&descriptor));
        Ok(PayloadTo::Discard)
    }

    pub(super) fn read(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let checksum = header.flags.has(FrameFlags::SUM_REPLIES).then_some(0);
        for item in Self::items::<ReadItem>(header, body)? {
            match self.segments.acquire(item.segment, item.offset, item.bytes, false) {
                Ok(place) => {
                    self.counters.read_bytes += place.bytes;
                    let header = Header::reply(Kind::Reply(Operation::Read), item.request, Status::Ok)
                        .with_payload(place.bytes, checksum);
                    let payload = Some((Places::One(place), self.segments.start_read(peer, item.segment)));
                    self.answers.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload });
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
                session.pending = Some(Pending::Refused { request, operation: Operation::Write, status, argument: 0 });
                Ok(PayloadTo::Discard)
            }
        }
    }

    /// The memory that the payload of this peer's write was to go to turned out to be gone: the payload is thrown away,
    /// and the write refused when it has come.
    pub fn refuse_payload(&mut self, peer: PeerKey) {
        let Some(pending) = self.session(peer).and_then(|session| session.pending.take()) else { return };
        let (status, argument) = (Status::OutOfRange, 0);
        let pending = match pending {
            Pending::Write { request, segment, .. } => {
                self.segments.release(segment, &mut self.answers.outputs);
                Pending::Refused { request, operation: Operation::Write, status, argument }
            }
            Pending::WriteMany { request, segments, .. } => {
                self.release_many(segments);
                Pending::Refused { request, operation: Operation::WriteMany, status, argument }
            }
            other => other,
        };
        if let Some(session) = self.session(peer) {
            session.pending = Some(pending);
        }
    }

    /// The memory that this answer was to carry turned out to be gone: the read is refused instead.
    pub fn refuse_read(&mut self, peer: PeerKey, answer: &Header, hold: Hold) {
        self.sent(hold);
        if let Kind::Reply(operation) = answer.kind {
            self.answer_id(peer, operation, answer.request, Status::OutOfRange, 0);
        }
    }
}
