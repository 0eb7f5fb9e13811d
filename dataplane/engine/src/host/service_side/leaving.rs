//! Segments that were unregistered while peers were using them.

use std::sync::Arc;
use std::time::Duration;

use kvplane_proto::SegmentId;
use kvplane_sys::Region;
use kvplane_transport::Shm;

use crate::host::reactor::PARK_WAITING;

/// Time for which the host checks closely on peers that are in the middle of a copy.
const CLOSE_NS: u64 = 2_000_000_000;
/// Longest park while waiting for peers that ring no bell, after that time.
const PARK_WAITING_LONG: Duration = Duration::from_millis(10);

/// Unregistered segments that peers on this host still copy from or to.
#[derive(Default)]
pub(super) struct LeavingSegments {
    segments: Vec<(SegmentId, Option<Arc<Region>>)>,
    /// End of the time of close checks.
    closely_until_ns: u64,
}

impl LeavingSegments {
    /// Adds a segment, whose memory is kept until its last user has released it. A segment that is added again is
    /// reported once.
    pub(super) fn add(&mut self, segment: SegmentId, region: Option<Arc<Region>>, now_ns: u64) {
        self.closely_until_ns = now_ns.saturating_add(CLOSE_NS);
        if !self.segments.iter().any(|(leaving, _)| *leaving == segment) {
            self.segments.push((segment, region));
        }
    }

    /// Returns how long the host may park: peers ring no bell when they are done. A peer that was stopped in the middle
    /// of a copy may stay so for days: that is not worth many checks a second.
    pub(super) fn longest_park(&self, now_ns: u64) -> Duration {
        match (self.segments.is_empty(), now_ns < self.closely_until_ns) {
            (true, _) => Duration::MAX,
            (false, true) => PARK_WAITING,
            (false, false) => PARK_WAITING_LONG,
        }
    }

    /// Releases the segments that no peer is using any more, and passes each to `free`.
    #[inline]
    pub(super) fn release_unused(&mut self, shm: &mut Shm, mut free: impl FnMut(SegmentId)) {
        self.segments.retain(|&(segment, _)| {
            let used = shm.is_named(segment);
            if !used {
                free(segment);
            }
            used
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unregistered_segments_are_checked_closely_at_first() {
        let mut leaving = LeavingSegments::default();
        assert_eq!(leaving.longest_park(0), Duration::MAX);
        leaving.add(SegmentId { index: 1, generation: 1 }, None, 5);
        assert_eq!(leaving.longest_park(5), PARK_WAITING);
        assert_eq!(leaving.longest_park(5 + CLOSE_NS), PARK_WAITING_LONG);
    }

    #[test]
    fn an_unused_segment_is_freed_once() {
        let (mut leaving, mut shm, mut free) = (LeavingSegments::default(), Shm::new(None), Vec::new());
        let segment = SegmentId { index: 1, generation: 1 };
        leaving.add(segment, None, 5);
        leaving.add(segment, None, 6);
        leaving.release_unused(&mut shm, |segment| free.push(segment));
        assert_eq!((free, leaving.longest_park(6)), (vec![segment], Duration::MAX));
    }
}
