//! Deal: distribution of a run of similar slices over lanes.

use crate::tables::Slice;
use crate::types::SegmentTarget;

/// Most lanes of a rail over which a run is dealt.
pub(super) const LANES: usize = 8;

/// Share of a lane in a run: its load, the number and the first of its new slices, and its last slice.
#[derive(Clone, Copy, Default)]
pub(super) struct Share {
    pub(super) lane: u32,
    pub(super) load_bytes: u64,
    /// Number of the run of the slices bound together to this lane.
    pub(super) run: u64,
    pub(super) bound: u32,
    pub(super) first: u32,
    pub(super) last: u32,
}

/// Chooses the lane for each slice: the least loaded, the first among equals. If all lanes have the same load and
/// slices are equal, this is round robin.
#[derive(Default)]
pub(super) struct Turns {
    /// Next lane while the rest of a round is known, and the load of its slices; 0 if it is not known.
    next: usize,
    pub(super) load_bytes: u64,
}

impl Turns {
    #[inline]
    pub(super) fn next(&mut self, shares: &[Share], load_bytes: u64) -> usize {
        if load_bytes != self.load_bytes {
            return self.look(shares, load_bytes);
        }
        let at = self.next;
        self.next = if at + 1 == shares.len() { 0 } else { at + 1 };
        at
    }

    #[inline(never)]
    fn look(&mut self, shares: &[Share], load_bytes: u64) -> usize {
        let least_bytes = shares.iter().map(|share| share.load_bytes).min().unwrap_or(0);
        let at = shares.iter().position(|share| share.load_bytes == least_bytes).unwrap_or(0);
        // The other lanes have the load that the first slices of a round leave behind, or that its last ones find.
        let rest = |one: &Share, other: u64| one.load_bytes == other;
        let begun = shares[..at].iter().all(|one| rest(one, least_bytes + load_bytes));
        let known = begun && shares.get(at..).is_some_and(|ahead| ahead.iter().all(|one| rest(one, least_bytes)));
        (self.next, self.load_bytes) = (0, 0);
        if known && !shares.is_empty() {
            (self.next, self.load_bytes) = (if at + 1 == shares.len() { 0 } else { at + 1 }, load_bytes);
        }
        at
    }
}

/// Common properties of all slices of a run.
#[derive(Clone, Copy)]
pub(super) struct Common {
    pub(super) like: SegmentTarget,
    pub(super) small: bool,
    /// Bytes at which the rail's window of their size class is full: a larger slice goes alone.
    pub(super) room_bytes: u64,
}

/// A run of slices like one that was just routed: their lanes and common properties.
pub(crate) struct Deal {
    pub(super) rail: u32,
    /// A slice of the run before it is bound.
    pub(super) like: Slice,
    pub(super) common: Common,
    pub(super) shares: [Share; LANES],
    /// Number of shares in use.
    pub(super) open: usize,
}

/// Number of slices that were dealt, and the first item that is not among them.
pub(crate) struct DealOutcome<I> {
    pub(crate) bound: usize,
    pub(crate) next: Option<I>,
}
