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
        let mut live = vec![(0, 0); self.config.segments as usize];
        let mut held = 0;
        for (_, entry) in self.index.walk(0) {
            if entry.is_removed() {
                held += 1;
                continue;
            }
            let segment = self.segment_of(entry.offset());
            let (bytes, records) = &mut live[segment as usize];
            *bytes += self.record_bytes(entry.shape());
            *records += 1;
            let state = self.segments[segment].state;
            let may = state.has_records() || state == SegmentState::Unknown;
            assert!(may, "{entry:?} is in segment {segment}, which is {state:?}");
        }
        assert_eq!(self.stats.tombstones_held, held, "removals in the index");
        for (number, segment) in self.segments.iter() {
            let counted = (segment.live_bytes, segment.live_records);
            assert_eq!(counted, live[number as usize], "live bytes and records of segment {number}");
        }
        assert_eq!(self.stats.live_bytes, live.iter().map(|(bytes, _)| bytes).sum::<u64>(), "live bytes");
        let lists = self.spare_entries.len() + self.seals.len() + usize::from(self.log.open.is_some());
        assert!(lists <= super::ENTRY_LISTS, "{lists} lists of records");
        let generations = self.segments.filled.iter().map(|segment| self.segments[*segment].generation);
        assert!(generations.is_sorted(), "segments are filled in the order of their generations");
    }
}
