//! Segmented LRU against its reference twin, decision by decision, with pins of any length.

mod support;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_store::allocator::Allocator;
use kvplane_store::entry::{Entries, EntryId};
use kvplane_store::eviction::{EvictionPolicy, SegmentedLru};
use proptest::prelude::*;
use support::ReferenceSegmentedLru;

#[derive(Clone, Debug)]
enum Op {
    Insert { granules: u64 },
    Access(usize),
    Pin(usize),
    Unpin(usize),
    Remove(usize),
    Victim,
    Evict,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (1..6u64).prop_map(|granules| Op::Insert { granules }),
        4 => any::<usize>().prop_map(Op::Access),
        5 => any::<usize>().prop_map(Op::Pin),
        4 => any::<usize>().prop_map(Op::Unpin),
        1 => any::<usize>().prop_map(Op::Remove),
        2 => Just(Op::Victim),
        3 => Just(Op::Evict),
    ]
}

/// Both policies over one arena: the twin keeps nothing in the entries.
struct Pair {
    entries: Entries,
    fast: SegmentedLru,
    twin: ReferenceSegmentedLru,
    live: Vec<EntryId>,
    allocator: Allocator,
}

impl Pair {
    fn new(protected_limit_granules: u64) -> Self {
        Self {
            entries: Entries::new(300),
            fast: SegmentedLru::new(protected_limit_granules),
            twin: ReferenceSegmentedLru::new(protected_limit_granules),
            live: Vec::new(),
            allocator: Allocator::new(1 << 20, 300),
        }
    }

    fn insert(&mut self, granules: u64) -> EntryId {
        let block = self.allocator.allocate(256).unwrap();
        let id = self.entries.reserve(Digest(1), granules * 256, block);
        self.entries.commit(id, Version(1), 0);
        self.fast.insert(&mut self.entries, id);
        self.twin.insert(&mut self.entries, id);
        self.live.push(id);
        id
    }

    fn access(&mut self, id: EntryId) {
        self.fast.access(&mut self.entries, id);
        self.twin.access(&mut self.entries, id);
    }

    fn pin(&mut self, id: EntryId) {
        self.access(id);
        self.entries.pin(id);
    }

    fn unpin(&mut self, id: EntryId) {
        if self.entries[id].pins() > 0 && self.entries.unpin(id) == 0 {
            self.fast.unpinned(&mut self.entries, id);
            self.twin.unpinned(&mut self.entries, id);
        }
    }

    fn remove(&mut self, id: EntryId) {
        self.fast.remove(&mut self.entries, id);
        self.twin.remove(&mut self.entries, id);
        self.live.retain(|other| *other != id);
        while self.entries[id].pins() > 0 {
            self.entries.unpin(id);
        }
        self.allocator.free(self.entries[id].block());
        self.entries.release(id);
    }

    fn victim(&mut self) -> Option<EntryId> {
        let fast = self.fast.victim(&mut self.entries);
        assert_eq!(fast, self.twin.victim(&mut self.entries), "the victims differ");
        fast
    }

    fn apply(&mut self, op: &Op) {
        let pick = |n: usize| self.live.get(n % self.live.len().max(1)).copied();
        match *op {
            Op::Insert { granules } => {
                self.insert(granules);
            }
            Op::Access(n) => pick(n).into_iter().for_each(|id| self.access(id)),
            Op::Pin(n) => pick(n).into_iter().for_each(|id| self.pin(id)),
            Op::Unpin(n) => pick(n).into_iter().for_each(|id| self.unpin(id)),
            Op::Remove(n) => pick(n).into_iter().for_each(|id| self.remove(id)),
            Op::Victim => drop(self.victim()),
            Op::Evict => self.victim().into_iter().for_each(|id| self.remove(id)),
        }
        assert_eq!(self.fast.check(&self.entries), self.live.len());
        assert_eq!(self.twin.check(&self.entries), self.live.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn equals_the_reference_twin(
        ops in prop::collection::vec(op(), 1..250),
        protected_limit_granules in 0..40u64,
    ) {
        let mut pair = Pair::new(protected_limit_granules);
        for op in &ops {
            pair.apply(op);
        }
        // What is left goes in the same order too, also what was pinned until now.
        for id in pair.live.clone() {
            while pair.entries[id].pins() > 0 {
                pair.unpin(id);
            }
        }
        while let Some(id) = pair.victim() {
            pair.remove(id);
        }
        prop_assert!(pair.live.is_empty());
    }
}

#[test]
fn what_was_asked_for_twice_outlives_a_scan() {
    let mut pair = Pair::new(4);
    let hot = pair.insert(2);
    pair.access(hot);
    let scan: Vec<_> = (0..50).map(|_| pair.insert(1)).collect();
    for id in scan {
        assert_eq!(pair.victim(), Some(id));
        pair.remove(id);
    }
    assert_eq!(pair.victim(), Some(hot));
}

#[test]
fn objects_passed_over_while_pinned_return_in_the_order_of_their_accesses() {
    let mut pair = Pair::new(0);
    let ids: Vec<_> = (0..4).map(|_| pair.insert(1)).collect();
    for &id in &ids[..3] {
        pair.pin(id);
    }
    pair.access(ids[3]);
    assert_eq!(pair.victim(), Some(ids[3]), "the pinned ones are passed over");
    for n in [0, 2, 1] {
        pair.unpin(ids[n]);
    }
    for &id in &ids {
        assert_eq!(pair.victim(), Some(id));
        pair.remove(id);
    }
}
