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

/// One segment.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) state: SegmentState,
    /// A write to it failed.
    pub(crate) bad: bool,
    /// Whether objects in it are shown: recovery has read everything newer.
    pub(crate) visible: bool,
    pub(crate) generation: u64,
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
    pub(crate) free: VecDeque<u32>,
    /// The segments with records, in the order of their generations.
    pub(crate) filled: VecDeque<u32>,
    pub(crate) ready: Option<u32>,
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
        let state = &mut self[segment].state;
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

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Segment)> {
        (0..).zip(&self.all)
    }
}

impl core::ops::Index<u32> for Segments {
    type Output = Segment;

    fn index(&self, segment: u32) -> &Segment {
        &self.all[segment as usize]
    }
}

impl core::ops::IndexMut<u32> for Segments {
    fn index_mut(&mut self, segment: u32) -> &mut Segment {
        &mut self.all[segment as usize]
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
}
