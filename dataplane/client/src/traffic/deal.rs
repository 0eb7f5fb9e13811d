//! How slices that go the same way at once are dealt to lanes.

use crate::tables::Slice;
use crate::types::SegmentTarget;

/// Lanes of a rail among which a run is dealt.
pub(super) const LANES: usize = 8;

/// What a lane of a run gets: how many slices, the first of them, and the last slice that it has.
#[derive(Clone, Copy, Default)]
pub(super) struct Share {
    pub(super) lane: u32,
    pub(super) load_bytes: u64,
    /// What they are known by as those that were bound together to this lane.
    pub(super) run: u64,
    pub(super) bound: u32,
    pub(super) first: u32,
    pub(super) last: u32,
}

/// Whose turn it is: the lane with the least to do, the first among equals. Where all have the same to do and slices
/// are equal, that is each in its turn.
#[derive(Default)]
pub(super) struct Turns {
    /// Whose turn is next while the rest of a round is known, and the load of its slices; 0 where it is not.
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
        // The others are all as the first of a round leaves them, or as the last of a round finds them.
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

/// What all slices of a run have in common.
#[derive(Clone, Copy)]
pub(super) struct Common {
    pub(super) like: SegmentTarget,
    pub(super) small: bool,
    /// Once they have so many bytes, the rail has its window of their size class: one that is larger goes alone.
    pub(super) room_bytes: u64,
}

/// Slices like one that was just routed: where they go, and what they have in common.
pub(crate) struct Deal {
    pub(super) rail: u32,
    /// A slice of the run before it is bound.
    pub(super) like: Slice,
    pub(super) common: Common,
    pub(super) shares: [Share; LANES],
    /// How many of the shares are in use.
    pub(super) open: usize,
}

/// How many slices were dealt, and the first item that is not among them.
pub(crate) struct DealOutcome<I> {
    pub(crate) bound: usize,
    pub(crate) next: Option<I>,
}
