//! The segments: what each is doing, which are free, and the order in which they were filled.
//!
//! Segments are used in turn: the one that fell free first is used first, the one that was filled first is reclaimed
//! first. Both orders carry correctness: a tombstone goes with its segment, and by then every older record is gone.

use std::collections::VecDeque;

use kvplane_proto::state_machine;
use kvplane_proto::states::Step;

state_machine! {
    /// What a segment is doing.
    states SegmentState {
        /// Not looked at since the start.
        Unknown,
        /// Holds nothing that counts.
        Free,
        /// Its header is being made durable.
        Preparing,
        /// May take records.
        Ready,
        /// Takes records.
        Open,
        /// Full; records and footer are being made durable.
        Sealing,
        /// Its footer lists its records.
        Sealed,
        /// Without a footer: writing failed.
        Retired,
        /// What is to stay is being copied.
        Reclaiming,
        /// Not used again in this incarnation.
        Dead,
    }
    /// What happens to a segment.
    events SegmentEvent {
        /// Its header says that it holds nothing.
        FoundFree,
        /// Recovery has its footer.
        FoundSealed,
        /// Recovery has read its records.
        FoundUnsealed,
        /// It is next.
        Prepare,
        /// Its header is durable.
        Prepared,
        /// Records go to it.
        Open,
        /// Nothing more goes to it.
        Fill,
        /// The footer is written.
        Seal,
        /// A write failed, or nothing could be read.
        Fail,
        /// Its turn to go.
        Reclaim,
        /// What was to stay is durable elsewhere.
        Release,
        /// As before, and it is not to be used again.
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
    /// Whether there may be records that count in such a segment.
    pub(crate) const fn has_records(self) -> bool {
        matches!(self, Self::Open | Self::Sealing | Self::Sealed | Self::Retired | Self::Reclaiming)
    }
}

/// What is known of a segment; it changes by methods of [`Segments`] only.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) state: SegmentState,
    /// A write to it failed.
    pub(crate) bad: bool,
    /// Whether objects in it are shown: recovery has read everything newer.
    pub(crate) visible: bool,
    pub(crate) generation: u64,
    /// The generation of the segment that was opened before it.
    pub(crate) previous: u64,
    /// Groups being written to it.
    pub(crate) groups: u32,
    /// Objects being read from it.
    pub(crate) reads: u32,
    /// Bytes of live records.
    pub(crate) live_bytes: u64,
    /// How many they are.
    pub(crate) live_records: u32,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Segments {
    all: Vec<Segment>,
    /// Those without records, in the order in which they are used.
    free: VecDeque<u32>,
    /// Those with records, in the order of their generations.
    filled: VecDeque<u32>,
    /// The one that takes records next.
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
            Step::Illegal => panic!("segment {segment} is {state:?} and met {event:?}"),
        }
    }

    /// Segments without records, the one made ready included.
    pub(crate) fn free_count(&self) -> u32 {
        self.free.len() as u32 + u32::from(self.ready.is_some())
    }

    /// Whether there are free segments beside the one made ready.
    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Whether a segment is ready to take records.
    pub(crate) const fn has_ready(&self) -> bool {
        self.ready.is_some()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Segment)> {
        (0..).zip(&self.all)
    }

    /// The header of a segment says which generation it is, and which was opened before.
    pub(crate) fn found_header(&mut self, segment: u32, generation: u64, previous: u64) {
        let at = self.at(segment);
        (at.generation, at.previous) = (generation, previous);
    }

    /// A scan says which generation a segment is.
    pub(crate) fn found_generation(&mut self, segment: u32, generation: u64) {
        self.at(segment).generation = generation;
    }

    /// A segment holds nothing that counts: it is used when all that fell free before are.
    pub(crate) fn found_free(&mut self, segment: u32) {
        self.step(segment, SegmentEvent::FoundFree);
        self.free.push_back(segment);
    }

    /// A segment was made ready and never used: it is the next.
    pub(crate) fn found_unused(&mut self, segment: u32) {
        self.step(segment, SegmentEvent::FoundFree);
        self.free.push_front(segment);
    }

    /// Objects in a segment are shown.
    pub(crate) fn show(&mut self, segment: u32) {
        self.at(segment).visible = true;
    }

    /// Recovery knows all: segments with records are in the order of their generations.
    pub(crate) fn order_filled(&mut self) {
        let mut filled: Vec<_> = self.iter().filter(|(_, segment)| segment.state.has_records()).collect();
        filled.sort_unstable_by_key(|(_, segment)| segment.generation);
        self.filled = filled.into_iter().map(|(number, _)| number).collect();
    }

    /// The segment that fell free first is to be prepared.
    pub(crate) fn take_free(&mut self) -> Option<u32> {
        let segment = self.free.pop_front()?;
        self.step(segment, SegmentEvent::Prepare);
        Some(segment)
    }

    /// A segment is of a new generation, which its header will say.
    pub(crate) fn renew(&mut self, segment: u32, generation: u64, previous: u64) {
        let at = self.at(segment);
        (at.generation, at.previous, at.bad, at.visible) = (generation, previous, false, true);
    }

    /// The header of a segment is durable: it is ready.
    pub(crate) fn prepared(&mut self, segment: u32) {
        self.step(segment, SegmentEvent::Prepared);
        self.ready = Some(segment);
    }

    /// The segment that is ready takes records from now on.
    pub(crate) fn open_ready(&mut self) -> Option<u32> {
        let segment = self.ready.take()?;
        self.step(segment, SegmentEvent::Open);
        self.show(segment);
        self.filled.push_back(segment);
        Some(segment)
    }

    /// A segment is not used again in this incarnation: it could not be written or read.
    pub(crate) fn discard(&mut self, segment: u32) {
        self.step(segment, SegmentEvent::Fail);
        self.step(segment, SegmentEvent::Discard);
    }

    /// A write to a segment failed; false when one did before.
    pub(crate) fn mark_bad(&mut self, segment: u32) -> bool {
        !core::mem::replace(&mut self.at(segment).bad, true)
    }

    /// The segment that was filled first.
    pub(crate) fn oldest(&self) -> Option<u32> {
        self.filled.front().copied()
    }

    /// The segment that was filled first is reclaimed.
    pub(crate) fn reclaim_oldest(&mut self) {
        if let Some(segment) = self.filled.pop_front() {
            self.step(segment, SegmentEvent::Reclaim);
        }
    }

    /// A segment was reclaimed: it is free, unless a write to it failed.
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

    /// The index has one more live record in a segment, of so many bytes.
    pub(super) fn add_live(&mut self, segment: u32, bytes: u64) {
        let at = self.at(segment);
        (at.live_bytes, at.live_records) = (at.live_bytes + bytes, at.live_records + 1);
    }

    /// The index has one less.
    pub(super) fn take_live(&mut self, segment: u32, bytes: u64) {
        let at = self.at(segment);
        (at.live_bytes, at.live_records) = (at.live_bytes - bytes, at.live_records - 1);
    }

    /// The index has none in a segment any more; how many bytes they had.
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
    fn the_life_of_a_segment_is_as_declared() {
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
