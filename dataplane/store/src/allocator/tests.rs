//! Tests of the allocator against a naive model: a map of the held extents.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Returns the free gaps between held extents, as (start, granules).
fn gaps(held: &BTreeMap<u64, (u64, Block)>, pool_granules: u64) -> Vec<(u64, u64)> {
    let (mut at, mut out) = (0, Vec::new());
    for (&start, &(granules, _)) in held {
        assert!(start >= at, "extents overlap at granule {start}");
        if start > at {
            out.push((at, start - at));
        }
        at = start + granules;
    }
    assert!(at <= pool_granules, "an extent ends beyond the pool");
    if at < pool_granules {
        out.push((at, pool_granules - at));
    }
    out
}

/// Returns the stretches of the pool without a held extent whose start is odd, as (start, granules).
fn runs(held: &BTreeMap<u64, (u64, Block)>, pool_granules: u64) -> Vec<(u64, u64)> {
    let mut stay = held.clone();
    stay.retain(|start, _| start % 2 == 1);
    gaps(&stay, pool_granules)
}

#[derive(Clone, Debug)]
enum Op {
    Allocate(u64),
    Free(usize),
}

fn ops(largest_bytes: u64) -> impl Strategy<Value = Vec<Op>> {
    let size = prop_oneof![1..=largest_bytes, Just(4096), Just(40 * 256), 20_000..=21_000u64];
    let op = prop_oneof![3 => size.prop_map(Op::Allocate), 2 => any::<usize>().prop_map(Op::Free)];
    prop::collection::vec(op, 1..200)
}

proptest! {
    #[test]
    fn agrees_with_the_naive_model(ops in ops(60_000), pool_granules in 1..3000u64) {
        let mut allocator = Allocator::new(pool_granules * GRANULE_BYTES + 255, 64);
        let mut held: BTreeMap<u64, (u64, Block)> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Allocate(bytes) if held.len() < 64 => {
                    let largest = gaps(&held, pool_granules).iter().map(|gap| gap.1).max();
                    let fits = granules_of(bytes) <= largest.unwrap_or(0);
                    let block = allocator.allocate(bytes);
                    prop_assert_eq!(block.is_some(), fits, "{} B, gaps {:?}", bytes, largest);
                    if let Some(block) = block {
                        allocator.set_owner(block, 7);
                        prop_assert_eq!(allocator.owner(block), Some(7));
                        prop_assert_eq!(allocator.granules(block), granules_of(bytes));
                        let start = allocator.offset_bytes(block) / GRANULE_BYTES;
                        prop_assert!(held.insert(start, (granules_of(bytes), block)).is_none());
                    }
                }
                Op::Free(pick) if !held.is_empty() => {
                    let start = *held.keys().nth(pick % held.len()).unwrap();
                    let merged = allocator.free(held.remove(&start).unwrap().1);
                    let gap = gaps(&held, pool_granules);
                    let gap = gap.iter().rfind(|gap| gap.0 <= start).unwrap();
                    prop_assert_eq!(allocator.granules(merged), gap.1, "merged with both sides");
                }
                _ => {}
            }
            allocator.check();
            let gap_granules = gaps(&held, pool_granules);
            let free: u64 = gap_granules.iter().map(|gap| gap.1).sum();
            prop_assert_eq!(allocator.free_bytes(), free * GRANULE_BYTES);
            let largest = gap_granules.iter().map(|gap| gap.1).max().unwrap_or(0);
            prop_assert_eq!(allocator.largest_free_bytes(), largest * GRANULE_BYTES);
        }
    }

    #[test]
    fn runs_are_found_exactly_when_they_exist(ops in ops(9000), wanted in 1..400u64) {
        let mut allocator = Allocator::new(500 * GRANULE_BYTES, 600);
        let mut held: BTreeMap<u64, (u64, Block)> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Allocate(bytes) => {
                    // The owner's word is the start, so that the predicate can tell odd from even.
                    if let Some(block) = allocator.allocate(bytes) {
                        let start = allocator.offset_bytes(block) / GRANULE_BYTES;
                        allocator.set_owner(block, start as u32);
                        held.insert(start, (granules_of(bytes), block));
                    }
                }
                Op::Free(pick) if !held.is_empty() => {
                    let start = *held.keys().nth(pick % held.len()).unwrap();
                    allocator.free(held.remove(&start).unwrap().1);
                }
                Op::Free(_) => {}
            }
        }
        let may_go = |owner: u32| owner.is_multiple_of(2);
        let long: Vec<_> = runs(&held, 500).into_iter().filter(|run| run.1 >= wanted).collect();
        let run = allocator.run_anywhere(wanted, may_go);
        prop_assert_eq!(run.is_some(), !long.is_empty());
        for (start, (_, block)) in &held {
            let within = long.iter().any(|run| (run.0..run.0 + run.1).contains(start));
            let around = allocator.run_around(*block, wanted, may_go);
            prop_assert_eq!(around.is_some(), within, "a run around granule {}", start);
        }
        if let Some(mut block) = run {
            loop {
                if let Some(owner) = allocator.owner(block) {
                    prop_assert!(may_go(owner));
                    block = allocator.free(block);
                }
                if allocator.granules(block) >= wanted {
                    break;
                }
                block = allocator.after(block).expect("the run is long enough");
            }
            allocator.check();
        }
    }
}

#[test]
fn equal_objects_fill_the_pool_completely_and_again_after_holes() {
    for bytes in [1, 256, 4096, 16_384, 20_000, 65_536, 1_000_000, 1 << 20, 3 << 20] {
        let each = granules_of(bytes) * GRANULE_BYTES;
        let mut allocator = Allocator::new(37 * each, 37);
        let mut blocks: Vec<_> = (0..37).map(|_| allocator.allocate(bytes).unwrap()).collect();
        assert_eq!(allocator.free_bytes(), 0, "{bytes} B objects leave nothing");
        for _ in 0..3 {
            for hole in (0..37).step_by(3) {
                allocator.free(blocks[hole]);
            }
            for hole in (0..37).step_by(3) {
                blocks[hole] = allocator.allocate(bytes).expect("the hole fits");
            }
            allocator.check();
        }
    }
}

#[test]
fn a_request_beyond_any_pool_is_refused() {
    let mut allocator = Allocator::new(1 << 20, 4);
    assert_eq!(allocator.allocate(u64::MAX), None);
    assert_eq!(allocator.allocate(MAX_POOL_BYTES + 1), None);
    assert!(allocator.allocate(1 << 20).is_some());
}

#[test]
#[should_panic(expected = "not held")]
fn a_double_free_is_caught() {
    let mut allocator = Allocator::new(1 << 20, 4);
    let block = allocator.allocate(100).unwrap();
    allocator.free(block);
    allocator.free(block);
}

#[test]
#[should_panic(expected = "another pool")]
fn a_foreign_block_is_caught() {
    let mut large = Allocator::new(1 << 20, 4);
    large.allocate(256).unwrap();
    let far = large.allocate(256).unwrap();
    Allocator::new(1 << 20, 4).free(far);
}

proptest! {
    /// Blocks that are held at the places of others are the same blocks, and go on like them.
    #[test]
    fn blocks_can_be_held_at_the_places_of_others(
        sizes in prop::collection::vec((1..40u32, any::<bool>()), 0..60),
        pool_granules in 1..900u32,
    ) {
        let pool_bytes = u64::from(pool_granules) * GRANULE_BYTES;
        let mut before = Allocator::new(pool_bytes, 100);
        let mut held: BTreeMap<u64, (u64, Block)> = BTreeMap::new();
        for (granules, stays) in sizes {
            let Some(block) = before.allocate(u64::from(granules) * GRANULE_BYTES) else { continue };
            if stays {
                held.insert(before.offset_bytes(block) / GRANULE_BYTES, (granules.into(), block));
            } else {
                before.free(block);
            }
        }
        let places: Vec<(u32, u32)> =
            held.iter().map(|(start, (granules, _))| (*start as u32, *granules as u32)).collect();
        let mut again = Allocator::new(pool_bytes, 100);
        let blocks = again.hold_at(&places).expect("the places were free");
        again.check();
        prop_assert_eq!(again.free_granules(), before.free_granules());
        prop_assert_eq!(again.largest_free_bytes(), before.largest_free_bytes());
        for (block, (start, granules)) in blocks.iter().zip(&places) {
            prop_assert_eq!(again.offset_bytes(*block), u64::from(*start) * GRANULE_BYTES);
            prop_assert_eq!(again.granules(*block), u64::from(*granules));
        }
        prop_assert!(places.is_empty() || again.hold_at(&places).is_none(), "blocks are held");
        blocks.into_iter().for_each(|block| _ = again.free(block));
        again.check();
        prop_assert_eq!(again.largest_free_bytes(), pool_bytes);
    }
}

#[test]
fn places_that_do_not_fit_hold_nothing() {
    for places in
        [&[(0, 5), (4, 1)][..], &[(5, 1), (0, 1)], &[(0, 0)], &[(8, 3)], &[(u32::MAX, 2)], &[(0, 1), (2, 1), (4, 1)]]
    {
        let mut allocator = Allocator::new(10 * GRANULE_BYTES, 2);
        assert!(allocator.hold_at(places).is_none(), "{places:?}");
        allocator.check();
        assert_eq!((allocator.free_granules(), allocator.held_blocks()), (10, 0));
        assert!(allocator.hold_at(&[(0, 4), (9, 1)]).is_some());
        allocator.check();
    }
}
