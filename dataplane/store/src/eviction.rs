//! The order in which objects go: the contract of an eviction policy, and those there are.
//!
//! A policy sees every live entry and is told of accesses; asked for a victim it names one and changes nothing else.
//! Pins are not its business except that it never names a pinned entry. It keeps its links in the entries, so that it
//! allocates nothing. Its arithmetic is in granules, the space that entries really take.
//!
//! `tests/` has the naive twin of each policy: a second implementation of the trait whose correctness is plain to see,
//! against which the fast one is compared decision by decision.

mod choice;
mod list;
mod s3_fifo;
mod segment;
mod segmented_lru;

pub use choice::{ChosenPolicy, Eviction};
pub use s3_fifo::S3Fifo;
pub(crate) use segment::Segment;
pub use segmented_lru::SegmentedLru;

use crate::entry::{Entries, EntryId};

/// Decides which object goes next. The store calls; a policy never calls back. The store pins an entry only just
/// after it reported an access of it.
pub trait EvictionPolicy {
    /// A policy of the same settings that considers nothing yet: each tenant of a store has one of its own.
    #[must_use]
    fn anew(&self) -> Self
    where
        Self: Sized;

    /// An object became live, or lost its soft pin: then it may be pinned by readers. The policy MUST from now on
    /// consider it; the entry is in no order yet.
    fn insert(&mut self, entries: &mut Entries, id: EntryId);

    /// An object was asked for. `id` was inserted and not removed. The policy MUST accept this for pinned entries
    /// too.
    fn access(&mut self, entries: &mut Entries, id: EntryId);

    /// An object goes, pinned or not, because somebody wants it gone. The policy MUST forget it: the entry will be
    /// reused.
    fn remove(&mut self, entries: &mut Entries, id: EntryId);

    /// An object goes to make room: the last victim, or a neighbour of it. As [`Self::remove`], but the policy may
    /// remember the digest.
    fn evict(&mut self, entries: &mut Entries, id: EntryId) {
        self.remove(entries, id);
    }

    /// The last pin of a live entry went. The entry MUST be a candidate again, at the place in the order that its
    /// accesses gave it: holding a pin for long is not a use.
    fn unpinned(&mut self, entries: &mut Entries, id: EntryId);

    /// The entry that should go next. It MUST be one without pins, and MUST be found whenever there is one. Asking
    /// twice without another call between MUST give the same answer. The cost MUST be O(1) amortised over the other
    /// calls, however many entries are pinned.
    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId>;

    /// How many entries the policy considers, pinned ones included; asserts its own invariants on the way. For tests
    /// and simulation.
    fn check(&self, entries: &Entries) -> usize;
}
