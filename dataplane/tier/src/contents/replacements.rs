//! Tombstones of replacements in flight, and the records to restore if one of them cannot be written.
//!
//! The tombstone of a replacement removes the replaced record before the replacement is acknowledged. If the tombstone
//! cannot be written, the replacement is refused, and the replaced object is live again; not so if anything later was
//! put, replaced or removed: groups complete in any order, and the one that completes last may have been begun first.
//!
//! Invariant: an entry is restored only if every later tombstone of its digest has failed too, and the index has no
//! entry of that digest.

use std::collections::BTreeMap;

use kvplane_proto::digest::Digest;

use super::index::Entry;
use crate::types::Token;

/// Record that a tombstone removes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplacedRecord {
    pub(crate) entry: Entry,
    /// Generation of the segment that has the record.
    pub(crate) generation: u64,
    /// Number of its tenant, if it is known.
    pub(crate) tenant: Option<u32>,
}

/// Tombstone of a replacement.
#[derive(Clone, Copy, Debug)]
struct Replacement {
    token: Token,
    /// Record that the tombstone removes; `None` if an earlier tombstone had hidden it already.
    replaced: Option<ReplacedRecord>,
    has_failed: bool,
}

/// Tombstones of replacements, oldest first for each digest; there are at most as many in flight as waiters.
#[derive(Debug, Default)]
pub(crate) struct Replacements {
    by_digest: BTreeMap<Digest, Vec<Replacement>>,
    by_token: BTreeMap<Token, Digest>,
}

impl Replacements {
    /// Registers a tombstone in flight, which removes `replaced`.
    pub(crate) fn begin(&mut self, token: Token, digest: Digest, replaced: Option<ReplacedRecord>) {
        self.by_token.insert(token, digest);
        self.by_digest.entry(digest).or_default().push(Replacement { token, replaced, has_failed: false });
    }

    /// Returns true while an object that the index does not know may be restored.
    pub(crate) fn may_return(&self, digest: Digest) -> bool {
        self.by_digest.contains_key(&digest)
    }

    /// Forgets the tombstones of a digest that was removed: no record of it is restored any more.
    pub(crate) fn forget(&mut self, digest: Digest) {
        for replacement in self.by_digest.remove(&digest).into_iter().flatten() {
            self.by_token.remove(&replacement.token);
        }
    }

    /// Notes that an object was put, whether or not the put itself replaced another. No older record is restored,
    /// except the one that this put replaces while its tombstone is in flight.
    pub(crate) fn put(&mut self, digest: Digest, has_replaced: bool) {
        let Some(replacements) = self.by_digest.get(&digest) else { return };
        if has_replaced || replacements.iter().all(|replacement| replacement.has_failed) {
            self.forget(digest);
        }
    }

    /// Ends a tombstone that was written or has failed; returns its digest if an object may have to be restored now.
    pub(crate) fn end(&mut self, token: Token, good: bool) -> Option<Digest> {
        let digest = self.by_token.remove(&token)?;
        let replacements = self.by_digest.get_mut(&digest)?;
        let at = replacements.iter().position(|replacement| replacement.token == token)?;
        if !good {
            replacements[at].has_failed = true;
            return Some(digest);
        }
        // A written tombstone covers those before it.
        for replacement in replacements.drain(..=at).filter(|replacement| replacement.token != token) {
            self.by_token.remove(&replacement.token);
        }
        // Later tombstones that failed and had only the same record to remove.
        let moot = replacements
            .iter()
            .take_while(|replacement| replacement.has_failed && replacement.replaced.is_none())
            .count();
        replacements.drain(..moot);
        if replacements.is_empty() {
            self.by_digest.remove(&digest);
        }
        None
    }

    /// Returns the record to restore to the index, which has no entry of this digest; `None` while a later tombstone is
    /// in flight.
    pub(crate) fn give_back(&mut self, digest: Digest) -> Option<ReplacedRecord> {
        let replacements = self.by_digest.get(&digest)?;
        let last =
            replacements.iter().rev().find(|replacement| !replacement.has_failed || replacement.replaced.is_some());
        match last {
            Some(replacement) if !replacement.has_failed => None,
            last => {
                let replaced = last.and_then(|replacement| replacement.replaced);
                self.forget(digest);
                replaced
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::Version;

    use super::*;
    use crate::format::Kind;

    const DIGEST: Digest = Digest(7);

    fn replaced(version: u64) -> Option<ReplacedRecord> {
        let entry = Entry::new(Kind::Object, DIGEST, Version(version), version);
        Some(ReplacedRecord { entry, generation: 1, tenant: None })
    }

    /// Ends a tombstone and restores the record, if it may be; returns its version.
    fn end(replacements: &mut Replacements, token: u64, good: bool) -> Option<u64> {
        let digest = replacements.end(Token(token), good)?;
        Some(replacements.give_back(digest)?.entry.version().0)
    }

    fn two(second: Option<ReplacedRecord>) -> Replacements {
        let mut replacements = Replacements::default();
        replacements.begin(Token(1), DIGEST, replaced(73));
        replacements.begin(Token(2), DIGEST, second);
        replacements
    }

    #[test]
    fn a_failed_tombstone_restores_its_record() {
        let mut replacements = Replacements::default();
        replacements.begin(Token(1), DIGEST, replaced(73));
        assert!(replacements.may_return(DIGEST));
        assert_eq!(end(&mut replacements, 1, false), Some(73));
        assert!(!replacements.may_return(DIGEST));
    }

    #[test]
    fn no_record_is_restored_after_a_removal() {
        let mut replacements = two(None);
        replacements.forget(DIGEST);
        assert_eq!((end(&mut replacements, 1, false), end(&mut replacements, 2, false)), (None, None));
    }

    #[test]
    fn no_record_is_restored_if_a_later_tombstone_is_in_flight_or_written() {
        for first_ends_first in [true, false] {
            let mut replacements = two(None);
            let (first, second) = if first_ends_first {
                let first = end(&mut replacements, 1, false);
                (first, end(&mut replacements, 2, true))
            } else {
                let second = end(&mut replacements, 2, true);
                (end(&mut replacements, 1, false), second)
            };
            assert_eq!((first, second), (None, None), "first of all: {first_ends_first}");
            assert!(!replacements.may_return(DIGEST) && replacements.by_token.is_empty());
        }
    }

    #[test]
    fn two_failed_tombstones_restore_the_latest_record_removed() {
        for order in [[1, 2], [2, 1]] {
            for (second, expected) in [(None, 73), (replaced(75), 75)] {
                let mut replacements = two(second);
                let returned = order.map(|token| end(&mut replacements, token, false));
                assert_eq!(returned.into_iter().flatten().collect::<Vec<_>>(), [expected], "{order:?}");
                assert!(!replacements.may_return(DIGEST) && replacements.by_token.is_empty());
            }
        }
    }

    #[test]
    fn a_failed_later_tombstone_restores_no_record_that_an_earlier_one_removed() {
        for order in [[1, 2], [2, 1]] {
            let mut replacements = two(None);
            let returned = order.map(|token| end(&mut replacements, token, token == 1));
            assert_eq!(returned, [None, None], "{order:?}");
            assert!(!replacements.may_return(DIGEST) && replacements.by_token.is_empty());
        }
    }

    #[test]
    fn a_put_keeps_the_record_that_its_tombstone_in_flight_removes() {
        let mut replacements = Replacements::default();
        replacements.begin(Token(1), DIGEST, replaced(73));
        replacements.put(DIGEST, false);
        assert_eq!(replacements.end(Token(1), false), Some(DIGEST), "its own record may fail yet");
        assert_eq!(replacements.give_back(DIGEST).map(|replaced| replaced.entry.version()), Some(Version(73)));
        replacements.begin(Token(2), DIGEST, replaced(73));
        assert_eq!(replacements.end(Token(2), false), Some(DIGEST));
        replacements.put(DIGEST, false);
        assert!(replacements.give_back(DIGEST).is_none() && !replacements.may_return(DIGEST));
    }
}
