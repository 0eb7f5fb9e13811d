//! Records that the next start may find on the device although the index does not know them, by digest if the digest is
//! known.
//!
//! They are records that could not be read, written or removed; removals and reclaimed segments that are not durable
//! yet; and records that a scan could not identify. A device that takes no more writes takes no tombstones either, so a
//! replacement is safe only for digests that the device surely does not have. The lists are bounded: on overflow, any
//! digest may be on the device.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::digest::Digest;

/// Most digests of one kind that are listed.
const DIGESTS_MOST: usize = 16 << 10;

/// Digests of records that the index does not know.
#[derive(Debug, Default)]
pub(crate) struct UntrackedObjects {
    /// True if any record could not be read, written or removed in this incarnation.
    any: bool,
    /// True if not all digests of such records are known.
    all: bool,
    digests: BTreeSet<Digest>,
    removed: PassingDigests,
    reclaimed: PassingDigests,
    /// Segments that were scanned, since the next scan may find a record that this one did not identify. They stay
    /// listed until they are used again, or until their footer is durable, if one is being written (`true`).
    unclear: BTreeMap<u32, bool>,
}

/// Digests that are listed until a mark has passed them, in the order of their marks.
#[derive(Debug, Default)]
struct PassingDigests {
    digests: VecDeque<(u64, Digest)>,
    /// Mark up to which digests were dropped from the list; 0 if none were.
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

    /// Drops all digests up to this mark.
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
    /// Returns true if there may be records that could not be read, written or removed, or objects given up because of
    /// that.
    pub(crate) const fn is_any(&self) -> bool {
        self.any
    }

    /// Returns true if there are segments in which a scan could not identify all records.
    pub(crate) fn has_unclear(&self) -> bool {
        !self.unclear.is_empty()
    }

    /// Returns true if a scanned segment is being sealed, after which all its records are known.
    pub(crate) fn is_settling(&self) -> bool {
        self.unclear.values().any(|gets_footer| *gets_footer)
    }

    /// Notes that there may be a record of this digest.
    pub(crate) fn note(&mut self, digest: Digest) {
        self.any = true;
        if self.all || self.digests.len() == DIGESTS_MOST {
            self.note_all();
        } else {
            self.digests.insert(digest);
        }
    }

    /// Notes that there may be records of any digest.
    pub(crate) fn note_all(&mut self) {
        (self.any, self.all) = (true, true);
        self.digests.clear();
    }

    /// Notes that a fault happened; records that it may have left are noted separately, by digest.
    pub(crate) fn note_fault(&mut self) {
        self.any = true;
    }

    /// Notes the tombstone of this sequence as appended.
    pub(crate) fn removed(&mut self, sequence: u64, digest: Digest) {
        self.removed.push(sequence, digest);
    }

    /// Notes that all tombstones up to this sequence are durable.
    pub(crate) fn removals_durable(&mut self, sequence: u64) {
        self.removed.pass(sequence);
    }

    /// Notes a record that was given up with the segment of this generation.
    pub(crate) fn reclaimed(&mut self, generation: u64, digest: Digest) {
        self.reclaimed.push(generation, digest);
    }

    /// Notes that a durable header states that segments of generations below `oldest_live` hold no live records.
    pub(crate) fn reclaim_durable(&mut self, oldest_live: u64) {
        self.reclaimed.pass(oldest_live.saturating_sub(1));
    }

    /// Notes a segment that was scanned, and whether it gets a footer.
    pub(crate) fn scanned(&mut self, segment: u32, gets_footer: bool) {
        self.unclear.insert(segment, gets_footer);
    }

    /// Notes that a scanned segment gets no footer after all.
    pub(crate) fn no_footer(&mut self, segment: u32) {
        self.unclear.entry(segment).and_modify(|gets_footer| *gets_footer = false);
    }

    /// Notes that all records of a segment are known, or that the segment is used anew.
    pub(crate) fn settled(&mut self, segment: u32) {
        self.unclear.remove(&segment);
    }

    /// Returns true if the segment was scanned and gets a footer.
    pub(crate) fn gets_footer(&self, segment: u32) -> bool {
        self.unclear.get(&segment) == Some(&true)
    }

    /// Returns true if there may be a record of this digest outside of segments with unidentified records.
    pub(crate) fn is_noted(&self, digest: Digest) -> bool {
        self.all || self.digests.contains(&digest)
    }

    /// Returns true if there may be a record of this digest.
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
    fn only_noted_digests_may_be_found() {
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
    fn undurable_removals_are_listed_until_durable() {
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
    fn an_overflowing_list_covers_any_digest_until_durable() {
        let (mut untracked, most) = (UntrackedObjects::default(), DIGESTS_MOST as u64);
        (1..=most + 2).for_each(|number| untracked.removed(number, digest(number)));
        assert!(untracked.may_have(digest(0)) && untracked.may_have(digest(most + 2)));
        untracked.removals_durable(most + 1);
        assert!(!untracked.may_have(digest(1)) && untracked.may_have(digest(most + 2)));
    }
}
