//! Invariants of the store, for tests and simulation.

use super::Store;
use crate::entry::{EntryId, Mark, STATES, State};
use crate::eviction::EvictionPolicy;

impl<P: EvictionPolicy> Store<P> {
    /// Asserts every invariant. Walks all entries and blocks.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn check(&self) {
        self.allocator.check();
        self.index.check(&self.entries);
        self.check_ownership();
        self.check_accounts();
        self.check_handles();
    }

    /// Asserts that every held block has one entry and every entry one block: no block is both free and in use, or used
    /// twice.
    fn check_ownership(&self) {
        let mut owned = 0;
        for (id, entry) in self.entries.iter() {
            let owner = self.allocator.owner(entry.block());
            assert_eq!(owner, Some(id.0), "the block of {entry:?} belongs to it");
            assert_eq!(self.allocator.granules(entry.block()), entry.granules(), "{entry:?}");
            owned += 1;
        }
        let pages = self.check_pages();
        assert_eq!(owned + pages, self.allocator.held_blocks(), "each held block belongs to an entry or is a page");
    }

    /// Asserts that index, eviction order and the accounts of space agree with the entries.
    fn check_accounts(&self) {
        let (mut granules, mut live, mut payload) = ([0; STATES], 0, 0);
        let (mut copies, mut copied) = (0, 0);
        for (id, entry) in self.entries.iter() {
            granules[entry.state() as usize] += entry.granules();
            if entry.state() == State::Live {
                live += 1;
                payload += entry.bytes();
                copies += u64::from(entry.is(Mark::Copy));
                copied += u64::from(entry.is(Mark::Copied));
                let found = self.index.find(&self.entries, entry.digest());
                assert_eq!(found, Some(id), "{entry:?} is in the index");
            }
        }
        assert_eq!(self.granules, granules, "granules by state");
        assert_eq!(self.counters.payload_bytes, payload, "bytes of live objects");
        assert_eq!(
            (self.counters.copies, self.counters.copied),
            (copies, copied),
            "replicas, and objects that have one"
        );
        assert_eq!(self.index.len(), live, "the index has the live entries only");
        let in_order = self.order.check(&self.entries);
        assert_eq!(in_order, live as usize, "the eviction order has the live entries only");
    }

    /// Asserts that pins and reservations lead to entries in the right states, and that all of them are counted.
    fn check_handles(&self) {
        let pins: u32 = self.entries.iter().map(|(_, entry)| entry.pins()).sum();
        assert_eq!(pins, self.pins.len(), "pins are counted");
        for id in self.pins.values().map(EntryId) {
            let entry = &self.entries[id];
            assert!(entry.pins() > 0, "a pin leads to {entry:?}");
            assert!(matches!(entry.state(), State::Live | State::Doomed), "{entry:?} is pinned");
        }
        let is_put = |state| matches!(state, State::Reserved | State::Quarantined);
        for id in self.reservations.values().map(EntryId) {
            assert!(is_put(self.entries[id].state()), "a reservation leads to {:?}", self.entries[id]);
        }
        let puts = self.entries.iter().filter(|(_, entry)| is_put(entry.state())).count();
        assert_eq!(puts, self.reservations.len() as usize, "reservations are counted");
        let doomed = self.entries.iter().filter(|(_, entry)| entry.state() == State::Doomed);
        assert!(doomed.into_iter().all(|(_, entry)| entry.pins() > 0), "a doomed entry is pinned");
    }
}
