//! Gathered requests: many ranges in one frame. All are checked before any is used, and all stay in use until their
//! payload was transferred.
//!
//! A range costs its peer at most 32 bytes of a frame and this shard a few operations: a run of ranges is checked as a
//! whole, adjacent ranges become one extent, and consecutive runs in the same segment count as one user.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::SegmentId;
use kvplane_proto::message::{Items, RunItem};
use kvplane_proto::{Limits, Status};

use crate::service::shard::answers::items_of;
use crate::service::types::{CloseReason, Memory, MemoryExtent};

/// Failure of a frame because of a range that cannot be used.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Refusal {
    pub(super) status: Status,
    /// Number of good ranges before that one.
    pub(super) good: u64,
}

/// Lists the extents of the ranges of a frame, and the segments to count as used. Returns the sum of the ranges'
/// lengths. `usable_bytes` returns the length of a segment that the peer may use in this way.
pub(super) fn list_ranges(
    runs: Items<'_, RunItem>,
    usable_bytes: impl Fn(SegmentId) -> Result<u64, Status>,
    extents: &mut Vec<MemoryExtent>,
    used: &mut Vec<SegmentId>,
) -> Result<u64, Refusal> {
    let start = extents.len();
    let (mut bytes, mut good) = (0, 0);
    for run in runs {
        let segment_bytes = usable_bytes(run.segment).map_err(|status| Refusal { status, good })?;
        if let Some(outside) = run.first_outside(segment_bytes) {
            return Err(Refusal { status: Status::OutOfRange, good: good + u64::from(outside) });
        }
        good += u64::from(run.ranges);
        bytes += u64::from(run.ranges) * u64::from(run.bytes);
        if used.last() != Some(&run.segment) {
            used.push(run.segment);
        }
        push_extents(extents, start, &run);
    }
    Ok(bytes)
}

/// Appends the extents of a run that is inside its segment; adjacent ones are merged.
fn push_extents(extents: &mut Vec<MemoryExtent>, start: usize, run: &RunItem) {
    let memory = Memory::Segment(run.segment);
    let bytes = u64::from(run.bytes);
    for offset in run.offsets() {
        match extents[start..].last_mut() {
            Some(last) if last.memory == memory && last.offset + last.bytes == offset => last.bytes += bytes,
            _ => extents.push(MemoryExtent { memory, offset, bytes }),
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

#[cfg(test)]
mod tests {
    use kvplane_proto::message::{Item, decode_items};

    use super::*;

    const USABLE: SegmentId = SegmentId { index: 1, generation: 1 };
    const OTHER: SegmentId = SegmentId { index: 2, generation: 1 };

    /// Lists the ranges of these runs, where both segments have 4096 bytes, and no other may be used.
    fn listed(runs: &[RunItem]) -> (Result<u64, Refusal>, Vec<MemoryExtent>, Vec<SegmentId>) {
        let mut body = Vec::new();
        runs.iter().for_each(|run| run.encode(&mut body));
        let runs = decode_items(&body, runs.len() as u32).expect("a body of these runs");
        let usable = |segment| if [USABLE, OTHER].contains(&segment) { Ok(4096) } else { Err(Status::Stale) };
        let (mut extents, mut used) = (Vec::new(), Vec::new());
        let bytes = list_ranges(runs, usable, &mut extents, &mut used);
        (bytes, extents, used)
    }

    fn run(segment: SegmentId, offset: u64, stride_bytes: u64, ranges: u32) -> RunItem {
        RunItem { segment, offset, stride_bytes, bytes: 64, ranges }
    }

    #[test]
    fn adjacent_ranges_become_one_extent_and_consecutive_runs_one_user() {
        let (bytes, extents, used) = listed(&[run(USABLE, 0, 64, 2), run(USABLE, 128, 256, 2), run(OTHER, 0, 64, 1)]);
        assert_eq!((bytes, used), (Ok(5 * 64), vec![USABLE, OTHER]));
        let extent = |segment, offset, bytes| MemoryExtent { memory: Memory::Segment(segment), offset, bytes };
        assert_eq!(extents, [extent(USABLE, 0, 192), extent(USABLE, 384, 64), extent(OTHER, 0, 64)]);
    }

    #[test]
    fn a_refusal_counts_the_good_ranges_before_it() {
        let outside = listed(&[run(USABLE, 0, 64, 3), run(OTHER, 4000, 64, 2)]).0;
        assert_eq!(outside, Err(Refusal { status: Status::OutOfRange, good: 4 }));
        let unknown = SegmentId { index: 3, generation: 1 };
        let stale = listed(&[run(USABLE, 0, 64, 3), run(unknown, 0, 64, 1)]).0;
        assert_eq!(stale, Err(Refusal { status: Status::Stale, good: 3 }));
    }
}
