//! The tier's invariants, for tests and simulation.

use super::Tier;
use crate::segments::SegmentState;

impl Tier {
    /// Asserts every invariant. Walks everything.
    ///
    /// # Panics
    /// When one does not hold.
    pub fn check(&self) {
        self.index.check();
        let mut live = vec![0; self.config.segments as usize];
        let mut held = 0;
        for (_, entry) in self.index.walk(0) {
            if entry.is_removed() {
                held += 1;
                continue;
            }
            let segment = self.segment_of(entry.offset());
            live[segment as usize] += self.record_bytes(entry.shape());
            let state = self.segments[segment].state;
            let may = state.has_records() || state == SegmentState::Unknown;
            assert!(may, "{entry:?} is in segment {segment}, which is {state:?}");
        }
        assert_eq!(self.stats.tombstones_held, held, "removals in the index");
        for (number, segment) in self.segments.iter() {
            assert_eq!(segment.live_bytes, live[number as usize], "live bytes of segment {number}");
        }
        assert_eq!(self.stats.live_bytes, live.iter().sum::<u64>(), "live bytes");
        let lists = self.spare_entries.len() + self.seals.len() + usize::from(self.log.open.is_some());
        assert!(lists <= super::ENTRY_LISTS, "{lists} lists of records");
        let generations = self.segments.filled.iter().map(|segment| self.segments[*segment].generation);
        assert!(generations.is_sorted(), "segments are filled in the order of their generations");
    }
}
