//! Segments of the device: the state of each, the free ones, and the order in which they were filled.
//!
//! Segments are used in turn: the one that was freed first is used first, the one that was filled first is reclaimed
//! first. Both orders are required for correctness: a tombstone is dropped with its segment, and by then every older
//! record is gone.

use kvplane_proto::narrowing::length_u32;
use std::collections::VecDeque;

use kvplane_proto::state_machine;
use kvplane_proto::states::Step;

state_machine! {
    /// State of a segment.
    states SegmentState {
        /// Not examined since the start.
        Unknown,
        /// Holds no live records.
        Free,
        /// Its header is being made durable.
        Preparing,
        /// Ready to take records.
        Ready,
        /// Takes records.
        Open,
        /// Full; records and footer are being made durable.
        Sealing,
        /// Its footer lists its records.
        Sealed,
        /// Not sealed by a footer, because a write failed.
        Retired,
        /// Records that stay are being copied.
        Reclaiming,
        /// Not used again in this incarnation.
        Dead,
    }
    /// Event in the life of a segment.
    events SegmentEvent {
        /// Its header, or the absence of one, shows that it holds no live records.
        FoundFree,
        /// Recovery has read its footer.
        FoundSealed,
        /// Recovery has read its records.
        FoundUnsealed,
        /// The segment is prepared as the next to be used.
        Prepare,
        /// Its header is durable.
        Prepared,
        /// Records are appended to the segment from now on.
        Open,
        /// No more records are appended to the segment.
        Fill,
        /// The footer is written.
        Seal,
        /// A write failed, or the segment could not be read.
        Fail,
        /// Reclaim of the segment begins.
        Reclaim,
        /// Records that stay are durable in other segments.
        Release,
        /// Like `Release`, but the segment must not be used again.
        Discard,
    }
    transitions {
        Unknown, FoundFree => Free;
        Unknown, FoundSealed => Sealed;
        Unknown, FoundUnsealed => Sealing;
        Unknown | Preparing | Open | Sealing, Fail => Retired;
        Retired | Reclaiming, Fail => ignored;
        Free, Prepare => Preparing;
        Preparing, Prepared => Ready;
        Ready, Open => Open;
        Open, Fill => Sealing;
        Sealing, Seal => Sealed;
        Sealed | Retired, Reclaim => Reclaiming;
        Reclaiming, Release => Free;
        Reclaiming | Retired, Discard => Dead;
    }
}

impl SegmentState {
    /// Returns true if a segment in this state may have live records.
    pub(crate) const fn has_records(self) -> bool {
        matches!(self, Self::Open | Self::Sealing | Self::Sealed | Self::Retired | Self::Reclaiming)
    }
}

/// State and counters of a segment; only methods of [`Segments`] change them.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) state: SegmentState,
    /// True if a write to the segment failed.
    pub(crate) bad: bool,
    /// True if objects in the segment are visible: recovery has read everything newer.
    pub(crate) visible: bool,
    pub(crate) generation: u64,
    /// Generation of the segment that was opened before it.
    pub(crate) previous: u64,
    /// Groups being written to it.
    pub(crate) groups: u32,
    /// Objects being read from it.
    pub(crate) reads: u32,
    /// Bytes of live records.
    pub(crate) live_bytes: u64,
    /// Number of live records.
    pub(crate) live_records: u32,
}

/// All segments of a device.
#[derive(Debug)]
pub(crate) struct Segments {
    all: Vec<Segment>,
    /// Segments without records, in the order in which they are used.
    free: VecDeque<u32>,
    /// Segments with records, in the order of their generations.
    filled: VecDeque<u32>,
    /// Segment that takes records next.
    ready: Option<u32>,
}

impl Segments {
    pub(crate) fn new(count: u32) -> Self {
        let segment = Segment {
            state: SegmentState::Unknown,
            bad: false,
            visible: false,
            generation: 0,
            previous: 0,
            groups: 0,
            reads: 0,
            live_bytes: 0,
            live_records: 0,
        };
        let room = || VecDeque::with_capacity(count as usize);
        Self { all: vec![segment; count as usize], free: room(), filled: room(), ready: None }
    }

    pub(crate) fn step(&mut self, segment: u32, event: SegmentEvent) {
        let state = &mut self.at(segment).state;
        match state.on(event) {
            Step::Moved(to) => *state = to,
            Step::Stale => {}
            Step::Illegal => panic!("segment {segment} is {state:?}: illegal event {event:?}"),
        }
    }

    /// Returns the number of segments without records, including the one that is ready.
    pub(crate) fn free_count(&self) -> u32 {
        length_u32(self.free.len()) + u32::from(self.ready.is_some())
    }

    /// Returns true if there are free segments besides the one that is ready.
    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns true if a segment is ready to take records.
    pub(crate) const fn has_ready(&self) -> bool {
        self.ready.is_some()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Segment)> {
        (0..).zip(&self.all)
    }

    /// Sets the generation of a segment, and that of the segment opened before it, as its header states them.
    pub(crate) fn found_header(&mut self, segment: u32, generation: u64, previous: u64) {
        let at = self.at(segment);
        (at.generation, at.previous) = (generation, previous);
    }

    /// Sets the generation of a segment, as a scan found it.
    pub(crate) fn found_generation(&mut self, segment: u32, generation: u64) {
        self.at(segment).generation = generation;
    }

    /// Marks a segment without live records as free; it is used after those that were freed before.
    pub(crate) fn found_free(&mut self, segment: u32) {
        self.step(segment, SegmentEvent::FoundFree);
        self.free.push_back(segment);
    }

    /// Marks a segment that was prepared but never used as free; it is used next.
    pub(crate) fn found_unused(&mut self, segment: u32) {
        self.step(segment, SegmentEvent::FoundFree);
        self.free.push_front(segment);
    }

    /// Makes the objects in a segment visible.
    pub(crate) fn show(&mut self, segment: u32) {
        self.at(segment).visible = true;
    }

    /// Sorts the segments with records by generation, as recovery is complete.
    pub(crate) fn order_filled(&mut self) {
        let mut filled: Vec<_> = self.iter().filter(|(_, segment)| segment.state.has_records()).collect();
        filled.sort_unstable_by_key(|(_, segment)| segment.generation);
        self.filled = filled.into_iter().map(|(number, _)| number).collect();
    }

    /// Takes the segment that was freed first, to prepare it.
    pub(crate) fn take_free(&mut self) -> Option<u32> {
        let segment = self.free.pop_front()?;
        self.step(segment, SegmentEvent::Prepare);
        Some(segment)
    }

    /// Gives a segment its new generation, which its header will state.
    pub(crate) fn renew(&mut self, segment: u32, generation: u64, previous: u64) {
        let at = self.at(segment);
        (at.generation, at.previous, at.bad, at.visible) = (generation, previous, false, true);
    }

    /// Marks a segment as ready, as its header is durable.
    pub(crate) fn prepared(&mut self, segment: u32) {
        self.step(segment, SegmentEvent::Prepared);
        self.ready = Some(segment);
    }

    /// Opens the segment that is ready: it takes records from now on.
    pub(crate) fn open_ready(&mut self) -> Option<u32> {
        let segment = self.ready.take()?;
        self.step(segment, SegmentEvent::Open);
        self.show(segment);
        self.filled.push_back(segment);
        Some(segment)
    }

    /// Discards a segment that could not be written or read: it is not used again in this incarnation.
    pub(crate) fn discard(&mut self, segment: u32) {
        self.step(segment, SegmentEvent::Fail);
        self.step(segment, SegmentEvent::Discard);
    }

    /// Marks a segment as bad after a failed write; returns false if it was marked before.
    pub(crate) fn mark_bad(&mut self, segment: u32) -> bool {
        !core::mem::replace(&mut self.at(segment).bad, true)
    }

    /// Returns the segment that was filled first.
    pub(crate) fn oldest(&self) -> Option<u32> {
        self.filled.front().copied()
    }

    /// Begins reclaim of the segment that was filled first.
    pub(crate) fn reclaim_oldest(&mut self) {
        if let Some(segment) = self.filled.pop_front() {
            self.step(segment, SegmentEvent::Reclaim);
        }
    }

    /// Frees a reclaimed segment, or discards it if a write to it failed.
    pub(crate) fn release(&mut self, segment: u32) {
        if self[segment].bad {
            self.step(segment, SegmentEvent::Discard);
        } else {
            self.step(segment, SegmentEvent::Release);
            self.free.push_back(segment);
        }
    }

    pub(crate) fn begin_group(&mut self, segment: u32) {
        self.at(segment).groups += 1;
    }

    pub(crate) fn end_group(&mut self, segment: u32) {
        self.at(segment).groups -= 1;
    }

    pub(crate) fn begin_read(&mut self, segment: u32) {
        self.at(segment).reads += 1;
    }

    pub(crate) fn end_read(&mut self, segment: u32) {
        self.at(segment).reads -= 1;
    }

    /// Counts a live record of `bytes` more in a segment.
    pub(super) fn add_live(&mut self, segment: u32, bytes: u64) {
        let at = self.at(segment);
        (at.live_bytes, at.live_records) = (at.live_bytes + bytes, at.live_records + 1);
    }

    /// Counts a live record of `bytes` less in a segment.
    pub(super) fn take_live(&mut self, segment: u32, bytes: u64) {
        let at = self.at(segment);
        (at.live_bytes, at.live_records) = (at.live_bytes - bytes, at.live_records - 1);
    }

    /// Clears the counters of live records of a segment; returns their bytes.
    pub(super) fn clear_live(&mut self, segment: u32) -> u64 {
        let at = self.at(segment);
        at.live_records = 0;
        core::mem::take(&mut at.live_bytes)
    }

    /// Asserts that segments are filled in the order of their generations.
    pub(super) fn check(&self) {
        let generations = self.filled.iter().map(|segment| self[*segment].generation);
        assert!(generations.is_sorted(), "segments are filled in the order of their generations");
    }

    fn at(&mut self, segment: u32) -> &mut Segment {
        &mut self.all[segment as usize]
    }
}

impl core::ops::Index<u32> for Segments {
    type Output = Segment;

    fn index(&self, segment: u32) -> &Segment {
        &self.all[segment as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_machine_of_segments_matches_its_table() {
        let table = kvplane_proto::states::render(SegmentState::ALL, SegmentEvent::ALL, |state, event| state.on(event));
        assert_eq!(table, include_str!("segments.table"));
    }

    #[test]
    fn segments_are_used_and_reclaimed_in_turn() {
        let mut segments = Segments::new(3);
        [2, 0].into_iter().for_each(|segment| segments.found_free(segment));
        segments.found_unused(1);
        for (expected, generation) in [(1, 10), (2, 20), (0, 30)] {
            assert_eq!(segments.take_free(), Some(expected));
            segments.renew(expected, generation, generation - 10);
            segments.prepared(expected);
            assert_eq!(segments.open_ready(), Some(expected));
            segments.step(expected, SegmentEvent::Fill);
            segments.step(expected, SegmentEvent::Seal);
        }
        segments.check();
        assert!(segments.mark_bad(2) && !segments.mark_bad(2));
        for expected in [1, 2] {
            assert_eq!(segments.oldest(), Some(expected));
            segments.reclaim_oldest();
            segments.release(expected);
        }
        assert_eq!((segments.take_free(), segments.take_free()), (Some(1), None), "a bad one is not used again");
        assert_eq!((segments[2].state, segments.oldest()), (SegmentState::Dead, Some(0)));
    }
}
