//! Gathered requests: many ranges in one frame. All are checked before any is used, and all stay in use until their
//! payload was transferred.
//!
//! A range costs its peer at most 32 bytes of a frame and this shard a few operations: a run of ranges is checked as a
//! whole, adjacent ranges become one extent, and consecutive runs in the same segment count as one user.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::SegmentId;
use kvplane_proto::message::{Items, RunItem};
use kvplane_proto::{Limits, Status};

use super::Segments;
use crate::service::shard::answers::items_of;
use crate::service::shard::timing::Outputs;
use crate::service::types::{CloseReason, Hold, Memory, PeerKey, Place};

/// Lists of segments that are kept for the next frames.
const SPARE_LISTS: usize = 64;

/// Replies to gathered reads that are being sent: the peer, and the segments.
pub(super) struct ManyReads {
    entries: Vec<Option<(PeerKey, Vec<SegmentId>)>>,
    free: Vec<u32>,
    spare: Vec<Vec<SegmentId>>,
}

impl ManyReads {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), spare: Vec::new() }
    }

    pub(super) fn list(&mut self) -> Vec<SegmentId> {
        self.spare.pop().unwrap_or_default()
    }

    pub(super) fn recycle(&mut self, mut list: Vec<SegmentId>) {
        if self.spare.len() < SPARE_LISTS {
            list.clear();
            self.spare.push(list);
        }
    }

    pub(super) fn start(&mut self, peer: PeerKey, segments: Vec<SegmentId>) -> Hold {
        let read = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.entries[read as usize] = Some((peer, segments));
        Hold::Segments { read }
    }

    fn finish(&mut self, read: u32) -> Vec<SegmentId> {
        let (_, segments) = self.entries[read as usize].take().expect("a reply's segments were released twice");
        self.free.push(read);
        segments
    }

    /// Returns the peers that are being sent bytes of this segment.
    pub(super) fn readers(&self, segment: SegmentId) -> impl Iterator<Item = PeerKey> {
        self.entries.iter().flatten().filter(move |(_, used)| used.contains(&segment)).map(|&(peer, _)| peer)
    }

    #[cfg(test)]
    pub(super) fn under_way(&self) -> usize {
        assert_eq!(self.entries.len() - self.free.len(), self.entries.iter().flatten().count());
        self.entries.len() - self.free.len()
    }
}

/// Failure of a frame because of a range that cannot be used.
pub(super) struct Refusal {
    pub(super) status: Status,
    /// Number of good ranges before that one.
    pub(super) good: u64,
}

impl Segments {
    /// Checks the ranges of a frame and lists their extents and the segments to count as used. Returns the sum of their
    /// lengths. Counts no users yet.
    pub(super) fn check_many(
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

    /// Ends a gathered read whose reply was sent, or never will be.
    pub(in crate::service) fn finish_read_many(&mut self, read: u32, outputs: &mut Outputs) {
        let segments = self.many.finish(read);
        self.release_many(segments, outputs);
    }

    /// Ends one use of each of these segments by a frame.
    pub(super) fn release_many(&mut self, segments: Vec<SegmentId>, outputs: &mut Outputs) {
        for &segment in &segments {
            self.release(segment, outputs);
        }
        self.many.recycle(segments);
    }
}

/// Appends the extents of a run that is inside its segment; adjacent ones are merged.
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

/// Decodes the runs of a body and checks the limits of a frame.
pub(super) fn runs_of<'a>(header: &Header, body: &'a [u8]) -> Result<Items<'a, RunItem>, CloseReason> {
    let runs = items_of::<RunItem>(header, body)?;
    let (mut ranges, mut bytes) = (0, 0);
    for run in runs.clone() {
        if run.ranges == 0 || run.bytes == 0 {
            return Err(CloseReason::Malformed("an empty run"));
        }
        ranges += u64::from(run.ranges);
        // The product of two 32-bit words, added to a sum within the limit, does not overflow 64 bits.
        bytes += u64::from(run.ranges) * u64::from(run.bytes);
        if ranges > Limits::RANGES_PER_FRAME as u64 || bytes > Limits::GATHER_BYTES {
            return Err(CloseReason::Malformed("more ranges or bytes than the limit of a gathered request"));
        }
    }
    if ranges == 0 {
        return Err(CloseReason::Malformed("a gathered request without ranges"));
    }
    Ok(runs)
}
