//! Tests of the models against traces worked out by hand, and against a naive implementation with lists.

use proptest::prelude::*;

use super::*;
use crate::trace::generate::{Shape, generate};

fn request(blocks: &[u64]) -> Request {
    Request { timestamp_ms: 0, input_tokens: blocks.len() as u32 * 512, output_tokens: 1, blocks: blocks.to_vec() }
}

fn run(policy: Policy, capacity_blocks: u64, requests: &[&[u64]]) -> ModelRun {
    let requests: Vec<_> = requests.iter().map(|blocks| request(blocks)).collect();
    simulate(policy, &requests, 100, capacity_blocks * 100 + 99)
}

#[test]
fn lru_evicts_what_was_accessed_longest_ago() {
    // Block 1 is accessed before 3 is inserted: 2 is evicted.
    let lru = run(Policy::Lru, 2, &[&[1], &[2], &[1], &[3], &[1], &[2]]);
    assert_eq!((lru.counts.hit_blocks, lru.evictions), (2, 2));
    assert_eq!(lru.after(3).hit_blocks, 1);
    assert_eq!((lru.after(0).blocks, lru.after(99).blocks), (0, 6));
}

#[test]
fn only_the_prefix_is_a_hit_and_the_rest_is_accessed() {
    // The third request misses block 1, so 2 is put, not got: no hit, yet 2 outlives 3.
    let lru = run(Policy::Lru, 3, &[&[2], &[3], &[1, 2], &[4], &[2], &[3]]);
    assert_eq!(lru.counts.hit_blocks, 1);
}

#[test]
fn a_scan_does_not_evict_blocks_accessed_twice() {
    let scan: Vec<Vec<u64>> = (10..30).map(|block| vec![block]).collect();
    let mut requests: Vec<&[u64]> = vec![&[1], &[1]];
    requests.extend(scan.iter().map(Vec::as_slice));
    requests.push(&[1]);
    assert_eq!(run(Policy::Lru, 5, &requests).counts.hit_blocks, 1);
    assert_eq!(run(Policy::SegmentedLru, 5, &requests).counts.hit_blocks, 2);
    // The protected fifth of four blocks holds none: the policy behaves like LRU.
    assert_eq!(run(Policy::SegmentedLru, 4, &requests).counts.hit_blocks, 1);
}

#[test]
fn blocks_demoted_from_protected_are_most_recent_in_probation() {
    // The cache has room for five blocks, one of them protected. 2 takes the place of 1, which goes behind 3, 4 and 5:
    // those are evicted first.
    let requests: &[&[u64]] = &[&[1], &[2], &[3], &[4], &[5], &[1], &[2], &[6], &[7], &[8], &[1]];
    let slru = run(Policy::SegmentedLru, 5, requests);
    assert_eq!((slru.counts.hit_blocks, slru.evictions), (3, 3));
}

#[test]
fn a_block_larger_than_the_pool_is_refused() {
    let run = simulate(Policy::SegmentedLru, &[request(&[1, 2]), request(&[1])], 200, 199);
    assert_eq!((run.refused, run.counts.hit_blocks, run.evictions), (3, 0, 0));
}

#[test]
fn an_endless_pool_equals_the_infinite_cache_and_hits_grow_with_the_pool() {
    let trace = generate(Shape::Conversation, 600, 3).unwrap();
    let infinite = crate::trace::TraceStats::of(&trace).infinite_cache;
    for policy in [Policy::Lru, Policy::SegmentedLru] {
        assert_eq!(simulate(policy, &trace.requests, 1, u64::MAX).counts, infinite);
        let rates = [100, 1_000, 4_000].map(|blocks| simulate(policy, &trace.requests, 1, blocks).counts.rate_blocks());
        assert!(rates.is_sorted(), "{rates:?}");
    }
}

/// Hit rates of an independent simulation of the published trace, for pools counted in blocks.
#[test]
fn lru_on_the_published_conversation_trace() {
    let Some(path) = crate::trace::stats::tests::published("conversation_trace.jsonl") else { return };
    let requests = crate::trace::load(&path).unwrap().requests;
    for (blocks, published) in [(1_000, 0.044), (10_000, 0.211), (30_000, 0.326), (50_000, 0.355), (100_000, 0.364)] {
        let found = simulate(Policy::Lru, &requests, 1, blocks).counts.rate_blocks();
        assert!((found - published).abs() < 0.001, "{blocks} blocks: {found}, published {published}");
    }
}

/// Naive implementation of both policies: lists with the least recent block first.
fn naive(segmented: bool, requests: &[Vec<u64>], capacity: usize) -> (u64, u64) {
    let (mut probation, mut protected): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
    let (mut hits, mut evictions) = (0, 0);
    for blocks in requests {
        let found = blocks.iter().take_while(|b| probation.contains(b) || protected.contains(b)).count();
        hits += found as u64;
        for block in blocks {
            if probation.contains(block) || protected.contains(block) {
                probation.retain(|other| other != block);
                protected.retain(|other| other != block);
                if segmented && capacity / 5 >= 1 {
                    protected.push(*block);
                } else {
                    probation.push(*block);
                }
                if protected.len() > capacity / 5 {
                    probation.push(protected.remove(0));
                }
            } else {
                if probation.len() + protected.len() == capacity {
                    if probation.is_empty() {
                        protected.remove(0)
                    } else {
                        probation.remove(0)
                    };
                    evictions += 1;
                }
                probation.push(*block);
            }
        }
    }
    (hits, evictions)
}

proptest! {
    #[test]
    fn equal_to_lists_moved_by_hand(
        requests in prop::collection::vec(prop::collection::vec(0u64..25, 1..6), 1..80), capacity in 1usize..20,
    ) {
        let slices: Vec<&[u64]> = requests.iter().map(Vec::as_slice).collect();
        for (policy, segmented) in [(Policy::Lru, false), (Policy::SegmentedLru, true)] {
            let model = run(policy, capacity as u64, &slices);
            prop_assert_eq!((model.counts.hit_blocks, model.evictions), naive(segmented, &requests, capacity));
        }
    }
}
