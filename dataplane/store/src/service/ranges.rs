//! Many ranges in one frame: all are checked before any is used, and all are in use until their payload is through.
//!
//! A range costs its peer at most 32 bytes of a frame and us a few operations: a run is checked by its last range that
//! is inside, neighbours become one place, and a segment counts one user for each stretch of runs that name it.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::SegmentId;
use kvplane_proto::message::{Items, Kind, Operation, RunItem};
use kvplane_proto::{FrameFlags, Limits, Status};

use super::Service;
use super::segments::SegmentTable;
use super::session::Pending;
use super::types::{CloseReason, Hold, Memory, Output, PayloadTo, PeerKey, Place, Places};

/// Lists of segments that are kept for the next frames.
const SPARE_LISTS: usize = 64;

/// Answers to gathered reads that are leaving: to whom, from which segments.
pub(super) struct ManyReads {
    entries: Vec<Option<(PeerKey, Vec<SegmentId>)>>,
    free: Vec<u32>,
    spare: Vec<Vec<SegmentId>>,
}

impl ManyReads {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), spare: Vec::new() }
    }

    fn list(&mut self) -> Vec<SegmentId> {
        self.spare.pop().unwrap_or_default()
    }

    fn recycle(&mut self, mut list: Vec<SegmentId>) {
        if self.spare.len() < SPARE_LISTS {
            list.clear();
            self.spare.push(list);
        }
    }

    fn start(&mut self, peer: PeerKey, segments: Vec<SegmentId>) -> Hold {
        let read = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.entries[read as usize] = Some((peer, segments));
        Hold::Segments { read }
    }

    fn finish(&mut self, read: u32) -> Vec<SegmentId> {
        let (_, segments) = self.entries[read as usize].take().expect("an answer's segments were let go twice");
        self.free.push(read);
        segments
    }

    /// Who is being sent bytes of this segment.
    pub(super) fn readers(&self, segment: SegmentId) -> impl Iterator<Item = PeerKey> {
        self.entries.iter().flatten().filter(move |(_, used)| used.contains(&segment)).map(|&(peer, _)| peer)
    }

    #[cfg(test)]
    pub(super) fn under_way(&self) -> usize {
        assert_eq!(self.entries.len() - self.free.len(), self.entries.iter().flatten().count());
        self.entries.len() - self.free.len()
    }
}

/// A range of a frame that cannot be used.
struct Refusal {
    status: Status,
    /// Ranges that were good, before this one.
    good: u64,
}

impl SegmentTable {
    /// Checks the ranges of a frame: their places, the segments to count as used, and how many bytes they are. Nothing
    /// is counted yet.
    fn check_many(
        &self,
        runs: Items<'_, RunItem>,
        write: bool,
        places: &mut Vec<Place>,
        used: &mut Vec<SegmentId>,
    ) -> Result<u64, Refusal> {
        let start = places.len();
        let (mut bytes, mut good) = (0, 0);
        for run in runs {
            let segment_bytes = self.usable_bytes(run.segment, write).map_err(|status| Refusal { status, good })?;
            if let Some(outside) = run.first_outside(segment_bytes) {
                return Err(Refusal { status: Status::OutOfRange, good: good + u64::from(outside) });
            }
            good += u64::from(run.ranges);
            bytes += u64::from(run.ranges) * u64::from(run.bytes);
            if used.last() != Some(&run.segment) {
                used.push(run.segment);
            }
            push_places(places, start, &run);
        }
        Ok(bytes)
    }
}

/// Appends the places of a run that is inside its segment; what follows on each other is one.
fn push_places(places: &mut Vec<Place>, start: usize, run: &RunItem) {
    let memory = Memory::Segment(run.segment);
    let bytes = u64::from(run.bytes);
    for offset in run.offsets() {
        match places[start..].last_mut() {
            Some(last) if last.memory == memory && last.offset + last.bytes == offset => last.bytes += bytes,
            _ => places.push(Place { memory, offset, bytes }),
        }
    }
}

/// The runs of a body, which stay within the limits of a frame.
fn runs_of<'a>(header: &Header, body: &'a [u8]) -> Result<Items<'a, RunItem>, CloseReason> {
    let runs = Service::items::<RunItem>(header, body)?;
    let (mut ranges, mut bytes) = (0, 0);
    for run in runs.clone() {
        if run.ranges == 0 || run.bytes == 0 {
            return Err(CloseReason::Malformed("a run of nothing"));
        }
        ranges += u64::from(run.ranges);
        // The product of two 32-bit words leaves room in 64 bits for what the limit let through before.
        bytes += u64::from(run.ranges) * u64::from(run.bytes);
        if ranges > Limits::RANGES_PER_FRAME as u64 || bytes > Limits::GATHER_BYTES {
            return Err(CloseReason::Malformed("more ranges or bytes than a frame gathers"));
        }
    }
    if ranges == 0 {
        return Err(CloseReason::Malformed("a gathered request without ranges"));
    }
    Ok(runs)
}

impl Service {
    pub(super) fn read_many(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let runs = runs_of(header, body)?;
        let mut used = self.segments.many.list();
        let listed = self.answers.list_places(|places| self.segments.check_many(runs, false, places, &mut used));
        let (bytes, places) = match listed {
            Ok(listed) => listed,
            Err(refusal) => {
                self.segments.many.recycle(used);
                self.answer_id(peer, Operation::ReadMany, header.request, refusal.status, refusal.good);
                return Ok(PayloadTo::Discard);
            }
        };
        self.segments.count_users(&used);
        self.counters.read_bytes += bytes;
        let checksum = header.flags.has(FrameFlags::SUM_REPLIES).then_some(0);
        let header =
            Header::reply(Kind::Reply(Operation::ReadMany), header.request, Status::Ok).with_payload(bytes, checksum);
        let payload = Some((Places::Many(places), self.segments.many.start(peer, used)));
        self.answers.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload });
        Ok(PayloadTo::Discard)
    }

    pub(super) fn write_many(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let runs = runs_of(header, body)?;
        let stated: u64 = runs.clone().map(|run| u64::from(run.ranges) * u64::from(run.bytes)).sum();
        if header.payload_bytes != stated {
            return Err(CloseReason::Malformed("a payload of another length than its ranges"));
        }
        let request = header.request;
        let mut used = self.segments.many.list();
        let listed = self.answers.list_places(|places| self.segments.check_many(runs, true, places, &mut used));
        let session = self.sessions.get_mut(peer).expect("a session that was just looked up");
        match listed {
            Ok((bytes, places)) => {
                self.segments.count_users(&used);
                self.counters.write_bytes += bytes;
                session.pending = Some(Pending::WriteMany { request, segments: used, expected: header.checksum() });
                Ok(PayloadTo::Places(places))
            }
            Err(Refusal { status, good }) => {
                let operation = Operation::WriteMany;
                session.pending = Some(Pending::Refused { request, operation, status, argument: good });
                self.segments.many.recycle(used);
                Ok(PayloadTo::Discard)
            }
        }
    }

    /// The answer to a gathered read has left, or never will.
    pub(super) fn finish_read_many(&mut self, read: u32) {
        let segments = self.segments.many.finish(read);
        self.release_many(segments);
    }

    /// Nothing uses these segments for a frame any more.
    pub(super) fn release_many(&mut self, segments: Vec<SegmentId>) {
        for &segment in &segments {
            self.segments.release(segment, &mut self.answers.outputs);
        }
        self.segments.many.recycle(segments);
    }
}
