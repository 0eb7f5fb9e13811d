//! Packs ranges into runs: consecutive ranges of equal length and distance share one record.

use crate::ids::SegmentId;

use super::items::{Item, RunItem};

/// Packer of ranges into the [`RunItem`]s of a gathered read or write, in the order in which they are added.
#[derive(Debug, Default)]
pub struct RunPacker {
    open: Option<RunItem>,
    items: usize,
    ranges: usize,
}

impl RunPacker {
    /// Creates an empty packer.
    #[must_use]
    pub const fn new() -> Self {
        Self { open: None, items: 0, ranges: 0 }
    }

    /// Adds a range. Completed runs are appended to `out`.
    pub fn push(&mut self, segment: SegmentId, offset: u64, bytes: u32, out: &mut Vec<u8>) {
        self.ranges += 1;
        if let Some(run) = &mut self.open {
            if run.segment == segment && run.bytes == bytes && run.continues_at(offset) {
                run.stride_bytes = if run.ranges == 1 { offset - run.offset } else { run.stride_bytes };
                run.ranges += 1;
                return;
            }
            run.encode(out);
            self.items += 1;
        }
        self.open = Some(RunItem { segment, offset, stride_bytes: 0, bytes, ranges: 1 });
    }

    /// Appends the last run. Returns the number of records in total.
    pub fn finish(self, out: &mut Vec<u8>) -> usize {
        match self.open {
            Some(run) => {
                run.encode(out);
                self.items + 1
            }
            None => self.items,
        }
    }

    /// Returns the number of ranges added so far.
    #[must_use]
    pub const fn ranges(&self) -> usize {
        self.ranges
    }
}

impl RunItem {
    /// Returns true if a range at `offset` continues this run. Any later offset continues a run of 1.
    fn continues_at(&self, offset: u64) -> bool {
        match self.ranges {
            1 => offset > self.offset,
            ranges => {
                let next =
                    self.stride_bytes.checked_mul(u64::from(ranges)).and_then(|far| self.offset.checked_add(far));
                next == Some(offset)
            }
        }
    }

    /// Returns the position within the run of its first range that does not end within `segment_bytes`.
    #[must_use]
    pub fn first_outside(&self, segment_bytes: u64) -> Option<u32> {
        let room = segment_bytes.checked_sub(u64::from(self.bytes)).and_then(|room| room.checked_sub(self.offset));
        let Some(room) = room else { return (self.ranges > 0).then_some(0) };
        // A stride of 0 repeats the first range, which is inside.
        let last_inside = room.checked_div(self.stride_bytes)?;
        u32::try_from(last_inside + 1).ok().filter(|&first| first < self.ranges)
    }

    /// Returns the start of each range of the run, which has to be inside its segment.
    pub fn offsets(&self) -> impl Iterator<Item = u64> + use<> {
        let (offset, stride_bytes) = (self.offset, self.stride_bytes);
        (0..u64::from(self.ranges)).map(move |range| offset + range * stride_bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::items::decode_items;
    use super::*;

    const SEGMENT: SegmentId = SegmentId { index: 3, generation: 4 };

    fn pack(ranges: &[(SegmentId, u64, u32)]) -> Vec<RunItem> {
        let (mut packer, mut body) = (RunPacker::new(), Vec::new());
        ranges.iter().for_each(|&(segment, offset, bytes)| packer.push(segment, offset, bytes, &mut body));
        assert_eq!(packer.ranges(), ranges.len());
        let items = packer.finish(&mut body);
        decode_items(&body, items as u32).expect("as many records as were counted").collect()
    }

    fn unpack(runs: &[RunItem]) -> Vec<(SegmentId, u64, u32)> {
        runs.iter().flat_map(|run| run.offsets().map(|offset| (run.segment, offset, run.bytes))).collect()
    }

    #[test]
    fn even_distances_take_one_record() {
        let ranges: Vec<_> = (0..4096).map(|n| (SEGMENT, 100 + n * 8192, 4096)).collect();
        let run = RunItem { segment: SEGMENT, offset: 100, stride_bytes: 8192, bytes: 4096, ranges: 4096 };
        assert_eq!(pack(&ranges), [run]);
        assert!(pack(&[]).is_empty());
    }

    #[test]
    fn the_same_range_twice_and_a_step_back_are_runs_of_their_own() {
        let ranges = [(SEGMENT, 10, 1), (SEGMENT, 10, 1), (SEGMENT, 5, 1)];
        assert_eq!(pack(&ranges).iter().map(|run| run.ranges).collect::<Vec<_>>(), [1, 1, 1]);
    }

    #[test]
    fn the_end_of_the_address_space_does_not_wrap() {
        let ranges = [(SEGMENT, 1, 1), (SEGMENT, u64::MAX, 1), (SEGMENT, u64::MAX - 1, 1)];
        assert_eq!(unpack(&pack(&ranges)), ranges);
        let run = RunItem { segment: SEGMENT, offset: u64::MAX, stride_bytes: u64::MAX, bytes: u32::MAX, ranges: 9 };
        assert_eq!(run.first_outside(u64::MAX), Some(0));
        assert_eq!(RunItem { offset: 0, ..run }.first_outside(u64::MAX), Some(1));
        assert_eq!(RunItem { offset: 0, stride_bytes: 0, ..run }.first_outside(u64::MAX), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn ranges_survive_packing(
            ranges in prop::collection::vec((0u32..2, 0u64..12, 1u32..3), 0..60),
            even in any::<bool>(),
        ) {
            let mut at = 0;
            let ranges: Vec<_> = ranges
                .into_iter()
                .map(|(index, offset, bytes)| {
                    at = if even { at + (offset % 3) * 4 } else { offset };
                    (SegmentId { index, generation: 1 }, at, bytes)
                })
                .collect();
            prop_assert_eq!(unpack(&pack(&ranges)), ranges);
        }

        #[test]
        fn the_first_range_outside_is_found(
            offset in 0u64..50,
            stride_bytes in 0u64..20,
            bytes in 0u32..20,
            ranges in 0u32..20,
            segment_bytes in 0u64..200,
        ) {
            let run = RunItem { segment: SEGMENT, offset, stride_bytes, bytes, ranges };
            let outside = run.offsets().position(|offset| offset + u64::from(bytes) > segment_bytes);
            prop_assert_eq!(run.first_outside(segment_bytes), outside.map(|at| at as u32));
        }

        #[test]
        fn runs_of_any_size_do_not_overflow(words in any::<[u64; 4]>(), bytes in any::<u32>(), ranges in any::<u32>()) {
            let [offset, stride_bytes, segment_bytes, _] = words;
            let run = RunItem { segment: SEGMENT, offset, stride_bytes, bytes, ranges };
            let inside = |range: u64| {
                let far = u128::from(stride_bytes) * u128::from(range);
                far + u128::from(offset) + u128::from(bytes) <= u128::from(segment_bytes)
            };
            match run.first_outside(segment_bytes) {
                Some(first) => {
                    prop_assert!(first < ranges && !inside(first.into()));
                    prop_assert!(first == 0 || inside(u64::from(first) - 1));
                }
                None => prop_assert!(ranges == 0 || inside(u64::from(ranges) - 1)),
            }
        }
    }
}
