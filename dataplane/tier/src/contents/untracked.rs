//! What the next start may find on the device although the index does not know it, digest by digest where that is
//! known.
//!
//! Records that could not be read, written or struck out; removals and reclaimed segments until that is durable; what a
//! scan could not make out. A device that takes no writes any more strikes nothing out, so only what it surely does not
//! have may be put in place of something there. The lists are bounded: what finds no room counts as any digest.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::digest::Digest;

/// Digests of one kind that are told apart.
const DIGESTS_MOST: usize = 16 << 10;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct UntrackedObjects {
    /// Whether there was anything of the first kind in this incarnation.
    any: bool,
    /// Whether not all digests of the first kind are known.
    all: bool,
    digests: BTreeSet<Digest>,
    removed: PassingDigests,
    reclaimed: PassingDigests,
    /// Segments that were scanned, as a record that one scan cannot make out may be there for the next: until they are
    /// used again, or until their footer is durable, where one is being written.
    unclear: BTreeMap<u32, bool>,
}

/// Digests that count until a mark has passed them, in the order of their marks.
#[derive(Debug, Default)]
struct PassingDigests {
    digests: VecDeque<(u64, Digest)>,
    /// Up to this mark not all are known.
    unknown_to: u64,
}

impl PassingDigests {
    fn push(&mut self, mark: u64, digest: Digest) {
        if self.digests.len() == DIGESTS_MOST {
            self.digests.clear();
            self.unknown_to = mark;
        } else if self.unknown_to < mark {
            self.digests.push_back((mark, digest));
        }
    }

    /// Up to this mark nothing counts any more.
    fn pass(&mut self, mark: u64) {
        while self.digests.front().is_some_and(|(at, _)| *at <= mark) {
            self.digests.pop_front();
        }
        if self.unknown_to <= mark {
            self.unknown_to = 0;
        }
    }

    fn may_have(&self, digest: Digest) -> bool {
        self.unknown_to > 0 || self.digests.iter().any(|(_, other)| *other == digest)
    }
}

impl UntrackedObjects {
    /// Whether there may be records that could not be read, written or removed, and what was given up because of that.
    pub(crate) const fn is_any(&self) -> bool {
        self.any
    }

    /// Whether there are segments of which a scan could not make out everything.
    pub(crate) fn has_unclear(&self) -> bool {
        !self.unclear.is_empty()
    }

    /// Whether more will be known soon, as a segment that was scanned is being sealed.
    pub(crate) fn is_settling(&self) -> bool {
        self.unclear.values().any(|gets_footer| *gets_footer)
    }

    /// There may be a record of this digest.
    pub(crate) fn note(&mut self, digest: Digest) {
        self.any = true;
        if self.all || self.digests.len() == DIGESTS_MOST {
            self.note_all();
        } else {
            self.digests.insert(digest);
        }
    }

    /// There may be records of any digest.
    pub(crate) fn note_all(&mut self) {
        (self.any, self.all) = (true, true);
        self.digests.clear();
    }

    /// Something went wrong that leaves no records but those that are noted.
    pub(crate) fn note_fault(&mut self) {
        self.any = true;
    }

    /// A tombstone of this sequence was appended.
    pub(crate) fn removed(&mut self, sequence: u64, digest: Digest) {
        self.removed.push(sequence, digest);
    }

    /// All tombstones up to this sequence are durable.
    pub(crate) fn removals_durable(&mut self, sequence: u64) {
        self.removed.pass(sequence);
    }

    /// A record of the segment of this generation was given up.
    pub(crate) fn reclaimed(&mut self, generation: u64, digest: Digest) {
        self.reclaimed.push(generation, digest);
    }

    /// It is durable that segments of lesser generations hold nothing that counts.
    pub(crate) fn reclaim_durable(&mut self, oldest_live: u64) {
        self.reclaimed.pass(oldest_live.saturating_sub(1));
    }

    /// A segment was scanned; it gets a footer, or not.
    pub(crate) fn scanned(&mut self, segment: u32, gets_footer: bool) {
        self.unclear.insert(segment, gets_footer);
    }

    /// A segment that was scanned gets no footer after all.
    pub(crate) fn no_footer(&mut self, segment: u32) {
        self.unclear.entry(segment).and_modify(|gets_footer| *gets_footer = false);
    }

    /// What a segment has is known by now, or is over.
    pub(crate) fn settled(&mut self, segment: u32) {
        self.unclear.remove(&segment);
    }

    /// Whether a segment that was scanned gets a footer.
    pub(crate) fn gets_footer(&self, segment: u32) -> bool {
        self.unclear.get(&segment) == Some(&true)
    }

    /// Whether there may be a record of this digest that is not in an unclear segment.
    pub(crate) fn is_noted(&self, digest: Digest) -> bool {
        self.all || self.digests.contains(&digest)
    }

    /// Whether there may be a record of this digest.
    pub(crate) fn may_have(&self, digest: Digest) -> bool {
        let sure = !self.is_noted(digest) && self.unclear.is_empty();
        !sure || self.removed.may_have(digest) || self.reclaimed.may_have(digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(number: u64) -> Digest {
        Digest::of(b"", &number.to_le_bytes())
    }

    #[test]
    fn what_is_noted_counts_and_nothing_else() {
        let mut untracked = UntrackedObjects::default();
        assert!(!untracked.is_any());
        untracked.note(digest(1));
        assert!(untracked.is_any() && untracked.may_have(digest(1)) && !untracked.may_have(digest(2)));
        untracked.scanned(7, true);
        assert!(untracked.may_have(digest(2)));
        untracked.settled(7);
        assert!(!untracked.may_have(digest(2)));
        (0..=DIGESTS_MOST as u64).for_each(|number| untracked.note(digest(number)));
        assert!(untracked.may_have(digest(1 << 40)), "what finds no room may be anything");
    }

    #[test]
    fn what_is_not_durable_counts_until_it_is() {
        let mut untracked = UntrackedObjects::default();
        (10..20).for_each(|number| untracked.removed(number, digest(number)));
        untracked.reclaimed(10, digest(20));
        untracked.removals_durable(14);
        untracked.reclaim_durable(10);
        for number in 0..30 {
            assert_eq!(untracked.may_have(digest(number)), (15..=20).contains(&number), "{number}");
        }
        untracked.reclaim_durable(11);
        assert!(!untracked.may_have(digest(20)) && !untracked.is_any());
    }

    #[test]
    fn too_much_that_is_not_durable_may_be_anything_until_it_is() {
        let (mut untracked, most) = (UntrackedObjects::default(), DIGESTS_MOST as u64);
        (1..=most + 2).for_each(|number| untracked.removed(number, digest(number)));
        assert!(untracked.may_have(digest(0)) && untracked.may_have(digest(most + 2)));
        untracked.removals_durable(most + 1);
        assert!(!untracked.may_have(digest(1)) && untracked.may_have(digest(most + 2)));
    }
}
