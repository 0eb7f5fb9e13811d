//! Removals from the SSD: of objects that are removed, of records that a put replaces, known or not, and of void
//! records.
//!
//! A removal is answered when the tier has written it. Until then it hides the object.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;
use kvplane_tier::Token;

use crate::service::shard::deferrals::DeferredItem;

/// Most removals that wait to be written.
const REMOVALS_MOST: usize = 65_536;

/// Reason for a removal, and the reply that waits for it.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) enum RemovalCause {
    /// A peer removes the object.
    Requested(DeferredItem),
    /// The owner of the slot has the replica removed.
    Replica(DeferredItem),
    /// The object's slot went to another owner, or other owners changed the object there.
    Swept,
    /// The object was replaced by this version.
    Replaced { digest: Digest, version: Version, told: Option<DeferredItem> },
}

/// Removals that wait to be passed to the tier, and those in flight there.
#[derive(Debug, Default)]
pub(in crate::service) struct Removals {
    queue: VecDeque<(Digest, RemovalCause)>,
    /// Objects whose removals wait to be passed to the tier.
    waiting: BTreeSet<Digest>,
    calls: BTreeMap<u64, RemovalCause>,
}

impl Removals {
    /// Returns true while the removal of an object waits to be passed to the tier.
    pub(in crate::service) fn has(&self, digest: Digest) -> bool {
        self.waiting.contains(&digest)
    }

    /// Returns true if this many more removals may wait.
    pub(super) fn has_room(&self, removals: usize) -> bool {
        self.queue.len() + removals <= REMOVALS_MOST
    }

    /// Returns the number of waiting removals.
    pub(in crate::service::tiering) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns true if no removal waits or is in flight.
    pub(in crate::service::tiering) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.calls.is_empty()
    }

    pub(in crate::service::tiering) fn add(&mut self, digest: Digest, cause: RemovalCause) {
        self.queue.push_back((digest, cause));
        self.waiting.insert(digest);
    }
    /// Returns the removal that is to be passed to the tier next.
    pub(super) fn next(&self) -> Option<(Digest, RemovalCause)> {
        self.queue.front().copied()
    }

    /// Removes the next removal from the queue: the tier has taken it under this token, or refused it.
    pub(super) fn pass(&mut self, taken: Option<Token>) {
        let Some((digest, cause)) = self.queue.pop_front() else { return };
        self.waiting.remove(&digest);
        if let Some(token) = taken {
            self.calls.insert(token.0, cause);
        }
    }

    /// Ends a removal in the tier; `None` if the token belongs to none.
    pub(super) fn end(&mut self, token: Token) -> Option<RemovalCause> {
        self.calls.remove(&token.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_hides_its_object_until_the_tier_has_it_and_is_idle_when_it_is_written() {
        let mut removals = Removals::default();
        [1, 2].into_iter().for_each(|number| removals.add(Digest(number), RemovalCause::Swept));
        assert!(removals.has(Digest(1)) && removals.has(Digest(2)));
        assert!(removals.has_room(REMOVALS_MOST - 2) && !removals.has_room(REMOVALS_MOST - 1));
        assert!(matches!(removals.next(), Some((Digest(1), RemovalCause::Swept))));
        removals.pass(Some(Token(7)));
        assert!(!removals.has(Digest(1)) && removals.len() == 1);
        assert!(matches!(removals.next(), Some((Digest(2), RemovalCause::Swept))));
        removals.pass(None);
        assert!(removals.next().is_none() && !removals.is_idle(), "the tier has one");
        assert!(removals.end(Token(8)).is_none() && removals.end(Token(7)).is_some());
        assert!(removals.is_idle());
    }
}
