//! Tests of the eviction policies against their reference twins, decision by decision, with pins of any length.

use crate::support;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_store::allocator::Allocator;
use kvplane_store::entry::{Entries, EntryId, Reserve};
use kvplane_store::eviction::{EvictionPolicy, S3Fifo, SegmentedLru};
use proptest::prelude::*;
use support::{ReferenceLru, ReferenceS3Fifo, ReferenceSegmentedLru};

#[derive(Clone, Debug)]
enum Op {
    Insert { granules: u64, key: u8 },
    Access(usize),
    Pin(usize),
    Unpin(usize),
    Remove(usize),
    Victim,
    Evict,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (1..6u64, 0..24u8).prop_map(|(granules, key)| Op::Insert { granules, key }),
        4 => any::<usize>().prop_map(Op::Access),
        5 => any::<usize>().prop_map(Op::Pin),
        4 => any::<usize>().prop_map(Op::Unpin),
        1 => any::<usize>().prop_map(Op::Remove),
        2 => Just(Op::Victim),
        3 => Just(Op::Evict),
    ]
}

/// Both policies over one arena: the twin keeps nothing in the entries.
struct Pair<F, T> {
    entries: Entries,
    fast: F,
    twin: T,
    live: Vec<EntryId>,
    allocator: Allocator,
}

/// Segmented LRU and its twin.
fn segmented(pool_granules: u64, percent: u8) -> Pair<SegmentedLru, ReferenceSegmentedLru> {
    let twin = ReferenceSegmentedLru::new(pool_granules, percent.into());
    Pair::new(SegmentedLru::new(pool_granules, percent), twin)
}

/// S3-FIFO and its twin.
fn s3_fifo() -> Pair<S3Fifo, ReferenceS3Fifo> {
    Pair::new(S3Fifo::new(300), ReferenceS3Fifo::new())
}

impl<F: EvictionPolicy, T: EvictionPolicy> Pair<F, T> {
    fn new(fast: F, twin: T) -> Self {
        Self { entries: Entries::new(300), fast, twin, live: Vec::new(), allocator: Allocator::new(1 << 20, 300) }
    }

    fn insert(&mut self, granules: u64, key: u8) -> EntryId {
        let block = self.allocator.allocate(256).unwrap();
        let id = self.entries.reserve(&Reserve::plain(Digest(key.into()), granules * 256), block);
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
        self.release(id);
    }

    fn evict(&mut self, id: EntryId) {
        self.fast.evict(&mut self.entries, id);
        self.twin.evict(&mut self.entries, id);
        self.release(id);
    }

    fn release(&mut self, id: EntryId) {
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
            Op::Insert { granules, key } => {
                self.insert(granules, key);
            }
            Op::Access(n) => pick(n).into_iter().for_each(|id| self.access(id)),
            Op::Pin(n) => pick(n).into_iter().for_each(|id| self.pin(id)),
            Op::Unpin(n) => pick(n).into_iter().for_each(|id| self.unpin(id)),
            Op::Remove(n) => pick(n).into_iter().for_each(|id| self.remove(id)),
            Op::Victim => drop(self.victim()),
            Op::Evict => self.victim().into_iter().for_each(|id| self.evict(id)),
        }
        assert_eq!(self.fast.check(&self.entries), self.live.len());
        assert_eq!(self.twin.check(&self.entries), self.live.len());
    }

    /// Runs the operations; then checks that the remaining objects are evicted in the same order too, including those
    /// pinned until now.
    fn run(mut self, ops: &[Op]) {
        for op in ops {
            self.apply(op);
        }
        for id in self.live.clone() {
            while self.entries[id].pins() > 0 {
                self.unpin(id);
            }
        }
        while let Some(id) = self.victim() {
            self.evict(id);
        }
        assert!(self.live.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn segmented_lru_equals_its_twin(
        ops in prop::collection::vec(op(), 1..250),
        pool_granules in 0..200u64,
        percent in 1..=100u8,
    ) {
        segmented(pool_granules, percent).run(&ops);
    }

    #[test]
    fn segmented_lru_with_nothing_protected_is_lru(ops in prop::collection::vec(op(), 1..250)) {
        Pair::new(SegmentedLru::new(100, 0), ReferenceLru::default()).run(&ops);
    }

    #[test]
    fn s3_fifo_equals_its_twin(ops in prop::collection::vec(op(), 1..250)) {
        s3_fifo().run(&ops);
    }
}

#[test]
fn object_accessed_twice_outlives_a_scan() {
    let mut pair = segmented(20, 20);
    let hot = pair.insert(2, 0);
    pair.access(hot);
    let scan: Vec<_> = (0..50).map(|_| pair.insert(1, 1)).collect();
    for id in scan {
        assert_eq!(pair.victim(), Some(id));
        pair.remove(id);
    }
    assert_eq!(pair.victim(), Some(hot));
}

#[test]
fn objects_passed_over_while_pinned_return_in_the_order_of_their_accesses() {
    let mut pair = segmented(100, 0);
    let ids: Vec<_> = (0..4).map(|_| pair.insert(1, 1)).collect();
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

#[test]
fn a_ghost_that_comes_back_soon_enters_the_main_queue() {
    let mut pair = s3_fifo();
    // One object in the main queue, so that a ghost lasts for one eviction.
    let hot = pair.insert(4, 0);
    (0..2).for_each(|_| pair.access(hot));
    let cold = pair.insert(4, 1);
    assert_eq!(pair.victim(), Some(cold), "the hot one moved on");
    pair.evict(cold);
    let back = pair.insert(4, 1);
    let next = pair.insert(4, 2);
    assert_eq!(pair.victim(), Some(next), "who came back is not in the small queue");
    pair.evict(next);
    assert_eq!(pair.victim(), Some(hot), "the main queue is first in, first out");
    pair.evict(hot);
    assert_eq!(pair.victim(), Some(back));
}
