//! Eviction policies: the contract of a policy, and its implementations.
//!
//! A policy sees every live entry and every access; when a victim is requested, it names one and changes nothing else.
//! It need not track pins, except that it never names a pinned entry. It keeps its links in the entries, so that it
//! allocates nothing. It counts in granules, the space that entries really take.
//!
//! `tests/` has the naive twin of each policy: a second implementation of the trait whose correctness is plain to see,
//! against which the fast one is compared decision by decision.

mod choice;
mod list;
mod priority_levels;
mod s3_fifo;
mod segment;
mod segmented_lru;

pub use choice::{ChosenPolicy, Eviction, UnknownEviction};
pub(crate) use priority_levels::PriorityLevels;
pub use s3_fifo::S3Fifo;
pub(crate) use segment::Segment;
pub use segmented_lru::SegmentedLru;

use crate::entry::{Entries, Entry, EntryId};

/// Rule that decides which object is evicted next. The store calls the policy; a policy never calls back. The store
/// pins an entry only just after it reported an access of it.
pub trait EvictionPolicy {
    /// Creates a policy with the same settings and no entries: each tenant of a store has its own.
    #[must_use]
    fn anew(&self) -> Self
    where
        Self: Sized;

    /// Inserts an object that became live, or whose soft pin expired; the latter may be pinned by readers. The policy
    /// MUST consider it from now on; the entry is in no order yet.
    fn insert(&mut self, entries: &mut Entries, id: EntryId);

    /// Records an access. `id` was inserted and not removed. The policy MUST accept this for pinned entries too.
    fn access(&mut self, entries: &mut Entries, id: EntryId);

    /// Removes an object, pinned or not, on request. The policy MUST forget it: the entry will be reused.
    fn remove(&mut self, entries: &mut Entries, id: EntryId);

    /// Removes an object to make room: the last victim, or a neighbour of it. Like [`Self::remove`], but the policy may
    /// remember the digest.
    fn evict(&mut self, entries: &mut Entries, id: EntryId) {
        self.remove(entries, id);
    }

    /// Handles the release of a live entry's last pin. The entry MUST be a candidate again, at the position in the
    /// order that its accesses gave it: holding a pin for long is not an access.
    fn unpinned(&mut self, entries: &mut Entries, id: EntryId);

    /// Returns the entry to evict next. It MUST be unpinned, and one MUST be found whenever there is an unpinned entry.
    /// Two calls without another call in between MUST return the same entry. The cost MUST be O(1) amortised over the
    /// other calls, however many entries are pinned.
    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId>;

    /// Returns true if an entry that was inserted was accessed since, as far as the policy knows; a policy that does
    /// not distinguish such entries returns true for all.
    fn was_accessed(&self, entry: &Entry) -> bool {
        let _ = entry;
        true
    }

    /// Asserts the policy's own invariants; returns the number of entries that it considers, pinned ones included. For
    /// tests and simulation.
    fn check(&self, entries: &Entries) -> usize;
}
